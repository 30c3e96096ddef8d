# SPDX-License-Identifier: Apache-2.0
"""The fused update on the GPU, in Triton: one pass over memory, the bits of `kernels.reference`.

Importing this module needs Triton, not a GPU. With TRITON_INTERPRET=1 in the environment at import, Triton runs the
same source on numpy, and the kernel takes host tensors.

[Note: The same bits]
- Each operation of the update is one IEEE-754 operation. The launch forbids the compiler to fuse a multiplication and
  an addition; `/` and `tl.sqrt` have approximate forms, hence `div_rn` and `sqrt_rn`. Nothing flushes denormals but the
  rule on the moments itself.
- Scalars are run-time arguments of type fp32, never compile-time constants that an optimiser could fold.
- Rounding to bfloat16 and the one NaN that is stored are integer arithmetic: instructions differ between GPUs in which
  NaN they give, and Triton's interpreter does not round ties to even.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch._subclasses.fake_tensor import FakeTensor

from megatron_dos.kernels import operands
from megatron_dos.kernels.fp_environment import ieee_environment

__all__ = ["BLOCK", "LAUNCH_OPTIONS", "adamw", "adamw_kernel"]

# The kernel moves 28 bytes or more per element and computes little, so only memory matters. 4 elements per thread are
# one 16-byte access of an FP32 state and one of 8 bytes of a bfloat16 grad: with the four inputs a thread asks for over
# 50 bytes before it waits, which from full multiprocessors is more than the memory latency needs in flight. Blocks are
# small, so that their number divides evenly over the multiprocessors.
_WARPS = 8
_ELEMENTS_PER_THREAD = 4
BLOCK = 32 * _WARPS * _ELEMENTS_PER_THREAD
LAUNCH_OPTIONS = {"num_warps": _WARPS, "enable_fp_fusion": False}


@triton.jit
def _load(pointers, mask):
    """Values of any of the float dtypes -> float32, exactly."""
    values = tl.load(pointers, mask=mask)
    if values.dtype == tl.bfloat16:
        return (values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return values.to(tl.float32)


@triton.jit
def _store(pointers, values, mask):
    """float32 -> nearest value of the target's dtype, ties to even; every NaN becomes the one NaN that is stored."""
    bits = values.to(tl.uint32, bitcast=True)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    if pointers.dtype.element_ty == tl.float32:
        tl.store(pointers, tl.where(is_nan, 0x7FC00000, bits).to(tl.float32, bitcast=True), mask=mask)
    elif pointers.dtype.element_ty == tl.bfloat16:
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        narrow = tl.where(is_nan, 0x7FC0, rounded).to(tl.uint16)
        tl.store(pointers, narrow.to(tl.bfloat16, bitcast=True), mask=mask)
    else:
        narrow = tl.where(is_nan, 0x7E00, values.to(tl.float16).to(tl.uint16, bitcast=True)).to(tl.uint16)
        tl.store(pointers, narrow.to(tl.float16, bitcast=True), mask=mask)


@triton.jit
def _flush_denormals(values):
    smallest_normal = 1.1754943508222875e-38
    return tl.where(tl.abs(values) < smallest_normal, 0.0, values)


@triton.jit
def _update(
    param_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    grad_ptr,
    out_ptr,
    start,
    lanes,
    mask,
    unscale,
    grad_scale,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    decay,
    step_size,
    rsqrt_bias_correction2,
    weight_decay,
    L2_MODE: tl.constexpr,
):
    """The update of elements start + lanes where the mask allows; None allows all."""
    p = _load(param_ptr + start + lanes, mask)
    m = _load(exp_avg_ptr + start + lanes, mask)
    v = _load(exp_avg_sq_ptr + start + lanes, mask)
    g = _load(grad_ptr + start + lanes, mask)

    g = g * unscale
    g = g * grad_scale
    if L2_MODE:
        g = g + p * weight_decay
    m = _flush_denormals(m * beta1 + g * one_minus_beta1)
    v = _flush_denormals(v * beta2 + (g * g) * one_minus_beta2)
    denominator = tl.sqrt_rn(v) * rsqrt_bias_correction2 + eps
    p = p * decay - tl.div_rn(m, denominator) * step_size

    _store(exp_avg_ptr + start + lanes, m, mask)
    _store(exp_avg_sq_ptr + start + lanes, v, mask)
    _store(param_ptr + start + lanes, p, mask)
    if out_ptr is not None:
        _store(out_ptr + start + lanes, p, mask)


@triton.jit(do_not_specialize=["numel"])
def adamw_kernel(
    param_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    grad_ptr,
    out_ptr,
    numel,
    unscale,
    grad_scale,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    decay,
    step_size,
    rsqrt_bias_correction2,
    weight_decay,
    L2_MODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The update of one block of a flat array of `numel` elements. `out_ptr` may be None."""
    start = tl.program_id(0).to(tl.int64) * BLOCK  # 64 bits: a shard may have 2^31 elements and more
    lanes = tl.arange(0, BLOCK)
    # Whole blocks take no mask: a mask from a numel that is no multiple of the vector length would make every block
    # access memory element by element.
    if start + BLOCK <= numel:
        _update(
            param_ptr,
            exp_avg_ptr,
            exp_avg_sq_ptr,
            grad_ptr,
            out_ptr,
            start,
            lanes,
            None,
            unscale,
            grad_scale,
            beta1,
            one_minus_beta1,
            beta2,
            one_minus_beta2,
            eps,
            decay,
            step_size,
            rsqrt_bias_correction2,
            weight_decay,
            L2_MODE,
        )
    else:
        _update(
            param_ptr,
            exp_avg_ptr,
            exp_avg_sq_ptr,
            grad_ptr,
            out_ptr,
            start,
            lanes,
            lanes < numel - start,
            unscale,
            grad_scale,
            beta1,
            one_minus_beta1,
            beta2,
            one_minus_beta2,
            eps,
            decay,
            step_size,
            rsqrt_bias_correction2,
            weight_decay,
            L2_MODE,
        )


@ieee_environment()
def adamw(*given: Any, **by_name: Any) -> None:
    """Enqueue one AdamW step, in place, on the current stream, on CUDA tensors.

    Args:
        given: see `operands.Operands`; moments are float32 or bfloat16.

    Raises:
        TypeError, ValueError: an operand is not as there; it is named.
    """
    param, exp_avg, exp_avg_sq, grad, scalars, unscale, grad_scale, out = operands.Operands(*given, **by_name)
    operands.check(param, exp_avg, exp_avg_sq, grad, out, operands.FLOAT32_OR_BFLOAT16)
    factors = operands.factor("unscale", unscale), operands.factor("grad_scale", grad_scale)
    if isinstance(param, FakeTensor) or param.numel() == 0:
        return
    if param.device.type != "cuda" and not _INTERPRETED:
        raise ValueError(f"param: is on device {param.device}, expected a CUDA device")
    with torch.cuda.device_of(param):  # does nothing for a host tensor
        adamw_kernel[(triton.cdiv(param.numel(), BLOCK),)](
            param,
            exp_avg,
            exp_avg_sq,
            grad,
            out,
            param.numel(),
            *factors,
            scalars.beta1,
            scalars.one_minus_beta1,
            scalars.beta2,
            scalars.one_minus_beta2,
            scalars.eps,
            scalars.decay,
            scalars.step_size,
            scalars.rsqrt_bias_correction2,
            scalars.weight_decay,
            L2_MODE=scalars.l2_mode,
            BLOCK=BLOCK,
            **LAUNCH_OPTIONS,
        )


_INTERPRETED = not isinstance(adamw_kernel, triton.JITFunction)
