"""The virtual clock keeps every order, wastes no time, and shows that an even mix keeps all lanes busy."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dos.device.clock import FULL_DUPLEX, HALF_DUPLEX, Rate, Sharing, durations, simulate
from megatron_dos.schedule import (
    OpKind,
    Placement,
    Program,
    Stream,
    SubgroupShape,
    build_program,
    cpu_only,
    device_only,
    every_kth_with_serial_copies,
    mix,
    static_split,
)

NUMEL = 100_000_000


def shapes(count: int, casts: bool = False) -> list[SubgroupShape]:
    return [SubgroupShape((0, i // 8), NUMEL, casts) for i in range(count)]


def rates(link: float = 55e9, cpu: float = 2e9, gpu: float = 40e9, latency: float = 0.0) -> dict[OpKind, Rate]:
    """Bytes a second of each direction; parameters a second of the updates."""
    return {
        OpKind.CAST_GRAD: Rate(400e9, 1, latency),
        OpKind.GRAD_TO_HOST: Rate(link, 2, latency),
        OpKind.UPDATE_ON_HOST: Rate(cpu, latency=latency),
        OpKind.PARAM_TO_DEVICE: Rate(link, 2, latency),
        OpKind.STATES_TO_DEVICE: Rate(link, 12, latency),
        OpKind.UPDATE_ON_DEVICE: Rate(gpu, latency=latency),
        OpKind.STATES_TO_HOST: Rate(link, 12, latency),
    }


@st.composite
def timed(draw: st.DrawFn) -> tuple[Program, dict[int, float], dict[Stream, str]]:
    """Any program with any durations, zero among them, on lanes of either kind or on a single one."""
    count = draw(st.integers(0, 12))
    subgroups = shapes(count, draw(st.booleans()))
    kind = draw(st.sampled_from(["mixed", "static", "stride"]))
    slots = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    if kind == "mixed":
        program = build_program(subgroups, mix([NUMEL] * count, draw(st.fractions(0, 1, max_denominator=50))), *slots)
    elif kind == "static":
        program = static_split(subgroups, draw(st.fractions(0, 1, max_denominator=50)))
    else:
        program = every_kth_with_serial_copies(subgroups, draw(st.integers(1, 4)), *slots)
    seconds = draw(
        st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.5, 10.0]), min_size=len(program.ops), max_size=len(program.ops))
    )
    lanes = draw(st.sampled_from([FULL_DUPLEX, HALF_DUPLEX, dict.fromkeys(Stream, "all")]))
    return program, dict(enumerate(seconds)), lanes


@settings(max_examples=200, deadline=None)
@given(timed())
def test_every_operation_keeps_its_place_and_no_lane_waits_without_need(made):
    program, seconds, lanes = made
    timeline = simulate(program, lambda op: seconds[op.index], lanes)
    ready = [max((timeline.ends[i] for i in waits), default=0.0) for waits in program.predecessors()]
    for op in program.ops:
        assert timeline.ends[op.index] == timeline.starts[op.index] + seconds[op.index]
        assert timeline.starts[op.index] >= ready[op.index]
    assert sorted(index for ran in timeline.lanes.values() for index in ran) == [op.index for op in program.ops]
    for lane, ran in timeline.lanes.items():
        assert all(lanes[program.ops[index].stream] == lane for index in ran)
        free_from = 0.0
        for position, index in enumerate(ran):
            assert timeline.starts[index] >= free_from
            # Work conservation: it starts as soon as the lane is free and what it waits for has ended ...
            assert timeline.starts[index] == max(free_from, ready[index])
            # ... and none of those that the lane runs later could have started first.
            assert all(
                ready[index] <= ready[later] or ready[later] >= timeline.starts[index] for later in ran[position:]
            )
            free_from = timeline.ends[index]


@settings(max_examples=200, deadline=None)
@given(timed())
def test_a_lane_that_is_shared_evenly_starts_everything_at_once_and_is_never_idle(made):
    program, seconds, lanes = made
    timeline = simulate(program, lambda op: seconds[op.index], lanes, Sharing.EVEN)
    for op, waits in zip(program.ops, program.predecessors(), strict=True):
        assert timeline.starts[op.index] == max((timeline.ends[i] for i in waits), default=0.0)
        took = timeline.ends[op.index] - timeline.starts[op.index]
        assert seconds[op.index] - 1e-9 <= took
    for lane, ran in timeline.lanes.items():
        in_use, end = 0.0, 0.0
        for index in ran:
            in_use += max(timeline.ends[index] - max(timeline.starts[index], end), 0.0)
            end = max(end, timeline.ends[index])
        assert in_use == pytest.approx(timeline.busy(lane), abs=1e-6)


def test_two_copies_that_share_a_link_evenly_each_get_half_of_it():
    program = build_program([SubgroupShape((0, 0), 1, False)] * 2, [Placement.STREAMED, Placement.HOST])
    seconds = {OpKind.GRAD_TO_HOST: 0.0, OpKind.UPDATE_ON_HOST: 1.0, OpKind.PARAM_TO_DEVICE: 2.0}
    timeline = simulate(program, lambda op: seconds.get(op.kind, 5.0), sharing=Sharing.EVEN)
    of = {op.kind: op.index for op in program.ops}
    # Alone until 1, at half the rate until the params have arrived, alone again.
    assert timeline.ends[of[OpKind.PARAM_TO_DEVICE]] == 5.0
    assert timeline.ends[of[OpKind.STATES_TO_DEVICE]] == 7.0
    assert timeline.busy("h2d") == 7.0


@settings(max_examples=50, deadline=None)
@given(timed(), st.sampled_from(Sharing))
def test_the_makespan_is_no_less_than_any_lane_s_work_and_no_more_than_all_of_it(made, sharing):
    program, seconds, lanes = made
    timeline = simulate(program, lambda op: seconds[op.index], lanes, sharing)
    busy = {lane: timeline.busy(lane) for lane in set(lanes.values())}
    assert math.fsum(busy.values()) == pytest.approx(math.fsum(seconds.values()))
    assert max(busy.values()) - 1e-9 <= timeline.makespan <= math.fsum(seconds.values()) + 1e-9


def test_of_two_that_wait_for_a_lane_the_first_to_come_goes_first():
    shape = [SubgroupShape((0, 0), 1, False)] * 2
    program = build_program(shape, [Placement.STREAMED, Placement.HOST])
    seconds = {OpKind.GRAD_TO_HOST: 1.0, OpKind.STATES_TO_DEVICE: 5.0, OpKind.UPDATE_ON_HOST: 2.0}
    timeline = simulate(program, lambda op: seconds.get(op.kind, 0.5))
    on_h2d = [program.ops[index].kind for index in timeline.lanes["h2d"]]
    assert on_h2d == [OpKind.STATES_TO_DEVICE, OpKind.PARAM_TO_DEVICE]
    param = next(op.index for op in program.ops if op.kind is OpKind.PARAM_TO_DEVICE)
    assert timeline.starts[param] == 5.0


def balanced_share(link: float, cpu: float) -> Fraction:
    """The CPU's share c with c / cpu = (12 * (1 - c) + 2 * c) / link."""
    return Fraction(12 / link / (1 / cpu + 10 / link))


