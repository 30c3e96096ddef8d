// The Python module megatron_dos._cpp_adam. It takes host memory as addresses (plain integers) and counts of elements,
// so one build serves every version of torch. Arguments are checked here as far as addresses can be; the caller
// (megatron_dos/kernels/cpu.py) vouches that the memory exists.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>

#include "kernels.h"
#include "pool.h"

namespace py = pybind11;

namespace {

std::atomic<const dos::Isa*> active_isa{nullptr};

[[noreturn]] void refuse(const std::string& name, const std::string& problem) {
  throw py::value_error(name + ": " + problem);
}

uintptr_t address_from(py::handle value, const std::string& name) {
  if (!PyLong_Check(value.ptr())) throw py::type_error(name + ": expected an address as int, got " +
                                                       py::str(py::type::of(value)).cast<std::string>());
  const unsigned long long address = PyLong_AsUnsignedLongLong(value.ptr());
  if (PyErr_Occurred()) {
    PyErr_Clear();
    refuse(name, "not an address (negative, or more than 64 bits)");
  }
  return static_cast<uintptr_t>(address);
}

int64_t count_from(py::handle value) {
  if (!PyLong_Check(value.ptr())) throw py::type_error("count: expected an int");
  const long long count = PyLong_AsLongLong(value.ptr());
  if (PyErr_Occurred()) {
    PyErr_Clear();
    refuse("count", "does not fit in 64 bits");
  }
  if (count < 0) refuse("count", "must not be negative, got " + std::to_string(count));
  return count;
}

dos::DType dtype_from(py::handle value, const std::string& name, std::initializer_list<dos::DType> allowed) {
  if (!PyLong_Check(value.ptr())) throw py::type_error(name + ": expected a dtype code as int");
  const long code = PyLong_AsLong(value.ptr());
  if (PyErr_Occurred()) PyErr_Clear();
  for (const dos::DType dtype : allowed)
    if (static_cast<long>(dtype) == code) return dtype;
  refuse(name, "dtype code " + std::to_string(code) + " is not allowed here");
}

double double_from(py::handle value, const std::string& name) {
  const double number = PyFloat_AsDouble(value.ptr());
  if (PyErr_Occurred()) {
    PyErr_Clear();
    throw py::type_error(name + ": expected a float");
  }
  if (!std::isfinite(number)) refuse(name, "must be finite, got " + std::to_string(number));
  return number;
}

float scalar_from(py::handle scalars, const char* field) {
  const std::string name = std::string("scalars.") + field;
  PyObject* attribute = PyObject_GetAttrString(scalars.ptr(), field);
  if (attribute == nullptr) {
    PyErr_Clear();
    throw py::type_error(name + ": missing; pass a megatron_dos.kernels.AdamScalars");
  }
  const py::object value = py::reinterpret_steal<py::object>(attribute);
  const double number = double_from(value, name);
  const float rounded = static_cast<float>(number);
  if (static_cast<double>(rounded) != number)
    refuse(name, "is not a float32 value; make the scalars with AdamScalars.at_step");
  return rounded;
}

dos::Scalars scalars_from(py::handle scalars) {
  return {scalar_from(scalars, "beta1"),
          scalar_from(scalars, "one_minus_beta1"),
          scalar_from(scalars, "beta2"),
          scalar_from(scalars, "one_minus_beta2"),
          scalar_from(scalars, "eps"),
          scalar_from(scalars, "decay"),
          scalar_from(scalars, "step_size"),
          scalar_from(scalars, "rsqrt_bias_correction2"),
          scalar_from(scalars, "weight_decay"),
          py::bool_(scalars.attr("l2_mode"))};
}

struct Array {
  const char* name;
  uintptr_t address;
  uintptr_t bytes;
};

Array array_from(const char* name, uintptr_t address, int64_t count, dos::DType dtype) {
  const uintptr_t size = dtype == dos::DType::float32 ? 4 : 2;
  if (count > std::numeric_limits<int64_t>::max() / static_cast<int64_t>(size)) refuse("count", "too many elements");
  if (count > 0 && address == 0) refuse(name, "null address");
  if (address % size != 0)
    refuse(name, "address is not a multiple of the element size, " + std::to_string(size) + " bytes");
  const uintptr_t bytes = static_cast<uintptr_t>(count) * size;
  if (address + bytes < address) refuse(name, "address and count reach past the end of memory");
  return {name, address, bytes};
}

void refuse_overlap(const Array& a, const Array& b) {
  if (a.bytes > 0 && b.bytes > 0 && a.address < b.address + b.bytes && b.address < a.address + a.bytes)
    refuse(a.name, std::string("overlaps ") + b.name + " in memory");
}

dos::Update update_from(py::handle param, py::handle exp_avg, py::handle exp_avg_sq, py::handle grad, py::handle out,
                        py::handle count, py::handle exp_avg_dtype, py::handle exp_avg_sq_dtype,
                        py::handle grad_dtype, py::handle out_dtype, py::handle scalars, py::handle grad_scale) {
  using dos::DType;
  dos::Update u;
  u.count = count_from(count);
  u.exp_avg_dtype = dtype_from(exp_avg_dtype, "exp_avg", {DType::float32, DType::bfloat16});
  u.exp_avg_sq_dtype = dtype_from(exp_avg_sq_dtype, "exp_avg_sq", {DType::float32, DType::bfloat16});
  u.grad_dtype = dtype_from(grad_dtype, "grad", {DType::float32, DType::bfloat16, DType::float16});
  u.out_dtype = dtype_from(out_dtype, "out", {DType::none, DType::float32, DType::bfloat16, DType::float16});
  u.scalars = scalars_from(scalars);
  const double scale = double_from(grad_scale, "grad_scale");
  u.grad_scale = static_cast<float>(scale);
  if (!std::isfinite(u.grad_scale)) refuse("grad_scale", "too large for float32");

  const Array p = array_from("param", address_from(param, "param"), u.count, DType::float32);
  const Array m = array_from("exp_avg", address_from(exp_avg, "exp_avg"), u.count, u.exp_avg_dtype);
  const Array v = array_from("exp_avg_sq", address_from(exp_avg_sq, "exp_avg_sq"), u.count, u.exp_avg_sq_dtype);
  const Array g = array_from("grad", address_from(grad, "grad"), u.count, u.grad_dtype);
  refuse_overlap(m, p);
  refuse_overlap(v, p);
  refuse_overlap(v, m);
  for (const Array* state : {&p, &m, &v}) refuse_overlap(g, *state);
  u.param = reinterpret_cast<float*>(p.address);
  u.exp_avg = reinterpret_cast<void*>(m.address);
  u.exp_avg_sq = reinterpret_cast<void*>(v.address);
  u.grad = reinterpret_cast<const void*>(g.address);

  const uintptr_t out_address = address_from(out, "out");
  u.out = nullptr;
  if (u.out_dtype == DType::none) {
    if (out_address != 0) refuse("out", "an address without a dtype");
  } else {
    const Array o = array_from("out", out_address, u.count, u.out_dtype);
    for (const Array* other : {&p, &m, &v, &g}) refuse_overlap(o, *other);
    u.out = reinterpret_cast<void*>(o.address);
  }
  // Past the caches only when the update does not fit in them anyway: the state's 24 bytes an element against a few MiB.
  constexpr int64_t kStreamFrom = 256 * 1024;
  u.stream_out = u.count >= kStreamFrom;
  return u;
}

// A submitted update and what keeps its memory alive. Dropping it waits: the memory may go right after.
class PyTicket {
 public:
  PyTicket(dos::Ticket ticket, py::object keep_alive) : ticket_(std::move(ticket)), keep_alive_(std::move(keep_alive)) {}
  PyTicket(PyTicket&&) = default;
  ~PyTicket() {
    if (ticket_.done()) return;
    const py::gil_scoped_release release;
    try {
      ticket_.wait();
    } catch (const std::exception&) {
      // A forked child drops its parent's ticket: nobody here touches that memory.
    }
  }

