// SPDX-License-Identifier: Apache-2.0
// The Python module megatron_dos._cpp_adam. It takes host memory as addresses (plain integers) and counts of elements,
// so one build serves every version of torch. Arguments are checked here as far as addresses can be; the caller
// (megatron_dos/kernels/cpu.py) vouches that the memory exists.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <initializer_list>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "footprint.h"
#include "fp_environment.h"
#include "kernels.h"
#include "pool.h"
#include "slab.h"

namespace py = pybind11;

namespace {

std::atomic<const dos::Isa*> active_isa{nullptr};

// Name of an argument in errors, put together only when there is one.
struct Name {
  const char* field;
  int64_t piece = -1;  // its index in a job of several pieces

  std::string text() const {
    return piece < 0 ? std::string(field) : "pieces[" + std::to_string(piece) + "]." + field;
  }
};

[[noreturn]] void refuse(const Name& name, const std::string& problem) {
  throw py::value_error(name.text() + ": " + problem);
}

[[noreturn]] void refuse_type(const Name& name, const std::string& expected, py::handle value) {
  throw py::type_error(name.text() + ": expected " + expected + ", got " + Py_TYPE(value.ptr())->tp_name);
}

uintptr_t address_from(py::handle value, const Name& name) {
  if (!PyLong_Check(value.ptr())) refuse_type(name, "an address as int", value);
  const unsigned long long address = PyLong_AsUnsignedLongLong(value.ptr());
  if (PyErr_Occurred()) {
    PyErr_Clear();
    refuse(name, "not an address (negative, or more than 64 bits)");
  }
  return static_cast<uintptr_t>(address);
}

int64_t count_from(py::handle value, const Name& name) {
  if (!PyLong_Check(value.ptr())) refuse_type(name, "an int", value);
  const long long count = PyLong_AsLongLong(value.ptr());
  if (PyErr_Occurred()) {
    PyErr_Clear();
    refuse(name, "does not fit in 64 bits");
  }
  if (count < 0) refuse(name, "must not be negative, got " + std::to_string(count));
  return count;
}

dos::DType dtype_from(py::handle value, const Name& name, std::initializer_list<dos::DType> allowed) {
  if (!PyLong_Check(value.ptr())) refuse_type(name, "a dtype code as int", value);
  const long code = PyLong_AsLong(value.ptr());
  if (PyErr_Occurred()) PyErr_Clear();  // code is -1 then, which is refused or says "none"
  for (const dos::DType dtype : allowed)
    if (static_cast<long>(dtype) == code) return dtype;
  refuse(name, "dtype code " + std::to_string(code) + " is not allowed here");
}

double double_from(py::handle value, const Name& name) {
  const double number = PyFloat_AsDouble(value.ptr());
  if (PyErr_Occurred()) {
    PyErr_Clear();
    refuse_type(name, "a float", value);
  }
  if (!std::isfinite(number)) refuse(name, "must be finite, got " + std::to_string(number));
  return number;
}

float factor_from(py::handle value, const Name& name) {
  const float factor = static_cast<float>(double_from(value, name));
  if (!std::isfinite(factor)) refuse(name, "too large for float32");
  return factor;
}

py::object attribute_of(py::handle scalars, const char* attribute, const Name& name) {
  py::object value = py::reinterpret_steal<py::object>(PyObject_GetAttrString(scalars.ptr(), attribute));
  if (!value) {
    PyErr_Clear();
    refuse_type(name, "a megatron_dos.kernels.AdamScalars", scalars);
  }
  return value;
}

dos::Scalars scalars_from(py::handle given, int64_t piece) {
  const auto scalar = [&](const char* attribute) {
    const double number = double_from(attribute_of(given, attribute, {"scalars", piece}), {attribute, piece});
    const float rounded = static_cast<float>(number);
    if (static_cast<double>(rounded) != number)
      refuse({attribute, piece}, "is not a float32 value; make the scalars with AdamScalars.at_step");
    return rounded;
  };
  dos::Scalars s;
  s.beta1 = scalar("beta1");
  s.one_minus_beta1 = scalar("one_minus_beta1");
  s.beta2 = scalar("beta2");
  s.one_minus_beta2 = scalar("one_minus_beta2");
  s.eps = scalar("eps");
  s.decay = scalar("decay");
  s.step_size = scalar("step_size");
  s.rsqrt_bias_correction2 = scalar("rsqrt_bias_correction2");
  s.weight_decay = scalar("weight_decay");
  const py::object l2_mode = attribute_of(given, "l2_mode", {"scalars", piece});
  if (!PyBool_Check(l2_mode.ptr())) refuse_type({"l2_mode", piece}, "a bool", l2_mode);
  s.l2_mode = l2_mode.is(py::bool_(true));
  return s;
}

struct Array {
  Name name;
  uintptr_t address;
  uintptr_t bytes;
};

Array array_from(const Name& name, py::handle value, int64_t count, dos::DType dtype) {
  const uintptr_t address = address_from(value, name);
  const int64_t size = dos::element_size(dtype);
  if (count > std::numeric_limits<int64_t>::max() / size) refuse(name, "more elements than there are addresses");
  const uintptr_t bytes = static_cast<uintptr_t>(count * size);
  // No system maps the first page or the upper half of the addresses for a program.
  constexpr uintptr_t kFirst = 4096;
  constexpr uintptr_t kEnd = uintptr_t{1} << 63;
  if (count > 0 && address < kFirst) refuse(name, "null address");
  if (address % size != 0)
    refuse(name, "address is not a multiple of the element size, " + std::to_string(size) + " bytes");
  if (address > kEnd || bytes > kEnd - address) refuse(name, "reaches past the last address");
  return {name, address, bytes};
}

void refuse_overlap(const Array& a, const Array& b) {
  if (a.bytes > 0 && b.bytes > 0 && a.address < b.address + b.bytes && b.address < a.address + a.bytes)
    refuse(a.name, std::string("overlaps ") + b.name.field + " in memory");
}

// Fields of a piece, in the order of the tuple that Python passes.
enum Field {
  kParam,
  kExpAvg,
  kExpAvgSq,
  kGrad,
  kOut,
  kCount,
  kExpAvgDType,
  kExpAvgSqDType,
  kGradDType,
  kOutDType,
  kScalars,
  kUnscale,
  kGradScale,
  kFields
};

dos::Update update_from(PyObject* given, const dos::Scalars& scalars, int64_t piece) {
  using dos::DType;
  const auto field = [&](Field index) { return py::handle(PyTuple_GET_ITEM(given, index)); };
  dos::Update u;
  u.scalars = scalars;
  u.count = count_from(field(kCount), {"count", piece});
  u.exp_avg_dtype = dtype_from(field(kExpAvgDType), {"exp_avg", piece}, {DType::float32, DType::bfloat16});
  u.exp_avg_sq_dtype = dtype_from(field(kExpAvgSqDType), {"exp_avg_sq", piece}, {DType::float32, DType::bfloat16});
  u.grad_dtype = dtype_from(field(kGradDType), {"grad", piece}, {DType::float32, DType::bfloat16, DType::float16});
  u.out_dtype =
      dtype_from(field(kOutDType), {"out", piece}, {DType::none, DType::float32, DType::bfloat16, DType::float16});
  u.unscale = factor_from(field(kUnscale), {"unscale", piece});
  u.grad_scale = factor_from(field(kGradScale), {"grad_scale", piece});

  const Array p = array_from({"param", piece}, field(kParam), u.count, DType::float32);
  const Array m = array_from({"exp_avg", piece}, field(kExpAvg), u.count, u.exp_avg_dtype);
  const Array v = array_from({"exp_avg_sq", piece}, field(kExpAvgSq), u.count, u.exp_avg_sq_dtype);
  const Array g = array_from({"grad", piece}, field(kGrad), u.count, u.grad_dtype);
  refuse_overlap(m, p);
  refuse_overlap(v, p);
  refuse_overlap(v, m);
  for (const Array* state : {&p, &m, &v}) refuse_overlap(g, *state);
  u.param = reinterpret_cast<float*>(p.address);
  u.exp_avg = reinterpret_cast<void*>(m.address);
  u.exp_avg_sq = reinterpret_cast<void*>(v.address);
  u.grad = reinterpret_cast<const void*>(g.address);

  if (u.out_dtype == DType::none) {
    if (address_from(field(kOut), {"out", piece}) != 0) refuse({"out", piece}, "an address without a dtype");
    u.out = nullptr;
  } else {
    const Array o = array_from({"out", piece}, field(kOut), u.count, u.out_dtype);
    for (const Array* other : {&p, &m, &v, &g}) refuse_overlap(o, *other);
    u.out = reinterpret_cast<void*>(o.address);
  }
  return u;
}

// Not inlined: no conversion of a scalar may move past the change of the floating-point mode around the call.
[[gnu::noinline]] std::vector<dos::Update> parse(const py::list& pieces) {
  std::vector<dos::Update> updates;
  updates.reserve(pieces.size());
  py::object parsed;  // pieces of one param group share one AdamScalars
  dos::Scalars scalars{};
  int64_t total = 0;
  for (size_t index = 0; index < pieces.size(); ++index) {
    const py::object piece = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(pieces.ptr(), index));
    const int64_t number = pieces.size() > 1 ? static_cast<int64_t>(index) : -1;
    if (!PyTuple_Check(piece.ptr()) || PyTuple_GET_SIZE(piece.ptr()) != kFields)
      throw py::type_error("pieces: expected tuples of " + std::to_string(kFields) + " fields");
    const py::handle given(PyTuple_GET_ITEM(piece.ptr(), kScalars));
    if (!parsed.is(given)) {
      scalars = scalars_from(given, number);
      parsed = py::reinterpret_borrow<py::object>(given);
    }
    updates.push_back(update_from(piece.ptr(), scalars, number));
    if (__builtin_add_overflow(total, updates.back().count, &total)) refuse({"count", number}, "too many elements");
  }
  // Past the caches only when the job does not fit in them anyway: 24 bytes of state an element against a few MiB.
  constexpr int64_t kStreamFrom = 256 * 1024;
  for (dos::Update& update : updates) update.stream_out = total >= kStreamFrom;
  return updates;
}

