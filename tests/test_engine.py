"""The engine: states and params have the bits of the numpy reference, wherever and however cut they are updated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from megatron_dos.device import HostDevice
from megatron_dos.engine import EngineOptions, UpdateEngine, host_bytes, staging_bytes
from megatron_dos.kernels import AdamScalars, device_kernel, reference
from megatron_dos.operations import StepInputs, StepOperations
from megatron_dos.partition import OwnedRange, partition
from megatron_dos.schedule import OpKind, Placement, SubgroupShape, build_program, static_split

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


def make_engine(params: list[torch.Tensor], subgroup_size: int, **options) -> UpdateEngine:
    parts = make_partition(subgroup_size)
    kernel = device_kernel.select("auto", torch.device("cpu"), threads=1)
    engine = UpdateEngine(parts, params, EngineOptions(threads=1, **options), device_kernel=kernel)
    for owner, param in enumerate(params):
        engine.owner_states(owner)["master"].copy_(param)
    return engine


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
        wide = grad.float().numpy()
        if grad.dtype != torch.float32:
            wide = wide * np.float32(unscale)
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
    scales = {3: 0.3125, 5: 0.7}
    for step in range(1, STEPS + 1):
        engine.options = replace(engine.options, host_share=shares[(step - 1) % len(shares)])
        grads = [torch.randn(n, generator=generator).to(d) for n, d in zip(NUMELS, grad_dtypes, strict=True)]
        scalars = [scalars_at(step, 0.1 if owner % 2 else 0.0, decoupled) for owner in range(len(NUMELS))]
        engine.update(StepInputs(grads, scalars, unscale, scales))
        for owner, grad in enumerate(grads):
            expected[owner].step(grad, scalars[owner], unscale, scales.get(owner, 1.0))
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


@pytest.mark.parametrize("share", SHARES)
def test_l2_mode(share):
    check_against_numpy(1000, [torch.float32] * 6, shares=(share,), decoupled=False)


@pytest.mark.parametrize("share", SHARES)
def test_zero_grads_without_decay_change_no_bit(share):
    params = random_params()
    before = [param.clone() for param in params]
    engine = make_engine(params, 500, host_share=share)
    masters = engine.states.master.clone()
    grads = [torch.zeros(n) for n in NUMELS]
    engine.update(StepInputs(grads, [scalars_at(1, 0.0)] * len(NUMELS)))
    assert torch.equal(engine.states.master.view(torch.int32), masters.view(torch.int32))
    assert not engine.states.exp_avg.any()
    assert not engine.states.exp_avg_sq.any()
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(before, params, strict=True))


@pytest.mark.parametrize("share", SHARES)
def test_constant_grads_move_every_element(share):
    params = random_params()
    engine = make_engine(params, 500, host_share=share)
    masters = engine.states.master.clone()
    engine.update(StepInputs([torch.ones(n) for n in NUMELS], [scalars_at(1, 0.0)] * len(NUMELS)))
    assert (engine.states.master != masters).all()


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
    assert staging_bytes(parts, 0) == 0
    assert staging_bytes(parts) == 2 * 8 * parts.largest
    assert staging_bytes(parts, 3) == 3 * 8 * parts.largest
    assert staging_bytes(parts, 10**6) == len(parts.subgroups) * 8 * parts.largest
    assert host_bytes(parts, 3) == 12 * parts.numel + staging_bytes(parts, 3)
    engine = make_engine(random_params(), 1000, host_slots=3)
    assert sum(slot.numel() for slot in (*engine.host_grads, *engine.host_params)) == staging_bytes(parts, 3)


def test_refuses_a_program_that_needs_states_on_the_device():
    engine = make_engine(random_params(), 1000)
    grads = [torch.zeros(n) for n in NUMELS]
    shapes = [SubgroupShape(subgroup.bucket, subgroup.numel, False) for subgroup in engine.partition.subgroups]
    program = static_split(shapes, 0.5)
    with pytest.raises(NotImplementedError, match="states that stay on the device"):
        StepOperations(engine, StepInputs(grads, [scalars_at(1, 0.0)] * 6), program)


def test_a_rank_that_owns_nothing_steps():
    engine = UpdateEngine(partition([], 64), [], EngineOptions(threads=1))
    engine.update(StepInputs([], []))
    assert host_bytes(engine.partition) == 0
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
