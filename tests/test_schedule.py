"""Programs are in a valid order, and their dependencies cover every conflict between streams."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dos.device import HostDevice
from megatron_dos.schedule import OpKind, Program, cpu_update_program


def happens_before(program):
    """For each operation, all operations that must have ended before it: by dependency or by stream order."""
    before, last_on_stream = [], {}
    for op in program.ops:
        direct = set(op.depends_on)
        if op.stream in last_on_stream:
            direct.add(last_on_stream[op.stream])
        before.append(direct.union(*(before[i] for i in direct)) if direct else set())
        last_on_stream[op.stream] = op.index
    return before


@settings(max_examples=100, deadline=None)
@given(st.lists(st.booleans(), max_size=12), st.integers(1, 5))
def test_conflicting_operations_are_ordered(casts, slots):
    program = cpu_update_program(casts, slots)
    before = happens_before(program)
    for op in program.ops:
        assert all(dependency < op.index for dependency in op.depends_on)
        for earlier in program.ops[: op.index]:
            conflict = (op.writes & (earlier.reads | earlier.writes)) | (op.reads & earlier.writes)
            if conflict:
                assert earlier.index in before[op.index], (earlier, op)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(1, 5))
def test_each_subgroup_passes_all_stages_once(casts, slots):
    program = cpu_update_program(casts, slots)
    for subgroup, cast in enumerate(casts):
        stages = [op.kind for op in program.ops if op.subgroup == subgroup]
        assert stages == ([OpKind.CAST_GRAD] if cast else []) + [
            OpKind.GRAD_TO_HOST,
            OpKind.UPDATE_ON_HOST,
            OpKind.PARAM_TO_DEVICE,
        ]
    assert program.casts == any(casts)


def test_more_slots_let_more_subgroups_overlap():
    def longest_wait(slots):
        program = cpu_update_program([True] * 6, slots)
        before = happens_before(program)
        second_copy = [op for op in program.ops if op.kind is OpKind.GRAD_TO_HOST][1]
        return any(program.ops[i].kind is OpKind.UPDATE_ON_HOST for i in before[second_copy.index])

    assert longest_wait(1)
    assert not longest_wait(2)


def test_refuses_a_program_without_slots():
    with pytest.raises(ValueError, match="slot"):
        cpu_update_program([True], 0)


def test_host_device_runs_each_operation_once_in_order():
    program = cpu_update_program([True, False, True], 2)
    ran = []
    HostDevice().run(program, dict.fromkeys(OpKind, lambda op: ran.append(op.index)))
    assert ran == list(range(len(program.ops)))


def test_host_device_refuses_an_order_that_breaks_a_dependency():
    program = cpu_update_program([True], 1)
    broken = Program((replace(program.ops[0], depends_on=(1,)),), 1)
    with pytest.raises(RuntimeError, match="later operation"):
        HostDevice().run(broken, dict.fromkeys(OpKind, lambda op: None))
