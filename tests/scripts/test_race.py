# SPDX-License-Identifier: Apache-2.0
"""The update has no race: a short race check, and proof that the check finds what it is meant to find."""

from __future__ import annotations

from dataclasses import replace

import pytest
import race_check

from megatron_dos.device import HostDevice
from megatron_dos.device.sim import SimDevice
from megatron_dos.program import schedule
from megatron_dos.update.operations import StepOperations


@pytest.mark.parametrize("seed", range(1000, 1020))
def test_random_orders_give_the_bits_of_the_sequential_run(seed):
    assert race_check.check_orders(seed, 30) == []


@pytest.mark.parametrize("seed", range(1000, 1006))
def test_every_dependency_is_needed(seed):
    mutations = race_check.check_mutations(seed)
    assert mutations.survivors == []
    assert mutations.by_check == mutations.by_bits == mutations.total


def test_the_cases_cover_what_can_vary():
    cases = [race_check.make_case(seed) for seed in range(200)]
    subgroups = {len(case.partition.subgroups) for case in cases}
    assert subgroups == set(range(1, 18))
    assert {case.options.host_slots for case in cases} == {case.options.device_slots for case in cases} == {1, 2, 3, 4}
    assert {case.options.grads_as_fp32 for case in cases} == {False, True}
    assert {len(case.buckets) for case in cases} == {1, 2, 3, 4}
    assert {case.options.early_slots for case in cases} == {0, 1, 2, 3, 4}
    assert {case.options.resident_share > 0 for case in cases} == {False, True}
    assert {step.skipped for case in cases for step in case.steps} == {False, True}
    assert sum(bool(case.changing) and case.options.early_slots > 0 for case in cases) > 20
    shares = {step.share for case in cases for step in case.steps}
    assert {0, 1} < shares
    assert len(shares) > 50
    for tensors in ([case.params for case in cases], [case.steps[0].grads for case in cases]):
        dtypes = [frozenset(tensor.dtype for tensor in of_case) for of_case in tensors]
        assert {frozenset([dtype]) for dtype in race_check.DTYPES} < set(dtypes)
        assert any(len(each) > 1 for each in dtypes)


def faults(seeds: range = range(1000, 1010)) -> list[str]:
    return [fault for seed in seeds for fault in race_check.check_orders(seed, 30)]


def test_finds_a_builder_that_does_not_wait_for_readers(monkeypatch):
    """Without these waits a slot is filled anew while its last contents are still read."""

    def forgetful(self, kind, stream, subgroup, slot, reads, writes):
        self._reads_since.clear()
        original(self, kind, stream, subgroup, slot, reads, writes)

    original = schedule._Builder.add
    monkeypatch.setattr(schedule._Builder, "add", forgetful)
    assert any("overwrites" in fault for fault in faults())


@pytest.mark.slow
def test_finds_a_program_without_the_second_copy_of_grads_that_change(monkeypatch):
    original = schedule._host_update

    def forgetful(build, subgroup, shape, slot, early_slot):
        original(build, subgroup, replace(shape, changes=False), slot, early_slot)

    monkeypatch.setattr(schedule, "_host_update", forgetful)
    assert any("differs" in fault for fault in faults(range(1000, 1030)))


READS_A_SLOT = [
    schedule.OpKind.GRAD_TO_HOST,
    schedule.OpKind.UPDATE_ON_HOST,
    schedule.OpKind.PARAM_TO_DEVICE,
    schedule.OpKind.UPDATE_ON_DEVICE,
    schedule.OpKind.STATES_TO_HOST,
]


@pytest.mark.parametrize("kind", READS_A_SLOT)
def test_finds_an_operation_that_does_not_declare_what_it_reads(monkeypatch, kind):
    """The dependencies follow from the declarations, so nothing but the NaN in the slot can show this."""
    original = schedule._Builder.add

    def silent(self, of_kind, stream, subgroup, slot, reads, writes):
        declared = {r for r in reads if not r[0].endswith("_slot")} if of_kind is kind else reads
        original(self, of_kind, stream, subgroup, slot, declared, writes)

    monkeypatch.setattr(schedule._Builder, "add", silent)
    assert any("differs" in fault for fault in faults())


def test_finds_an_operation_that_writes_what_it_does_not_declare(monkeypatch):
    """An update on the device that writes into the slot beside its own."""
    original = StepOperations.update_on_device

    def careless(self, op):
        original(self, op)
        if len(self._states_slots) > 1:
            self._states_slots[op.slot - 1].fill_(1.0)

    monkeypatch.setattr(StepOperations, "update_on_device", careless)
    assert any("differs" in fault for fault in faults())


def test_a_bucket_that_is_released_too_early_is_found():
    """The case's result holds each bucket's params as they were at its release."""
    case = race_check.make_case(1003)
    step = case.steps[0]
    expected = race_check.Run(case, HostDevice()).step(step)

    class Early(SimDevice):
        def run(self, program, handlers, memory):
            ops = [
                replace(op, depends_on=()) if op.kind is schedule.OpKind.RELEASE_BUCKET else op for op in program.ops
            ]
            super().run(replace(program, ops=tuple(ops)), handlers, memory)

    assert not race_check.same_bits(race_check.Run(case, Early(0, check=False)).step(step), expected)


def test_the_program_says_what_it_did_and_fails_when_a_check_does(monkeypatch, capsys):
    arguments = ["--orders", "60", "--mutated", "1", "--jobs", "1", "--seed", "1009"]
    assert race_check.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "orders: 60 in 2 cases, 0 cases with a fault" in printed
    assert "(100.0 %) caught by the declared reads and writes" in printed
    monkeypatch.setattr(race_check, "check_orders", lambda seed, orders: [f"case {seed}: broken"])
    assert race_check.main(arguments) == 1
    assert "case 1010: broken" in capsys.readouterr().out
    monkeypatch.undo()
    survivor = race_check.Mutations(total=1, survivors=["case 0: survivor"])
    monkeypatch.setattr(race_check, "check_mutations", lambda seed: survivor)
    assert race_check.main(arguments) == 1
    assert "case 0: survivor" in capsys.readouterr().out
