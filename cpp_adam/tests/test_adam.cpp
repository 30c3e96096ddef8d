// SPDX-License-Identifier: Apache-2.0
// Tests of the C++ parts without Python, for sanitizers and for other architectures under an emulator. That the bits are
// the right ones is shown against numpy in tests/kernels/; `test_adam replay IN OUT ISA` serves that on an emulator.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "fp_environment.h"
#include "kernels.h"
#include "pool.h"
#include "scalar_lane.h"
#include "slab.h"

namespace {

using dos::DType;

void check(bool good, const std::string& what) {
  if (good) return;
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  std::exit(1);
}

template <class Error, class Call>
void check_throws(Call call, const std::string& what) {
  try {
    call();
  } catch (const Error&) {
    return;
  }
  check(false, what);
}

size_t size_of(DType dtype) { return dtype == DType::none ? 0 : dtype == DType::float32 ? 4 : 2; }

dos::Scalars training_scalars(bool l2_mode) {
  return {0.9f, 0.1f, 0.999f, 0.001f, 1e-8f, l2_mode ? 1.0f : 0.99999f, 1e-2f, 31.6f, 0.01f, l2_mode};
}

// One array on the heap with no byte to spare after it, so that AddressSanitizer sees any access beyond.
class Array {
 public:
  Array(DType dtype, size_t count, size_t offset)
      : dtype_(dtype), count_(count), offset_(offset * size_of(dtype)), bytes_(offset_ + count * size_of(dtype)) {}

  void* data() { return bytes_.data() + offset_; }
  const std::vector<unsigned char>& bytes() const { return bytes_; }

  // Bits of every kind of number; with sign off, no negative ones.
  void fill(std::mt19937& random, bool sign) {
    for (size_t i = 0; i < count_; ++i) {
      uint32_t bits = random();
      if (random() % 4 != 0) bits = (bits & 0x807fffffu) | ((100u + random() % 30u) << 23);
      if (!sign) bits &= 0x7fffffffu;
      unsigned char* element = bytes_.data() + offset_ + i * size_of(dtype_);
      if (dtype_ == DType::float32) {
        std::memcpy(element, &bits, 4);
      } else {
        const uint16_t half = static_cast<uint16_t>(bits >> 16);
        std::memcpy(element, &half, 2);
      }
    }
  }

 private:
  DType dtype_;
  size_t count_;
  size_t offset_;
  std::vector<unsigned char> bytes_;
};

struct Arrays {
  Arrays(DType moments, DType grad_dtype, DType out_dtype, size_t count, size_t offset)
      : param(DType::float32, count, offset % 5),
        exp_avg(moments, count, offset % 7),
        exp_avg_sq(moments, count, offset % 3),
        grad(grad_dtype, count, offset % 11),
        out(out_dtype, count, offset % 33),
        update{} {
    update.count = static_cast<int64_t>(count);
    update.exp_avg_dtype = update.exp_avg_sq_dtype = moments;
    update.grad_dtype = grad_dtype;
    update.out_dtype = out_dtype;
    update.unscale = 0.5f;
    update.grad_scale = 0.75f;
    update.scalars = training_scalars(false);
  }

  void fill(unsigned seed) {
    std::mt19937 random(seed);
    param.fill(random, true);
    exp_avg.fill(random, true);
    exp_avg_sq.fill(random, false);
    grad.fill(random, true);
  }

  dos::Update bound() {
    update.param = static_cast<float*>(param.data());
    update.exp_avg = exp_avg.data();
    update.exp_avg_sq = exp_avg_sq.data();
    update.grad = grad.data();
    update.out = update.out_dtype == DType::none ? nullptr : out.data();
    return update;
  }

  bool same_bits(const Arrays& other) const {
    return param.bytes() == other.param.bytes() && exp_avg.bytes() == other.exp_avg.bytes() &&
           exp_avg_sq.bytes() == other.exp_avg_sq.bytes() && out.bytes() == other.out.bytes();
  }

