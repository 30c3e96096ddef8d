// SPDX-License-Identifier: Apache-2.0
// The limit that the update is measured against: loops with its loads and stores and hardly any arithmetic, run by the
// same pool or by plain threads. scripts/bench_adam.py loads this as a shared library; it is no part of the package.
#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "adam.h"
#include "pool.h"

namespace {

// Any 32-bit pattern survives these operations, however often they run: no number turns into a denormal or a NaN.
struct Pointers {
  Pointers(const dos::Update& u, int64_t begin)
      : p(reinterpret_cast<uint32_t*>(u.param) + begin),
        m(static_cast<uint32_t*>(u.exp_avg) + begin),
        v(static_cast<uint32_t*>(u.exp_avg_sq) + begin),
        grad32(static_cast<const uint32_t*>(u.grad) + begin),
        grad16(static_cast<const uint16_t*>(u.grad) + begin),
        out(static_cast<uint16_t*>(u.out) + begin) {}

  uint32_t* p;
  uint32_t* m;
  uint32_t* v;
  const uint32_t* grad32;
  const uint16_t* grad16;
  uint16_t* out;
};

template <bool kWideGrad>
void touch_one_by_one(const Pointers& a, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const uint32_t g = kWideGrad ? a.grad32[i] : uint32_t{a.grad16[i]};
    a.m[i] ^= g;
    a.v[i] ^= g;
    a.p[i] ^= a.m[i] ^ a.v[i];
    a.out[i] = static_cast<uint16_t>(a.p[i]);
  }
}

#if defined(__x86_64__)

constexpr int64_t kBlock = 32;

template <bool kWideGrad, bool kStream>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))) void touch_avx512(const dos::Update& u, int64_t begin,
                                                                                int64_t end) {
  const Pointers a(u, begin);
  const int64_t count = end - begin;
  int64_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    __m256i halves[2];
    for (int k = 0; k < 2; ++k) {
      const int64_t at = i + 16 * k;
      __m512i g;
      if (kWideGrad)
        g = _mm512_loadu_si512(a.grad32 + at);
      else
        g = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a.grad16 + at)));
      const __m512i m = _mm512_xor_si512(_mm512_loadu_si512(a.m + at), g);
      const __m512i v = _mm512_xor_si512(_mm512_loadu_si512(a.v + at), g);
      const __m512i p = _mm512_xor_si512(_mm512_loadu_si512(a.p + at), _mm512_xor_si512(m, v));
      _mm512_storeu_si512(a.m + at, m);
      _mm512_storeu_si512(a.v + at, v);
      _mm512_storeu_si512(a.p + at, p);
      halves[k] = _mm512_cvtepi32_epi16(p);
    }
    const __m512i line = _mm512_inserti64x4(_mm512_castsi256_si512(halves[0]), halves[1], 1);
    if (kStream)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(a.out + i), line);
    else
      _mm512_storeu_si512(a.out + i, line);
  }
  _mm_sfence();
  touch_one_by_one<kWideGrad>(a, i, count);
}

template <bool kWideGrad, bool kStream>
__attribute__((target("avx2"))) void touch_avx2(const dos::Update& u, int64_t begin, int64_t end) {
  const Pointers a(u, begin);
  const int64_t count = end - begin;
  int64_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    for (int k = 0; k < 2; ++k) {
      __m256i pair[2];
      for (int j = 0; j < 2; ++j) {
        const int64_t at = i + 16 * k + 8 * j;
        __m256i g;
        if (kWideGrad)
          g = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a.grad32 + at));
        else
          g = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a.grad16 + at)));
        __m256i* const m_at = reinterpret_cast<__m256i*>(a.m + at);
        __m256i* const v_at = reinterpret_cast<__m256i*>(a.v + at);
        __m256i* const p_at = reinterpret_cast<__m256i*>(a.p + at);
        const __m256i m = _mm256_xor_si256(_mm256_loadu_si256(m_at), g);
        const __m256i v = _mm256_xor_si256(_mm256_loadu_si256(v_at), g);
        const __m256i p = _mm256_xor_si256(_mm256_loadu_si256(p_at), _mm256_xor_si256(m, v));
        _mm256_storeu_si256(m_at, m);
        _mm256_storeu_si256(v_at, v);
        _mm256_storeu_si256(p_at, p);
        pair[j] = p;
      }
      // The order of the packed halves does not matter here.
      __m256i* const out_at = reinterpret_cast<__m256i*>(a.out + i + 16 * k);
      const __m256i packed = _mm256_packus_epi32(pair[0], pair[1]);
      if (kStream)
        _mm256_stream_si256(out_at, packed);
      else
        _mm256_storeu_si256(out_at, packed);
    }
  }
  _mm_sfence();
  touch_one_by_one<kWideGrad>(a, i, count);
}

template <bool kWideGrad, bool kStream>
dos::RangeKernel best_kernel() {
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return touch_avx512<kWideGrad, kStream>;
  if (__builtin_cpu_supports("avx2")) return touch_avx2<kWideGrad, kStream>;
  return [](const dos::Update& u, int64_t begin, int64_t end) {
    touch_one_by_one<kWideGrad>(Pointers(u, begin), 0, end - begin);
  };
}

#else

template <bool kWideGrad, bool>
dos::RangeKernel best_kernel() {
  return [](const dos::Update& u, int64_t begin, int64_t end) {
    touch_one_by_one<kWideGrad>(Pointers(u, begin), 0, end - begin);
  };
}

#endif

dos::RangeKernel choose(bool wide_grad, bool stream) {
  if (wide_grad) return stream ? best_kernel<true, true>() : best_kernel<true, false>();
  return stream ? best_kernel<false, true>() : best_kernel<false, false>();
}

}  // namespace

// One pass over arrays that start on cache lines: float32 param, exp_avg and exp_avg_sq, a grad of 4 or 2 bytes an
// element, a 16-bit out. `stream` writes out past the caches; `pooled` splits the work as the update does, otherwise
// every thread gets one stretch.
extern "C" void bare_loop(void* param, void* exp_avg, void* exp_avg_sq, const void* grad, void* out, int64_t count,
                          int grad_bytes, int stream, int pooled, int threads) {
  dos::Update u{};
  u.param = static_cast<float*>(param);
  u.exp_avg = exp_avg;
  u.exp_avg_sq = exp_avg_sq;
  u.grad = grad;
  u.out = out;
  u.count = count;
  u.grad_dtype = grad_bytes == 4 ? dos::DType::float32 : dos::DType::bfloat16;
  u.out_dtype = dos::DType::bfloat16;
  const dos::RangeKernel kernel = choose(grad_bytes == 4, stream != 0);
  if (pooled != 0) {
    static std::map<int, std::unique_ptr<dos::Pool>> pools;
    std::unique_ptr<dos::Pool>& pool = pools[threads];
    if (pool == nullptr) pool = std::make_unique<dos::Pool>(threads, std::vector<int>{});
    pool->start({u}, kernel).wait();
    return;
  }
  const int64_t stretch = (count / threads + 63) / 64 * 64;
  std::vector<std::thread> others;
  for (int index = 1; index < threads; ++index)
    others.emplace_back([=] { kernel(u, std::min(index * stretch, count), std::min((index + 1) * stretch, count)); });
  kernel(u, 0, std::min(stretch, count));
  for (std::thread& other : others) other.join();
}
