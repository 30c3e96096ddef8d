// SPDX-License-Identifier: Apache-2.0
// The update itself, written once over a "lane": a type that gives the arithmetic of one instruction set
// (ScalarLane, Avx2Lane, ...). Every kernel_*.cpp instantiates it with its own lane and compiler flags.
//
// The order of operations in update_lane is the specification. Each is rounded to nearest even on its own: the build
// forbids contraction into fused multiply-adds. Change nothing there without megatron_dos/kernels/reference.py.
//
// Everything is in an unnamed namespace on purpose (see adam.h).
#pragma once

#include <type_traits>

#include "adam.h"
#include "scalar_lane.h"

namespace dos {
namespace {

struct NoOutput {};

// Elements per block: as 16-bit outputs they fill one cache line, which a streamed output writes at once.
constexpr int64_t kBlock = 32;
constexpr uintptr_t kCacheLine = 64;

template <class Lane>
struct Constants {
  using Value = typename Lane::Value;

  explicit Constants(const Update& u)
      : unscale(Lane::broadcast(u.unscale)),
        grad_scale(Lane::broadcast(u.grad_scale)),
        beta1(Lane::broadcast(u.scalars.beta1)),
        one_minus_beta1(Lane::broadcast(u.scalars.one_minus_beta1)),
        beta2(Lane::broadcast(u.scalars.beta2)),
        one_minus_beta2(Lane::broadcast(u.scalars.one_minus_beta2)),
        eps(Lane::broadcast(u.scalars.eps)),
        decay(Lane::broadcast(u.scalars.decay)),
        step_size(Lane::broadcast(u.scalars.step_size)),
        rsqrt_bias_correction2(Lane::broadcast(u.scalars.rsqrt_bias_correction2)),
        weight_decay(Lane::broadcast(u.scalars.weight_decay)) {}

