// SPDX-License-Identifier: Apache-2.0
// What one AdamW update is: its arguments, shared by every other file. Nothing here computes.
//
// This header is included by translation units compiled for different instruction sets, so it must define no
// function: an inline function emitted with AVX-512 code could be the copy the linker keeps for every CPU.
#pragma once

#include <cstdint>

namespace dos {

// Codes are part of the Python interface (megatron_dos/kernels/__init__.py).
enum class DType : int32_t { none = -1, float32 = 0, bfloat16 = 1, float16 = 2 };

// The scalars of one step, each rounded once from float64 (design: "one update, the same bits everywhere").
struct Scalars {
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float eps;
  float decay;
  float step_size;
  float rsqrt_bias_correction2;
  float weight_decay;
  bool l2_mode;
};

// One flat update of `count` elements in host memory. `out` may be null; every other pointer is set when count > 0.
struct Update {
  float* param;
  void* exp_avg;
  void* exp_avg_sq;
  const void* grad;
  void* out;
  int64_t count;
  DType exp_avg_dtype;     // float32 or bfloat16
  DType exp_avg_sq_dtype;  // float32 or bfloat16
  DType grad_dtype;        // float32, bfloat16 or float16
  DType out_dtype;         // any; none exactly when out is null
  float unscale;     // first factor on the FP32 grad
  float grad_scale;  // second
  Scalars scalars;
  bool stream_out;  // write a 16-bit `out` past the caches: it is read next by a DMA engine, not by this core
};

// Updates elements [begin, end). One such function exists per instruction set; all give the same bits.
using RangeKernel = void (*)(const Update& update, int64_t begin, int64_t end);

}  // namespace dos