  bool done() const { return ticket_.done(); }
  void wait() {
    {
      const py::gil_scoped_release release;
      ticket_.wait();
    }
    keep_alive_ = py::none();
  }

 private:
  dos::Ticket ticket_;
  py::object keep_alive_;
};

void set_isa(const std::string& name) { active_isa = &dos::find_isa(name); }

void choose_isa() {
  const char* forced = std::getenv("MEGATRON_DOS_ISA");
  if (forced == nullptr || *forced == '\0') {
    active_isa = &dos::supported_isas().front();
    return;
  }
  try {
    set_isa(forced);
  } catch (const std::invalid_argument& error) {
    throw py::import_error(std::string("environment variable MEGATRON_DOS_ISA: ") + error.what());
  }
}

std::unique_ptr<dos::Pool> make_pool(int threads, std::vector<int> cpus) {
  if (threads < 1) refuse("threads", "must be at least 1, got " + std::to_string(threads));
  for (const int cpu : cpus)
    if (cpu < 0) refuse("cpus", "negative CPU number");
  return std::make_unique<dos::Pool>(threads, std::move(cpus));
}

}  // namespace

PYBIND11_MODULE(_cpp_adam, m) {
  m.doc() = "Fused CPU AdamW over raw host addresses; use megatron_dos.kernels.cpu instead.";
  choose_isa();

  m.def("isa", [] { return std::string(active_isa.load()->name); }, "Name of the instruction set in use.");
  m.def(
      "supported_isas",
      [] {
        std::vector<std::string> names;
        for (const dos::Isa& isa : dos::supported_isas()) names.emplace_back(isa.name);
        return names;
      },
      "Names of the instruction sets that this build and CPU support, best first.");
  m.def("set_isa", &set_isa, py::arg("name"),
        "Use another instruction set from now on (tests and benchmarks; MEGATRON_DOS_ISA is the user's way).");

  py::class_<PyTicket>(m, "Ticket", "A submitted update. Dropping it waits for the update.")
      .def("done", &PyTicket::done, "Whether the update is done; never blocks.")
      .def("wait", &PyTicket::wait, "Block until the update is done, with the GIL released.");

  py::class_<dos::Pool>(m, "Pool", "Worker threads that run updates in order of submission.")
      .def(py::init(&make_pool), py::arg("threads"), py::arg("cpus") = std::vector<int>())
      .def_property_readonly("threads", &dos::Pool::threads)
      .def_property_readonly("cpus", &dos::Pool::cpus)
      .def_property_readonly("closed", &dos::Pool::closed)
      .def("close", &dos::Pool::close, py::call_guard<py::gil_scoped_release>(),
           "Finish what was submitted and end the threads.")
      .def(
          "submit",
          [](dos::Pool& pool, py::handle param, py::handle exp_avg, py::handle exp_avg_sq, py::handle grad,
             py::handle out, py::handle count, py::handle exp_avg_dtype, py::handle exp_avg_sq_dtype,
             py::handle grad_dtype, py::handle out_dtype, py::handle scalars, py::handle grad_scale,
             py::object keep_alive) {
            const dos::Update update = update_from(param, exp_avg, exp_avg_sq, grad, out, count, exp_avg_dtype,
                                                   exp_avg_sq_dtype, grad_dtype, out_dtype, scalars, grad_scale);
            return PyTicket(pool.submit(update, active_isa.load()->update_range), std::move(keep_alive));
          },
          py::arg("param"), py::arg("exp_avg"), py::arg("exp_avg_sq"), py::arg("grad"), py::arg("out"),
          py::arg("count"), py::arg("exp_avg_dtype"), py::arg("exp_avg_sq_dtype"), py::arg("grad_dtype"),
          py::arg("out_dtype"), py::arg("scalars"), py::arg("grad_scale"), py::arg("keep_alive") = py::none(),
          "Start an update and return its Ticket, which holds keep_alive until the update is done.")
      .def(
          "run",
          [](dos::Pool& pool, py::handle param, py::handle exp_avg, py::handle exp_avg_sq, py::handle grad,
             py::handle out, py::handle count, py::handle exp_avg_dtype, py::handle exp_avg_sq_dtype,
             py::handle grad_dtype, py::handle out_dtype, py::handle scalars, py::handle grad_scale) {
            const dos::Update update = update_from(param, exp_avg, exp_avg_sq, grad, out, count, exp_avg_dtype,
                                                   exp_avg_sq_dtype, grad_dtype, out_dtype, scalars, grad_scale);
            const dos::Ticket ticket = pool.start(update, active_isa.load()->update_range);
            const py::gil_scoped_release release;
            ticket.wait();
          },
          py::arg("param"), py::arg("exp_avg"), py::arg("exp_avg_sq"), py::arg("grad"), py::arg("out"),
          py::arg("count"), py::arg("exp_avg_dtype"), py::arg("exp_avg_sq_dtype"), py::arg("grad_dtype"),
          py::arg("out_dtype"), py::arg("scalars"), py::arg("grad_scale"),
          "Run an update to its end, a small one on the calling thread; the GIL is released meanwhile.");
}
