# SPDX-License-Identifier: Apache-2.0
"""One AdamW, several backends that give the same bits: `reference` (numpy), `cpu` (C++ on host tensors).

Here live what they share: the scalars of a step and the dtype codes. Nothing here knows of subgroups, streams or
Megatron. docs/kernels.md specifies the update.
"""

from __future__ import annotations

import enum
import math
import operator
from dataclasses import dataclass

import numpy as np

from megatron_dos.kernels.fp_environment import ieee_environment

__all__ = ["AdamScalars", "DType"]


class DType(enum.IntEnum):
    """Dtype codes of the C++ interface."""

    NONE = -1
    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2


@dataclass(frozen=True)
class AdamScalars:
    """The scalars of one step of one param group.

    Every float is exactly a float32 value: computed in float64 and rounded once. Make them with `at_step`.

    Attributes:
        beta1: decay rate of exp_avg.
        one_minus_beta1: weight of the new grad in exp_avg.
        beta2: decay rate of exp_avg_sq.
        one_minus_beta2: weight of the new squared grad in exp_avg_sq.
        eps: added to the denominator.
        decay: factor on the parameter, 1 - lr * weight_decay; 1 in L2 mode.
        step_size: lr / (1 - beta1^step).
        rsqrt_bias_correction2: 1 / sqrt(1 - beta2^step).
        weight_decay: factor of the parameter added to the grad in L2 mode; unused otherwise.
        l2_mode: weight decay as an L2 term of the grad (Adam), instead of decoupled from it (AdamW).
    """

    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    eps: float
    decay: float
    step_size: float
    rsqrt_bias_correction2: float
    weight_decay: float
    l2_mode: bool

    @classmethod
    @ieee_environment()
    def at_step(
        cls,
        step: int,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        decoupled: bool,
    ) -> AdamScalars:
        """The scalars of step number `step` (the first is 1).

        Args:
            step: updates so far, this one included.
            lr: learning rate, at least 0.
            betas: decay rates of exp_avg and exp_avg_sq, each in [0, 1).
            eps: at least 0; a positive one must not vanish in float32.
            weight_decay: at least 0.
            decoupled: AdamW when true, L2 mode when false.

        Raises:
            TypeError: step is no integer, or another argument no number.
            ValueError: an argument is out of range or not finite, or a scalar overflows float32; it is named.
        """
        if isinstance(step, bool) or not hasattr(step, "__index__"):
            raise TypeError(f"step: expected an integer, got {type(step).__name__}")
        step = operator.index(step)
        if step < 1:
            raise ValueError(f"step: must be at least 1, got {step}")
        if len(betas) != 2:
            raise ValueError(f"betas: expected 2 values, got {len(betas)}")
        beta1, beta2 = (_number(f"betas[{index}]", beta) for index, beta in enumerate(betas))
        for index, beta in enumerate((beta1, beta2)):
            if beta >= 1.0:
                raise ValueError(f"betas[{index}]: must be in [0, 1), got {beta}")
        lr = _number("lr", lr)
        eps = _number("eps", eps)
        weight_decay = _number("weight_decay", weight_decay)
        rounded_eps = _round("eps", eps)
        if eps > 0.0 and rounded_eps == 0.0:
            raise ValueError(f"eps: {eps} is zero in float32")
        return cls(
            beta1=_round("betas[0]", beta1),
            one_minus_beta1=_round("betas[0]", 1.0 - beta1),
            beta2=_round("betas[1]", beta2),
            one_minus_beta2=_round("betas[1]", 1.0 - beta2),
            eps=rounded_eps,
            decay=_round("lr * weight_decay", 1.0 - lr * weight_decay) if decoupled else 1.0,
            step_size=_round("lr / (1 - betas[0]**step)", lr / (1.0 - beta1**step)),
            rsqrt_bias_correction2=_round("betas[1]", 1.0 / math.sqrt(1.0 - beta2**step)),
            weight_decay=_round("weight_decay", weight_decay),
            l2_mode=not decoupled,
        )


def _number(name: str, value: float) -> float:
    """`value` as a finite float of at least 0."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}") from None
    if not math.isfinite(number):
        raise ValueError(f"{name}: must be finite, got {number}")
    if number < 0.0:
        raise ValueError(f"{name}: must not be negative, got {number}")
    return number


def _round(name: str, value: float) -> float:
    """The float32 nearest to `value`, as a Python float."""
    with np.errstate(over="ignore", under="ignore"):
        rounded = float(np.float32(value))
    if not math.isfinite(rounded):
        raise ValueError(f"{name}: {value} is too large for float32")
    return rounded
