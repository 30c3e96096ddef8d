# SPDX-License-Identifier: Apache-2.0
"""A measured step: each operation has the times at which it ran, and its figures are those of its operations."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_clock import timed
from virtual_cuda import CALL, VirtualCuda

from megatron_dos.device import CudaDevice, HostDevice
from megatron_dos.observing.figures import SubgroupTraffic, bytes_moved, figures, slot_stalls
from megatron_dos.observing.stopwatch import Stopwatch, timeline
from megatron_dos.planning.clock import Rate, Sharing, durations, simulate
from megatron_dos.program.schedule import OpKind, Placement, Stream, SubgroupShape, build_program, mix
from megatron_dos.program.timeline import FULL_DUPLEX

NUMEL = 100_000_000
CUDA = torch.device("cuda")
ALONE = {stream: stream.value for stream in Stream}


def program_of(count: int, host_share: float, host_slots: int = 2, device_slots: int = 3):
    shapes = [SubgroupShape((0, i // 4), NUMEL, True) for i in range(count)]
    return build_program(shapes, mix([NUMEL] * count, host_share), host_slots, device_slots)


def duration_of(count: int, cpu: float = 2e9, link: float = 50e9):
    return durations(
        [NUMEL] * count,
        {
            OpKind.CAST_GRAD: Rate(400e9),
            OpKind.GRAD_TO_HOST: Rate(link, 4),
            OpKind.UPDATE_ON_HOST: Rate(cpu),
            OpKind.PARAM_TO_DEVICE: Rate(link, 2),
            OpKind.STATES_TO_DEVICE: Rate(link, 12),
            OpKind.UPDATE_ON_DEVICE: Rate(40e9),
            OpKind.STATES_TO_HOST: Rate(link, 12),
        },
    )


def no_memory(resource):
    return []


def run(watch, device, program, handlers):
    with watch.timing(program, handlers) as timed_handlers:
        device.run(program, timed_handlers, no_memory)


def measured(monkeypatch, program, duration, caller_is_busy_for: float = 0.0):
    machine = VirtualCuda(duration)
    machine.install(monkeypatch)
    device, watch = CudaDevice(CUDA), Stopwatch(CUDA)
    machine.caller.time = machine.now + caller_is_busy_for
    with watch.timing(program, machine.handlers(), what="it") as handlers:
        device.run(program, handlers, no_memory)
    device.synchronize()
    (ran,) = watch.finished(wait=True)
    assert ran.what == "it"
    assert machine.now - 60 < ran.began < machine.now
    return ran.timeline


@pytest.mark.parametrize("caller_is_busy_for", [0.0, 3.0], ids=["host waits", "host is ahead"])
@pytest.mark.parametrize("host_share", [0, 0.3, 0.6, 1])
def test_events_and_tickets_tell_when_the_operations_ran(monkeypatch, host_share, caller_is_busy_for):
    count = 12
    program, duration = program_of(count, host_share), duration_of(count)
    ran = measured(monkeypatch, program, duration, caller_is_busy_for)
    # Each stream is a lane here, so nothing but the order of streams and the dependencies makes an operation wait.
    expected = simulate(program, duration, ALONE)
    slack = 40 * CALL * len(program.ops)
    assert slack < 0.3 * NUMEL / 2e9
    for op in program.ops:
        assert ran.starts[op.index] == pytest.approx(expected.starts[op.index], abs=slack), op
        assert ran.ends[op.index] == pytest.approx(expected.ends[op.index], abs=slack), op
    for op in program.ops:  # also across the two clocks
        for earlier in program.predecessors()[op.index]:
            assert ran.starts[op.index] >= ran.ends[earlier] - 20 * CALL


def test_nothing_waits_for_a_step_that_still_runs(monkeypatch):
    program, duration = program_of(6, 0.5), duration_of(6)
    machine = VirtualCuda(duration)
    machine.install(monkeypatch)
    device, watch = CudaDevice(CUDA), Stopwatch(CUDA)
    run(watch, device, program, machine.handlers())
    machine.caller.time += 1.0
    last = max(stream.time for stream in device._streams.values())
    if last < machine.now:
        last = machine.now + 1
        next(iter(device._streams.values())).time = last
    before = machine.now
    watch.finished()
    assert machine.now - before < 10 * CALL
    machine.now = last + 1
    assert len(watch.finished()) == 1
    assert watch.finished() == []


def test_events_are_made_once(monkeypatch):
    program, duration = program_of(6, 0.5), duration_of(6)
    machine = VirtualCuda(duration)
    machine.install(monkeypatch)
    device, watch = CudaDevice(CUDA), Stopwatch(CUDA)
    made = []
    for _ in range(4):
        run(watch, device, program, machine.handlers())
        assert len(watch.finished(wait=True)) == 1
        made.append(machine.made_events)
    assert made[1:] == made[:1] * 3


def test_a_step_that_failed_is_forgotten(monkeypatch):
    program, duration = program_of(4, 1.0), duration_of(4)
    machine = VirtualCuda(duration)
    machine.install(monkeypatch)
    device, watch = CudaDevice(CUDA), Stopwatch(CUDA)

    def fails(op):
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        run(watch, device, program, machine.handlers() | {OpKind.PARAM_TO_DEVICE: fails})
    assert watch.finished(wait=True) == []
    run(watch, device, program, machine.handlers())
    assert len(watch.finished(wait=True)) == 1


def test_what_was_begun_before_the_step_takes_none_of_its_time(monkeypatch):
    program, duration = program_of(4, 1.0), duration_of(4)
    machine = VirtualCuda(duration)
    machine.install(monkeypatch)
    watch = Stopwatch(torch.device("cpu"))
    with watch.timing(program, machine.handlers()) as handlers:
        for op in program.ops[2:]:
            ticket = handlers[op.kind](op)
            if ticket:
                ticket.wait()
    ((_, ran, _),) = watch.finished()
    assert ran.starts[0] == ran.ends[0] == ran.work[1] == 0.0
    assert ran.makespan == pytest.approx(duration_of(4)(program.ops[2]) * 4, rel=0.01)


def test_runs_that_nobody_asks_for_do_not_pile_up():
    program = program_of(2, 1.0)
    watch = Stopwatch(torch.device("cpu"))
    for _ in range(50):
        run(watch, HostDevice(), program, dict.fromkeys(OpKind, lambda op: None))
    assert 1 <= len(watch.finished()) < 10


def test_the_inline_device_runs_one_operation_after_the_other(monkeypatch):
    program, duration = program_of(5, 0.5), duration_of(5)
    machine = VirtualCuda(duration)
    machine.install(monkeypatch)

    def handle(op):
        if op.stream is Stream.CPU:
            return machine._handle(op)
        machine.now += duration(op)
        return None

    watch = Stopwatch(torch.device("cpu"))
    run(watch, HostDevice(), program, dict.fromkeys(OpKind, handle))
    ((_, ran, _),) = watch.finished()
    order = [ran.starts[op.index] for op in program.ops]
    assert order == sorted(order)
    assert ran.makespan == pytest.approx(sum(map(duration, program.ops)), rel=1e-3)
    assert ran.starts[0] == 0.0


@settings(max_examples=100, deadline=None)
@given(timed(), st.sampled_from(Sharing))
def test_what_operations_have_of_a_lane_adds_up_to_the_time_it_was_in_use(made, sharing):
    program, seconds, _ = made
    truth = simulate(program, lambda op: seconds[op.index], sharing=sharing)
    ran = timeline(program, [s + 5.0 for s in truth.starts], [e + 5.0 for e in truth.ends])
    for lane in set(FULL_DUPLEX.values()):
        assert ran.busy(lane) == pytest.approx(truth.busy(lane), abs=1e-6)
        assert set(ran.lanes[lane]) == set(truth.lanes[lane])
    for op in program.ops:
        assert ran.ends[op.index] == pytest.approx(truth.ends[op.index] + 5.0)


def test_figures_are_those_of_the_operations():
    count = 16
    program, duration = program_of(count, 0.5), duration_of(count)
    ran = simulate(program, duration)
    traffic = [SubgroupTraffic(NUMEL, 4 * NUMEL, 2 * NUMEL)] * count
    found = figures(7, ran, traffic)
    half = NUMEL * count // 2
    assert (found.step, found.numel, found.device_share) == (7, NUMEL * count, 0.5)
    assert found.seconds == ran.makespan
    assert found.lanes["h2d"].nbytes == 12 * half + 2 * half
    assert found.lanes["d2h"].nbytes == 12 * half + 4 * half
    assert found.lanes["cpu"].nbytes == found.lanes["gpu"].nbytes == 0
    assert found.lanes["cpu"].busy == pytest.approx(half / 2e9)
    assert found.lanes["gpu"].busy == pytest.approx(half / 40e9 + half / 400e9)  # updates and casts
    assert found.waiting("cpu") == pytest.approx(ran.makespan - half / 2e9)
    assert found.params_per_second == pytest.approx(NUMEL * count / ran.makespan)
    assert found.bytes_per_second("h2d") == pytest.approx(14 * half / ran.makespan)
    for kind, seconds in found.costs.items():
        assert NUMEL * seconds == pytest.approx(duration(next(op for op in program.ops if op.kind is kind))), kind
    assert found.costs.keys() == {op.kind for op in program.ops} - {OpKind.RELEASE_BUCKET}


def test_figures_of_a_rank_that_owns_nothing():
    found = figures(1, simulate(build_program([], []), lambda op: 0.0), [])
    assert (found.numel, found.seconds, found.params_per_second, found.device_share) == (0, 0.0, 0.0, 0.0)
    assert found.bytes_per_second("h2d") == 0.0


def test_slot_stalls_are_the_waits_that_a_further_slot_ends():
    count = 12
    slow_cpu = duration_of(count, cpu=0.5e9)
    host_only = [simulate(program_of(count, 1, host_slots=slots), slow_cpu) for slots in (1, 2, count)]
    stalls = [slot_stalls(ran).get("host_grad_slot", 0.0) for ran in host_only]
    assert stalls[0] > 0
    assert stalls[2] == 0.0
    # With two slots each grad after the first two waits for the CPU to end with the one before the last.
    assert stalls[1] == pytest.approx(host_only[1].makespan, rel=0.25)
    streamed = [simulate(program_of(count, 0, device_slots=slots), slow_cpu) for slots in (1, 3, count)]
    of_states = [slot_stalls(ran)["states_slot"] for ran in streamed]
    assert of_states[0] == pytest.approx(streamed[0].makespan - count * NUMEL * 12 / 50e9, rel=0.15)
    assert of_states[0] > of_states[1] >= of_states[2] == 0.0


def test_an_operation_started_while_the_one_before_it_ran_has_waited_for_it():
    program = build_program([SubgroupShape((0, 0), NUMEL, False)] * 2, [Placement.HOST] * 2, host_slots=0)
    ran = timeline(program, [0.0, 1.0, 5.0], [3.0, 5.0, 5.0])
    assert ran.starts[:2] == (0.0, 3.0)
    assert ran.ends[:2] == (3.0, 5.0)
    assert ran.work[:2] == (3.0, 2.0)


def test_a_wait_for_the_lane_after_the_slot_was_free_is_no_slot_stall():
    program = build_program([SubgroupShape((0, 0), NUMEL, False)] * 2, [Placement.STREAMED] * 2, device_slots=1)
    second = [op.index for op in program.ops if op.subgroup == 1 and op.kind is not OpKind.RELEASE_BUCKET]
    starts = [float(index) for index in range(len(program.ops))]
    for index in second:
        starts[index] += 7.0  # the link was busy with something else
    ran = timeline(program, starts, [start + 1 for start in starts])
    # Its states could have been fetched from 1 on, the slot is free at 3.
    assert slot_stalls(ran) == {"states_slot": 2.0}


def test_a_wait_for_data_is_no_slot_stall():
    program = build_program([SubgroupShape((0, 0), NUMEL, True)] * 2, [Placement.HOST] * 2)
    assert slot_stalls(simulate(program, lambda op: 1.0)) == dict.fromkeys(
        ("device_grad_slot", "host_grad_slot", "host_param_slot"), 0.0
    )


def test_bytes_of_copies_only():
    of = bytes_moved([SubgroupTraffic(10, 20, 30)])
    expected = {
        OpKind.STATES_TO_DEVICE: 120,
        OpKind.STATES_TO_HOST: 120,
        OpKind.GRAD_TO_HOST: 20,
        OpKind.PARAM_TO_DEVICE: 30,
    }
    for kind in OpKind:
        assert of(SimpleNamespace(kind=kind, subgroup=0)) == expected.get(kind)
    assert set(FULL_DUPLEX.values()) >= {"cpu", "h2d", "d2h", "gpu"}