@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.parametrize(
    ("link", "cpu", "sharing"),
    [(link, cpu, Sharing.EVEN) for link in (13e9, 25e9, 55e9) for cpu in (1e9, 2e9, 6e9)]
    # A CPU that could update several subgroups while one's states are copied waits for grads behind those copies.
    + [(link, cpu, Sharing.TURNS) for link, cpu in ((13e9, 1e9), (25e9, 1e9), (55e9, 1e9), (25e9, 2e9), (55e9, 2e9))],
)
def test_an_even_mix_at_the_balance_point_keeps_all_lanes_busy_but_for_fill_and_drain(casts, link, cpu, sharing):
    count = 64
    program = build_program(shapes(count, casts), mix([NUMEL] * count, balanced_share(link, cpu)))
    timeline = simulate(program, durations([NUMEL] * count, rates(link, cpu)), sharing=sharing)
    busy = [timeline.busy(lane) for lane in ("cpu", "h2d", "d2h")]
    assert max(busy) - min(busy) < 0.1 * max(busy), "not balanced: the test shows nothing"
    longest = NUMEL * max(12 / link, 1 / cpu)  # of all operations
    assert timeline.makespan <= max(busy) + 4 * longest


def test_the_interleaved_program_beats_its_rivals_at_the_balance_point():
    count, of = 64, rates()
    subgroups = shapes(count)

    def makespan(program: Program, lanes=FULL_DUPLEX) -> float:
        return simulate(program, durations([NUMEL] * count, of), lanes).makespan

    ours = makespan(build_program(subgroups, mix([NUMEL] * count, balanced_share(55e9, 2e9))))
    rivals = {
        "cpu only": makespan(cpu_only(subgroups)),
        "device only": makespan(device_only(subgroups)),
        "k=2, by turns": makespan(every_kth_with_serial_copies(subgroups, 2), HALF_DUPLEX),
        "20 % static": makespan(static_split(subgroups, 0.2)),
    }
    assert all(ours < rival for rival in rivals.values()), (ours, rivals)
    assert rivals["cpu only"] == pytest.approx(count * NUMEL / 2e9, rel=0.05)
    assert rivals["device only"] == pytest.approx(count * NUMEL * 12 / 55e9, rel=0.08)
    assert rivals["20 % static"] == pytest.approx(0.8 * count * NUMEL / 2e9 + 0.2 * count * NUMEL / 40e9, rel=0.05)