  Array param, exp_avg, exp_avg_sq, grad, out;
  dos::Update update;
};

void update_on_this_thread(Arrays& arrays, dos::RangeKernel kernel) {
  const dos::IeeeEnvironment environment;
  const dos::Update update = arrays.bound();
  kernel(update, 0, update.count);
}

void test_every_instruction_set_agrees_with_scalar() {
  for (const dos::Isa& isa : dos::supported_isas()) {
    std::mt19937 random(7);
    for (const DType moments : {DType::float32, DType::bfloat16})
      for (const DType grad : {DType::float32, DType::bfloat16, DType::float16})
        for (const DType out : {DType::none, DType::float32, DType::bfloat16, DType::float16})
          for (const bool l2_mode : {false, true})
            for (const bool stream : {false, true})
              for (const size_t count : {0, 1, 3, 15, 16, 31, 32, 33, 64, 257}) {
                const size_t offset = random() % 1000;
                Arrays plain(moments, grad, out, count, offset);
                plain.fill(static_cast<unsigned>(random()));
                plain.update.scalars = training_scalars(l2_mode);
                plain.update.stream_out = stream;
                Arrays vectors = plain;
                update_on_this_thread(plain, dos::update_range_scalar);
                update_on_this_thread(vectors, isa.update_range);
                check(plain.same_bits(vectors), std::string(isa.name) + " differs from scalar");
              }
  }
}

void test_float16_conversion_is_exact_and_rounds_to_even() {
  using Lane = dos::ScalarLane;
  for (uint32_t bits = 0; bits < 0x7c00u; ++bits) {
    const dos::Float16 half{static_cast<uint16_t>(bits)};
    const dos::Float16 next{static_cast<uint16_t>(bits + 1)};
    const float here = Lane::load(&half);
    // 65536 is where the halves would go on if the exponent did.
    const float there = bits + 1 == 0x7c00u ? 65536.0f : Lane::load(&next);
    const float middle = static_cast<float>((double{here} + double{there}) / 2);
    const float values[] = {here, std::nextafterf(middle, here), middle, std::nextafterf(middle, there)};
    const uint32_t wanted[] = {bits, bits, bits + (bits & 1u), bits + 1};
    for (int i = 0; i < 4; ++i)
      for (const float sign : {1.0f, -1.0f}) {
        dos::Float16 rounded;
        Lane::store(&rounded, sign * values[i]);
        check(rounded.bits == (wanted[i] | (sign < 0 ? 0x8000u : 0u)), "float16 rounding of " + std::to_string(values[i]));
      }
  }
}

void test_flush_denormal_mode_of_the_caller_changes_nothing() {
#if defined(__x86_64__)
  for (const dos::Isa& isa : dos::supported_isas()) {
    Arrays expected(DType::float32, DType::float16, DType::bfloat16, 1000, 3);
    expected.fill(1);
    Arrays actual = expected;
    update_on_this_thread(expected, isa.update_range);
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040u);
    update_on_this_thread(actual, isa.update_range);
    check((_mm_getcsr() & 0x8040u) == 0x8040u, "the caller's mode is put back");
    dos::Pool pool(2, {});
    Arrays pooled(DType::float32, DType::float16, DType::bfloat16, 1000, 3);
    pooled.fill(1);
    pool.submit({pooled.bound()}, isa.update_range).wait();
    // Workers inherit the mode in which they are started. Nothing moves this param but a flush: all else is zero.
    Arrays denormal(DType::float32, DType::float32, DType::float32, 1000, 0);
    const uint32_t bits = 0x00030201u;
    for (size_t i = 0; i < 1000; ++i) std::memcpy(static_cast<char*>(denormal.param.data()) + 4 * i, &bits, 4);
    denormal.update.scalars.decay = 1.0f;
    const std::vector<unsigned char> untouched = denormal.param.bytes();
    pool.submit({denormal.bound()}, isa.update_range).wait();
    _mm_setcsr(before);
    check(denormal.param.bytes() == untouched, std::string(isa.name) + " on a worker flushes a denormal param");
    check(expected.same_bits(actual), std::string(isa.name) + " on the calling thread flushes denormals");
    check(expected.same_bits(pooled), std::string(isa.name) + " on a worker flushes denormals");
  }
#endif
}

void test_pool_shares_pieces_and_keeps_order() {
  const dos::RangeKernel kernel = dos::supported_isas().front().update_range;
  dos::Pool pool(3, {});
  constexpr int kSteps = 5;
  std::vector<Arrays> expected;
  for (const size_t count : {0, 1, 70000, 200001, 17, 0, 65536, 131072})
    expected.emplace_back(DType::float32, DType::bfloat16, DType::bfloat16, count, expected.size());
  for (size_t i = 0; i < expected.size(); ++i) expected[i].fill(static_cast<unsigned>(i));
  std::vector<Arrays> actual = expected;
  for (Arrays& arrays : expected)
    for (int step = 0; step < kSteps; ++step) update_on_this_thread(arrays, kernel);

  // The same memory several times over: each job must see the one before it done.
  std::vector<dos::Ticket> tickets;
  std::vector<dos::Update> updates;
  for (Arrays& arrays : actual) updates.push_back(arrays.bound());
  for (int step = 0; step + 1 < kSteps; ++step) tickets.push_back(pool.submit(updates, kernel));
  pool.start({updates[1]}, kernel).wait();  // small enough to run here, but not before the others are done
  updates.erase(updates.begin() + 1);
  tickets.push_back(pool.submit(updates, kernel));
  for (const dos::Ticket& ticket : tickets) ticket.wait();
  for (const dos::Ticket& ticket : tickets) check(ticket.done(), "a ticket that was waited for is done");
  for (size_t i = 0; i < expected.size(); ++i) check(expected[i].same_bits(actual[i]), "pooled update differs");
}

