# SPDX-License-Identifier: Apache-2.0
"""The specification of the update, in numpy: every other backend gives the same bits.

numpy's float32 `*`, `+`, `-`, `/` and `sqrt` are IEEE-754, rounded to nearest even, one at a time. Arrays are float32
or float16; bfloat16, which numpy lacks, is given as dtype uint16 and holds the 16 bits.
"""

from __future__ import annotations

import numpy as np

from megatron_dos.kernels import AdamScalars
from megatron_dos.kernels.fp_environment import ieee_environment

__all__ = ["adamw", "bfloat16_to_float32", "float32_to_bfloat16", "float32_to_float16", "to_float32"]

SMALLEST_NORMAL = np.finfo(np.float32).tiny
NAN = np.array(0x7FC00000, dtype=np.uint32).view(np.float32)[()]


def bfloat16_to_float32(bits: np.ndarray) -> np.ndarray:
    """uint16 bits of bfloat16 -> float32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def float32_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 -> uint16 bits of the nearest bfloat16, ties to even; every NaN becomes the quiet NaN 0x7FC0."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    with np.errstate(over="ignore"):
        rounded = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def float32_to_float16(values: np.ndarray) -> np.ndarray:
    """float32 -> nearest float16, ties to even, overflow to infinity; every NaN becomes the quiet NaN 0x7E00."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.where(np.isnan(values), np.array(0x7E00, dtype=np.uint16).view(np.float16), values.astype(np.float16))


def to_float32(values: np.ndarray) -> np.ndarray:
    """float32, float16 or bfloat16 bits (uint16) -> float32, exactly."""
    if values.dtype == np.uint16:
        return bfloat16_to_float32(values)
    return values.astype(np.float32)


@ieee_environment()
def adamw(
    param: np.ndarray,
    exp_avg: np.ndarray,
    exp_avg_sq: np.ndarray,
    grad: np.ndarray,
    scalars: AdamScalars,
    unscale: float = 1.0,
    grad_scale: float = 1.0,
    out: np.ndarray | None = None,
) -> None:
    """One AdamW step, in place, on 1-D arrays of one length.

    Args:
        param: float32 master params.
        exp_avg: float32, or uint16 bits of bfloat16.
        exp_avg_sq: float32, or uint16 bits of bfloat16.
        grad: float32, float16, or uint16 bits of bfloat16; only read.
        scalars: the step's scalars.
        unscale: first factor on the grad, rounded to float32.
        grad_scale: second factor, likewise.
        out: receives the new params rounded to its dtype: float32, float16, or uint16 for bfloat16.
    """
    f32 = np.float32
    s = scalars
    with np.errstate(all="ignore"):
        g = to_float32(grad) * f32(unscale) * f32(grad_scale)
        if s.l2_mode:
            g = g + f32(s.weight_decay) * param
        m = f32(s.beta1) * to_float32(exp_avg) + f32(s.one_minus_beta1) * g
        v = f32(s.beta2) * to_float32(exp_avg_sq) + f32(s.one_minus_beta2) * (g * g)
        m = np.where(np.abs(m) < SMALLEST_NORMAL, f32(0.0), m)
        v = np.where(np.abs(v) < SMALLEST_NORMAL, f32(0.0), v)
        denominator = np.sqrt(v) * f32(s.rsqrt_bias_correction2) + f32(s.eps)
        p = param * f32(s.decay) - f32(s.step_size) * (m / denominator)
    _store(exp_avg, m)
    _store(exp_avg_sq, v)
    _store(param, p)
    if out is not None:
        _store(out, p)


def _store(target: np.ndarray, values: np.ndarray) -> None:
    """Round to the dtype of `target`. Hardware disagrees on the sign and payload of a NaN: one is stored for all."""
    if target.dtype == np.uint16:
        target[...] = float32_to_bfloat16(values)
    elif target.dtype == np.float16:
        target[...] = float32_to_float16(values)
    else:
        target[...] = np.where(np.isnan(values), NAN, values)
