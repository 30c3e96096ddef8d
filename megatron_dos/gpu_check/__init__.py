# SPDX-License-Identifier: Apache-2.0
"""`megatron-dos check`: its stages, which run in worker processes; each is a module with `run(context)`.

Importing this package, its `runner` and its `summary` needs the standard library alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType

__all__ = ["STAGES", "Stage"]


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        name: of the stage and of its module.
        title: what it does, for the summary.
        limit: seconds; the stage leaves out what does not fit, and is killed some time after that.
        checks: whether it decides on the exit status: it must run to its end then. A check that fails counts anywhere.
        module: whose `run` it is, where that is not the name.
        environment: variables that its worker process has besides those of `variables.of_worker`; it shares the process
            with no stage that has others.
    """

    name: str
    title: str
    limit: float
    checks: bool = False
    module: str = ""
    environment: MappingProxyType[str, str] = field(default_factory=lambda: MappingProxyType({}))


STAGES = (
    Stage("environment", "the machine", 20),
    Stage("kernels", "device kernels give the bits of the CPU kernel", 35, checks=True),
    Stage("engine", "the engine gives the bits of the sequential update", 40, checks=True),
    Stage("memory", "a step leaves memory, streams and events as they were", 15, checks=True),
    Stage("rates", "rates of the lanes, alone and together", 30),
    Stage("step_time", "step time against other ways to update", 110),
    Stage("connections", "step time as usual", 10, module="connections"),
    Stage(
        "one_connection",
        "step time with CUDA_DEVICE_MAX_CONNECTIONS=1, as Megatron sets it",
        20,
        module="connections",
        environment=MappingProxyType({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
    ),
)
"""In the order in which they run: correctness first, so that it is known when time runs out."""