// A scalar may be denormal in float32, which the caller's mode may flush when it is rounded or looked at.
std::vector<dos::Update> updates_from(const py::list& pieces) {
  const dos::IeeeEnvironment environment;
  return parse(pieces);
}

// An IeeeEnvironment for Python's `with`.
class PyIeeeEnvironment {
 public:
  void enter() {
    if (held_) throw std::runtime_error("IeeeEnvironment: it has been entered already");
    held_.emplace();
  }
  void exit(const py::args&) { held_.reset(); }

 private:
  std::optional<dos::IeeeEnvironment> held_;
};

dos::RangeKernel active_kernel() { return active_isa.load()->update_range; }

// A submitted job and what keeps its memory alive. Dropping it waits: the memory may go right after.
class PyTicket {
 public:
  PyTicket(dos::Ticket ticket, py::object keep_alive)
      : ticket_(std::move(ticket)), keep_alive_(std::move(keep_alive)) {}
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

  bool poll() const { return ticket_.done(); }
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

// A slab that Python may have page-locked, which must be undone before the memory goes.
class PySlab : public dos::Slab {
 public:
  using dos::Slab::Slab;
  ~PySlab() {
    if (before_release.is_none()) return;
    try {
      before_release();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("megatron_dos slab");
    }
  }

  py::object before_release = py::none();
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
  constexpr int kMostThreads = 4096;
  if (threads < 1 || threads > kMostThreads)
    refuse({"threads"}, "must be 1 to " + std::to_string(kMostThreads) + ", got " + std::to_string(threads));
  constexpr int kMostCpus = 1 << 16;
  for (const int cpu : cpus)
    if (cpu < 0 || cpu >= kMostCpus) refuse({"cpus"}, "not a CPU number: " + std::to_string(cpu));
  return std::make_unique<dos::Pool>(threads, std::move(cpus));
}

std::unique_ptr<PySlab> make_slab(int64_t nbytes, int node, bool shared) {
  constexpr int kMostNodes = 1 << 16;
  if (nbytes < 1) refuse({"nbytes"}, "must be at least 1, got " + std::to_string(nbytes));
  if (node < -1 || node >= kMostNodes) refuse({"node"}, "not a NUMA node: " + std::to_string(node));
  return std::make_unique<PySlab>(static_cast<size_t>(nbytes), node, shared);
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

  py::class_<PyIeeeEnvironment>(m, "IeeeEnvironment",
                                "Within `with`, the running thread keeps denormals and rounds to nearest even.")
      .def(py::init<>())
      .def("__enter__", &PyIeeeEnvironment::enter)
      .def("__exit__", &PyIeeeEnvironment::exit);

  py::class_<PyTicket>(m, "Ticket", "A submitted job. Dropping it waits for the job.")
      .def("poll", &PyTicket::poll, "Whether the job is done; never blocks.")
      .def("wait", &PyTicket::wait, "Block until the job is done, with the GIL released.");

  py::class_<dos::Pool>(
      m, "Pool",
      "Worker threads that run jobs in order of submission. A job is a list of pieces, each the tuple (param, exp_avg,\n"
      "exp_avg_sq, grad, out, count, exp_avg_dtype, exp_avg_sq_dtype, grad_dtype, out_dtype, scalars, unscale,\n"
      "grad_scale):\n"
      "addresses (out 0 for none), a count of elements, codes of kernels.DType, an AdamScalars, two floats.")
      .def(py::init(&make_pool), py::arg("threads"), py::arg("cpus") = std::vector<int>())
      .def_property_readonly("threads", &dos::Pool::threads)
      .def_property_readonly("cpus", &dos::Pool::cpus)
      .def_property_readonly("closed", &dos::Pool::closed)
      .def("close", &dos::Pool::close, py::call_guard<py::gil_scoped_release>(),
           "Finish what was submitted and end the threads.")
      .def(
          "submit",
          [](dos::Pool& pool, const py::list& pieces, py::object keep_alive) {
            return PyTicket(pool.submit(updates_from(pieces), active_kernel()), std::move(keep_alive));
          },
          py::arg("pieces"), py::arg("keep_alive") = py::none(),
          "Start a job and return its Ticket, which holds keep_alive until it is done.")
      .def(
          "run",
          [](dos::Pool& pool, const py::list& pieces) {
            const dos::Ticket ticket = pool.start(updates_from(pieces), active_kernel());
            const py::gil_scoped_release release;
            ticket.wait();
          },
          py::arg("pieces"), "Run a job to its end, a small one on the calling thread; the GIL is released.");

  py::class_<PySlab>(m, "Slab", py::buffer_protocol(),
                     "Zeroed, page-aligned host memory; a writable buffer of bytes, for torch.frombuffer.")
      .def(py::init(&make_slab), py::arg("nbytes"), py::arg("node") = -1, py::arg("shared") = false)
      .def_property_readonly("address", [](const PySlab& slab) { return reinterpret_cast<uintptr_t>(slab.address()); })
      .def_property_readonly("nbytes", &PySlab::bytes)
      .def_property_readonly("huge_pages_asked", &PySlab::huge_pages_asked)
      .def_property_readonly("node_preferred", &PySlab::node_preferred)
      .def_readwrite("before_release", &PySlab::before_release, "Called before the memory goes, unless None.")
      .def_buffer([](PySlab& slab) {
        return py::buffer_info(static_cast<uint8_t*>(slab.address()), static_cast<py::ssize_t>(slab.bytes()));
      });
}