// Stands in for the update: jobs of one element are noted, longer ones held up until they are let go.
std::atomic<bool> let_go{false};
std::atomic<int> short_jobs_done{0};

void held_up(const dos::Update& update, int64_t, int64_t) {
  if (update.count == 1) {
    ++short_jobs_done;
    return;
  }
  while (!let_go) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void test_only_jobs_that_touch_unfinished_memory_wait() {
  dos::Pool pool(3, {});
  Arrays first(DType::float32, DType::float32, DType::none, 1000, 0);
  Arrays apart(DType::float32, DType::float32, DType::none, 1, 0);
  dos::Update reads_first = apart.bound();
  reads_first.grad = static_cast<float*>(first.bound().exp_avg_sq) + 999;
  dos::Update writes_what_first_reads = apart.bound();
  writes_what_first_reads.param = static_cast<float*>(const_cast<void*>(first.bound().grad)) + 999;
  for (const dos::Update& touching : {reads_first, writes_what_first_reads}) {
    let_go = false;
    short_jobs_done = 0;
    const dos::Ticket long_one = pool.submit({first.bound()}, held_up);
    pool.submit({apart.bound()}, held_up).wait();  // side by side, or this would wait for ever
    check(short_jobs_done == 1, "a job elsewhere does not wait");
    const dos::Ticket short_one = pool.submit({touching}, held_up);
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    check(!short_one.done() && short_jobs_done == 1, "a job on unfinished memory waits");
    let_go = true;
    short_one.wait();
    check(long_one.done() && short_jobs_done == 2, "and runs after it");
  }
}

void test_pool_refuses_pieces_that_overlap() {
  const dos::RangeKernel kernel = dos::supported_isas().front().update_range;
  dos::Pool pool(2, {});
  Arrays arrays(DType::float32, DType::float32, DType::none, 1000, 0);
  Arrays other(DType::float32, DType::float32, DType::none, 1000, 0);
  dos::Update reads_written = other.bound();
  reads_written.grad = arrays.bound().exp_avg;
  for (const std::vector<dos::Update>& updates :
       {std::vector<dos::Update>{arrays.bound(), arrays.bound()}, {arrays.bound(), reads_written}}) {
    check_throws<std::invalid_argument>([&] { pool.submit(updates, kernel); }, "submit refuses overlap");
    check_throws<std::invalid_argument>([&] { pool.start(updates, kernel); }, "start refuses overlap");
  }
}

void test_pool_closes_after_what_was_submitted() {
  const dos::RangeKernel kernel = dos::supported_isas().front().update_range;
  Arrays arrays(DType::float32, DType::float32, DType::float16, 300000, 0);
  dos::Ticket ticket;
  {
    dos::Pool pool(2, {0});
    ticket = pool.submit({arrays.bound()}, kernel);
    pool.close();
    pool.close();
    check(ticket.done(), "closing finishes what was submitted");
    check_throws<std::runtime_error>([&] { pool.submit({arrays.bound()}, kernel); }, "a closed pool refuses");
  }
  ticket.wait();
  check_throws<std::runtime_error>([] { dos::Pool nowhere(2, {60000}); }, "a CPU that does not exist is refused");
}

void test_tickets_can_be_waited_for_on_many_threads() {
  const dos::RangeKernel kernel = dos::supported_isas().front().update_range;
  dos::Pool pool(2, {});
  Arrays arrays(DType::bfloat16, DType::float16, DType::bfloat16, 400000, 5);
  const dos::Ticket ticket = pool.submit({arrays.bound()}, kernel);
  std::vector<std::thread> waiting;
  for (int i = 0; i < 4; ++i) waiting.emplace_back([&] { ticket.wait(); });
  for (std::thread& thread : waiting) thread.join();
  check(ticket.done(), "done");
}

void test_a_forked_child_gets_fresh_workers() {
  const dos::RangeKernel kernel = dos::supported_isas().front().update_range;
  dos::Pool pool(2, {});
  Arrays arrays(DType::float32, DType::float32, DType::float32, 300000, 0);
  Arrays busy(DType::float32, DType::float32, DType::float32, 3000000, 0);
  const dos::Ticket parents = pool.submit({busy.bound()}, kernel);
  const pid_t child = fork();
  if (child == 0) {
    pool.submit({arrays.bound()}, kernel).wait();
    if (!parents.done()) check_throws<std::runtime_error>([&] { parents.wait(); }, "a parent's ticket is refused");
    pool.close();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child ends well");
  parents.wait();
}

void test_slab_is_page_aligned_zeroed_and_no_larger_than_asked() {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  for (const size_t bytes : {size_t{1}, page, (size_t{2} << 20) + 1, (size_t{5} << 20) + 3}) {
    for (const bool shared : {false, true}) {
      dos::Slab slab(bytes, 0, shared);
      unsigned char* memory = static_cast<unsigned char*>(slab.address());
      check(reinterpret_cast<uintptr_t>(memory) % page == 0, "page-aligned");
      check(slab.bytes() == bytes, "bytes");
      for (size_t i = 0; i < bytes; i += 997) check(memory[i] == 0, "zeroed");
      std::memset(memory, 1, bytes);
    }
  }
  for (const bool shared : {false, true}) {
    check_throws<std::invalid_argument>([=] { dos::Slab none(0, -1, shared); }, "an empty slab is refused");
    check_throws<std::system_error>([=] { dos::Slab huge(size_t{1} << 62, -1, shared); },
                                    "an impossible size is refused");
  }
}

// `replay IN OUT ISA`: IN holds cases one after the other, a Header, then param, exp_avg, exp_avg_sq and grad. OUT gets
// param, exp_avg, exp_avg_sq and out of each case.
struct Header {
  int64_t count;
  int32_t exp_avg_dtype, exp_avg_sq_dtype, grad_dtype, out_dtype;
  int32_t l2_mode, stream_out;
  float scalars[9];
  float unscale, grad_scale;
  int32_t padding;  // to a multiple of 8 bytes, as the file has it
};

void replay(const char* in_path, const char* out_path, const dos::Isa& isa) {
  std::ifstream in(in_path, std::ios::binary);
  std::ofstream out(out_path, std::ios::binary);
  Header h;
  while (in.read(reinterpret_cast<char*>(&h), sizeof h)) {
    dos::Update u{};
    u.count = h.count;
    u.exp_avg_dtype = static_cast<DType>(h.exp_avg_dtype);
    u.exp_avg_sq_dtype = static_cast<DType>(h.exp_avg_sq_dtype);
    u.grad_dtype = static_cast<DType>(h.grad_dtype);
    u.out_dtype = static_cast<DType>(h.out_dtype);
    u.stream_out = h.stream_out != 0;
    u.unscale = h.unscale;
    u.grad_scale = h.grad_scale;
    const float* s = h.scalars;
    u.scalars = {s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], h.l2_mode != 0};
    const auto read = [&](DType dtype) {
      std::vector<char> bytes(static_cast<size_t>(h.count) * size_of(dtype));
      in.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
      return bytes;
    };
    std::vector<char> param = read(DType::float32);
    std::vector<char> exp_avg = read(u.exp_avg_dtype);
    std::vector<char> exp_avg_sq = read(u.exp_avg_sq_dtype);
    std::vector<char> grad = read(u.grad_dtype);
    std::vector<char> result(static_cast<size_t>(h.count) * size_of(u.out_dtype));
    u.param = reinterpret_cast<float*>(param.data());
    u.exp_avg = exp_avg.data();
    u.exp_avg_sq = exp_avg_sq.data();
    u.grad = grad.data();
    u.out = u.out_dtype == DType::none ? nullptr : result.data();
    const dos::IeeeEnvironment environment;
    isa.update_range(u, 0, u.count);
    for (const std::vector<char>* bytes : {&param, &exp_avg, &exp_avg_sq, &result})
      out.write(bytes->data(), static_cast<std::streamsize>(bytes->size()));
  }
  out.flush();
  check(out.good() && in.eof(), "replay could read and write its files");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 5 && std::string(argv[1]) == "replay") {
    replay(argv[2], argv[3], dos::find_isa(argv[4]));
    return 0;
  }
  const bool fork_too = argc < 2 || std::string(argv[1]) != "--no-fork";
  test_every_instruction_set_agrees_with_scalar();
  test_float16_conversion_is_exact_and_rounds_to_even();
  test_flush_denormal_mode_of_the_caller_changes_nothing();
  test_pool_shares_pieces_and_keeps_order();
  test_only_jobs_that_touch_unfinished_memory_wait();
  test_pool_refuses_pieces_that_overlap();
  test_pool_closes_after_what_was_submitted();
  test_tickets_can_be_waited_for_on_many_threads();
  if (fork_too) test_a_forked_child_gets_fresh_workers();
  test_slab_is_page_aligned_zeroed_and_no_larger_than_asked();
  std::string isas;
  for (const dos::Isa& isa : dos::supported_isas()) isas += std::string(" ") + isa.name;
  std::printf("all good:%s\n", isas.c_str());
}
