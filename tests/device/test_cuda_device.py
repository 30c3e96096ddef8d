# SPDX-License-Identifier: Apache-2.0
"""The CUDA device without a GPU: its streams and events are replaced by ones that run as late and as mixed as they may.

`Machine` keeps what is enqueued on each stream and runs it in a random order that only stream order and event waits
limit, from queries and synchronisations inwards. Programs run through it must give the bits of the inline device.
"""

import random
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from virtual_cuda import VirtualCuda

from megatron_dos.device import cuda
from megatron_dos.device.host import HostDevice
from megatron_dos.program.schedule import OpKind, Placement, Stream, SubgroupShape, build_program, mix


class Machine:
    """Stands in for torch.cuda: streams are queues of (wait for event | record event | work)."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.streams = []
        self.made_streams = self.made_events = 0
        self.default = self.Stream()
        self.stack = [self.default]

    def Stream(self, device=None):
        stream = SimpleNamespace(queue=[], wait_event=None)
        stream.wait_event = lambda event: stream.queue.append(("wait", event, event.recorded))
        stream.synchronize = lambda: self._synchronize(stream)
        self.streams.append(stream)
        self.made_streams += 1
        return stream

    def Event(self):
        machine = self

        class Event:
            def __init__(self):
                self.recorded = 0  # how many times record() was called
                self.passed = set()  # which of these have been reached; a wait is for the last one before it

            def record(self, stream):
                self.recorded += 1
                stream.queue.append(("record", self, self.recorded))

            def query(self):
                machine.run_some()
                return self.recorded == 0 or self.recorded in self.passed

            def synchronize(self):
                while self.recorded not in self.passed:
                    assert machine.step(), "deadlock"

        self.made_events += 1
        return Event()

    def _synchronize(self, stream):
        while stream.queue:
            assert self.step(), "deadlock"

    def current_stream(self, device=None):
        return self.stack[-1]

    @contextmanager
    def stream(self, stream):
        self.stack.append(stream)
        yield
        self.stack.pop()

    def launch(self, work):
        self.current_stream().queue.append(("work", work, 0))

    def step(self):
        """Run the head of a random stream that is not waiting; whether there was one."""
        ready = [
            s
            for s in self.streams
            if s.queue and not (s.queue[0][0] == "wait" and s.queue[0][2] not in s.queue[0][1].passed)
        ]
        if not ready:
            return False
        kind, what, number = self.random.choice(ready).queue.pop(0)
        if kind == "work":
            what()
        elif kind == "record":
            what.passed.add(number)
        return True

    def run_some(self):
        for _ in range(self.random.randrange(3)):
            self.step()

    def drain(self):
        while self.step():
            pass
        assert not any(stream.queue for stream in self.streams)


class Ticket:
    """CPU work that ends at a random query, or when waited for."""

    def __init__(self, machine, work, before):
        self.machine, self.work, self.before, self.ended = machine, work, before, False

    def wait(self):
        if not self.ended:
            if self.before is not None:
                self.before.wait()
            self.ended = True
            self.work()

    def poll(self):
        if self.machine.random.random() < 0.3:
            self.wait()
        return self.ended


@pytest.fixture
def machine(monkeypatch, request):
    made = Machine(request.param)
    for name in ("Stream", "Event", "stream", "current_stream"):
        monkeypatch.setattr(cuda.torch.cuda, name, getattr(made, name))
    return made


def handlers_over(values, launch=None, submit=None):
    """Every operation mixes what it reads into what it writes, so that any wrong order changes the outcome."""

    def work(op):
        read = sum(values.get(resource, 1.0) * (3 + i) for i, resource in enumerate(sorted(op.reads)))
        for resource in op.writes:
            values[resource] = (values.get(resource, 0.0) * 1.25 + read + op.index) % 1e6

    def handle(op):
        if op.stream is Stream.CPU:
            return submit(lambda: work(op)) if submit else work(op)
        return launch(lambda: work(op)) if launch else work(op)

    return dict.fromkeys(OpKind, handle)


def programs(seed):
    chooser = random.Random(seed)
    count = chooser.randint(1, 12)
    shapes = [SubgroupShape((0, i // 3), chooser.randint(1, 9), chooser.random() < 0.5) for i in range(count)]
    share = chooser.choice([0, 0.3, 0.5, 0.8, 1])
    return build_program(shapes, mix([s.numel for s in shapes], share), chooser.randint(1, 3), chooser.randint(1, 4))


@pytest.mark.parametrize("machine", range(150), indirect=True)
def test_any_order_the_streams_allow_gives_the_inline_result(machine):
    program = programs(machine.random.random())
    expected = {}
    HostDevice().run(program, handlers_over(expected), lambda resource: [])
    HostDevice().run(program, handlers_over(expected), lambda resource: [])

    values, last = {}, [None]

    def submit(work):
        last[0] = Ticket(machine, work, last[0])
        return last[0]

    device = cuda.CudaDevice(torch.device("cuda"))
    device.run(program, handlers_over(values, machine.launch, submit), lambda resource: [])
    machine.run_some()
    device.run(program, handlers_over(values, machine.launch, submit), lambda resource: [])
    last_of_caller = []
    machine.default.queue.append(("work", lambda: last_of_caller.append(dict(values)), 0))
    machine.drain()
    assert last_of_caller == [expected]  # what the caller enqueues next sees the whole step


def program_with_early_grads(seed):
    chooser = random.Random(seed)
    shapes = [SubgroupShape((0, i // 3), 1, False, changes=chooser.random() < 0.5) for i in range(9)]
    placements = mix([1] * 9, 0.6)
    on_host = [i for i, place in enumerate(placements) if place is Placement.HOST]
    early = {subgroup: slot for slot, subgroup in enumerate(on_host[: chooser.randint(1, 5)])}
    return build_program(shapes, placements, early=early)


@pytest.mark.parametrize("machine", range(60), indirect=True)
def test_operations_begun_ahead_of_their_program_run_once_and_in_order(machine):
    """Some are begun and some not, a step is skipped in between, and the caller zeroes the grads in the end."""
    program = program_with_early_grads(machine.random.random())
    early = [op for op in program.ops if op.kind is OpKind.EARLY_GRAD_TO_HOST]
    begun = early[: machine.random.randint(0, len(early))]
    host, device = HostDevice(), cuda.CudaDevice(torch.device("cuda"))
    expected, values = {}, {}
    inline, handlers = (
        handlers_over(expected),
        handlers_over(values, machine.launch, lambda work: Ticket(machine, work, None)),
    )
    seen = []  # by what the caller enqueues after the skipped step
    for each, of_device, contents in ((host, inline, expected), (device, handlers, values)):
        for op in begun:
            each.begin(op, of_device[op.kind])
            machine.run_some()
        each.run(program, of_device, lambda resource: [])
        for op in early:  # a step that is skipped
            each.begin(op, of_device[op.kind])
        each.join()
        machine.launch(lambda contents=contents: seen.append(dict(contents)))
        machine.drain()
        each.run(program, of_device, lambda resource: [])
    machine.drain()
    assert values == expected
    assert seen[0] == seen[1]


@pytest.mark.parametrize("machine", [5], indirect=True)
def test_early_operations_make_no_events_in_later_steps(machine):
    program = program_with_early_grads(1)
    device = cuda.CudaDevice(torch.device("cuda"))
    handlers = handlers_over({}, machine.launch, lambda work: Ticket(machine, work, None))
    made = []
    for step in range(6):
        for op in program.ops:
            if op.kind is OpKind.EARLY_GRAD_TO_HOST:
                device.begin(op, handlers[op.kind])
        if step % 2:
            device.join()
        else:
            device.run(program, handlers, lambda resource: [])
        machine.drain()
        made.append(machine.made_events)
    assert made[2:] == made[1:2] * 4


@pytest.mark.parametrize("machine", range(20), indirect=True)
def test_after_a_synchronisation_all_states_are_on_the_host(machine):
    program = programs(machine.random.random())
    expected, values = {}, {}
    HostDevice().run(program, handlers_over(expected), lambda resource: [])
    device = cuda.CudaDevice(torch.device("cuda"))
    device.run(program, handlers_over(values, machine.launch, lambda work: Ticket(machine, work, None)), lambda r: [])
    device.synchronize()
    assert {r: v for r, v in values.items() if r[0] == "states"} == {
        r: v for r, v in expected.items() if r[0] == "states"
    }


@pytest.mark.parametrize("machine", [1], indirect=True)
def test_streams_and_events_are_made_once(machine):
    device = cuda.CudaDevice(torch.device("cuda"))
    program = programs(3)
    inline = handlers_over({}, machine.launch, lambda work: Ticket(machine, work, None))
    device.run(program, inline, lambda resource: [])
    machine.drain()
    streams, events = machine.made_streams, machine.made_events
    for _ in range(5):
        device.run(program, inline, lambda resource: [])
        machine.drain()
    assert (machine.made_streams, machine.made_events) == (streams, events)


@pytest.mark.parametrize("machine", [2], indirect=True)
def test_a_failing_update_is_raised_and_leaves_nothing_in_flight(machine):
    shapes = [SubgroupShape((0, 0), 4, False)] * 4
    program = build_program(shapes, mix([4] * 4, 1))
    started = []

    def submit(work):
        ticket = Ticket(machine, work, None)
        started.append(ticket)
        if len(started) == 2:
            ticket.work = lambda: pytest.fail("boom")
        return ticket

    with pytest.raises(pytest.fail.Exception, match="boom"):
        cuda.CudaDevice(torch.device("cuda")).run(
            program, handlers_over({}, machine.launch, submit), lambda resource: []
        )
    assert all(ticket.ended for ticket in started)
    machine.drain()


def test_a_program_that_cannot_go_on_is_reported(monkeypatch):
    made = Machine(0)
    for name in ("Stream", "Event", "stream", "current_stream"):
        monkeypatch.setattr(cuda.torch.cuda, name, getattr(made, name))
    from dataclasses import replace

    program = build_program([SubgroupShape((0, 0), 4, False)], mix([4], 1))
    ops = (replace(program.ops[0], depends_on=(2,)), *program.ops[1:])
    with pytest.raises(RuntimeError, match="no operation of the program can start"):
        cuda.CudaDevice(torch.device("cuda")).run(
            replace(program, ops=ops), handlers_over({}, made.launch, None), lambda resource: []
        )


@pytest.mark.parametrize("host_share", [1, 0.5])
def test_the_cpu_finds_its_next_operation_waiting(monkeypatch, host_share):
    seconds = {
        OpKind.GRAD_TO_HOST: 2e-4,
        OpKind.UPDATE_ON_HOST: 5e-4,
        OpKind.PARAM_TO_DEVICE: 1e-4,
        OpKind.STATES_TO_DEVICE: 3e-4,
        OpKind.STATES_TO_HOST: 3e-4,
    }
    clock = VirtualCuda(lambda op: seconds.get(op.kind, 0.0))
    clock.install(monkeypatch)
    program = build_program([SubgroupShape((0, 0), 4, False)] * 16, mix([4] * 16, host_share))
    cuda.CudaDevice(torch.device("cuda")).run(program, clock.handlers(), lambda resource: [])
    assert clock.cpu_idle == 0
