"""The virtual clock: when each operation of a program would run, given how long each takes.

Nothing is executed. A *lane* is what streams have to share: one link, one processor. An operation is ready when the one
before it on its stream and all that it depends on have ended; no lane is idle while an operation of its own is ready.

[Note: sharing] What a copy engine does with two streams that copy in one direction is the hardware's affair, so there
are two models. Taking turns: a lane runs one operation at a time, to its end, and then the one that was ready first (of
those ready at the same moment, the first in program order). A small copy may then wait for a large one in front of it.
Evenly: all ready operations of a lane run at once, each at an equal part of the lane's rate.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from megatron_dos.schedule import Op, OpKind, Program, Stream

__all__ = ["FULL_DUPLEX", "HALF_DUPLEX", "Rate", "Sharing", "Timeline", "durations", "simulate"]


class Sharing(Enum):
    """How the streams of a lane share it. See [Note: sharing]."""

    TURNS = "turns"
    EVEN = "even"


FULL_DUPLEX: Mapping[Stream, str] = {
    Stream.STATES_H2D: "h2d",
    Stream.PARAM_H2D: "h2d",
    Stream.STATES_D2H: "d2h",
    Stream.GRAD_D2H: "d2h",
    Stream.COMPUTE: "gpu",
    Stream.CAST: "gpu",
    Stream.CPU: "cpu",
    Stream.RELEASE: "release",
}
"""Each copy direction is a lane of its own."""

HALF_DUPLEX: Mapping[Stream, str] = {
    stream: "link" if lane in ("h2d", "d2h") else lane for stream, lane in FULL_DUPLEX.items()
}
"""The two copy directions take turns."""


@dataclass(frozen=True)
class Timeline:
    """When the operations of a program run.

    Attributes:
        program: the program.
        starts: for each operation, in seconds from the start of the program.
        ends: likewise.
        work: for each operation, the seconds that it takes of its lane.
        lanes: lane -> the indices of its operations, in the order in which they start.
    """

    program: Program
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    work: tuple[float, ...]
    lanes: Mapping[str, tuple[int, ...]]

    @property
    def makespan(self) -> float:
        """Seconds until the last operation ends."""
        return max(self.ends, default=0.0)

    def busy(self, lane: str) -> float:
        """Seconds for which the lane is in use."""
        return math.fsum(self.work[index] for index in self.lanes.get(lane, ()))


def simulate(
    program: Program,
    duration: Callable[[Op], float],
    lanes: Mapping[Stream, str] = FULL_DUPLEX,
    sharing: Sharing = Sharing.TURNS,
) -> Timeline:
    """Run `program` on the virtual clock.

    Args:
        program: what to run.
        duration: seconds that an operation takes when it has its lane to itself; 0 is allowed.
        lanes: stream -> the lane that it shares with other streams.
        sharing: how they share it.

    Raises:
        ValueError: a duration is negative or not finite, a stream has no lane, or an operation depends on a later one.
    """
    missing = sorted({op.stream.value for op in program.ops if op.stream not in lanes})
    if missing:
        raise ValueError(f"lanes: no lane for {', '.join(missing)}")
    clock = _Clock(program, [_checked(op, duration(op)) for op in program.ops], lanes, sharing)
    clock.run()
    ran = {name: tuple(lane.ran) for name, lane in clock.lanes.items()}
    return Timeline(program, tuple(clock.starts), tuple(clock.ends), tuple(clock.work), ran)


class _Lane:
    """The operations that are ready for one lane or running on it."""

    def __init__(self, at_once: float) -> None:
        self._at_once = at_once
        self._ready: list[tuple[float, int]] = []
        self._left: dict[int, float] = {}  # running operation -> seconds of the lane that it still needed at `_since`
        self._since = 0.0
        self.ran: list[int] = []

    def add(self, index: int, now: float) -> None:
        heapq.heappush(self._ready, (now, index))

    def start(self, now: float, work: Sequence[float]) -> list[int]:
        """Start what can start; the operations."""
        started = []
        while self._ready and len(self._left) < self._at_once:
            index = heapq.heappop(self._ready)[1]
            started.append(index)
            self._advance(now)
            self._left[index] = work[index]
        self.ran += started
        return started

    def next_end(self) -> float:
        """When the next operation ends if no other starts; infinity when none is running."""
        return self._since + min(self._left.values()) * len(self._left) if self._left else math.inf

    def end(self, now: float) -> list[int]:
        """The operations that end now, which is `next_end()`."""
        least = min(self._left.values())
        ended = [index for index, left in self._left.items() if left == least]
        self._left = {index: left - least for index, left in self._left.items() if left > least}
        self._since = now
        return ended

    def _advance(self, now: float) -> None:
        """Take the time since the last change off what the running operations need."""
        for index in self._left:
            self._left[index] = max(self._left[index] - (now - self._since) / len(self._left), 0.0)
        self._since = now


class _Clock:
    """One pass over a program."""

    def __init__(self, program: Program, work: Sequence[float], lanes: Mapping[Stream, str], sharing: Sharing) -> None:
        self.work = work
        self.starts = [0.0] * len(work)
        self.ends = [0.0] * len(work)
        at_once = 1 if sharing is Sharing.TURNS else math.inf
        self.lanes = {name: _Lane(at_once) for name in lanes.values()}
        self._lane_of = [self.lanes[lanes[op.stream]] for op in program.ops]
        self._waits_for = [set(waits) for waits in program.predecessors()]
        self._unblocks: list[list[int]] = [[] for _ in work]
        for index, waits in enumerate(self._waits_for):
            for earlier in waits:
                self._unblocks[earlier].append(index)

    def run(self) -> None:
        for index, waits in enumerate(self._waits_for):
            if not waits:
                self._lane_of[index].add(index, 0.0)
        now = 0.0
        while now < math.inf:
            for lane in self.lanes.values():
                for index in lane.start(now, self.work):
                    self.starts[index] = now
            now = min((lane.next_end() for lane in self.lanes.values()), default=math.inf)
            for lane in self.lanes.values():
                if lane.next_end() == now < math.inf:
                    self._end(lane.end(now), now)

    def _end(self, ended: Sequence[int], now: float) -> None:
        for index in ended:
            self.ends[index] = now
            for later in self._unblocks[index]:
                self._waits_for[later].remove(index)
                if not self._waits_for[later]:
                    self._lane_of[later].add(later, now)


def _checked(op: Op, seconds: float) -> float:
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"duration: {seconds} s for {op.kind.value} of subgroup {op.subgroup}; finite, at least 0")
    return seconds


@dataclass(frozen=True)
class Rate:
    """How fast operations of one kind are.

    Attributes:
        per_second: units that pass in a second: bytes, or parameters.
        per_parameter: units of each parameter of the subgroup, 1 where the unit is the parameter.
        latency: seconds that each operation takes besides.
    """

    per_second: float
    per_parameter: float = 1.0
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not self.per_second > 0:
            raise ValueError(f"per_second: must be positive, got {self.per_second}")
        for name in ("per_parameter", "latency"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}: must be finite and at least 0, got {value}")


def durations(numels: Sequence[int], rates: Mapping[OpKind, Rate]) -> Callable[[Op], float]:
    """Durations in seconds for `simulate`, from the subgroups' sizes and the rate of each kind of operation.

    Releasing a bucket takes no time. The returned function raises KeyError for another kind that has no rate.
    """

    def duration(op: Op) -> float:
        if op.kind is OpKind.RELEASE_BUCKET:
            return 0.0
        if op.kind not in rates:
            raise KeyError(f"rates: no rate for {op.kind.value}")
        rate = rates[op.kind]
        return rate.latency + numels[op.subgroup] * rate.per_parameter / rate.per_second

    return duration
