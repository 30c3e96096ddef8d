# SPDX-License-Identifier: Apache-2.0
"""The adversarial device makes every legal order, reports every illegal one, and leaves nothing in a freed slot."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
import torch

from megatron_dos.device.sim import RaceError, SimDevice
from megatron_dos.program.schedule import (
    Op,
    OpKind,
    Placement,
    Program,
    Resource,
    Stream,
    SubgroupShape,
    build_program,
    mix,
)


def program_of(*ops: tuple[Stream, set[Resource], set[Resource], tuple[int, ...]]) -> Program:
    """A program of operations given by stream, reads, writes and dependencies; operation i is of subgroup i."""
    made = (
        Op(i, OpKind.CAST_GRAD, stream, i, 0, frozenset(reads), frozenset(writes), depends_on)
        for i, (stream, reads, writes, depends_on) in enumerate(ops)
    )
    return Program(tuple(made), (), 1, 1)


def real_program(share: float = 0.5, count: int = 6) -> Program:
    shapes = [SubgroupShape((0, i // 4), 1, casts=i % 2 == 0) for i in range(count)]
    return build_program(shapes, mix([1] * count, share), host_slots=2, device_slots=2)


def nothing(resource: Resource) -> list[torch.Tensor]:
    return []


def effects(program: Program, device: SimDevice) -> list[int]:
    """The operations in the order of their effects."""
    order: list[int] = []
    device.run(program, dict.fromkeys(OpKind, lambda op: order.append(op.index)), nothing)
    return order


def all_before(program: Program) -> list[set[int]]:
    before: list[set[int]] = []
    for waits in program.predecessors():
        before.append(set(waits).union(*(before[i] for i in waits)))
    return before


@pytest.mark.parametrize("share", [0, 0.37, 1])
def test_each_pair_of_operations_comes_in_every_order_that_the_program_allows(share):
    program = real_program(share)
    before = all_before(program)
    seen: set[tuple[int, int]] = set()
    device = SimDevice(0)
    for number in range(600):
        device.hold_back = number % len(program.ops) if number % 2 else None
        order = effects(program, device)
        assert sorted(order) == list(range(len(program.ops)))
        seen.update(combinations(order, 2))
    for one, other in combinations(range(len(program.ops)), 2):
        assert (one, other) in seen or other in before[one]
        assert ((other, one) in seen) == (one not in before[other])


def test_the_operation_that_is_held_back_comes_after_all_that_do_not_need_it():
    program = real_program()
    before = all_before(program)
    for held_back in range(len(program.ops)):
        order = effects(program, SimDevice(held_back, hold_back=held_back))
        after = {i for i, earlier in enumerate(before) if held_back in earlier}
        assert set(order[order.index(held_back) + 1 :]) == after


def test_the_seed_gives_the_order():
    program = real_program()
    assert effects(program, SimDevice(3)) == effects(program, SimDevice(3))
    assert len({tuple(effects(program, SimDevice(seed))) for seed in range(20)}) == 20


def test_one_device_makes_a_new_order_every_time():
    device = SimDevice(3)
    assert effects(real_program(), device) != effects(real_program(), device)


SLOT = ("states_slot", 0)
PARAM = ("param", 0)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (({PARAM}, {SLOT}), ({SLOT}, {PARAM}), "reads states_slot 0 as written by"),
        (({PARAM}, {SLOT}), (set(), {PARAM}), "overwrites param 0, which is read by"),
        ((set(), {PARAM}), (set(), {PARAM}), "overwrites param 0, written by"),
    ],
)
def test_every_kind_of_race_is_reported_with_both_operations(first, second, words):
    ordered = program_of((Stream.CPU, *first, ()), (Stream.COMPUTE, *second, (0,)))
    for seed in range(20):
        effects(ordered, SimDevice(seed))
    racing = program_of((Stream.CPU, *first, ()), (Stream.COMPUTE, *second, ()))
    with pytest.raises(RaceError, match=f"cast_grad of subgroup 1 .*{words} cast_grad of subgroup 0") as caught:
        effects(racing, SimDevice(0, hold_back=0))
    assert str(caught.value).endswith("which has not started")


def test_an_operation_that_starts_while_the_one_before_still_runs_is_reported():
    racing = program_of((Stream.CPU, set(), {PARAM}, ()), (Stream.COMPUTE, {PARAM}, set(), ()))
    messages = set()
    for seed in range(40):
        try:
            effects(racing, SimDevice(seed))
        except RaceError as error:
            messages.add(str(error).rpartition(", which ")[2])
    assert messages == {"has not started", "is still running"}


def test_without_the_check_only_the_effects_tell():
    racing = program_of((Stream.CPU, set(), {PARAM}, ()), (Stream.COMPUTE, {PARAM}, set(), ()))
    assert effects(racing, SimDevice(0, hold_back=0, check=False)) == [1, 0]


def test_operations_that_do_not_conflict_need_no_order():
    both_read = program_of((Stream.CPU, {PARAM}, set(), ()), (Stream.COMPUTE, {PARAM}, set(), ()))
    for seed in range(20):
        effects(both_read, SimDevice(seed))


def test_a_slot_that_nothing_has_written_cannot_be_read():
    with pytest.raises(ValueError, match="reads states_slot 0, which no operation before it writes"):
        effects(program_of((Stream.CPU, {SLOT}, set(), ())), SimDevice(0))


def test_refuses_a_program_that_is_in_no_valid_order():
    program = real_program()
    broken = replace(program, ops=(replace(program.ops[0], depends_on=(1,)), *program.ops[1:]))
    with pytest.raises(ValueError, match="later operation"):
        effects(broken, SimDevice(0))


class Memory:
    """One FP32 tensor for each resource, also for those that are no staging memory."""

    def __init__(self) -> None:
        self.tensors: dict[Resource, torch.Tensor] = {}

    def __call__(self, resource: Resource) -> list[torch.Tensor]:
        return [self.tensors.setdefault(resource, torch.zeros(4))]

    def __getitem__(self, resource: Resource) -> torch.Tensor:
        return self(resource)[0]


def run(program: Program, memory: Memory, seed: int, undeclared: tuple[int, Resource] | None = None) -> None:
    """Each operation checks that all it reads is finite and fills what it writes with its index + 1."""

    def handler(op: Op) -> None:
        reads = set(op.reads)
        if undeclared is not None and undeclared[0] == op.index:
            reads.add(undeclared[1])
        values = [memory[resource] for resource in reads]
        bad = not all(value.isfinite().all() for value in values)
        for resource in op.writes:
            memory[resource].fill_(float("nan") if bad else op.index + 1)

    SimDevice(seed).run(program, dict.fromkeys(OpKind, handler), memory)


@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_slots_hold_nan_after_the_step_and_nothing_else_ever_does(share):
    for seed in range(20):
        memory = Memory()
        run(real_program(share), memory, seed)
        for (name, number), tensor in memory.tensors.items():
            if name.endswith("_slot"):
                assert tensor.isnan().all(), (name, number)
            else:
                assert tensor.isfinite().all(), (name, number)


def test_a_slot_is_nan_before_it_is_written_and_once_all_its_readers_have_ended():
    first = (Stream.CPU, set(), {SLOT}, ())
    reader = (Stream.COMPUTE, {SLOT}, set(), (0,))
    other_reader = (Stream.CAST, {SLOT}, set(), (0,))
    late = (Stream.CPU, set(), {PARAM}, (1, 2))
    early = (Stream.COMPUTE, set(), {PARAM}, ())
    for seed in range(10):
        memory = Memory()
        run(program_of(first, reader, other_reader, late), memory, seed, undeclared=(3, SLOT))
        assert memory[PARAM].isnan().all()
        memory = Memory()
        run(program_of(early, (*first[:3], (0,)), (*reader[:3], (1,))), memory, seed, undeclared=(0, SLOT))
        assert memory[PARAM].isnan().all()


def test_what_is_updated_in_place_stays():
    """The update reads the slot and writes it: nothing is freed until the copy back has ended."""
    states = ("states", 0)
    program = program_of(
        (Stream.STATES_H2D, {states}, {SLOT}, ()),
        (Stream.COMPUTE, {SLOT}, {SLOT}, (0,)),
        (Stream.STATES_D2H, {SLOT}, {states}, (1,)),
    )
    for seed in range(10):
        memory = Memory()
        run(program, memory, seed)
        assert (memory[states] == 3).all()
        assert memory[SLOT].isnan().all()


def test_contents_that_nobody_reads_are_gone_at_once():
    program = program_of((Stream.CPU, set(), {SLOT}, ()), (Stream.CPU, set(), {PARAM}, ()))
    memory = Memory()
    run(program, memory, 0, undeclared=(1, SLOT))
    assert memory[PARAM].isnan().all()


class Ticket:
    def __init__(self, open_tickets: set[int], index: int) -> None:
        self._open, self._index = open_tickets, index
        self._open.add(index)

    def wait(self) -> None:
        self._open.discard(self._index)


def test_no_operation_starts_before_the_tickets_of_those_it_waits_for_have_been_waited_for():
    program = real_program(1)
    before = all_before(program)
    still_open: set[int] = set()
    overlapped = 0

    def handler(op: Op) -> Ticket | None:
        nonlocal overlapped
        assert not before[op.index] & still_open
        overlapped += bool(still_open)
        return Ticket(still_open, op.index) if op.stream is Stream.CPU else None

    for seed in range(40):
        SimDevice(seed).run(program, dict.fromkeys(OpKind, handler), nothing)
        assert not still_open
    assert overlapped, "work on the host threads never overlapped with anything"


def test_after_an_error_all_tickets_have_been_waited_for():
    program = real_program(1)
    left_open = 0
    for seed in range(40):
        still_open: set[int] = set()

        def handler(op: Op, still_open: set[int] = still_open) -> Ticket | None:
            nonlocal left_open
            if op.kind is OpKind.PARAM_TO_DEVICE and op.subgroup == 1:
                left_open += bool(still_open)
                raise RuntimeError("broken copy")
            return Ticket(still_open, op.index) if op.stream is Stream.CPU else None

        with pytest.raises(RuntimeError, match="broken copy"):
            SimDevice(seed).run(program, dict.fromkeys(OpKind, handler), nothing)
        assert not still_open
    assert left_open


def test_an_empty_program_runs():
    SimDevice(0).run(Program((), (Placement.HOST,), 1, 1), {}, nothing)
