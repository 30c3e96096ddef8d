// SPDX-License-Identifier: Apache-2.0
// AArch64 only, where these instructions are part of the base architecture.
#include <arm_neon.h>

#include "kernels.h"
#include "update_range.h"

namespace dos {
namespace {

struct NeonLane {
  using Value = float32x4_t;
  static constexpr int width = 4;
  static constexpr bool can_stream = false;

  static Value broadcast(float x) { return vdupq_n_f32(x); }
  static Value add(Value a, Value b) { return vaddq_f32(a, b); }
  static Value sub(Value a, Value b) { return vsubq_f32(a, b); }
  static Value mul(Value a, Value b) { return vmulq_f32(a, b); }
  static Value div(Value a, Value b) { return vdivq_f32(a, b); }
  static Value sqrt(Value a) { return vsqrtq_f32(a); }

  static Value flush_denormal(Value x) {
    const uint32x4_t tiny = vcltq_f32(vabsq_f32(x), vdupq_n_f32(kSmallestNormal));
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(x), tiny));
  }
  static Value canonical(Value x) {
    return vbslq_f32(vceqq_f32(x, x), x, vreinterpretq_f32_u32(vdupq_n_u32(kCanonicalNaN)));
  }

  static Value load(const float* from) { return vld1q_f32(from); }
  static Value load(const BFloat16* from) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&from->bits), 16));
  }
  static Value load(const Float16* from) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&from->bits))); }

  static void store(float* to, Value x) { vst1q_f32(to, x); }
  static void store(BFloat16* to, Value x) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    vst1_u16(&to->bits, vshrn_n_u32(vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd), 16));
  }
  static void store(Float16* to, Value x) { vst1_u16(&to->bits, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
};

}  // namespace

void update_range_neon(const Update& update, int64_t begin, int64_t end) {
  update_range<NeonLane>(update, begin, end);
}

}  // namespace dos
