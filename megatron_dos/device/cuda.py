# SPDX-License-Identifier: Apache-2.0
"""Runs programs on CUDA streams and the host threads of the CPU update.

[Note: enqueueing] The calling thread only enqueues: device operations go to their streams with event waits in front,
CPU operations to the update's worker threads as tickets. A device operation can be enqueued once the CPU operations it
depends on have ended (a stream cannot wait for the CPU) and the device operations it depends on have been enqueued (it
waits for their events). A CPU operation can be submitted once the events of the device operations it depends on have
passed. The thread enqueues whatever can be enqueued, stream by stream, and blocks only when nothing can: on the
oldest ticket or the events that the next CPU operation waits for, whichever comes first.

[Note: memory of other streams] Staging memory comes from the caching allocator on the caller's stream. Every stream
first waits for the caller's stream, and the caller's stream waits for all of them at the end, so the memory can be
given back, and the host slots and states used again, in the order of the caller's stream.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from megatron_dos.device.protocol import Handlers
from megatron_dos.program.schedule import Op, OpKind, Program, Resource, Stream

__all__ = ["CudaDevice"]

_POLL_S = 5e-5  # far below what the smallest subgroup takes


class CudaDevice:
    """CUDA streams and events, made once and used by every step.

    Args:
        device: the CUDA device of the parameters.

    A handler enqueues its operation on the current stream; the handler of an operation of `Stream.CPU` returns a
    ticket with `wait()` and `poll()`. RELEASE runs on the caller's stream, where Megatron's collectives are ordered.
    """

    shares_memory = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # COMPUTE runs beside the caller's stream, so that updates are not held up by releases waiting there.
        self._streams: dict[Stream, torch.cuda.Stream] = {
            stream: torch.cuda.Stream(device) for stream in Stream if stream not in (Stream.CPU, Stream.RELEASE)
        }
        self._spare_events: list[torch.cuda.Event] = []
        self._begun: dict[int, torch.cuda.Event] = {}  # subgroup -> its early grads have been sent

    def begin(self, op: Op, handler: Callable[[Op], Any]) -> None:
        """Enqueue an operation ahead of its program, see `Device`."""
        stream = self._streams[op.stream]
        self._after(torch.cuda.current_stream(self._device), [stream])
        with torch.cuda.stream(stream):
            handler(op)
        event = self._begun.pop(op.subgroup, None) or self._take_event()
        event.record(stream)
        self._begun[op.subgroup] = event

    def join(self) -> None:
        """Let the caller's stream wait for what was begun."""
        if self._begun:
            self._after(self._streams[Stream.GRAD_D2H], [torch.cuda.current_stream(self._device)])
            self._spare_events += self._begun.values()
            self._begun = {}

    def run(
        self,
        program: Program,
        handlers: Handlers,
        memory: Callable[[Resource], list[torch.Tensor]],
    ) -> None:
        """Enqueue `program` and wait for its CPU operations; its device operations may still be running.

        What the caller enqueues on its stream afterwards is ordered after the whole program.
        """
        caller = torch.cuda.current_stream(self._device)
        self._after(caller, self._streams.values())
        run = _Run(program, handlers, {**self._streams, Stream.RELEASE: caller}, self._take_event, self._begun)
        self._spare_events += self._begun.values()  # of subgroups that the GPU updates after all
        self._begun = {}
        try:
            run.to_the_end()
        finally:
            # Also after an error: what is in flight must end before its memory is used again.
            failures = run.wait_for_tickets()
            for stream in self._streams.values():
                self._after(stream, [caller])
            self._spare_events += run.events.values()
        if failures:
            raise failures[0]

    def _after(self, stream: torch.cuda.Stream, others: Iterable[torch.cuda.Stream]) -> None:
        """Let `others` wait for what is on `stream` now. Stream.wait_stream would make an event each time."""
        event = self._take_event()
        event.record(stream)
        for other in others:
            other.wait_event(event)
        self._spare_events.append(event)  # a wait holds what was recorded before it; recording again is harmless

    def synchronize(self) -> None:
        """Block until everything that was enqueued has ended, so that the host may read what it wrote."""
        for stream in self._streams.values():
            stream.synchronize()

    def _take_event(self) -> torch.cuda.Event:
        return self._spare_events.pop() if self._spare_events else torch.cuda.Event()


