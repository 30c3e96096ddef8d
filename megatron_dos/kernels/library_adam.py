# SPDX-License-Identifier: Apache-2.0
"""The fused Adam kernels of Transformer Engine, Apex and torch, run on our memory.

They round in their own ways (fused multiply-adds, 1 - beta taken from the float32 beta), so with them a result depends
on which subgroups were updated on the GPU, if only in the last bits. That is said once in the log.

[Note: Without bias correction]
A kernel is given no step number here, because the step's scalars hold the corrections already. With r =
rsqrt_bias_correction2,
    p * decay - step_size * m / (sqrt(v) * r + eps)  =  p * decay - (step_size / r) * m / (sqrt(v) + eps / r),
which is an uncorrected Adam whose learning rate is step_size / r and whose eps is eps / r.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from megatron_dos.kernels import AdamScalars, operands
from megatron_dos.kernels.fp_environment import ieee_environment

__all__ = ["LIBRARIES", "adamw", "load"]

LIBRARIES = {"te": "Transformer Engine", "apex": "Apex", "torch": "torch"}
"""Names of --dos-gpu-kernel -> the libraries' own names."""

_logger = logging.getLogger(__name__)

# Elements at a time where the grad needs an FP32 copy: 64 MB.
_CHUNK = 1 << 24


class _Uncorrected(NamedTuple):
    """Arguments of an Adam without bias correction that makes the step of our scalars; see the note above."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    l2_mode: bool

    @classmethod
    def of(cls, scalars: AdamScalars) -> _Uncorrected:
        lr = scalars.step_size / scalars.rsqrt_bias_correction2
        if scalars.l2_mode:
            weight_decay = scalars.weight_decay
        else:
            # The libraries multiply it by the lr given, which must come to the decay of ours.
            weight_decay = (1.0 - scalars.decay) / lr if scalars.decay != 1.0 else 0.0
        return cls(
            lr=lr,
            # 1 - beta is the number of which small errors matter.
            beta1=1.0 - scalars.one_minus_beta1,
            beta2=1.0 - scalars.one_minus_beta2,
            eps=scalars.eps / scalars.rsqrt_bias_correction2,
            weight_decay=weight_decay,
            l2_mode=scalars.l2_mode,
        )


# (param, exp_avg, exp_avg_sq, grad, arguments), all tensors FP32
_Fused = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, _Uncorrected], None]


@functools.cache
def load(name: str) -> Callable[..., None]:
    """The device kernel that runs the named library's: called with the operands alone.

    Args:
        name: te, apex or torch.

    Raises:
        RuntimeError: the library is not installed, or is without its CUDA extensions.
    """
    try:
        fused = _LOADERS[name]()
    except (ImportError, OSError, AttributeError) as error:
        raise RuntimeError(
            f"--dos-gpu-kernel {name}: {LIBRARIES[name]} with its fused Adam kernel cannot be loaded here ({error}). "
            f"Install it, or leave --dos-gpu-kernel at auto, which needs no other library."
        ) from error
    _logger.warning(
        "--dos-gpu-kernel %s: results follow %s's rounding: no longer bit-identical across placements",
        name,
        LIBRARIES[name],
    )
    return functools.partial(adamw, fused)


@torch.no_grad()
@ieee_environment()
def adamw(fused: _Fused, *given: Any, **by_name: Any) -> None:
    """Enqueue one step of a library's kernel, in place, on the current stream.

    Args:
        fused: the library's kernel on FP32 tensors.
        given: see `operands.Operands`; moments are float32. The grad is copied in chunks where it is not FP32 or a
            factor is not 1.

    Raises:
        TypeError, ValueError: an operand is not as there; it is named.
    """
    param, exp_avg, exp_avg_sq, grad, scalars, unscale, grad_scale, out = operands.Operands(*given, **by_name)
    operands.check(param, exp_avg, exp_avg_sq, grad, out, operands.FLOAT32_ONLY)
    factors = operands.factor("unscale", unscale), operands.factor("grad_scale", grad_scale)
    arguments = _Uncorrected.of(scalars)
    for start in range(0, param.numel(), _CHUNK):
        span = slice(start, start + _CHUNK)
        fused(param[span], exp_avg[span], exp_avg_sq[span], operands.scaled_grad(grad[span], *factors), arguments)
    if out is not None:
        out.copy_(param)


def _transformer_engine() -> _Fused:
    import transformer_engine.pytorch  # noqa: F401  (loads the libraries that the next import needs)
    import transformer_engine_torch

    return functools.partial(_multi_tensor, transformer_engine_torch.multi_tensor_adam)


def _apex() -> _Fused:
    import amp_C

    return functools.partial(_multi_tensor, amp_C.multi_tensor_adam)


def _torch() -> _Fused:
    return functools.partial(_torch_fused, torch._fused_adamw_, torch._fused_adam_)


_LOADERS: dict[str, Callable[[], _Fused]] = {"te": _transformer_engine, "apex": _apex, "torch": _torch}

_MULTI_TENSOR_CHUNK = 2048 * 32  # elements per CUDA block, as both libraries' optimizers call it


def _multi_tensor(
    multi_tensor_adam: Callable[..., None],
    param: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    arguments: _Uncorrected,
) -> None:
    """Transformer Engine's and Apex's kernel, which have one signature."""
    multi_tensor_adam(
        _MULTI_TENSOR_CHUNK,
        param.new_zeros(1, dtype=torch.int32),  # no overflow
        [[grad], [param], [exp_avg], [exp_avg_sq]],
        arguments.lr,
        arguments.beta1,
        arguments.beta2,
        arguments.eps,
        1,  # step, which only a bias correction reads
        0 if arguments.l2_mode else 1,  # mode
        0,  # no bias correction
        arguments.weight_decay,
    )


def _torch_fused(
    adamw: Callable[..., None],
    adam: Callable[..., None],
    param: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    arguments: _Uncorrected,
) -> None:
    """torch's kernel, which always corrects for the step: after infinitely many there is nothing to correct."""
    (adam if arguments.l2_mode else adamw)(
        [param],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [],
        [param.new_full((), float("inf"))],
        lr=arguments.lr,
        beta1=arguments.beta1,
        beta2=arguments.beta2,
        weight_decay=arguments.weight_decay,
        eps=arguments.eps,
        amsgrad=False,
        maximize=False,
    )
