# SPDX-License-Identifier: Apache-2.0
"""An engine whose device can be exchanged between its steps: for checks that run one case in several ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_dos.device.protocol import Handlers
from megatron_dos.program.schedule import Op, Program
from megatron_dos.update.engine import UpdateEngine

__all__ = ["ExchangedDevice", "set_back"]


class ExchangedDevice:
    """Is the device of an engine, and hands on to `device`."""

    shares_memory = False

    device: Any

    def run(self, program: Program, handlers: Handlers, memory: Any) -> None:
        self.device.run(program, handlers, memory)

    def begin(self, op: Op, handler: Callable[[Op], Any]) -> None:
        self.device.begin(op, handler)

    def join(self) -> None:
        self.device.join()

    def synchronize(self) -> None:
        self.device.synchronize()


def set_back(engine: UpdateEngine, params: Sequence[torch.Tensor], first: Sequence[torch.Tensor]) -> None:
    """Back to before the first step: params and masters as they were, moments of zero. Nothing may be in flight."""
    for owner, (param, value) in enumerate(zip(params, first, strict=True)):
        param.copy_(value)
        zeros = torch.zeros(value.numel())
        engine.write_owner_states(owner, {"master": value, "exp_avg": zeros, "exp_avg_sq": zeros})
