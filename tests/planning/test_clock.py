# SPDX-License-Identifier: Apache-2.0
"""The virtual clock keeps every order, wastes no time, and shows that an even mix keeps all lanes busy."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dos.planning.clock import HostMemory, Queues, Rate, Sharing, durations, fair_parts, simulate
from megatron_dos.planning.rival_programs import (
    every_kth_with_serial_copies,
    static_split,
    with_blocking_params,
    with_serial_copies,
)
from megatron_dos.program.schedule import Op, OpKind, Placement, Program, Stream, SubgroupShape, build_program, mix
from megatron_dos.program.timeline import FULL_DUPLEX

NUMEL = 100_000_000
# The two copy directions take turns.
HALF_DUPLEX = {stream: "link" if lane in ("h2d", "d2h") else lane for stream, lane in FULL_DUPLEX.items()}


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
        "cpu only": makespan(build_program(subgroups, [Placement.HOST] * count)),
        "device only": makespan(build_program(subgroups, [Placement.STREAMED] * count)),
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


# --- host memory, and links that are not quite full duplex

ONE_OF_EACH = [Placement.STREAMED, Placement.HOST]


def ends_by_kind(program, timeline) -> dict[OpKind, float]:
    return {op.kind: timeline.ends[op.index] for op in program.ops}


def test_memory_is_divided_max_min_fairly():
    assert fair_parts({"a": 10.0, "b": 20.0}, 100.0) == {"a": 10.0, "b": 20.0}
    assert fair_parts({"a": 10.0, "b": 90.0, "c": 80.0}, 90.0) == {"a": 10.0, "c": 40.0, "b": 40.0}
    assert fair_parts({"a": 50.0, "b": 50.0, "c": 50.0}, 90.0) == dict.fromkeys("abc", 30.0)
    assert fair_parts({}, 1.0) == {}


def test_operations_that_ask_for_more_memory_than_there_is_are_slowed_and_the_modest_are_not():
    program = build_program([SubgroupShape((0, 0), 1, False)] * 2, ONE_OF_EACH)
    seconds = {OpKind.STATES_TO_DEVICE: 4.0, OpKind.UPDATE_ON_HOST: 4.0}
    moved = {OpKind.STATES_TO_DEVICE: 80.0, OpKind.UPDATE_ON_HOST: 400.0}  # 20 and 100 a second
    memory = HostMemory(60.0, lambda op: moved.get(op.kind, 0.0))
    timeline = simulate(program, lambda op: seconds.get(op.kind, 0.0), memory=memory)
    ends = ends_by_kind(program, timeline)
    # The copy gets its 20. The update gets 40 for 4 seconds, then 60: 160 + 60 t = 400.
    assert ends[OpKind.STATES_TO_DEVICE] == 4.0
    assert ends[OpKind.UPDATE_ON_HOST] == pytest.approx(8.0)
    assert timeline.busy("cpu") == pytest.approx(8.0), "a slowed operation occupies its lane for longer"


@settings(max_examples=100, deadline=None)
@given(timed(), st.sampled_from(Sharing), st.floats(1.0, 50.0), st.data())
def test_memory_gives_no_more_than_it_has_and_no_less_than_is_asked_for(made, sharing, per_second, data):
    program, seconds, lanes = made
    asked = data.draw(st.lists(st.sampled_from([0.0, 1.0, 7.0, 30.0]), min_size=len(OpKind), max_size=len(OpKind)))
    per_kind = dict(zip(OpKind, asked, strict=True))

    def moved(op):
        return per_kind[op.kind] * seconds[op.index]

    timeline = simulate(program, lambda op: seconds[op.index], lanes, sharing, HostMemory(per_second, moved))
    free = simulate(program, lambda op: seconds[op.index], lanes, sharing)
    total = math.fsum(moved(op) for op in program.ops)
    assert timeline.makespan >= total / per_second - 1e-6
    # Were lanes and memory used one after the other, it would take this long.
    assert timeline.makespan <= math.fsum(seconds.values()) + total / per_second + 1e-6
    for op, waits in zip(program.ops, program.predecessors(), strict=True):
        assert timeline.starts[op.index] >= max((timeline.ends[i] for i in waits), default=0.0)
        took = timeline.ends[op.index] - timeline.starts[op.index]
        assert took >= max(seconds[op.index], moved(op) / per_second) - 1e-6
    plenty = simulate(program, lambda op: seconds[op.index], lanes, sharing, HostMemory(1e6, moved))
    assert plenty.ends == free.ends


def test_two_directions_at_once_are_slower_than_one():
    program = build_program([SubgroupShape((0, 0), 1, False)] * 2, ONE_OF_EACH)
    seconds = {OpKind.STATES_TO_DEVICE: 4.0, OpKind.GRAD_TO_HOST: 1.0}
    timeline = simulate(program, lambda op: seconds.get(op.kind, 0.0), together={"h2d": 0.5, "d2h": 0.25})
    ends = ends_by_kind(program, timeline)
    # The grad takes 4 seconds at a quarter of the rate; meanwhile 2 of the 4 seconds' worth of states have come.
    assert ends[OpKind.GRAD_TO_HOST] == 4.0
    assert ends[OpKind.STATES_TO_DEVICE] == 6.0


def test_refuses_memory_and_links_that_make_no_sense():
    program = build_program([SubgroupShape((0, 0), 1, False)], [Placement.HOST])
    with pytest.raises(ValueError, match="per_second: must be positive"):
        HostMemory(0.0, lambda op: 0.0)
    with pytest.raises(ValueError, match="memory: -1 bytes for grad_to_host of subgroup 0"):
        simulate(program, lambda op: 1.0, memory=HostMemory(1.0, lambda op: -1))
    with pytest.raises(ValueError, match="5 bytes in no time for grad_to_host"):
        simulate(program, lambda op: 0.0, memory=HostMemory(1.0, lambda op: 5))
    for together in ({"h2d": 0.0}, {"h2d": 1.5}, {"tape": 0.5}):
        with pytest.raises(ValueError, match="together: "):
            simulate(program, lambda op: 1.0, together=together)


# --- the programs of systems that wait


@settings(max_examples=50, deadline=None)
@given(timed())
def test_with_blocking_params_updates_and_params_go_one_at_a_time(made):
    program, _, _ = made
    blocking = with_blocking_params(program)
    assert [op.kind for op in blocking.ops] == [op.kind for op in program.ops]
    timeline = simulate(blocking, lambda op: 1.0)
    waited_for = (OpKind.UPDATE_ON_HOST, OpKind.UPDATE_ON_DEVICE, OpKind.PARAM_TO_DEVICE)
    starts = [timeline.starts[op.index] for op in blocking.ops if op.kind in waited_for]
    assert all(later >= earlier + 1.0 for earlier, later in pairwise(starts))


def test_with_serial_copies_states_never_go_both_ways_at_once():
    program = with_serial_copies(build_program(shapes(8), mix([NUMEL] * 8, 0.25)))
    assert all(op.stream is not Stream.STATES_D2H for op in program.ops)
    timeline = simulate(program, lambda op: 1.0)
    copies = [op for op in program.ops if op.kind in (OpKind.STATES_TO_DEVICE, OpKind.STATES_TO_HOST)]
    assert len(copies) == 12
    starts = sorted(timeline.starts[op.index] for op in copies)
    assert all(later >= earlier + 1.0 for earlier, later in pairwise(starts))


# --- one hardware queue

ONE = (Queues.ONE_AHEAD, Queues.ONE_WHEN_NEEDED)
OWN_LANES = {stream: stream.value for stream in Stream}


def made_of(*ops: tuple[OpKind, Stream, tuple[int, ...]]) -> Program:
    """Operations of one subgroup: kind, stream, and the operations that they depend on."""
    return Program(
        tuple(
            Op(index, kind, stream, 0, 0, frozenset(), frozenset(), depends_on)
            for index, (kind, stream, depends_on) in enumerate(ops)
        ),
        (Placement.HOST,),
        1,
        1,
    )


def times(program: Program, seconds: list[float], queues: Queues) -> list[tuple[float, float]]:
    timeline = simulate(program, lambda op: seconds[op.index], OWN_LANES, queues=queues)
    return list(zip(timeline.starts, timeline.ends, strict=True))


# Of three operations the second waits for the first, and the third for nothing.
SECOND_WAITS = made_of(
    (OpKind.STATES_TO_DEVICE, Stream.STATES_H2D, ()),
    (OpKind.UPDATE_ON_DEVICE, Stream.COMPUTE, (0,)),
    (OpKind.GRAD_TO_HOST, Stream.GRAD_D2H, ()),
)


def test_with_a_queue_for_each_stream_an_operation_waits_for_its_own_predecessors_alone():
    assert times(SECOND_WAITS, [4, 2, 1], Queues.EACH) == [(0, 4), (4, 6), (0, 1)]


def test_one_queue_holds_up_what_was_enqueued_behind_an_operation_that_waits():
    assert times(SECOND_WAITS, [4, 2, 1], Queues.ONE_AHEAD) == [(0, 4), (4, 6), (4, 5)]


def test_what_is_enqueued_when_needed_holds_up_nothing():
    assert times(SECOND_WAITS, [4, 2, 1], Queues.ONE_WHEN_NEEDED) == [(0, 4), (4, 6), (0, 1)]


@pytest.mark.parametrize("queues", ONE)
def test_an_operation_holds_up_those_behind_it_until_it_starts_and_no_longer(queues):
    program = made_of(*[(OpKind.STATES_TO_DEVICE, Stream.STATES_H2D, ())] * 2, (OpKind.CAST_GRAD, Stream.CAST, ()))
    # The second waits for its stream, however it was enqueued, and the third runs beside it.
    assert times(program, [4, 2, 1], queues) == [(0, 4), (4, 6), (4, 5)]


def test_the_host_goes_from_stream_to_stream_or_in_program_order():
    program = made_of(
        (OpKind.STATES_TO_DEVICE, Stream.STATES_H2D, ()),
        (OpKind.CAST_GRAD, Stream.CAST, ()),
        (OpKind.STATES_TO_DEVICE, Stream.STATES_H2D, ()),
    )
    assert times(program, [4, 1, 2], Queues.ONE_AHEAD) == [(0, 4), (4, 5), (4, 6)]
    assert times(program, [4, 1, 2], Queues.ONE_WHEN_NEEDED) == [(0, 4), (0, 1), (4, 6)]


@pytest.mark.parametrize("queues", ONE)
def test_updates_on_the_cpu_are_in_no_queue_and_nothing_is_enqueued_before_the_update_it_waits_for(queues):
    program = made_of(
        (OpKind.GRAD_TO_HOST, Stream.GRAD_D2H, ()),
        (OpKind.UPDATE_ON_HOST, Stream.CPU, (0,)),
        (OpKind.PARAM_TO_DEVICE, Stream.PARAM_H2D, (1,)),
        (OpKind.STATES_TO_DEVICE, Stream.STATES_H2D, ()),
    )
    assert times(program, [1, 5, 1, 3], queues) == [(0, 1), (1, 6), (6, 7), (0, 3)]


def test_params_from_the_cpu_wait_behind_states_that_were_enqueued_ahead():
    program = made_of(
        (OpKind.UPDATE_ON_HOST, Stream.CPU, ()),
        (OpKind.PARAM_TO_DEVICE, Stream.PARAM_H2D, (0,)),
        (OpKind.STATES_TO_DEVICE, Stream.STATES_H2D, ()),
        (OpKind.STATES_TO_HOST, Stream.STATES_D2H, (2,)),
    )
    assert times(program, [1, 1, 6, 2], Queues.ONE_AHEAD) == [(0, 1), (6, 7), (0, 6), (6, 8)]
    assert times(program, [1, 1, 6, 2], Queues.ONE_WHEN_NEEDED) == [(0, 1), (1, 2), (0, 6), (6, 8)]


@settings(max_examples=200, deadline=None)
@given(timed(), st.sampled_from(ONE), st.sampled_from(Sharing))
def test_one_queue_runs_everything_in_order_and_is_never_faster_where_streams_share_nothing(made, queues, sharing):
    program, seconds, _ = made
    free = simulate(program, lambda op: seconds[op.index], OWN_LANES, sharing)
    one = simulate(program, lambda op: seconds[op.index], OWN_LANES, sharing, queues=queues)
    for op, waits in zip(program.ops, program.predecessors(), strict=True):
        assert one.starts[op.index] >= free.starts[op.index]
        assert one.starts[op.index] >= max((one.ends[i] for i in waits), default=0.0)
        assert one.ends[op.index] == one.starts[op.index] + seconds[op.index]
    assert sorted(index for ran in one.lanes.values() for index in ran) == [op.index for op in program.ops]


@settings(max_examples=100, deadline=None)
@given(timed(), st.sampled_from(ONE), st.sampled_from(Sharing))
def test_one_queue_comes_to_an_end_on_any_lanes(made, queues, sharing):
    program, seconds, lanes = made
    one = simulate(program, lambda op: seconds[op.index], lanes, sharing, queues=queues)
    assert sorted(index for ran in one.lanes.values() for index in ran) == [op.index for op in program.ops]
    for op, waits in zip(program.ops, program.predecessors(), strict=True):
        assert one.starts[op.index] >= max((one.ends[i] for i in waits), default=0.0)
