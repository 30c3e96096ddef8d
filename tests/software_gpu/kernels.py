# SPDX-License-Identifier: Apache-2.0
"""Our Triton kernel on the software GPU: the numpy reference, run in the order of the stream."""

from __future__ import annotations

import torch

from megatron_dos.kernels import AdamScalars, operands, reference, triton_adam
from software_gpu.operations import alias_of, enqueue

__all__ = ["replace_triton"]


def replace_triton() -> None:
    """Have `triton_adam.adamw` enqueue the reference in the place of its kernel."""
    triton_adam.adamw = _adamw


def _adamw(
    param: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    scalars: AdamScalars,
    unscale: float = 1.0,
    grad_scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> None:
    operands.check(param, exp_avg, exp_avg_sq, grad, out, operands.FLOAT32_OR_BFLOAT16)
    arrays = [None if one is None else _array(one) for one in (param, exp_avg, exp_avg_sq, grad, out)]
    states_and_grad, new = arrays[:4], arrays[4]
    enqueue(lambda: reference.adamw(*states_and_grad, scalars, unscale, grad_scale, new))


def _array(tensor: torch.Tensor):
    alias = alias_of(tensor.detach())
    return (alias.view(torch.uint16) if alias.dtype is torch.bfloat16 else alias).numpy()
