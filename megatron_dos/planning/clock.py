# SPDX-License-Identifier: Apache-2.0
"""The virtual clock: when each operation of a program would run, given how long each takes.

Nothing is executed. A *lane* is what streams have to share: one link, one processor. An operation is ready when the one
before it on its stream and all that it depends on have ended; no lane is idle while an operation of its own is ready.

[Note: sharing] What a copy engine does with two streams that copy in one direction is the hardware's affair, so there
are two models. Taking turns: a lane runs one operation at a time, to its end, and then the one that was ready first (of
those ready at the same moment, the first in program order). A small copy may then wait for a large one in front of it.
Evenly: all ready operations of a lane run at once, each at an equal part of the lane's rate.

[Note: host memory] Copies and updates on the CPU move bytes of the same memory. Each running operation asks for the
rate at which it would move them had it the memory to itself, and all get what they ask for as long as the memory can
give it. Otherwise it is divided max-min fairly: nobody gets more than an equal part while another gets less than it
asks for, and what the modest leave goes to the greedy. An operation that gets a part of what it asks for goes at that
part of its speed.

[Note: one queue] With CUDA_DEVICE_MAX_CONNECTIONS=1 all streams of a GPU share one hardware queue. What the host has
enqueued first is issued first: an operation at the head whose predecessors have not ended holds up all behind it, of
whatever stream. So the order in which the host enqueues matters, which it does not where each stream has a queue of its
own. Updates on the CPU are in no queue. The host takes no time, and acts whenever an operation has ended. Ahead: it
goes from stream to stream, and enqueues all that it can of each; an operation has to wait for the CPU's updates that it
depends on to end, and for other operations that it depends on to be enqueued. This is what device/cuda.py does, see
[Note: enqueueing] there. When needed: in program order, and only once all that an operation depends on has ended; the
operation before it on its stream may still run, so that the stream does not wait for the host.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from megatron_dos.program.schedule import Op, OpKind, Program, Stream
from megatron_dos.program.timeline import FULL_DUPLEX, Timeline

__all__ = ["HostMemory", "Queues", "Rate", "Sharing", "durations", "fair_parts", "simulate"]


class Sharing(Enum):
    """How the streams of a lane share it. See [Note: sharing]."""

    TURNS = "turns"
    EVEN = "even"


class Queues(Enum):
    """The hardware queues of a GPU, and how the host fills them. See [Note: one queue]."""

    EACH = "each"  # a queue for each stream
    ONE_AHEAD = "one, ahead"
    ONE_WHEN_NEEDED = "one, when needed"


@dataclass(frozen=True)
class HostMemory:
    """Host memory, whose rate all operations share that move bytes of it. See [Note: host memory].

    Attributes:
        per_second: bytes a second that it moves for this program, reads and writes together.
        moved: bytes of it that an operation moves.
    """

    per_second: float
    moved: Callable[[Op], float]

    def __post_init__(self) -> None:
        if not self.per_second > 0:
            raise ValueError(f"per_second: must be positive, got {self.per_second}")


def simulate(
    program: Program,
    duration: Callable[[Op], float],
    lanes: Mapping[Stream, str] = FULL_DUPLEX,
    sharing: Sharing = Sharing.TURNS,
    memory: HostMemory | None = None,
    together: Mapping[str, float] | None = None,
    queues: Queues = Queues.EACH,
) -> Timeline:
    """Run `program` on the virtual clock.

    Args:
        program: what to run.
        duration: seconds that an operation takes when it has its lane and the host memory to itself; 0 is allowed.
        lanes: stream -> the lane that it shares with other streams.
        sharing: how they share it.
        memory: the host memory that operations of all lanes share; None when it is never short.
        together: lane -> the part of its rate that it keeps while all lanes named here are in use, like the two
            directions of a link that is not quite full duplex.
        queues: the hardware queues that the streams of the GPU have.

    Raises:
        ValueError: a duration or a number of bytes is negative or not finite, an operation moves bytes in no time, a
            lane of `together` does not exist or keeps no part of its rate from 0 to 1, a stream has no lane, or an
            operation depends on a later one.
    """
    missing = sorted({op.stream.value for op in program.ops if op.stream not in lanes})
    if missing:
        raise ValueError(f"lanes: no lane for {', '.join(missing)}")
    together = together or {}
    for name, part in together.items():
        if name not in lanes.values() or not 0 < part <= 1:
            raise ValueError(f"together: {part} for {name}; more than 0 and at most 1, for a lane")
    work = [_checked(op, "duration", duration(op), "s") for op in program.ops]
    moved = [_checked(op, "memory", memory.moved(op), "bytes") if memory else 0.0 for op in program.ops]
    for op in program.ops:
        if moved[op.index] and not work[op.index]:
            raise ValueError(f"memory: {moved[op.index]} bytes in no time for {_named(op)}")
    clock = _Clock(program, work, moved, memory.per_second if memory else math.inf, lanes, sharing, together, queues)
    clock.run()
    return Timeline(
        program,
        tuple(clock.starts),
        tuple(clock.ends),
        tuple(clock.used),
        {name: tuple(lane.ran) for name, lane in clock.lanes.items()},
    )


def fair_parts(wanted: Mapping[Any, float], available: float) -> dict[Any, float]:
    """What each gets of `available`, divided max-min fairly. See [Note: host memory]."""
    parts, left = {}, available
    for position, user in enumerate(sorted(wanted, key=wanted.__getitem__)):
        parts[user] = min(wanted[user], left / (len(wanted) - position))
        left -= parts[user]
    return parts


class _Lane:
    """The operations that are ready for one lane or running on it."""

    def __init__(self, name: str, at_once: float) -> None:
        self.name = name
        self._at_once = at_once
        self._ready: list[tuple[float, int]] = []
        self.running: list[int] = []
        self.ran: list[int] = []

    def add(self, index: int, now: float) -> None:
        heapq.heappush(self._ready, (now, index))

    def start(self) -> list[int]:
        """Start what can start; the operations."""
        started = []
        while self._ready and len(self.running) < self._at_once:
            index = heapq.heappop(self._ready)[1]
            started.append(index)
            self.running.append(index)
        self.ran += started
        return started


class _OneQueue:
    """The hardware queue of all streams of the GPU, and what the host has yet to enqueue. See [Note: one queue].

    Args:
        program: what runs.
        waits_for: for each operation, those that must still end before it starts; the clock keeps it up to date.
        ahead: whether the host enqueues all that it can.
    """

    def __init__(self, program: Program, waits_for: Sequence[set[int]], ahead: bool) -> None:
        self._ops, self._waits_for, self._ahead = program.ops, waits_for, ahead
        self._to_enqueue: dict[Stream, deque[int]] = {}
        self._enqueued: set[int] = set()
        self._queue: deque[int] = deque()
        for op in program.ops:
            if op.stream is not Stream.CPU:
                self._to_enqueue.setdefault(op.stream, deque()).append(op.index)

    def issue(self) -> list[int]:
        """Enqueue and issue what can be enqueued and issued now; the operations issued."""
        if self._ahead:
            self._enqueue_ahead()
        else:
            self._enqueue_when_needed()
        issued = []
        while self._queue and not self._waits_for[self._queue[0]]:
            issued.append(self._queue.popleft())
        return issued

    def _enqueue_ahead(self) -> None:
        progress = True
        while progress:
            progress = False
            for waiting in self._to_enqueue.values():
                while waiting and self._can_be_enqueued(waiting[0]):
                    self._enqueue(waiting)
                    progress = True

    def _enqueue_when_needed(self) -> None:
        while True:
            can = [waiting for waiting in self._to_enqueue.values() if waiting and self._can_be_enqueued(waiting[0])]
            if not can:
                return
            self._enqueue(min(can, key=lambda waiting: waiting[0]))

    def _enqueue(self, waiting: deque[int]) -> None:
        index = waiting.popleft()
        self._enqueued.add(index)
        self._queue.append(index)

    def _can_be_enqueued(self, index: int) -> bool:
        return all(
            dependency not in self._waits_for[index] or (self._ahead and dependency in self._enqueued)
            for dependency in self._ops[index].depends_on
        )


@dataclass
class _Running:
    """An operation under way: at `since` it still needed `left` seconds at full speed, and goes at `speed` from then.

    `part` is what it has of its lane.
    """

    left: float
    since: float
    speed: float = 1.0
    part: float = 1.0

    def end(self) -> float:
        return self.since + self.left / self.speed


class _Clock:
    """One pass over a program."""

    def __init__(
        self,
        program: Program,
        work: Sequence[float],
        moved: Sequence[float],
        memory: float,
        lanes: Mapping[Stream, str],
        sharing: Sharing,
        together: Mapping[str, float],
        queues: Queues,
    ) -> None:
        self.starts = [0.0] * len(work)
        self.ends = [0.0] * len(work)
        self.used = [0.0] * len(work)
        at_once = 1 if sharing is Sharing.TURNS else math.inf
        self.lanes = {name: _Lane(name, at_once) for name in lanes.values()}
        self._work, self._memory, self._together = work, memory, together
        self._demand = [size / seconds if size else 0.0 for size, seconds in zip(moved, work, strict=True)]
        self._running: dict[int, _Running] = {}
        self._lane_of = [self.lanes[lanes[op.stream]] for op in program.ops]
        self._waits_for = [set(waits) for waits in program.predecessors()]
        self._unblocks: list[list[int]] = [[] for _ in work]
        for index, waits in enumerate(self._waits_for):
            for earlier in waits:
                self._unblocks[earlier].append(index)
        self._queue: _OneQueue | None = None
        if queues is not Queues.EACH:
            self._queue = _OneQueue(program, self._waits_for, ahead=queues is Queues.ONE_AHEAD)
        # An operation that is in the queue comes to its lane from there; all others when they have nothing to wait for.
        self._queued = [self._queue is not None and op.stream is not Stream.CPU for op in program.ops]

    def run(self) -> None:
        now = 0.0
        self._to_lanes([index for index, waits in enumerate(self._waits_for) if not waits], now)
        while now < math.inf:
            for lane in self.lanes.values():
                for index in lane.start():
                    self.starts[index] = now
                    self._running[index] = _Running(self._work[index], now)
            self._set_speeds(now)
            ends = {index: running.end() for index, running in self._running.items()}
            now = min(ends.values(), default=math.inf)
            self._end([index for index, end in ends.items() if end == now], now)

    def _set_speeds(self, now: float) -> None:
        """Give every running operation its part of its lane and of the memory, from now on."""
        slowed = bool(self._together) and all(self.lanes[name].running for name in self._together)
        speeds: dict[int, float] = {}
        for lane in self.lanes.values():
            for index in lane.running:
                speeds[index] = (self._together.get(lane.name, 1.0) if slowed else 1.0) / len(lane.running)
        wanted = {index: self._demand[index] * speed for index, speed in speeds.items()}
        if math.fsum(wanted.values()) > self._memory:
            for index, granted in fair_parts(wanted, self._memory).items():
                if granted < wanted[index]:
                    speeds[index] *= granted / wanted[index]
        for index, speed in speeds.items():
            running, part = self._running[index], 1.0 / len(self._lane_of[index].running)
            if (running.speed, running.part) != (speed, part):
                self.used[index] += (now - running.since) * running.part
                running.left = max(running.left - (now - running.since) * running.speed, 0.0)
                running.since, running.speed, running.part = now, speed, part

    def _end(self, ended: Sequence[int], now: float) -> None:
        for index in ended:
            running = self._running.pop(index)
            self._lane_of[index].running.remove(index)
            self.used[index] += (now - running.since) * running.part
            self.ends[index] = now
        ready = []
        for index in ended:
            for later in self._unblocks[index]:
                self._waits_for[later].remove(index)
                if not self._waits_for[later]:
                    ready.append(later)
        self._to_lanes(ready, now)

    def _to_lanes(self, ready: Sequence[int], now: float) -> None:
        """Hand to their lanes the operations that have nothing more to wait for, or that the queue issues."""
        for index in ready:
            if not self._queued[index]:
                self._lane_of[index].add(index, now)
        for index in self._queue.issue() if self._queue else ():
            self._lane_of[index].add(index, now)


def _named(op: Op) -> str:
    return f"{op.kind.value} of subgroup {op.subgroup}"


def _checked(op: Op, what: str, value: float, unit: str) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{what}: {value} {unit} for {_named(op)}; finite, at least 0")
    return value


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
