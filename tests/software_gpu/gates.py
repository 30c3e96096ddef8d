# SPDX-License-Identifier: Apache-2.0
"""What `CudaDevice` promises, each promise asked for with a gate in the place where a missing wait would show.

A gate is an operation that ends when the host opens it. Behind it, on its stream, comes what is late; a copy that does
not wait for that reads what was there before. Correct code passes at any speed of the machine. Code with the fault is
given `SETTLE_S` to go ahead of the gate.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_dos.device import CudaDevice
from megatron_dos.program.schedule import Op, OpKind, Program, Stream
from software_gpu.operations import enqueue

__all__ = ["GATED", "Gate", "settle"]

NUMEL = 64
SETTLE_S = 0.1
LONGEST_S = 30  # so that a fault of a test is no process that never ends
DEVICE_STREAMS = [stream for stream in Stream if stream not in (Stream.CPU, Stream.RELEASE)]

GATED: dict[str, Callable[[CudaDevice], list[str]]] = {}
"""Name -> a check that gives what it has found wrong."""


def gated(check: Callable[[CudaDevice], list[str]]) -> Callable[[CudaDevice], list[str]]:
    GATED[check.__name__] = check
    return check


class Gate:
    """Holds up a stream, by default the current one, until it is opened."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self._opened = threading.Event()
        enqueue(lambda: self._opened.wait(LONGEST_S), stream)

    def open(self) -> None:
        self._opened.set()

    def open_later(self) -> None:
        """Open while the host goes on, or waits."""
        threading.Timer(SETTLE_S, self.open).start()


class Ticket:
    """An update on the CPU that ends after a while. What it raises is raised by `wait`, as by the engine's tickets."""

    def __init__(self, seconds: float = 0.0, work: Callable[[], None] = lambda: None) -> None:
        self.ended = False
        self._due = time.monotonic() + seconds
        self._work = work
        self._error: Exception | None = None

    def poll(self) -> bool:
        if time.monotonic() >= self._due:
            self._end()
        return self.ended

    def wait(self) -> None:
        time.sleep(max(self._due - time.monotonic(), 0))
        self._end()
        if self._error is not None:
            raise self._error

    def _end(self) -> None:
        if not self.ended:
            self.ended = True
            try:
                self._work()
            except Exception as error:
                self._error = error


def settle(*streams: torch.cuda.Stream) -> None:
    """Give streams the time to do what they can, if nothing holds them up."""
    end = time.monotonic() + SETTLE_S
    while time.monotonic() < end and not all(stream.query() for stream in streams):
        time.sleep(0.002)


def new(value: float) -> torch.Tensor:
    """A tensor on the device that is filled by now."""
    made = torch.full((NUMEL,), value, device="cuda")
    torch.cuda.synchronize()
    return made


def holds(tensor: torch.Tensor, value: float) -> bool:
    torch.cuda.synchronize()
    return bool((tensor.cpu() == value).all())


_KINDS = list(OpKind)


def make_program(*ops: tuple[Stream, Iterable[int]], subgroups: Iterable[int] = ()) -> Program:
    """A program of operations, each with its stream and what it depends on. The kind of each tells which it is."""
    made = [
        Op(index, _KINDS[index], stream, subgroup, 0, frozenset(), frozenset(), tuple(depends))
        for index, ((stream, depends), subgroup) in enumerate(zip(ops, subgroups or range(len(ops)), strict=False))
    ]
    return Program(tuple(made), (), 1, 1)


def run(device: CudaDevice, program: Program, *handlers: Callable[[Op], Any]) -> None:
    device.run(program, dict(zip(_KINDS, handlers, strict=False)), lambda resource: [])


def streams_of(device: CudaDevice) -> dict[Stream, torch.cuda.Stream]:
    """The streams that operations get."""
    found: dict[Stream, torch.cuda.Stream] = {}

    def look(op: Op) -> None:
        found[op.stream] = torch.cuda.current_stream()

    run(device, make_program(*((stream, ()) for stream in DEVICE_STREAMS)), *[look] * len(DEVICE_STREAMS))
    device.synchronize()
    return found


@contextmanager
def late(value: float, into: torch.Tensor) -> Iterator[Gate]:
    """A gate on the current stream, and behind it the writing of a value."""
    gate = Gate()
    into.fill_(value)
    yield gate
    gate.open()
    torch.cuda.synchronize()


@gated
def synchronize_waits_for_every_stream(device: CudaDevice) -> list[str]:
    wrong = []
    for name, stream in streams_of(device).items():
        Gate(stream).open_later()
        device.synchronize()
        wrong += [] if stream.query() else [name.value]
        torch.cuda.synchronize()
    return wrong


