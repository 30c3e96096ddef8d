# SPDX-License-Identifier: Apache-2.0
"""When each operation of a real step ran: from timing events on CUDA streams, and the host's clock elsewhere.

A stopwatch wraps the handlers of one run of a program; the device that runs it need not know. It never waits: times
are handed out once the events behind them have passed.

[Note: two clocks] Events tell times of the GPU's clock, the work of the host threads has times of the host's. A device
operation never starts before the host has enqueued it, and some operation of a step had been waited for by an idle
stream and starts at once: a param that comes back from the CPU, at the latest. So the difference of the clocks is the
largest of (moment of enqueueing - start on the GPU's clock) over the operations. That holds also where Megatron has all
streams share one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1), which an event on a stream of its own would not
survive: it would pass whenever the queue lets it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from megatron_dos.device.protocol import Handlers
from megatron_dos.program.schedule import Op, Program, Stream
from megatron_dos.program.timeline import FULL_DUPLEX, Timeline

__all__ = ["Stopwatch", "TimedRun", "timeline"]


# Runs that have not been asked for. More than one is rare; beyond this many the oldest are forgotten.
MOST_PENDING = 4


class Stopwatch:
    """Times runs of programs. Events are made once and used again.

    Args:
        device: where the operations run. Without CUDA, an operation ends when its handler returns.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spare_events: list[torch.cuda.Event] = []
        self._runs: deque[_Notes] = deque(maxlen=MOST_PENDING)

    @contextmanager
    def timing(self, program: Program, handlers: Handlers, what: Any = None) -> Iterator[Handlers]:
        """The handlers, for one run of `program` within the block, with a note of when each operation starts and ends.

        Args:
            program: what is run.
            handlers: as a device takes them.
            what: given back by `finished`.
        """
        run = _Notes(program, what)
        on_streams = self._device.type == "cuda"

        def wrapped(handler: Callable[[Op], Any]) -> Callable[[Op], Any]:
            def handle(op: Op) -> Any:
                if on_streams and op.stream is not Stream.CPU:
                    return self._on_stream(run, op, handler)
                started = time.perf_counter()
                ticket = handler(op)
                if ticket is None:
                    run.note(op.index, started, time.perf_counter())
                    return None
                return _TimedTicket(ticket, run, op.index, started)

            return handle

        yield {kind: wrapped(handler) for kind, handler in handlers.items()}
        self._runs.append(run)  # not after an error

    def _on_stream(self, run: _Notes, op: Op, handler: Callable[[Op], Any]) -> Any:
        stream = torch.cuda.current_stream(self._device)
        start, end = self._take_event(), self._take_event()
        enqueued = time.perf_counter()
        start.record(stream)
        result = handler(op)
        end.record(stream)
        run.events[op.index] = (enqueued, start, end)
        return result

    def _take_event(self) -> torch.cuda.Event:
        return self._spare_events.pop() if self._spare_events else torch.cuda.Event(enable_timing=True)

    def finished(self, wait: bool = False) -> list[TimedRun]:
        """The runs that have ended since the last call, oldest first.

        Args:
            wait: for the operations of runs that have not ended. Otherwise this never blocks.
        """
        ended = []
        while self._runs and self._runs[0].passed(wait):
            run = self._runs.popleft()
            ended.append(run.result())
            for _, start, end in run.events.values():
                self._spare_events += (start, end)
        return ended


class TimedRun(NamedTuple):
    """A run that has ended.

    Attributes:
        what: as given to `Stopwatch.timing`.
        timeline: its times, from the start of the first operation. What a device had begun before the run has none: it
            is at 0 and takes no time.
        began: that start on the host's clock, `time.perf_counter()`.
    """

    what: Any
    timeline: Timeline
    began: float


@dataclass
class _Notes:
    """The times of one run, as far as they are known."""

    program: Program
    what: Any
    on_host: dict[int, tuple[float, float]] = field(default_factory=dict)  # operation -> start and end, host clock
    events: dict[int, tuple[float, Any, Any]] = field(default_factory=dict)  # operation -> enqueued, events around it

    def note(self, index: int, start: float, end: float) -> None:
        self.on_host.setdefault(index, (start, end))

    def passed(self, wait: bool) -> bool:
        """Whether the events have, the last of each stream, which has all of its operations before it."""
        last = {self.program.ops[index].stream: end for index, (_, _, end) in sorted(self.events.items())}
        if wait:
            for event in last.values():
                event.synchronize()
        return all(event.query() for event in last.values())

    def result(self) -> TimedRun:
        times = dict(self.on_host)
        if self.events:
            origin = next(iter(self.events.values()))[1]
            since = {
                index: (origin.elapsed_time(start) / 1e3, start.elapsed_time(end) / 1e3)
                for index, (_, start, end) in self.events.items()
            }
            # See [Note: two clocks].
            offset = max(enqueued - since[index][0] for index, (enqueued, _, _) in self.events.items())
            times.update({index: (offset + start, offset + start + took) for index, (start, took) in since.items()})
        began = min((start for start, _ in times.values()), default=0.0)
        ordered = [times.get(op.index, (began, began)) for op in self.program.ops]
        starts, ends = [start - began for start, _ in ordered], [end - began for _, end in ordered]
        return TimedRun(self.what, timeline(self.program, starts, ends), began)


class _TimedTicket:
    """A ticket that notes when its work was seen to have ended: whoever waits for it sees that at once."""

    def __init__(self, ticket: Any, run: _Notes, index: int, started: float) -> None:
        self._ticket, self._run, self._index, self._started = ticket, run, index, started

    def poll(self) -> bool:
        ended = self._ticket.poll()
        if ended:
            self._run.note(self._index, self._started, time.perf_counter())
        return ended

    def wait(self) -> None:
        self._ticket.wait()
        self._run.note(self._index, self._started, time.perf_counter())


def timeline(
    program: Program,
    starts: Sequence[float],
    ends: Sequence[float],
) -> Timeline:
    """Measured times as a timeline.

    Operations of one stream do not overlap: one that was started while the one before it ran has waited for it. While
    operations of several streams run on one lane, each is taken to have an equal part of it, so that what they have of
    the lane adds up to the time for which it was in use.

    Args:
        program: what ran.
        starts: for each operation, in seconds from any moment.
        ends: likewise.
    """
    begins, stops = list(starts), list(ends)
    free_from: dict[Stream, float] = {}
    members: dict[str, list[int]] = {name: [] for name in FULL_DUPLEX.values()}
    for op in program.ops:
        begins[op.index] = max(begins[op.index], free_from.get(op.stream, begins[op.index]))
        stops[op.index] = max(stops[op.index], begins[op.index])
        free_from[op.stream] = stops[op.index]
        members[FULL_DUPLEX[op.stream]].append(op.index)
    work = [0.0] * len(begins)
    for of_lane in members.values():
        of_lane.sort(key=lambda index: (begins[index], index))
        lasting = [index for index in of_lane if begins[index] < stops[index]]
        changes = sorted(
            [(begins[index], True, index) for index in lasting] + [(stops[index], False, index) for index in lasting]
        )
        running: set[int] = set()
        since = 0.0
        for moment, starts_now, index in changes:
            for other in running:
                work[other] += (moment - since) / len(running)
            since = moment
            (running.add if starts_now else running.discard)(index)
    return Timeline(
        program, tuple(begins), tuple(stops), tuple(work), {name: tuple(of_lane) for name, of_lane in members.items()}
    )