class _Run:
    """One pass over a program. See [Note: enqueueing]."""

    def __init__(
        self,
        program: Program,
        handlers: Handlers,
        streams: Mapping[Stream, torch.cuda.Stream],
        take_event: Callable[[], torch.cuda.Event],
        begun: dict[int, torch.cuda.Event],
    ) -> None:
        self._ops = program.ops
        self._handlers = handlers
        self._streams = streams
        self._take_event = take_event
        self._waited_for = {dependency for op in program.ops for dependency in op.depends_on}
        self._tickets: dict[int, Any] = {}  # CPU operations that were submitted and are not known to have ended
        self._ended: set[int] = set()  # CPU operations that have ended
        self.events: dict[int, torch.cuda.Event] = {}  # of the device operations that were enqueued
        self._enqueued: set[int] = set()
        self._queues: dict[Stream, deque[Op]] = {}
        for op in program.ops:
            if op.kind is OpKind.EARLY_GRAD_TO_HOST and op.subgroup in begun:
                self._enqueued.add(op.index)
                self.events[op.index] = begun.pop(op.subgroup)
            else:
                self._queues.setdefault(op.stream, deque()).append(op)

    def to_the_end(self) -> None:
        while any(self._queues.values()):
            if not self._enqueue_all_that_can():
                self._block()

    def wait_for_tickets(self) -> list[BaseException]:
        """Wait for all, also for those after one that fails, and return what they raised."""
        failures: list[BaseException] = []
        for index in list(self._tickets):
            try:
                self._tickets.pop(index).wait()
            except BaseException as error:
                failures.append(error)
            self._ended.add(index)
        return failures

    def _enqueue_all_that_can(self) -> bool:
        progress = False
        for stream, queue in self._queues.items():
            while queue and self._ready(queue[0]):
                self._enqueue(queue.popleft(), stream)
                progress = True
        return progress

    def _is_cpu(self, index: int) -> bool:
        return self._ops[index].stream is Stream.CPU

    def _ready(self, op: Op) -> bool:
        return all(self._can_follow(op, dependency) for dependency in op.depends_on)

    def _can_follow(self, op: Op, dependency: int) -> bool:
        """Whether `op` can be enqueued now as far as this dependency goes."""
        if self._is_cpu(dependency):
            return op.stream is Stream.CPU or self._cpu_ended(dependency)
        if dependency not in self._enqueued:
            return False
        return op.stream is not Stream.CPU or self.events[dependency].query()

    def _cpu_ended(self, index: int) -> bool:
        if index in self._tickets and self._tickets[index].poll():
            self._tickets.pop(index).wait()  # raises what the update raised
            self._ended.add(index)
        return index in self._ended

    def _enqueue(self, op: Op, stream: Stream) -> None:
        if stream is Stream.CPU:
            self._tickets[op.index] = self._handlers[op.kind](op)
            return
        cuda_stream = self._streams[stream]
        for dependency in op.depends_on:
            if not self._is_cpu(dependency):
                cuda_stream.wait_event(self.events[dependency])
        with torch.cuda.stream(cuda_stream):
            self._handlers[op.kind](op)
        self._enqueued.add(op.index)
        if op.index in self._waited_for:
            event = self._take_event()
            event.record(cuda_stream)
            self.events[op.index] = event

    def _block(self) -> None:
        """Nothing can be enqueued: wait for what frees the CPU's results, or lets the CPU start on the next operation,
        whichever comes first. So the CPU's threads find the next one waiting when they have ended one."""
        queue = self._queues.get(Stream.CPU)
        before_next = [d for d in queue[0].depends_on if not self._is_cpu(d)] if queue else []
        events = [self.events[d] for d in before_next if d in self.events]
        if not self._tickets:
            if not events:
                stuck = [queue[0] for queue in self._queues.values() if queue]
                raise RuntimeError(f"no operation of the program can start; next on each stream: {stuck}")
            for event in events:
                event.synchronize()
            return
        index = next(iter(self._tickets))
        if before_next and len(events) == len(before_next):
            while not self._tickets[index].poll():
                if all(event.query() for event in events):
                    return
                time.sleep(_POLL_S)
        self._tickets.pop(index).wait()
        self._ended.add(index)