@gated
def every_stream_waits_for_the_caller(device: CudaDevice) -> list[str]:
    source = new(0)
    targets = [new(0) for _ in DEVICE_STREAMS]
    streams = streams_of(device).values()
    with late(1, source):
        copies = [lambda op, target=target: target.copy_(source) for target in targets]
        run(device, make_program(*((stream, ()) for stream in DEVICE_STREAMS)), *copies)
        settle(*streams)
    return [stream.value for stream, target in zip(DEVICE_STREAMS, targets, strict=True) if not holds(target, 1)]


@gated
def the_caller_waits_for_every_stream(device: CudaDevice) -> list[str]:
    return [stream.value for stream in DEVICE_STREAMS if not _caller_waits_for(device, stream, None)]


@gated
def the_caller_waits_after_an_error(device: CudaDevice) -> list[str]:
    return [] if _caller_waits_for(device, Stream.STATES_D2H, ValueError("planted")) else ["the caller went on"]


def _caller_waits_for(device: CudaDevice, stream: Stream, error: Exception | None) -> bool:
    written, seen, gates = new(0), new(0), []

    def write(op: Op) -> None:
        gates.append(Gate())
        written.fill_(1)

    def fail(op: Op) -> None:
        raise error

    # Nothing else waits for the stream, so that no other wait stands in for the one that is asked for.
    ops = [(stream, ()), (Stream.CAST, ())] if error else [(stream, ())]
    try:
        run(device, make_program(*ops), write, fail)
        raised = None
    except ValueError as caught:
        raised = caught
    seen.copy_(written)
    settle(torch.cuda.current_stream())
    gates[0].open()
    return holds(seen, 1) and raised is error


@gated
def an_operation_waits_for_its_dependencies(device: CudaDevice) -> list[str]:
    """From each stream to another, and twice, since events are used again."""
    streams = [*DEVICE_STREAMS, Stream.RELEASE]
    pairs = list(zip(streams, [*streams[1:], streams[0]], strict=True))
    return [
        f"{after.value} after {before.value}"
        for before, after in [*pairs, *pairs[:2]]
        if not _follows(device, before, after)
    ]


def _follows(device: CudaDevice, before: Stream, after: Stream) -> bool:
    written, seen, gates, streams = new(0), new(0), [], []

    def write(op: Op) -> None:
        gates.append(Gate())
        written.fill_(1)

    def read(op: Op) -> None:
        seen.copy_(written)
        streams.append(torch.cuda.current_stream())

    run(device, make_program((before, ()), (after, [0])), write, read)
    settle(*streams)
    gates[0].open()
    return holds(seen, 1)


@gated
def an_operation_waits_for_each_of_its_dependencies(device: CudaDevice) -> list[str]:
    """Of two, the one that is late."""
    wrong = []
    for late_one in (0, 1):
        written, seen, gates, streams = [new(0), new(0)], [new(0), new(0)], [], []

        def write(op: Op, late_one: int = late_one, written: Any = written, gates: Any = gates) -> None:
            if op.index == late_one:
                gates.append(Gate())
            written[op.index].fill_(1)

        def read(op: Op, written: Any = written, seen: Any = seen, streams: Any = streams) -> None:
            for target, source in zip(seen, written, strict=True):
                target.copy_(source)
            streams.append(torch.cuda.current_stream())

        program = make_program((Stream.CAST, ()), (Stream.STATES_H2D, ()), (Stream.COMPUTE, [0, 1]))
        run(device, program, write, write, read)
        settle(*streams)
        gates[0].open()
        wrong += [f"number {late_one + 1}"] if not all(holds(one, 1) for one in seen) else []
    return wrong


@gated
def buckets_are_released_on_the_stream_of_the_caller(device: CudaDevice) -> list[str]:
    found = []
    caller = torch.cuda.Stream()
    with torch.cuda.stream(caller):
        run(device, make_program((Stream.RELEASE, ())), lambda op: found.append(torch.cuda.current_stream()))
    return [] if found == [caller] else ["another stream"]


@gated
def the_cpu_waits_for_the_device(device: CudaDevice) -> list[str]:
    source, host, seen = new(1), torch.zeros(NUMEL).pin_memory(), []

    def send(op: Op) -> None:
        Gate().open_later()
        host.copy_(source, non_blocking=True)

    def update(op: Op) -> Ticket:
        seen.append(host.clone())
        return Ticket()

    run(device, make_program((Stream.GRAD_D2H, ()), (Stream.CPU, [0])), send, update)
    # The same while another update runs, for which the device waits.
    host.zero_()
    busy = make_program((Stream.CPU, ()), (Stream.GRAD_D2H, ()), (Stream.CPU, [1]))
    run(device, busy, lambda op: Ticket(2 * SETTLE_S), send, update)
    return ["the update began too early" for one in seen if not bool((one == 1).all())]


