// SPDX-License-Identifier: Apache-2.0
// Compiled with -mavx512f -mavx512bw -mavx512dq -mavx512vl: only reached after the CPU was seen to have them all.
#include <immintrin.h>

#include "kernels.h"
#include "update_range.h"

namespace dos {
namespace {

struct Avx512Lane {
  using Value = __m512;
  static constexpr int width = 16;
  static constexpr bool can_stream = true;

  static Value broadcast(float x) { return _mm512_set1_ps(x); }
  static Value add(Value a, Value b) { return _mm512_add_ps(a, b); }
  static Value sub(Value a, Value b) { return _mm512_sub_ps(a, b); }
  static Value mul(Value a, Value b) { return _mm512_mul_ps(a, b); }
  static Value div(Value a, Value b) { return _mm512_div_ps(a, b); }
  static Value sqrt(Value a) { return _mm512_sqrt_ps(a); }

  static Value flush_denormal(Value x) {
    const __mmask16 keep = _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(kSmallestNormal), _CMP_NLT_UQ);
    return _mm512_maskz_mov_ps(keep, x);
  }
  static Value canonical(Value x) {
    const Value nan = _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(kCanonicalNaN)));
    return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), nan);
  }

  static Value load(const float* from) { return _mm512_loadu_ps(from); }
  static Value load(const BFloat16* from) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  static Value load(const Float16* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }

  static void store(float* to, Value x) { _mm512_storeu_ps(to, x); }
  static void store(BFloat16* to, Value x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow_bfloat16(x)); }
  static void store(Float16* to, Value x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow_float16(x)); }

  static void stream_line(BFloat16* to, const Value (&x)[2]) {
    stream(to, narrow_bfloat16(x[0]), narrow_bfloat16(x[1]));
  }
  static void stream_line(Float16* to, const Value (&x)[2]) {
    stream(to, narrow_float16(x[0]), narrow_float16(x[1]));
  }
  static void fence() { _mm_sfence(); }

 private:
  // Integers, as in ScalarLane: vcvtne2ps2bf16 would flush denormals.
  static __m256i narrow_bfloat16(Value x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
  }
  static __m256i narrow_float16(Value x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }

  static void stream(void* to, __m256i low, __m256i high) {
    _mm512_stream_si512(static_cast<__m512i*>(to), _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
  }
};

}  // namespace

void update_range_avx512(const Update& update, int64_t begin, int64_t end) {
  update_range<Avx512Lane>(update, begin, end);
}

}  // namespace dos
