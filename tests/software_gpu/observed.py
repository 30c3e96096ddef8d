# SPDX-License-Identifier: Apache-2.0
"""Hooks for trainings on the software GPU: what shows that a run went the way that it was to go."""

from __future__ import annotations

from typing import Any

_counts = {"grads sent early": 0, "steps": 0, "largest share of the CPU": 0.0}


__all__ = ["count", "counts"]


def count() -> None:
    """Before the set-up: count what engines do."""
    from megatron_dos.device import CudaDevice
    from megatron_dos.program.schedule import Placement

    begin, run = CudaDevice.begin, CudaDevice.run

    def counting_begin(self: Any, op: Any, handler: Any) -> None:
        _counts["grads sent early"] += 1
        begin(self, op, handler)

    def counting_run(self: Any, program: Any, handlers: Any, memory: Any) -> None:
        on_cpu = sum(placement is Placement.HOST for placement in program.placements)
        _counts["steps"] += 1
        _counts["largest share of the CPU"] = max(
            _counts["largest share of the CPU"], on_cpu / max(len(program.placements), 1)
        )
        run(self, program, handlers, memory)

    CudaDevice.begin, CudaDevice.run = counting_begin, counting_run


def counts(point: str, model: Any, optimizer: Any, args: Any) -> Any:
    """At the end: the counts, the backend's name, and whether the optimizer's memory was a GPU's."""
    if point != "end":
        return None
    import torch

    params = [param for chunk in model for param in chunk.parameters()]
    return {
        **_counts,
        "backend": torch.distributed.get_backend(),
        "device": {str(param.device) for param in params} == {"cuda:0"},
    }