@gated
def the_device_waits_for_the_cpu(device: CudaDevice) -> list[str]:
    host, target = torch.zeros(NUMEL).pin_memory(), new(0)
    program = make_program((Stream.CPU, ()), (Stream.PARAM_H2D, [0]))
    update = lambda op: Ticket(SETTLE_S, lambda: host.fill_(1))  # noqa: E731
    run(device, program, update, lambda op: target.copy_(host, non_blocking=True))
    return [] if holds(target, 1) else ["the result was sent too early"]


@gated
def a_step_ends_after_its_updates_on_the_cpu(device: CudaDevice) -> list[str]:
    def fail() -> None:
        raise ValueError("planted")

    tickets = [Ticket(SETTLE_S), Ticket(SETTLE_S / 2, fail), Ticket(SETTLE_S)]
    each = iter(tickets)
    program = make_program(*[(Stream.CPU, ())] * 3)
    wrong = []
    try:
        run(device, program, *[lambda op: next(each)] * 3)
        wrong.append("what an update raised was lost")
    except ValueError:
        pass
    return [*wrong, *("an update still runs" for ticket in tickets if not ticket.ended)]


@gated
def what_an_update_raises_ends_the_step(device: CudaDevice) -> list[str]:
    def fail() -> None:
        raise ValueError("planted")

    program = make_program((Stream.CPU, ()), (Stream.PARAM_H2D, [0]))
    try:
        run(device, program, lambda op: Ticket(0.0, fail), lambda op: None)
    except ValueError:
        return []
    return ["what the update raised was lost"]


# --- early grads


def _early(subgroup: int = 0) -> Op:
    return Op(0, OpKind.EARLY_GRAD_TO_HOST, Stream.GRAD_D2H, subgroup, 0, frozenset(), frozenset(), ())


_EARLY_PROGRAM = Program(
    (
        _early(),
        Op(1, OpKind.UPDATE_ON_HOST, Stream.CPU, 0, 0, frozenset(), frozenset(), (0,)),
    ),
    (),
    1,
    1,
)


@gated
def begin_waits_for_the_caller(device: CudaDevice) -> list[str]:
    grad, host, stream = new(0), torch.zeros(NUMEL).pin_memory(), streams_of(device)[Stream.GRAD_D2H]
    with late(1, grad):
        device.begin(_early(), lambda op: host.copy_(grad, non_blocking=True))
        settle(stream)
    device.join()
    torch.cuda.synchronize()
    return [] if bool((host == 1).all()) else ["an old grad was sent"]


@gated
def join_holds_up_the_caller(device: CudaDevice) -> list[str]:
    grad, host, gates = new(1), torch.zeros(NUMEL).pin_memory(), []

    def send(op: Op) -> None:
        gates.append(Gate())
        host.copy_(grad, non_blocking=True)

    device.begin(_early(), send)
    device.join()
    grad.fill_(2)
    settle(torch.cuda.current_stream())
    gates[0].open()
    torch.cuda.synchronize()
    return [] if bool((host == 1).all()) else ["a grad was overwritten while it was sent"]


@gated
def an_update_waits_for_early_grads(device: CudaDevice) -> list[str]:
    grad, host, seen = new(1), torch.zeros(NUMEL).pin_memory(), []

    def send(op: Op) -> None:
        Gate().open_later()
        host.copy_(grad, non_blocking=True)

    def update(op: Op) -> Ticket:
        seen.append(host.clone())
        return Ticket()

    device.begin(_early(), send)
    handlers = {OpKind.EARLY_GRAD_TO_HOST: send, OpKind.UPDATE_ON_HOST: update}
    device.run(_EARLY_PROGRAM, handlers, lambda resource: [])
    torch.cuda.synchronize()
    return [] if bool((seen[0] == 1).all()) else ["the update began too early"]


@gated
def early_grads_are_those_of_one_step(device: CudaDevice) -> list[str]:
    """What no program holds, or what was joined, is sent by the next program that holds it."""
    other = make_program((Stream.COMPUTE, ()), subgroups=[1])
    wrong = []
    for end in (lambda: run(device, other, lambda op: None), device.join):
        device.begin(_early(), lambda op: None)
        end()
        sent: list[Op] = []
        handlers = {OpKind.EARLY_GRAD_TO_HOST: sent.append, OpKind.UPDATE_ON_HOST: lambda op: Ticket()}
        device.run(_EARLY_PROGRAM, handlers, lambda resource: [])
        wrong += [] if len(sent) == 1 else [f"grads were sent {len(sent)} times"]
    torch.cuda.synchronize()
    return wrong
