# SPDX-License-Identifier: Apache-2.0
"""The update as a row of torch operations, for GPUs without Triton: slower, the same bits.

Each operation used here is one IEEE-754 operation per element on CUDA: torch is compiled with correctly rounded
division and square root and without flushing denormals, and kernels of one operation have nothing to fuse. `addcmul`,
`addcdiv` and `lerp` are several operations, which the compiler may fuse; a division by a number is a multiplication by
its reciprocal there. So none of these appear. On host tensors torch's square root is off by a last bit now and then;
numpy's takes its place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from megatron_dos.kernels import AdamScalars, operands
from megatron_dos.kernels.fp_environment import ieee_environment

__all__ = ["adamw"]

# Elements at a time, so that the temporaries stay below 100 MB. A GPU is busy with far fewer.
_CHUNK = 1 << 22

# In host memory so few that torch leaves them to the calling thread: its other threads have modes of their own.
_CHUNK_ON_HOST = 1 << 14

_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny

# dtype -> integer dtype of its size, bits of the NaN that is stored
_NAN_BITS = {
    torch.float32: (torch.int32, 0x7FC00000),
    torch.bfloat16: (torch.int16, 0x7FC0),
    torch.float16: (torch.int16, 0x7E00),
}


@torch.no_grad()
@ieee_environment()
def adamw(*given: Any, **by_name: Any) -> None:
    """Enqueue one AdamW step, in place, on the current stream; operands and errors of `triton_adam.adamw`.

    Host tensors are taken, too.
    """
    param, exp_avg, exp_avg_sq, grad, scalars, unscale, grad_scale, out = operands.Operands(*given, **by_name)
    operands.check(param, exp_avg, exp_avg_sq, grad, out, operands.FLOAT32_OR_BFLOAT16)
    factors = operands.factor("unscale", unscale), operands.factor("grad_scale", grad_scale)
    chunk = _CHUNK_ON_HOST if param.device.type == "cpu" else _CHUNK
    buffers = param.new_empty((4, min(chunk, param.numel())))
    for start in range(0, param.numel(), chunk):
        span = slice(start, start + chunk)
        _update(
            param[span],
            exp_avg[span],
            exp_avg_sq[span],
            grad[span],
            scalars,
            factors,
            None if out is None else out[span],
            buffers[:, : param[span].numel()],
        )


def _update(
    param: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    scalars: AdamScalars,
    factors: tuple[float, float],
    out: torch.Tensor | None,
    buffers: torch.Tensor,
) -> None:
    """The update of one chunk; `buffers` are four FP32 rows of its length."""
    g, m, v, t = buffers
    unscale, grad_scale = factors
    g.copy_(grad).mul_(unscale).mul_(grad_scale)
    if scalars.l2_mode:
        g.add_(torch.mul(param, scalars.weight_decay, out=t))
    m.copy_(exp_avg).mul_(scalars.beta1).add_(torch.mul(g, scalars.one_minus_beta1, out=t))
    v.copy_(exp_avg_sq).mul_(scalars.beta2).add_(torch.mul(g, g, out=t).mul_(scalars.one_minus_beta2))
    for moment in (m, v):
        moment.masked_fill_(torch.abs(moment, out=t) < _SMALLEST_NORMAL, 0.0)
    _store(exp_avg, m)
    _store(exp_avg_sq, v)
    denominator = _sqrt_(v).mul_(scalars.rsqrt_bias_correction2).add_(scalars.eps)
    torch.div(m, denominator, out=t).mul_(scalars.step_size)
    _store(param, torch.mul(param, scalars.decay, out=g).sub_(t))
    if out is not None:
        _store(out, param)


def _sqrt_(values: torch.Tensor) -> torch.Tensor:
    """Square roots in place, correctly rounded."""
    if values.device.type != "cpu":
        return values.sqrt_()
    array = values.numpy()
    with np.errstate(invalid="ignore"):
        np.sqrt(array, out=array)
    return values


def _store(target: torch.Tensor, values: torch.Tensor) -> None:
    """float32 -> nearest value of the target's dtype, ties to even; every NaN becomes the one NaN that is stored."""
    is_nan = values.isnan()
    target.copy_(values)
    integer, nan = _NAN_BITS[target.dtype]
    target.view(integer).masked_fill_(is_nan, nan)
