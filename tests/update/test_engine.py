# SPDX-License-Identifier: Apache-2.0
"""The engine: states and params have the bits of the numpy reference, wherever and however cut they are updated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from megatron_dos.device import HostDevice
from megatron_dos.kernels import AdamScalars, device_kernel, reference
from megatron_dos.program.partition import STATES, OwnedRange, partition
from megatron_dos.program.schedule import OpKind, Placement, build_program
from megatron_dos.update.engine import EngineOptions, UpdateEngine
from megatron_dos.update.memory import host_bytes, resident_parameters, staging_bytes
from megatron_dos.update.operations import StepInputs

SHAPES = ((1,), (3, 5), (17,), (64, 64), (129, 7), (512, 64))
NUMELS = [int(np.prod(shape)) for shape in SHAPES]
DTYPES = [torch.bfloat16, torch.float32, torch.float16, torch.bfloat16, torch.float32, torch.bfloat16]
MIXED = [torch.float32, torch.bfloat16, torch.float32, torch.float32, torch.float16, torch.bfloat16]
SHARES = [0, 0.37, 1]
STEPS = 3


def random_params(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator).to(dtype) for n, dtype in zip(NUMELS, DTYPES, strict=True)]


def make_partition(subgroup_size: int):
    start, ranges = 0, []
    for owner, numel in enumerate(NUMELS):
        ranges.append(OwnedRange(owner, (0, int(owner >= 3)), start, numel))
        start += numel
    return partition(ranges, subgroup_size)


def make_engine(params: list[torch.Tensor], subgroup_size: int, changing=(), **options) -> UpdateEngine:
    parts = make_partition(subgroup_size)
    kernel = device_kernel.select("auto", torch.device("cpu"), threads=1)
    engine = UpdateEngine(parts, params, EngineOptions(threads=1, **options), device_kernel=kernel, changing=changing)
    for owner, param in enumerate(params):
        engine.write_owner_states(owner, {"master": param})
    return engine


def send_early(engine: UpdateEngine, grads: list[torch.Tensor]) -> None:
    """As in a backward pass, with the grads that may change not final yet."""
    final = {owner: grads[owner].clone() for owner in engine.changing}
    for owner in final:
        grads[owner].fill_(7)
    for bucket in engine.memory.buckets:
        engine.send_early([bucket], grads.__getitem__)
    for owner, grad in final.items():
        grads[owner].copy_(grad)


def scalars_at(step: int, weight_decay: float, decoupled: bool = True) -> AdamScalars:
    return AdamScalars.at_step(
        step, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=weight_decay, decoupled=decoupled
    )


@dataclass
class Expected:
    """The states of one shard as numpy computes them."""

    master: np.ndarray
    exp_avg: np.ndarray
    exp_avg_sq: np.ndarray

    def step(self, grad: torch.Tensor, scalars: AdamScalars, unscale: float, grad_scale: float) -> None:
        wide = grad.float().numpy() * np.float32(unscale)
        reference.adamw(self.master, self.exp_avg, self.exp_avg_sq, wide, scalars, grad_scale=grad_scale)


def check_against_numpy(
    subgroup_size: int,
    grad_dtypes: list[torch.dtype],
    unscale: float = 1.0,
    shares: tuple[float, ...] = (1,),
    decoupled: bool = True,
    **options,
) -> None:
    """Three steps, their shares by turns `shares`; all states and params are compared after each."""
    params = random_params()
    engine = make_engine(params, subgroup_size, **options)
    expected = [
        Expected(param.float().numpy().copy(), np.zeros(param.numel(), np.float32), np.zeros(param.numel(), np.float32))
        for param in params
    ]
    generator = torch.Generator().manual_seed(1)
    scales = {owner: (unscale, {3: 0.3125, 5: 0.7}.get(owner, 1.0)) for owner in range(len(NUMELS)) if owner != 1}
    for step in range(1, STEPS + 1):
        engine.set_host_share(shares[(step - 1) % len(shares)])
        grads = [torch.randn(n, generator=generator).to(d) for n, d in zip(NUMELS, grad_dtypes, strict=True)]
        scalars = [scalars_at(step, 0.1 if owner % 2 else 0.0, decoupled) for owner in range(len(NUMELS))]
        if engine.memory.early_grads:
            send_early(engine, grads)
        engine.update(StepInputs(grads, scalars, scales))
        for owner, grad in enumerate(grads):
            expected[owner].step(grad, scalars[owner], *scales.get(owner, (1.0, 1.0)))
        assert_same_bits(engine, params, expected)


def assert_same_bits(engine: UpdateEngine, params: list[torch.Tensor], expected: list[Expected]) -> None:
    for owner, param in enumerate(params):
        for name, state in engine.owner_states(owner).items():
            np.testing.assert_array_equal(
                state.numpy().view(np.uint32),
                getattr(expected[owner], name).view(np.uint32),
                err_msg=f"{name} of {owner}",
            )
        rounded = torch.from_numpy(expected[owner].master).to(param.dtype)
        assert torch.equal(param.view(torch.uint8), rounded.view(torch.uint8))


@pytest.mark.parametrize("subgroup_size", [1 << 20, 4096, 1000])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grads_as_fp32", [True, False])
@pytest.mark.parametrize("share", SHARES)
def test_every_share_has_the_bits_of_the_reference(subgroup_size, grad_dtype, grads_as_fp32, share):
    unscale = 1 / 1024 if grad_dtype == torch.float16 else 1.0
    check_against_numpy(subgroup_size, [grad_dtype] * 6, unscale, (share,), grads_as_fp32=grads_as_fp32)


@pytest.mark.parametrize("grads_as_fp32", [True, False])
def test_a_share_that_changes_between_steps_changes_no_bit(grads_as_fp32):
    shares = (1, 0, Fraction(37, 100))
    check_against_numpy(1000, [torch.bfloat16] * 6, shares=shares, grads_as_fp32=grads_as_fp32)


@pytest.mark.parametrize("grads_as_fp32", [True, False])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("subgroup_size", [1 << 20, 2500, 300])
def test_grads_of_several_dtypes_in_one_subgroup(subgroup_size, share, grads_as_fp32):
    check_against_numpy(subgroup_size, MIXED, 0.125, (share,), grads_as_fp32=grads_as_fp32)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(("host_slots", "device_slots"), [(0, 1), (1, 1), (4, 2), (100, 100)])
def test_any_number_of_slots(share, host_slots, device_slots):
    check_against_numpy(700, MIXED, 1.0, (share,), host_slots=host_slots, device_slots=device_slots)


@pytest.mark.parametrize("grads_as_fp32", [True, False])
@pytest.mark.parametrize("share", SHARES)
def test_an_unscale_factor_that_is_no_power_of_two_rounds_as_megatron_does(share, grads_as_fp32):
    check_against_numpy(1000, [torch.float16] * 6, 1 / 1000, (share,), grads_as_fp32=grads_as_fp32)


@pytest.mark.parametrize("early_slots", [1, 3, 100])
@pytest.mark.parametrize("grad_dtypes", [MIXED, [torch.bfloat16] * 6], ids=["mixed", "bf16"])
def test_grads_that_are_sent_early(early_slots, grad_dtypes):
    """Also those that change afterwards: a whole parameter in several subgroups, and a piece of one."""
    check_against_numpy(
        700, grad_dtypes, 1 / 1000, (0, Fraction(37, 100), 1), early_slots=early_slots, changing=(0, 3, 4)
    )


@pytest.mark.parametrize("edited", [{2}, {0, 3}, set(range(6))], ids=["a part", "across subgroups", "all"])
@pytest.mark.parametrize("seen", [True, False])
def test_grads_that_were_edited_after_they_were_sent(edited, seen):
    grads = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in NUMELS]
    engines = [make_engine(random_params(), 700, early_slots=slots, changing={4}) for slots in (100, 0)]
    engines[0].send_early(engines[0].memory.buckets, grads.__getitem__)
    for owner in edited:
        grads[owner].mul_(-2)
    inputs = StepInputs(grads, [scalars_at(1, 0.0)] * len(NUMELS), edited=edited if seen else ())
    for engine in engines:
        engine.update(inputs)
    assert torch.equal(*(engine.memory.states.exp_avg for engine in engines)) == seen
    again = [op.subgroup for op in engines[0]._program.ops if op.kind is OpKind.GRAD_TO_HOST]
    changed = {4} | (edited if seen else set())
    subgroups = engines[0].partition.subgroups
    assert again == [s.index for s in subgroups if any(piece.owner in changed for piece in s.pieces)]


def test_early_grads_are_those_of_the_first_buckets_as_far_as_slots_go():
    engine = make_engine(random_params(), 700, early_slots=4, host_share=Fraction(1, 2))
    grads = [torch.zeros(n) for n in NUMELS]
    engine.send_early([(0, 1)], grads.__getitem__)
    late = [op.subgroup for op in engine.program(grads).ops if op.kind is OpKind.EARLY_GRAD_TO_HOST]
    engine.send_early([(0, 0)], grads.__getitem__)
    engine.send_early([(0, 0)], grads.__getitem__)  # once is enough
    early = engine.program(grads).early
    on_host = [i for i, place in enumerate(engine.program(grads).placements) if place is Placement.HOST]
    assert sorted(early) == on_host[:4]
    assert late == [i for i in on_host[:4] if engine.partition.subgroups[i].bucket == (0, 1)]
    assert late
    engine.forget_early()
    assert engine.program(grads).early == {}


def test_early_grads_of_a_skipped_step_are_not_used():
    params = random_params()
    engine = make_engine(params, 700, early_slots=100)
    old, new = ([torch.full((n,), value) for n in NUMELS] for value in (5.0, 0.0))
    for bucket in engine.memory.buckets:
        engine.send_early([bucket], old.__getitem__)
    engine.forget_early()
    engine.update(StepInputs(new, [scalars_at(1, 0.0)] * len(NUMELS)))
    assert not engine.memory.states.exp_avg.any()


def test_a_subgroup_whose_grads_were_sent_may_go_to_the_device_after_all():
    engine = make_engine(random_params(), 700, early_slots=100)
    grads = [torch.randn(n) for n in NUMELS]
    engine.send_early(engine.memory.buckets, grads.__getitem__)
    engine.set_host_share(Fraction(1, 3))
    engine.update(StepInputs(grads, [scalars_at(1, 0.0)] * len(NUMELS)))
    other = make_engine(random_params(), 700)
    other.update(StepInputs(grads, [scalars_at(1, 0.0)] * len(NUMELS)))
    assert torch.equal(engine.memory.states.master, other.memory.states.master)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("resident_share", [0.2, Fraction(1, 2), 1])
@pytest.mark.parametrize("stride", [0, 2])
def test_resident_states(resident_share, share, stride):
    check_against_numpy(700, MIXED, 1.0, (share,), resident_share=resident_share, stride=stride, early_slots=2)


def test_resident_states_are_on_the_device_only_and_come_as_near_to_the_share_as_subgroups_allow():
    parts = make_partition(700)
    for percent in range(101):
        options = EngineOptions(threads=1, resident_share=Fraction(percent, 100))
        resident = resident_parameters(parts, options)
        assert abs(resident - parts.numel * percent / 100) <= parts.largest
        assert host_bytes(parts, options) == 12 * (parts.numel - resident) + staging_bytes(parts, options)
    assert resident == parts.numel
    engine = make_engine(random_params(), 700, resident_share=Fraction(1, 2))
    assert engine.memory.resident.exp_avg.numel() == resident_parameters(parts, engine.options) > 0
    assert engine.memory.states.exp_avg.numel() + engine.memory.resident.exp_avg.numel() == parts.numel


def test_states_of_a_shard_that_lies_in_both_memories_can_be_read_and_written():
    engine = make_engine(random_params(), 700, resident_share=Fraction(1, 4))
    (owner,) = [
        owner
        for owner, (start, stop) in engine.partition.slab_ranges.items()
        if start < engine.memory.resident_from < stop
    ]
    new = {name: torch.randn(NUMELS[owner]) for name in ("master", "exp_avg", "exp_avg_sq")}
    engine.write_owner_states(owner, new)
    assert all(torch.equal(state, new[name]) for name, state in engine.owner_states(owner).items())
    others = [engine.owner_states(other)["exp_avg"] for other in range(len(NUMELS)) if other != owner]
    assert not any(state.any() for state in others)


def test_resident_states_can_be_moved():
    engine = make_engine(random_params(), 700, resident_share=Fraction(1, 2))
    engine.move_resident(torch.device("cpu"))
    assert engine.memory.resident.master.any()
    engine.move_resident(torch.device("meta"))
    assert {getattr(engine.memory.resident, name).device.type for name in STATES} == {"meta"}


@pytest.mark.parametrize("share", SHARES)
def test_l2_mode(share):
    check_against_numpy(1000, [torch.float32] * 6, shares=(share,), decoupled=False)


@pytest.mark.parametrize("share", SHARES)
def test_zero_grads_without_decay_change_no_bit(share):
    params = random_params()
    before = [param.clone() for param in params]
    engine = make_engine(params, 500, host_share=share)
    masters = engine.memory.states.master.clone()
    grads = [torch.zeros(n) for n in NUMELS]
    engine.update(StepInputs(grads, [scalars_at(1, 0.0)] * len(NUMELS)))
    assert torch.equal(engine.memory.states.master.view(torch.int32), masters.view(torch.int32))
    assert not engine.memory.states.exp_avg.any()
    assert not engine.memory.states.exp_avg_sq.any()
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(before, params, strict=True))


@pytest.mark.parametrize("share", SHARES)
def test_constant_grads_move_every_element(share):
    params = random_params()
    engine = make_engine(params, 500, host_share=share)
    masters = engine.memory.states.master.clone()
    engine.update(StepInputs([torch.ones(n) for n in NUMELS], [scalars_at(1, 0.0)] * len(NUMELS)))
    assert (engine.memory.states.master != masters).all()


@pytest.mark.parametrize("share", SHARES)
def test_the_share_places_that_part_of_the_elements(share):
    engine = make_engine(random_params(), 1000, host_share=share)
    program = engine.program([torch.zeros(n) for n in NUMELS])
    on_host = sum(
        subgroup.numel
        for subgroup, placement in zip(engine.partition.subgroups, program.placements, strict=True)
        if placement is Placement.HOST
    )
    assert abs(on_host - share * engine.partition.numel) <= engine.partition.largest


def test_grads_are_cast_on_the_device_only_where_asked_for_and_needed():
    def cast(grad_dtypes: list[torch.dtype], grads_as_fp32: bool) -> set[int]:
        engine = make_engine(random_params(), 1000, grads_as_fp32=grads_as_fp32)
        program = engine.program([torch.zeros(n, dtype=d) for n, d in zip(NUMELS, grad_dtypes, strict=True)])
        return {op.subgroup for op in program.ops if op.kind is OpKind.CAST_GRAD}

    everywhere = set(range(len(make_partition(1000).subgroups)))
    assert cast([torch.bfloat16] * 6, True) == everywhere
    assert cast([torch.bfloat16] * 6, False) == set()
    assert cast([torch.float32] * 6, True) == set()
    assert set() < cast(MIXED, True) < everywhere


@pytest.mark.parametrize("share", SHARES)
def test_a_bucket_is_released_once_when_its_params_are_written(share):
    params = random_params()
    engine = make_engine(params, 500, host_share=share)
    at_release = {}

    def release(bucket):
        assert bucket not in at_release
        at_release[bucket] = [param.clone() for param in params]

    engine.update(StepInputs([torch.ones(n) for n in NUMELS], [scalars_at(1, 0.0)] * 6, release_bucket=release))
    assert list(at_release) == [(0, 0), (0, 1)]
    assert all(torch.equal(at_release[0, 0][owner], params[owner]) for owner in range(3))
    assert all(torch.equal(at_release[0, 1][owner], params[owner]) for owner in range(6))


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(
    "grad_dtypes", [[dtype] * 6 for dtype in (torch.float32, torch.bfloat16, torch.float16)], ids=str
)
def test_updates_in_place(share, grad_dtypes):
    check_against_numpy(1000, grad_dtypes, 1 / 1000, (share, 1), host_slots=0)


def test_host_memory_grows_with_the_slots():
    parts = make_partition(1000)

    def staging(**slots: int) -> int:
        return staging_bytes(parts, EngineOptions(threads=1, **slots))

    assert staging(host_slots=0) == 0
    assert staging() == 2 * 8 * parts.largest
    assert staging(host_slots=3) == 3 * 8 * parts.largest
    assert staging(host_slots=3, early_slots=5) == (3 * 8 + 5 * 4) * parts.largest
    assert staging(host_slots=10**6, early_slots=10**6) == len(parts.subgroups) * 12 * parts.largest
    options = EngineOptions(threads=1, host_slots=3, early_slots=2)
    assert host_bytes(parts, options) == 12 * parts.numel + staging_bytes(parts, options)
    engine = make_engine(random_params(), 1000, host_slots=3, early_slots=2)
    slots = (*engine.memory.host_grads, *engine.memory.host_params, *engine.memory.early_grads)
    assert sum(slot.numel() for slot in slots) == staging_bytes(parts, options)


def test_a_rank_that_owns_nothing_steps():
    engine = UpdateEngine(partition([], 64), [], EngineOptions(threads=1))
    engine.update(StepInputs([], []))
    assert host_bytes(engine.partition, engine.options) == 0
    assert build_program([], []).ops == engine.program([]).ops


def test_reading_states_waits_for_the_step_that_may_still_write_them():
    class Recording(HostDevice):
        waits = 0

        def synchronize(self):
            self.waits += 1

    device = Recording()
    numel = 100
    engine = UpdateEngine(
        partition([OwnedRange(0, (0, 0), 0, numel)], 64), [torch.zeros(numel)], EngineOptions(threads=1), device
    )
    engine.owner_states(0)
    assert device.waits == 0
    engine.update(StepInputs([torch.zeros(numel)], [scalars_at(1, 0.0)]))
    engine.owner_states(0)
    engine.owner_states(0)
    assert device.waits == 1


def test_what_memory_was_taken_for_cannot_be_changed_later():
    engine = make_engine(random_params(), 700, early_slots=2)
    engine.set_host_share(Fraction(1, 4))
    engine.use(replace(engine.options, grads_as_fp32=False, stride=2, threads=2))
    assert (engine.options.host_share, engine.options.stride) == (Fraction(1, 4), 2)
    for change in ({"resident_share": 1}, {"host_slots": 5}, {"early_slots": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(change))} is fixed when the engine is made"):
            engine.use(replace(engine.options, **change))