def test_states_that_take_turns_leave_half_of_the_link_idle():
    count = 40
    program = every_kth_with_serial_copies(shapes(count), 1)
    timeline = simulate(program, durations([NUMEL] * count, rates(gpu=1e15)))
    assert timeline.makespan == pytest.approx(2 * count * NUMEL * 12 / 55e9, rel=0.01)


def test_a_duration_is_bytes_over_rate_and_latency():
    duration = durations([10, 20], {OpKind.STATES_TO_DEVICE: Rate(60, 12, 0.5), OpKind.UPDATE_ON_DEVICE: Rate(5)})
    program = build_program([SubgroupShape((0, 0), 1, False)] * 2, [Placement.STREAMED] * 2)
    by_kind = {(op.kind, op.subgroup): op for op in program.ops}
    assert duration(by_kind[OpKind.STATES_TO_DEVICE, 1]) == 0.5 + 20 * 12 / 60
    assert duration(by_kind[OpKind.UPDATE_ON_DEVICE, 0]) == 2.0
    assert duration(by_kind[OpKind.RELEASE_BUCKET, 0]) == 0.0
    with pytest.raises(KeyError, match="no rate for states_to_host"):
        duration(by_kind[OpKind.STATES_TO_HOST, 0])


@pytest.mark.parametrize("seconds", [-1.0, math.inf, math.nan])
def test_refuses_a_duration_that_is_none(seconds):
    with pytest.raises(ValueError, match="cast_grad of subgroup 0"):
        simulate(build_program([SubgroupShape((0, 0), 1, True)], [Placement.HOST]), lambda op: seconds)


@pytest.mark.parametrize(
    "wrong", [{"per_second": 0.0}, {"per_second": 1.0, "latency": -1.0}, {"per_second": 1.0, "per_parameter": -1.0}]
)
def test_refuses_a_rate_that_is_none(wrong):
    with pytest.raises(ValueError, match="must be"):
        Rate(**wrong)


def test_refuses_streams_without_a_lane_and_programs_in_no_valid_order():
    program = build_program([SubgroupShape((0, 0), 1, True)], [Placement.HOST])
    with pytest.raises(ValueError, match="no lane for cpu, param_h2d"):
        simulate(program, lambda op: 1.0, {Stream.CAST: "a", Stream.GRAD_D2H: "b", Stream.RELEASE: "c"})
    broken = replace(program, ops=(replace(program.ops[0], depends_on=(1,)), *program.ops[1:]))
    with pytest.raises(ValueError, match="later operation"):
        simulate(broken, lambda op: 1.0)


def test_an_empty_program_takes_no_time():
    assert simulate(build_program([], []), lambda op: 1.0).makespan == 0.0