  const Value unscale, grad_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay, step_size,
      rsqrt_bias_correction2, weight_decay;
};

// Lane::width elements: updates the state in place and returns the new parameter value.
template <class Lane, bool kL2, class ExpAvg, class ExpAvgSq, class Grad>
inline typename Lane::Value update_lane(const Constants<Lane>& c, float* param, ExpAvg* exp_avg, ExpAvgSq* exp_avg_sq,
                                        const Grad* grad) {
  using Value = typename Lane::Value;
  Value p = Lane::load(param);
  Value g = Lane::mul(Lane::mul(Lane::load(grad), c.unscale), c.grad_scale);
  if constexpr (kL2) g = Lane::add(g, Lane::mul(c.weight_decay, p));

  Value m = Lane::add(Lane::mul(c.beta1, Lane::load(exp_avg)), Lane::mul(c.one_minus_beta1, g));
  Value v = Lane::add(Lane::mul(c.beta2, Lane::load(exp_avg_sq)), Lane::mul(c.one_minus_beta2, Lane::mul(g, g)));
  m = Lane::flush_denormal(m);
  v = Lane::flush_denormal(v);
  Lane::store(exp_avg, Lane::canonical(m));
  Lane::store(exp_avg_sq, Lane::canonical(v));

  // A 16-bit moment is rounded only where it is stored: the parameter moves by the unrounded ones.
  const Value denominator = Lane::add(Lane::mul(Lane::sqrt(v), c.rsqrt_bias_correction2), c.eps);
  p = Lane::sub(Lane::mul(p, c.decay), Lane::mul(c.step_size, Lane::div(m, denominator)));
  p = Lane::canonical(p);
  Lane::store(param, p);
  return p;
}

template <class Lane, bool kL2, class ExpAvg, class ExpAvgSq, class Grad, class Out>
inline void update_single(const Constants<Lane>& c, float* param, ExpAvg* exp_avg, ExpAvgSq* exp_avg_sq,
                          const Grad* grad, Out* out) {
  const typename Lane::Value p = update_lane<Lane, kL2>(c, param, exp_avg, exp_avg_sq, grad);
  if constexpr (!std::is_same_v<Out, NoOutput>) Lane::store(out, p);
}

template <class Lane, bool kL2, bool kStream, class ExpAvg, class ExpAvgSq, class Grad, class Out>
inline void update_block(const Constants<Lane>& c, float* param, ExpAvg* exp_avg, ExpAvgSq* exp_avg_sq,
                         const Grad* grad, Out* out) {
  constexpr int kLanes = kBlock / Lane::width;
  typename Lane::Value p[kLanes];
#pragma GCC unroll 8
  for (int k = 0; k < kLanes; ++k) {
    const int64_t at = k * Lane::width;
    p[k] = update_lane<Lane, kL2>(c, param + at, exp_avg + at, exp_avg_sq + at, grad + at);
    if constexpr (!kStream && !std::is_same_v<Out, NoOutput>) Lane::store(out + at, p[k]);
  }
  if constexpr (kStream) Lane::stream_line(out, p);
}

// The pointers are parameters, not members, so that the compiler believes __restrict.
template <class Lane, bool kL2, bool kStream, class ExpAvg, class ExpAvgSq, class Grad, class Out>
void update_arrays(const Update& u, int64_t count, float* __restrict param, ExpAvg* __restrict exp_avg,
                   ExpAvgSq* __restrict exp_avg_sq, const Grad* __restrict grad, Out* __restrict out) {
  const Constants<ScalarLane> scalar(u);
  int64_t i = 0;
  if constexpr (Lane::width > 1) {
    const Constants<Lane> wide(u);
    if constexpr (kStream) {  // a streamed line must start on a cache line
      for (; i < count && reinterpret_cast<uintptr_t>(out + i) % kCacheLine != 0; ++i)
        update_single<ScalarLane, kL2>(scalar, param + i, exp_avg + i, exp_avg_sq + i, grad + i, out + i);
    }
    for (; count - i >= kBlock; i += kBlock)
      update_block<Lane, kL2, kStream>(wide, param + i, exp_avg + i, exp_avg_sq + i, grad + i, out + i);
    for (; count - i >= Lane::width; i += Lane::width)
      update_single<Lane, kL2>(wide, param + i, exp_avg + i, exp_avg_sq + i, grad + i, out + i);
    if constexpr (kStream) Lane::fence();
  }
  for (; i < count; ++i)
    update_single<ScalarLane, kL2>(scalar, param + i, exp_avg + i, exp_avg_sq + i, grad + i, out + i);
}

// From run-time dtypes to types: each function below settles one of them.
template <class Lane, bool kL2, class ExpAvg, class ExpAvgSq, class Grad>
void with_output(const Update& u, int64_t begin, int64_t end) {
  const int64_t count = end - begin;
  float* param = u.param + begin;
  ExpAvg* exp_avg = static_cast<ExpAvg*>(u.exp_avg) + begin;
  ExpAvgSq* exp_avg_sq = static_cast<ExpAvgSq*>(u.exp_avg_sq) + begin;
  const Grad* grad = static_cast<const Grad*>(u.grad) + begin;
  const auto half_output = [&](auto* out) {
    if (Lane::can_stream && u.stream_out)
      update_arrays<Lane, kL2, Lane::can_stream>(u, count, param, exp_avg, exp_avg_sq, grad, out);
    else
      update_arrays<Lane, kL2, false>(u, count, param, exp_avg, exp_avg_sq, grad, out);
  };
  switch (u.out_dtype) {
    case DType::none:
      return update_arrays<Lane, kL2, false>(u, count, param, exp_avg, exp_avg_sq, grad,
                                             static_cast<NoOutput*>(nullptr));
    case DType::float32:
      return update_arrays<Lane, kL2, false>(u, count, param, exp_avg, exp_avg_sq, grad,
                                             static_cast<float*>(u.out) + begin);
    case DType::bfloat16:
      return half_output(static_cast<BFloat16*>(u.out) + begin);
    case DType::float16:
      return half_output(static_cast<Float16*>(u.out) + begin);
  }
}

template <class Lane, bool kL2, class ExpAvg, class ExpAvgSq>
void with_grad(const Update& u, int64_t begin, int64_t end) {
  switch (u.grad_dtype) {
    case DType::float32:
      return with_output<Lane, kL2, ExpAvg, ExpAvgSq, float>(u, begin, end);
    case DType::bfloat16:
      return with_output<Lane, kL2, ExpAvg, ExpAvgSq, BFloat16>(u, begin, end);
    case DType::float16:
      return with_output<Lane, kL2, ExpAvg, ExpAvgSq, Float16>(u, begin, end);
    case DType::none:
      return;
  }
}

template <class Lane, bool kL2>
void with_moments(const Update& u, int64_t begin, int64_t end) {
  const bool narrow_first = u.exp_avg_dtype == DType::bfloat16;
  const bool narrow_second = u.exp_avg_sq_dtype == DType::bfloat16;
  if (narrow_first && narrow_second) return with_grad<Lane, kL2, BFloat16, BFloat16>(u, begin, end);
  if (narrow_first) return with_grad<Lane, kL2, BFloat16, float>(u, begin, end);
  if (narrow_second) return with_grad<Lane, kL2, float, BFloat16>(u, begin, end);
  return with_grad<Lane, kL2, float, float>(u, begin, end);
}

template <class Lane>
void update_range(const Update& u, int64_t begin, int64_t end) {
  if (u.scalars.l2_mode) return with_moments<Lane, true>(u, begin, end);
  return with_moments<Lane, false>(u, begin, end);
}

}  // namespace
}  // namespace dos
