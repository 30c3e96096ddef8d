// SPDX-License-Identifier: Apache-2.0
// Compiled with -mavx2 -mf16c: only reached after the CPU was seen to have both.
#include <immintrin.h>

#include "kernels.h"
#include "update_range.h"

namespace dos {
namespace {

struct Avx2Lane {
  using Value = __m256;
  static constexpr int width = 8;
  static constexpr bool can_stream = true;

  static Value broadcast(float x) { return _mm256_set1_ps(x); }
  static Value add(Value a, Value b) { return _mm256_add_ps(a, b); }
  static Value sub(Value a, Value b) { return _mm256_sub_ps(a, b); }
  static Value mul(Value a, Value b) { return _mm256_mul_ps(a, b); }
  static Value div(Value a, Value b) { return _mm256_div_ps(a, b); }
  static Value sqrt(Value a) { return _mm256_sqrt_ps(a); }

  static Value flush_denormal(Value x) {
    const Value magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
    return _mm256_and_ps(x, _mm256_cmp_ps(magnitude, _mm256_set1_ps(kSmallestNormal), _CMP_NLT_UQ));
  }
  static Value canonical(Value x) {
    const Value nan = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(kCanonicalNaN)));
    return _mm256_blendv_ps(x, nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  }

  static Value load(const float* from) { return _mm256_loadu_ps(from); }
  static Value load(const BFloat16* from) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  static Value load(const Float16* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }

  static void store(float* to, Value x) { _mm256_storeu_ps(to, x); }
  static void store(BFloat16* to, Value x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), narrow_bfloat16(x)); }
  static void store(Float16* to, Value x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), narrow_float16(x)); }

  static void stream_line(BFloat16* to, const Value (&x)[4]) {
    stream(to, narrow_bfloat16(x[0]), narrow_bfloat16(x[1]), narrow_bfloat16(x[2]), narrow_bfloat16(x[3]));
  }
  static void stream_line(Float16* to, const Value (&x)[4]) {
    stream(to, narrow_float16(x[0]), narrow_float16(x[1]), narrow_float16(x[2]), narrow_float16(x[3]));
  }
  static void fence() { _mm_sfence(); }

 private:
  // Integers, as in ScalarLane: the conversion instruction of newer CPUs flushes denormals.
  static __m128i narrow_bfloat16(Value x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i high = _mm256_srli_epi32(rounded, 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
  }
  static __m128i narrow_float16(Value x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }

  static void stream(void* to, __m128i a, __m128i b, __m128i c, __m128i d) {
    __m256i* line = static_cast<__m256i*>(to);
    _mm256_stream_si256(line, _mm256_set_m128i(b, a));
    _mm256_stream_si256(line + 1, _mm256_set_m128i(d, c));
  }
};

}  // namespace

void update_range_avx2(const Update& update, int64_t begin, int64_t end) {
  update_range<Avx2Lane>(update, begin, end);
}

}  // namespace dos
