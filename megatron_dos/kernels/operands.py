# SPDX-License-Identifier: Apache-2.0
"""What the kernels take: their operands, the checks that the device kernels share, and the scaled grad for those that
cannot scale it themselves.

The checks read dtypes, devices and shapes only, so they work on fake tensors and never wait for a GPU.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from megatron_dos.kernels import AdamScalars
from megatron_dos.kernels.fp_environment import ieee_environment

__all__ = ["FLOAT32_ONLY", "FLOAT32_OR_BFLOAT16", "Operands", "check", "factor", "scaled_grad"]

FLOAT32_ONLY = (torch.float32,)
FLOAT32_OR_BFLOAT16 = (torch.float32, torch.bfloat16)
_ANY = (torch.float32, torch.bfloat16, torch.float16)


class Operands(NamedTuple):
    """What every kernel works on: 1-D contiguous tensors of one length on one device, which do not overlap.

    A kernel is called with them in this order or by name.

    Attributes:
        param: float32 master params.
        exp_avg: float32, or bfloat16 where the kernel takes it.
        exp_avg_sq: the same.
        grad: float32, bfloat16 or float16; only read.
        scalars: the step's scalars.
        unscale: finite factor on the FP32 grad, rounded to float32; it comes first.
        grad_scale: the same, applied to the product.
        out: receives the new params, rounded to its dtype: float32, bfloat16 or float16.
    """

    param: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    grad: torch.Tensor
    scalars: AdamScalars
    unscale: float = 1.0
    grad_scale: float = 1.0
    out: torch.Tensor | None = None


def check(
    param: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    out: torch.Tensor | None,
    moments: tuple[torch.dtype, ...],
) -> None:
    """Refuse anything but 1-D contiguous tensors of one length, on one device, of the dtypes a kernel takes.

    Args:
        param: float32.
        exp_avg: one of `moments`.
        exp_avg_sq: one of `moments`.
        grad: float32, bfloat16 or float16.
        out: the same, or None.
        moments: dtypes of exp_avg and exp_avg_sq that the kernel takes.

    Raises:
        TypeError: wrong type or dtype; the argument is named, as below.
        ValueError: wrong device, shape or layout.
    """
    _check_one("param", param, FLOAT32_ONLY, param)
    _check_one("exp_avg", exp_avg, moments, param)
    _check_one("exp_avg_sq", exp_avg_sq, moments, param)
    _check_one("grad", grad, _ANY, param)
    if out is not None:
        _check_one("out", out, _ANY, param)


@ieee_environment()
def factor(name: str, value: float) -> float:
    """A factor on the grad, rounded to float32.

    Raises:
        ValueError: not finite, in float32.
    """
    with np.errstate(over="ignore", under="ignore"):
        rounded = float(np.float32(value))
    if not math.isfinite(rounded):
        raise ValueError(f"{name}: must be finite in float32, got {value}")
    return rounded


def scaled_grad(
    grad: torch.Tensor, unscale: float, grad_scale: float, buffer: torch.Tensor | None = None
) -> torch.Tensor:
    """The grad in FP32 times both factors, in this order, each product rounded.

    Args:
        grad: 1-D, float32, bfloat16 or float16; never written.
        unscale: exactly a float32 value.
        grad_scale: the same.
        buffer: float32, at least as long; allocated where absent.

    Returns:
        The grad itself where it is FP32 and both factors are 1, else the start of the buffer.
    """
    if grad.dtype == torch.float32 and unscale == grad_scale == 1.0:
        return grad
    if buffer is None:
        buffer = grad.new_empty(grad.numel(), dtype=torch.float32)
    scaled = buffer[: grad.numel()].copy_(grad)
    return scaled.mul_(unscale).mul_(grad_scale)


def _check_one(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], param: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: dtype {tensor.dtype} is not one of {', '.join(map(str, dtypes))}")
    if tensor.device != param.device:
        raise ValueError(f"{name}: is on device {tensor.device}, but param is on {param.device}")
    if tensor.dim() != 1:
        raise ValueError(f"{name}: expected a 1-D tensor, got shape {tuple(tensor.shape)}")
    if tensor.numel() != param.numel():
        raise ValueError(f"{name}: has {tensor.numel()} elements, but param has {param.numel()}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: is not contiguous (stride {tensor.stride(0)})")
