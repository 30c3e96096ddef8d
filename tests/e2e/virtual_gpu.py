# SPDX-License-Identifier: Apache-2.0
"""A training on the CPU whose steps take the time that they would take with a GPU: for what goes by measured times."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def tune() -> None:
    """The share is found as with a GPU whose node updates slowly on its CPU; operations run in random orders."""
    import torch

    from megatron_dos.adapter import setup
    from megatron_dos.device.sim import SimDevice
    from megatron_dos.observing import monitor
    from megatron_dos.observing.stopwatch import TimedRun
    from megatron_dos.planning.clock import Rate, durations, simulate
    from megatron_dos.program.schedule import OpKind

    rates = {
        OpKind.CAST_GRAD: Rate(400e9),
        OpKind.GRAD_TO_HOST: Rate(50e9, 4),
        OpKind.UPDATE_ON_HOST: Rate(1e9),
        OpKind.PARAM_TO_DEVICE: Rate(50e9, 2),
        OpKind.STATES_TO_DEVICE: Rate(50e9, 12),
        OpKind.UPDATE_ON_DEVICE: Rate(40e9),
        OpKind.STATES_TO_HOST: Rate(50e9, 12),
    }

    class VirtualStopwatch:
        def __init__(self, device: torch.device) -> None:
            self._runs: list[TimedRun] = []

        @contextmanager
        def timing(self, program: Any, handlers: Any, what: Any) -> Iterator[Any]:
            yield handlers
            duration = durations([each.numel for each in what.traffic], rates)
            self._runs.append(TimedRun(what, simulate(program, duration), 0.0))

        def finished(self, wait: bool = False) -> list[TimedRun]:
            runs, self._runs = self._runs, []
            return runs

    monitor.Stopwatch = VirtualStopwatch
    setup.inject(
        make_device=lambda place: SimDevice(seed=torch.distributed.get_rank()), has_gpu=True, machine=lambda: None
    )
