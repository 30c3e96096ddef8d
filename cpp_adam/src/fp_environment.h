// SPDX-License-Identifier: Apache-2.0
// The floating-point control register of the running thread.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace dos {

// Holds the IEEE-754 default environment (nearest even, denormals kept) while it lives, then puts the caller's back:
// the caller may have asked to flush denormals, and the update's bits must not depend on it.
class IeeeEnvironment {
 public:
  IeeeEnvironment() : saved_(read()) { write(kDefault); }
  ~IeeeEnvironment() { write(saved_); }
  IeeeEnvironment(const IeeeEnvironment&) = delete;
  IeeeEnvironment& operator=(const IeeeEnvironment&) = delete;

 private:
#if defined(__x86_64__)
  using Register = uint32_t;
  static constexpr Register kDefault = 0x1f80;  // every exception masked
  static Register read() { return _mm_getcsr(); }
  static void write(Register value) { _mm_setcsr(value); }
#elif defined(__aarch64__)
  using Register = uint64_t;
  static constexpr Register kDefault = 0;
  static Register read() {
    Register value;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void write(Register value) { asm volatile("msr fpcr, %0" : : "r"(value) : "memory"); }
#else
#error "cpp_adam supports x86-64 and AArch64"
#endif

  const Register saved_;
};

}  // namespace dos
