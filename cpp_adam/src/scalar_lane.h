// SPDX-License-Identifier: Apache-2.0
// The arithmetic of the update on one element at a time: the fallback for every CPU, and the tail of the vector paths.
//
// Everything is in an unnamed namespace on purpose (see adam.h): each translation unit keeps its own copy.
#pragma once

#include <cstdint>
#include <cstring>

namespace dos {
namespace {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

constexpr float kSmallestNormal = 1.17549435e-38f;
constexpr uint32_t kCanonicalNaN = 0x7fc00000u;

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

struct ScalarLane {
  using Value = float;
  static constexpr int width = 1;
  static constexpr bool can_stream = false;

  static Value broadcast(float x) { return x; }
  static Value add(Value a, Value b) { return a + b; }
  static Value sub(Value a, Value b) { return a - b; }
  static Value mul(Value a, Value b) { return a * b; }
  static Value div(Value a, Value b) { return a / b; }
  static Value sqrt(Value a) { return __builtin_sqrtf(a); }

  // |x| < FLT_MIN becomes +0; a NaN stays.
  static Value flush_denormal(Value x) { return __builtin_fabsf(x) < kSmallestNormal ? 0.0f : x; }

  // Hardware disagrees on the sign and payload of a NaN, so one NaN is stored for all.
  static Value canonical(Value x) { return x != x ? float_of(kCanonicalNaN) : x; }

  static Value load(const float* from) { return *from; }
  static Value load(const BFloat16* from) { return float_of(uint32_t{from->bits} << 16); }
  static Value load(const Float16* from) {
    const uint32_t half = from->bits;
    const uint32_t sign = (half & 0x8000u) << 16;
    const uint32_t exponent = (half >> 10) & 0x1fu;
    const uint32_t mantissa = half & 0x3ffu;
    if (exponent == 0x1fu) return float_of(sign | 0x7f800000u | (mantissa << 13));
    if (exponent == 0) return float_of(sign | bits_of(static_cast<float>(mantissa) * 0x1p-24f));
    return float_of(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  }

  static void store(float* to, Value x) { *to = x; }

  // Both 16-bit stores round to nearest even with integers, whatever the floating-point environment; x holds no
  // NaN but the canonical one, whose rounding is the quiet NaN 0x7fc0 or 0x7e00.
  static void store(BFloat16* to, Value x) {
    const uint32_t bits = bits_of(x);
    to->bits = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
  static void store(Float16* to, Value x) { to->bits = half_of(x); }

 private:
  static uint16_t half_of(float x) {
    const uint32_t bits = bits_of(x);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7e00u;                                       // NaN
    if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);        // 65520 and up: infinity
    if (magnitude < 0x33000000u) return static_cast<uint16_t>(sign);                   // below 2^-25: zero
    if (magnitude >= 0x38800000u) {                                                    // normal half
      const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
      return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
    }
    // Denormal half: the result counts units of 2^-24, so shift the mantissa there and round what falls off.
    const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    const uint32_t shift = 126u - (magnitude >> 23);
    const uint32_t kept = mantissa >> shift;
    const uint32_t lost = mantissa & ((1u << shift) - 1u);
    const uint32_t halfway = 1u << (shift - 1u);
    const uint32_t up = (lost > halfway) | ((lost == halfway) & (kept & 1u));
    return static_cast<uint16_t>(sign | (kept + up));
  }
};

}  // namespace
}  // namespace dos
