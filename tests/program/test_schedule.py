# SPDX-License-Identifier: Apache-2.0
"""Programs are in a valid order, order every conflict, wait for nothing twice and mix placements evenly."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dos.device import HostDevice
from megatron_dos.planning.rival_programs import every_kth_with_serial_copies, static_split
from megatron_dos.program.schedule import (
    OpKind,
    Placement,
    Program,
    Stream,
    SubgroupShape,
    build_program,
    every_kth_on_device,
    mix,
)

SHARES = st.fractions(0, 1, max_denominator=1000)
NUMELS = st.lists(st.integers(1, 10**9), max_size=40)


@st.composite
def shapes(draw: st.DrawFn, min_size: int = 0) -> list[SubgroupShape]:
    """Subgroups of some buckets, each bucket's side by side, as a partition gives them."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=min_size, max_size=5))
    one = st.builds(SubgroupShape, st.just((0, 0)), st.integers(1, 1000), st.booleans())
    return [replace(draw(one), bucket=(number // 3, number)) for number, size in enumerate(sizes) for _ in range(size)]


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[SubgroupShape], Program]:
    """Any program the builder makes, other systems' among them."""
    subgroups = draw(shapes())
    slots = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    kind = draw(st.sampled_from(["any", "mixed", "cpu", "device", "static", "stride"]))
    if kind == "any":
        placements = draw(st.lists(st.sampled_from(Placement), min_size=len(subgroups), max_size=len(subgroups)))
        program = build_program(subgroups, placements, *slots)
    elif kind == "mixed":
        program = build_program(subgroups, mix([s.numel for s in subgroups], draw(SHARES)), *slots)
    elif kind == "cpu":
        program = build_program(subgroups, [Placement.HOST] * len(subgroups), *slots)
    elif kind == "device":
        program = build_program(subgroups, [Placement.STREAMED] * len(subgroups), *slots)
    elif kind == "static":
        program = static_split(subgroups, draw(SHARES), slots[0])
    else:
        program = every_kth_with_serial_copies(subgroups, draw(st.integers(1, 6)), *slots)
    return subgroups, program


def happens_before(program: Program, unordered: frozenset[Stream] = frozenset()) -> list[set[int]]:
    """For each operation, all that must have ended before it: by dependency or, unless `unordered`, by stream order."""
    before, last_on_stream = [], {}
    for op in program.ops:
        direct = set(op.depends_on)
        if op.stream in last_on_stream and op.stream not in unordered:
            direct.add(last_on_stream[op.stream])
        before.append(direct.union(*(before[i] for i in direct)) if direct else set())
        last_on_stream[op.stream] = op.index
    return before


@settings(max_examples=200, deadline=None)
@given(programs())
def test_conflicting_operations_are_ordered(made):
    """Also where updates on the CPU overlap, in programs that devices run: the kernel's jobs may run side by side."""
    _, program = made
    turns = any(("turn", 0) in op.writes for op in program.ops)
    before = happens_before(program, frozenset() if turns else frozenset([Stream.CPU]))
    for position, op in enumerate(program.ops):
        assert op.index == position
        assert all(dependency < op.index for dependency in op.depends_on)
        for earlier in program.ops[: op.index]:
            conflict = (op.writes & (earlier.reads | earlier.writes)) | (op.reads & earlier.writes)
            if conflict:
                assert earlier.index in before[op.index], (earlier, op)


@settings(max_examples=200, deadline=None)
@given(programs())
def test_no_dependency_is_implied_by_the_others(made):
    _, program = made
    before = happens_before(program)
    last_on_stream: dict[Stream, int] = {}
    for op in program.ops:
        assert len(set(op.depends_on)) == len(op.depends_on)
        for dependency in op.depends_on:
            others = set(op.depends_on) - {dependency}
            if op.stream in last_on_stream:
                others.add(last_on_stream[op.stream])
            assert dependency not in others.union(*(before[other] for other in others)), (dependency, op)
        last_on_stream[op.stream] = op.index


STAGES = {
    Placement.HOST: [OpKind.CAST_GRAD, OpKind.GRAD_TO_HOST, OpKind.UPDATE_ON_HOST, OpKind.PARAM_TO_DEVICE],
    Placement.STREAMED: [OpKind.STATES_TO_DEVICE, OpKind.UPDATE_ON_DEVICE, OpKind.STATES_TO_HOST],
    Placement.RESIDENT: [OpKind.UPDATE_ON_DEVICE],
}


@settings(max_examples=100, deadline=None)
@given(programs())
def test_each_subgroup_passes_all_stages_of_its_placement_once(made):
    subgroups, program = made
    releases = [op for op in program.ops if op.kind is OpKind.RELEASE_BUCKET]
    for index, (shape, placement) in enumerate(zip(subgroups, program.placements, strict=True)):
        stages = [op.kind for op in program.ops if op not in releases and op.subgroup == index]
        assert stages == [s for s in STAGES[placement] if shape.casts or s is not OpKind.CAST_GRAD]


@settings(max_examples=100, deadline=None)
@given(programs())
def test_each_bucket_is_released_once_after_its_last_param(made):
    subgroups, program = made
    before = happens_before(program)
    releases = [op for op in program.ops if op.kind is OpKind.RELEASE_BUCKET]
    buckets = list(dict.fromkeys(shape.bucket for shape in subgroups))
    assert sorted(op.subgroup for op in releases) == list(range(len(buckets)))
    for release in releases:
        members = {i for i, shape in enumerate(subgroups) if shape.bucket == buckets[release.subgroup]}
        writers = {op.index for op in program.ops if op.writes & {("param", i) for i in members}}
        assert len(writers) == len(members)
        assert writers <= before[release.index]


@settings(max_examples=100, deadline=None)
@given(programs())
def test_slots_stay_within_their_number(made):
    _, program = made
    limits = {
        "host_grad_slot": program.host_slots,
        "host_param_slot": program.host_slots,
        "device_grad_slot": program.host_slots,
        "states_slot": program.device_slots,
    }
    for op in program.ops:
        for name, number in op.reads | op.writes:
            assert 0 <= number < limits.get(name, number + 1)


def test_predecessors_are_the_dependencies_and_the_one_before_on_the_stream():
    program = build_program([SubgroupShape((0, 0), 1, False)] * 2, [Placement.STREAMED] * 2, device_slots=1)
    assert [sorted(waits) for waits in program.predecessors()] == [[], [0], [1], [0, 2], [1, 3], [2, 4], [4]]


@settings(max_examples=200, deadline=None)
@given(NUMELS, SHARES)
def test_after_every_subgroup_the_cpu_s_part_is_within_one_subgroup_of_its_share(numels, share):
    placements = mix(numels, share)
    seen, on_host = 0, 0
    for numel, placement in zip(numels, placements, strict=True):
        seen += numel
        on_host += numel if placement is Placement.HOST else 0
        assert abs(on_host - share * seen) <= max(numels)


@given(NUMELS)
def test_the_shares_0_and_1_leave_no_exception(numels):
    assert set(mix(numels, 0)) <= {Placement.STREAMED}
    assert set(mix(numels, 1)) <= {Placement.HOST}


def test_a_share_of_equal_subgroups_is_met_exactly_and_evenly():
    placements = mix([7] * 100, Fraction(37, 100))
    assert placements.count(Placement.HOST) == 37
    gaps = [i for i, placement in enumerate(placements) if placement is Placement.HOST]
    assert {after - before for before, after in pairwise(gaps)} == {2, 3}


@given(st.integers(0, 100), st.integers(1, 12))
def test_one_in_k_is_on_the_device(count, stride):
    placements = every_kth_on_device(count, stride)
    for prefix in range(count + 1):
        assert placements[:prefix].count(Placement.STREAMED) == prefix // stride
    assert len(placements) == count


@pytest.mark.parametrize("share", [-0.1, 1.1, Fraction(5, 4)])
def test_refuses_a_share_that_is_none(share):
    with pytest.raises(ValueError, match="CPU's share"):
        mix([1], share)
    with pytest.raises(ValueError, match="device's share"):
        static_split([], share)


def test_refuses_a_stride_below_one():
    with pytest.raises(ValueError, match="stride"):
        every_kth_on_device(3, 0)


@pytest.mark.parametrize("slots", [{"host_slots": -1}, {"device_slots": 0}])
def test_refuses_a_program_without_slots(slots):
    with pytest.raises(ValueError, match="slot"):
        build_program([SubgroupShape((0, 0), 1, True)], [Placement.HOST], **slots)


def test_without_host_slots_the_cpu_updates_in_place():
    shapes = [SubgroupShape((0, 0), 1, True)] * 4
    program = build_program(shapes, mix([1] * 4, 0.5), host_slots=0)
    on_host = [op for op in program.ops if program.placements[op.subgroup] is Placement.HOST]
    on_host = [op for op in on_host if op.kind is not OpKind.RELEASE_BUCKET]
    assert [op.kind for op in on_host] == [OpKind.UPDATE_ON_HOST] * 2
    for op in on_host:
        states, number = ("states", op.subgroup), op.subgroup
        assert op.reads == {("grad", number), states}
        assert op.writes == {("param", number), states}
    (release,) = (op for op in program.ops if op.kind is OpKind.RELEASE_BUCKET)
    assert {on_host[-1].index} <= happens_before(program)[release.index]
    assert {op.kind for op in program.ops} >= {OpKind.STATES_TO_DEVICE, OpKind.UPDATE_ON_DEVICE, OpKind.STATES_TO_HOST}


def test_refuses_placements_that_do_not_fit_the_subgroups():
    with pytest.raises(ValueError, match="1 subgroups but 2 placements"):
        build_program([SubgroupShape((0, 0), 1, True)], [Placement.HOST] * 2)


@pytest.mark.parametrize(
    ("placement", "slots", "last"),
    [
        (Placement.HOST, "host_slots", OpKind.UPDATE_ON_HOST),
        (Placement.STREAMED, "device_slots", OpKind.STATES_TO_HOST),
    ],
)
def test_more_slots_let_more_subgroups_overlap(placement, slots, last):
    def second_waits_for_first(count: int) -> bool:
        shape = SubgroupShape((0, 0), 1, False)
        program = build_program([shape] * 6, [placement] * 6, **{slots: count})
        first, second = (next(op.index for op in program.ops if op.subgroup == i) for i in (0, 1))
        return any(program.ops[i].kind is last for i in happens_before(program)[second] if i > first)

    assert second_waits_for_first(1)
    assert not second_waits_for_first(2)


def test_the_static_split_keeps_the_first_part_on_the_device_and_never_overlaps_updates():
    subgroups = [SubgroupShape((0, 0), 10, True)] * 10
    program = static_split(subgroups, 0.3)
    assert program.placements == (Placement.RESIDENT,) * 3 + (Placement.HOST,) * 7
    before = happens_before(program)
    on_device = {op.index for op in program.ops if op.kind is OpKind.UPDATE_ON_DEVICE}
    on_host = [op.index for op in program.ops if op.kind is OpKind.UPDATE_ON_HOST]
    assert all(on_device <= before[index] for index in on_host)


def test_serial_copies_of_states_share_one_stream():
    program = every_kth_with_serial_copies([SubgroupShape((0, 0), 10, True)] * 10, 2)
    copies = [op for op in program.ops if op.kind in (OpKind.STATES_TO_DEVICE, OpKind.STATES_TO_HOST)]
    assert len(copies) == 10
    assert len({op.stream for op in copies}) == 1


def nothing(resource):
    return []


def test_host_device_runs_each_operation_once_in_order():
    program = build_program([SubgroupShape((0, 0), 1, True)] * 3, mix([1] * 3, 0.5))
    ran = []
    HostDevice().run(program, dict.fromkeys(OpKind, lambda op: ran.append(op.index)), nothing)
    assert ran == list(range(len(program.ops)))


def test_host_device_waits_for_each_update_once_when_one_fails():
    waited = []

    class Ticket:
        def __init__(self, subgroup: int) -> None:
            self.subgroup = subgroup

        def wait(self) -> None:
            waited.append(self.subgroup)
            if self.subgroup == 1:
                raise RuntimeError("out of luck")

    program = build_program([SubgroupShape((0, 0), 1, True)] * 4, [Placement.HOST] * 4, host_slots=0)
    handlers = dict.fromkeys(OpKind, lambda op: None) | {OpKind.UPDATE_ON_HOST: lambda op: Ticket(op.subgroup)}
    with pytest.raises(RuntimeError, match="out of luck"):
        HostDevice().run(program, handlers, nothing)
    assert waited == [0, 1, 2, 3]


@pytest.mark.parametrize("host_slots", [0, 2])
def test_host_device_waits_for_updates_before_any_other_operation(host_slots):
    """In place, nothing but the release of the bucket comes between them, so they are in flight together."""
    running: list[int] = []
    most_running = 0

    class Ticket:
        def __init__(self, index: int) -> None:
            nonlocal most_running
            self.index = index
            running.append(index)
            most_running = max(most_running, len(running))

        def wait(self) -> None:
            running.remove(self.index)

    def handle(op):
        if op.stream is Stream.CPU:
            return Ticket(op.index)
        assert not running

    shapes = [SubgroupShape((0, bucket), 1, True) for bucket in (0, 0, 0, 1)]
    program = build_program(shapes, mix([1] * 4, 1), host_slots=host_slots)
    HostDevice().run(program, dict.fromkeys(OpKind, handle), nothing)
    assert not running
    assert most_running == (1 if host_slots else 3)


def test_a_program_that_is_in_no_valid_order_is_refused():
    program = build_program([SubgroupShape((0, 0), 1, True)], [Placement.HOST])
    broken = replace(program, ops=(replace(program.ops[0], depends_on=(1,)), *program.ops[1:]))
    with pytest.raises(RuntimeError, match="later operation"):
        HostDevice().run(broken, dict.fromkeys(OpKind, lambda op: None), nothing)
    with pytest.raises(ValueError, match="later operation"):
        broken.predecessors()


@pytest.mark.parametrize("last_bucket_first", [False, True])
def test_the_device_updates_resident_subgroups_while_the_first_states_are_fetched(last_bucket_first):
    shapes = [SubgroupShape((0, index), 1, False) for index in range(6)]
    placements = [Placement.STREAMED] * 3 + [Placement.RESIDENT] * 3
    program = build_program(shapes, placements, last_bucket_first=last_bucket_first)
    updates = [op.subgroup for op in program.ops if op.kind is OpKind.UPDATE_ON_DEVICE]
    assert sorted(updates[:3]) == [3, 4, 5]
    assert all(not op.depends_on for op in program.ops if op.subgroup in updates[:3] and op.stream is Stream.COMPUTE)
