# SPDX-License-Identifier: Apache-2.0
"""What a step's times say: how busy each lane was, how fast it moved, what waited for what.

Works on timelines, be they measured or simulated, and knows neither devices nor tensors. Times are seconds, amounts
bytes and parameters, of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dos.program.partition import BYTES_PER_PARAMETER
from megatron_dos.program.schedule import STAGING, Op, OpKind, Placement, Resource
from megatron_dos.program.timeline import Timeline

__all__ = [
    "LANES",
    "LaneUse",
    "StepFigures",
    "SubgroupTraffic",
    "bytes_moved",
    "figures",
    "slot_stalls",
]

LANES = ("cpu", "h2d", "d2h", "gpu")


@dataclass(frozen=True)
class SubgroupTraffic:
    """What one subgroup costs, wherever it is updated.

    Attributes:
        numel: parameters.
        grad_bytes: of its grads as they are sent to the CPU.
        param_bytes: of its params as they come back from the CPU.
    """

    numel: int
    grad_bytes: int
    param_bytes: int


def bytes_moved(traffic: Sequence[SubgroupTraffic]) -> Callable[[Op], int | None]:
    """The bytes that an operation moves over its link; None for one that is no copy."""

    def of(op: Op) -> int | None:
        if op.kind in (OpKind.STATES_TO_DEVICE, OpKind.STATES_TO_HOST):
            return BYTES_PER_PARAMETER * traffic[op.subgroup].numel
        if op.kind is OpKind.GRAD_TO_HOST:
            return traffic[op.subgroup].grad_bytes
        if op.kind is OpKind.PARAM_TO_DEVICE:
            return traffic[op.subgroup].param_bytes
        return None

    return of


@dataclass(frozen=True)
class LaneUse:
    """What a lane did in one step.

    Attributes:
        busy: seconds for which at least one operation ran on it.
        nbytes: moved over it; 0 where it is no link.
    """

    busy: float = 0.0
    nbytes: int = 0


@dataclass(frozen=True)
class StepFigures:
    """One step in figures.

    Attributes:
        step: its number.
        numel: parameters updated.
        seconds: from the start of the first operation to the end of the last.
        device_share: part of the parameters updated on the device.
        lanes: lane -> its use, for `LANES`.
        slot_stalls: kind of staging slot -> seconds for which operations waited for nothing but a slot, added up.
        costs: kind of operation -> seconds that one parameter takes of its lane. Kinds that did not run are absent.
    """

    step: int
    numel: int
    seconds: float
    device_share: float
    lanes: Mapping[str, LaneUse]
    slot_stalls: Mapping[str, float]
    costs: Mapping[OpKind, float]

    @property
    def params_per_second(self) -> float:
        return self.numel / self.seconds if self.seconds > 0 else 0.0

    def waiting(self, lane: str) -> float:
        """Seconds for which the lane was idle."""
        return max(self.seconds - self.lanes[lane].busy, 0.0)

    def bytes_per_second(self, lane: str) -> float:
        """Over the whole step, idle time included."""
        return self.lanes[lane].nbytes / self.seconds if self.seconds > 0 else 0.0


def figures(step: int, timeline: Timeline, traffic: Sequence[SubgroupTraffic]) -> StepFigures:
    """The figures of a step.

    Args:
        step: its number.
        timeline: when its operations ran.
        traffic: one for each subgroup of the program.
    """
    program = timeline.program
    moved = bytes_moved(traffic)
    lanes = {}
    for lane in LANES:
        ops = [program.ops[index] for index in timeline.lanes.get(lane, ())]
        lanes[lane] = LaneUse(busy=timeline.busy(lane), nbytes=sum(moved(op) or 0 for op in ops))
    numel = sum(each.numel for each in traffic)
    on_host = sum(
        each.numel for each, place in zip(traffic, program.placements, strict=True) if place is Placement.HOST
    )
    return StepFigures(
        step=step,
        numel=numel,
        seconds=timeline.makespan,
        device_share=1 - on_host / numel if numel else 0.0,
        lanes=lanes,
        slot_stalls=slot_stalls(timeline),
        costs=_costs(timeline, traffic),
    )


def _costs(timeline: Timeline, traffic: Sequence[SubgroupTraffic]) -> dict[OpKind, float]:
    seconds: dict[OpKind, float] = {}
    numel: dict[OpKind, int] = {}
    for op in timeline.program.ops:
        if op.kind is not OpKind.RELEASE_BUCKET:
            seconds[op.kind] = seconds.get(op.kind, 0.0) + timeline.work[op.index]
            numel[op.kind] = numel.get(op.kind, 0) + traffic[op.subgroup].numel
    return {kind: seconds[kind] / numel[kind] for kind in seconds if numel[kind]}


def slot_stalls(timeline: Timeline) -> dict[str, float]:
    """Kind of staging slot -> seconds for which operations that were otherwise ready waited for one to become free.

    Ready is an operation when what it reads has been written and its predecessor on its stream has ended.
    """
    ends = timeline.ends
    stalls: dict[Any, Any] = {}
    last_write: dict[Resource, int] = {}
    reads_since: dict[Resource, list[int]] = {}
    previous: dict[object, int] = {}
    for op in timeline.program.ops:
        awaited = [last_write[resource] for resource in op.reads if resource in last_write]
        awaited += [previous[op.stream]] if op.stream in previous else []
        ready = max((ends[index] for index in awaited), default=0.0)
        for resource in op.writes:
            name = resource[0]
            if name in STAGING:
                users = reads_since.get(resource, []) + ([last_write[resource]] if resource in last_write else [])
                free = max((ends[index] for index in users), default=0.0)
                stall = min(free, timeline.starts[op.index]) - ready
                stalls[name] = stalls.get(name, 0.0) + max(stall, 0.0)
        previous[op.stream] = op.index
        for resource in op.writes:
            last_write[resource], reads_since[resource] = op.index, []
        for resource in op.reads:
            reads_since.setdefault(resource, []).append(op.index)
    return stalls
