# SPDX-License-Identifier: Apache-2.0
"""Joined pieces: never a bit of difference to pieces one by one, and as few copies and arrays as the layout allows."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dos.device import HostDevice
from megatron_dos.device.sim import SimDevice
from megatron_dos.kernels import AdamScalars, device_kernel
from megatron_dos.program.partition import OwnedRange, partition
from megatron_dos.program.schedule import OpKind
from megatron_dos.update import joining as runs
from megatron_dos.update import operations
from megatron_dos.update.engine import EngineOptions, UpdateEngine
from megatron_dos.update.operations import StepInputs

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)


@dataclass(frozen=True)
class Layout:
    """Shards in flat buffers, as Megatron lays them out: in each bucket one after the other, some with padding before.

    gaps[i] is the padding before shard i. Shards of the same two dtypes lie in one buffer for params and one for grads;
    those in `apart` have grads of their own.
    """

    numels: list[int]
    gaps: list[int]
    buckets: list[int]
    param_dtypes: list[torch.dtype]
    grad_dtypes: list[torch.dtype]
    groups: list[int]
    apart: frozenset[int] = frozenset()

    def buffers(self, dtypes: list[torch.dtype], seed: int) -> tuple[list[torch.Tensor], dict]:
        """Views of random flat buffers, and the buffers by dtypes of param and grad."""
        generator = torch.Generator().manual_seed(seed)
        kinds = list(zip(self.param_dtypes, self.grad_dtypes, strict=True))
        length = sum(self.numels) + sum(self.gaps)
        flat = {kind: torch.randn(length, generator=generator) for kind in dict.fromkeys(kinds)}
        flat = {kind: flat[kind].to(dtypes[kinds.index(kind)]) for kind in flat}
        views, start = [], 0
        for kind, numel, gap in zip(kinds, self.numels, self.gaps, strict=True):
            start += gap
            views.append(flat[kind][start : start + numel])
            start += numel
        return views, flat

    def partition(self, subgroup_size: int):
        ranges, start = [], 0
        for owner, (numel, gap, bucket) in enumerate(zip(self.numels, self.gaps, self.buckets, strict=True)):
            start += gap
            ranges.append(OwnedRange(owner, (0, bucket), start, numel))
            start += numel
        return partition(ranges, subgroup_size)


@st.composite
def layouts(draw) -> Layout:
    count = draw(st.integers(1, 12))

    def several(strategy):
        return draw(st.lists(strategy, min_size=count, max_size=count))

    one_dtype = draw(st.booleans())  # as in real buffers, whose pieces can be joined
    dtypes = draw(st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)))
    pairs = [dtypes] * count if one_dtype else several(st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)))
    return Layout(
        numels=several(st.sampled_from([1, 3, 64, 200])),
        gaps=several(st.sampled_from([0, 0, 0, 5])),
        buckets=sorted(several(st.integers(0, 2))),
        param_dtypes=[pair[0] for pair in pairs],
        grad_dtypes=[pair[1] for pair in pairs],
        groups=several(st.integers(0, 1)),
        apart=frozenset(draw(st.sets(st.integers(0, count - 1), max_size=2))),
    )


def scalars_at(step: int, groups: list[int]) -> list[AdamScalars]:
    of_group = [
        AdamScalars.at_step(step, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=decay, decoupled=True)
        for decay in (0.1, 0.0)
    ]
    return [of_group[group] for group in groups]


def make_engine(layout: Layout, subgroup_size: int, device, **options) -> tuple[UpdateEngine, dict]:
    params, flat = layout.buffers(layout.param_dtypes, seed=0)
    kernel = device_kernel.select("auto", torch.device("cpu"), threads=1)
    engine = UpdateEngine(
        layout.partition(subgroup_size), params, EngineOptions(threads=1, **options), device, device_kernel=kernel
    )
    for owner, param in enumerate(params):
        engine.owner_states(owner)["master"].copy_(param)
    return engine, flat


def inputs_at(layout: Layout, step: int, unscale: float = 1.0, grad_scales: dict | None = None) -> StepInputs:
    scales = {}
    if unscale != 1.0 or grad_scales:
        scales = {owner: (unscale, (grad_scales or {}).get(owner, 1.0)) for owner in range(len(layout.numels))}
    grads, _ = layout.buffers(layout.grad_dtypes, seed=step)
    grads = [grad.clone() if owner in layout.apart else grad for owner, grad in enumerate(grads)]
    return StepInputs(grads, scalars_at(step, layout.groups), scales)


def outcome(layout: Layout, subgroup_size: int, device, factors: dict, **options) -> list[torch.Tensor]:
    """Bytes of the states and of the whole param buffers, paddings included, after three steps.

    Where its grads lie changes in the second step, and which shards share their factors in the third.
    """
    engine, flat = make_engine(layout, subgroup_size, device, **options)
    moved = Layout(**{**vars(layout), "apart": layout.apart | {0}})
    engine.update(inputs_at(layout, 1, **factors))
    engine.update(inputs_at(moved, 2, **factors))
    engine.update(inputs_at(layout, 3, **{**factors, "grad_scales": {len(layout.numels) // 2: 0.3}}))
    states = engine.memory.states
    return [each.view(torch.uint8) for each in (states.master, states.exp_avg, states.exp_avg_sq, *flat.values())]


def one_by_one():
    return patch.object(runs, "_join", lambda pieces, follows: iter(pieces))


@settings(max_examples=120, deadline=None)
@given(
    layout=layouts(),
    subgroup_size=st.sampled_from([50, 128, 1000]),
    share=st.sampled_from([0, 1, Fraction(1, 2)]),
    device=st.sampled_from([HostDevice, lambda: SimDevice(1)]),
    host_slots=st.sampled_from([0, 2]),
    grads_as_fp32=st.booleans(),
    unscale=st.sampled_from([1.0, 0.37]),
    scales=st.dictionaries(st.integers(0, 11), st.sampled_from([0.5, 0.7]), max_size=12),
)
def test_joined_pieces_have_the_bits_of_pieces_one_by_one(
    layout, subgroup_size, share, device, host_slots, grads_as_fp32, unscale, scales
):
    case = (layout, subgroup_size)
    options = {"host_share": share, "grads_as_fp32": grads_as_fp32}
    factors = {"unscale": unscale, "grad_scales": scales}
    joined = outcome(*case, device(), factors, host_slots=host_slots, **options)
    with one_by_one():
        expected = outcome(*case, HostDevice(), factors, **options)
    assert all(torch.equal(one, other) for one, other in zip(joined, expected, strict=True))


@settings(max_examples=100, deadline=None)
@given(layout=layouts(), subgroup_size=st.sampled_from([50, 128, 1000]), cast=st.booleans())
def test_runs_hold_each_element_of_a_subgroup_once_and_in_order(layout, subgroup_size, cast):
    engine, _ = make_engine(layout, subgroup_size, None)
    found = engine.runs(inputs_at(layout, 1))
    for index, subgroup in enumerate(engine.partition.subgroups):
        for pieces in (
            found.of_grads(index),
            found.of_params(index),
            found.of_staged_updates(index, cast),
            found.of_updates_in_place(index),
        ):
            assert pieces[0].slab == subgroup.start
            ends = [piece.slab + piece.numel for piece in pieces]
            assert [piece.slab for piece in pieces[1:]] == ends[:-1]
            assert ends[-1] == subgroup.stop
            assert {(p.owner, p.offset, p.slab) for p in pieces} <= {
                (p.owner, p.offset, p.slab) for p in subgroup.pieces
            }


def alike(count: int, numel: int = 64, gaps: list[int] | None = None, groups: list[int] | None = None) -> Layout:
    """bf16 params with FP32 grads in one bucket."""
    return Layout(
        [numel] * count, gaps or [0] * count, [0] * count, [BF16] * count, [FP32] * count, groups or [0] * count
    )


def numbers(layout: Layout, subgroup_size: int = 1 << 20, **factors) -> dict[str, int]:
    """Copies and arrays of one step."""
    engine, _ = make_engine(layout, subgroup_size, None)
    found = engine.runs(inputs_at(layout, 1, **factors))
    each = range(len(engine.partition.subgroups))
    return {
        "grads": sum(len(found.of_grads(index)) for index in each),
        "params": sum(len(found.of_params(index)) for index in each),
        "staged": sum(len(found.of_staged_updates(index, cast=False)) for index in each),
        "in place": sum(len(found.of_updates_in_place(index)) for index in each),
    }


def test_small_parameters_of_one_group_take_one_copy_and_one_array():
    assert numbers(alike(4096)) == {"grads": 1, "params": 1, "staged": 1, "in place": 1}
    assert numbers(alike(4096), 4096 * 16) == {"grads": 4, "params": 4, "staged": 4, "in place": 4}


def test_groups_divide_updates_but_not_copies():
    layout = alike(6, groups=[0, 1, 1, 0, 0, 1])
    assert numbers(layout) == {"grads": 1, "params": 1, "staged": 4, "in place": 4}


def test_padding_divides_copies_but_not_updates_of_staged_pieces():
    assert numbers(alike(4, gaps=[0, 5, 0, 5])) == {"grads": 3, "params": 3, "staged": 1, "in place": 3}


def test_factors_divide_updates_only():
    assert numbers(alike(4), grad_scales={3: 0.5}) == {"grads": 1, "params": 1, "staged": 2, "in place": 2}
    assert numbers(alike(4), unscale=0.5) == {"grads": 1, "params": 1, "staged": 1, "in place": 1}


def test_dtypes_divide_all():
    mixed = Layout([64] * 4, [0] * 4, [0] * 4, [BF16, BF16, FP32, FP32], [BF16, FP32, FP32, FP32], [0] * 4)
    assert numbers(mixed) == {"grads": 3, "params": 3, "staged": 3, "in place": 3}
    narrow = Layout([64] * 4, [0] * 4, [0] * 4, [BF16] * 4, [BF16] * 4, [0] * 4)
    assert numbers(narrow, unscale=0.5) == {"grads": 1, "params": 1, "staged": 1, "in place": 1}


def test_memory_that_is_another_storage_is_never_joined():
    layout = Layout(**{**vars(alike(4)), "apart": frozenset({1, 2})})
    assert numbers(layout)["grads"] == 4


def test_runs_are_found_once_and_again_when_something_has_moved():
    layout = alike(8)
    engine, _ = make_engine(layout, 128, None)
    grads = inputs_at(layout, 1).grads

    def of_step(step: int, grads: list[torch.Tensor], groups: list[int]):
        return engine.runs(StepInputs(grads, scalars_at(step, groups)))

    first = of_step(1, grads, [0] * 8)
    assert of_step(2, [grad.view(-1) for grad in grads], [0] * 8) is first
    assert of_step(2, [grad.view(-1) for grad in grads], [1] * 8) is first
    assert of_step(3, grads, [0] * 4 + [1] * 4) is not first
    assert of_step(4, [grad.clone() for grad in grads], [0] * 8) is not first


@pytest.mark.parametrize("share", [0, 1])
def test_operations_copy_and_update_by_runs(monkeypatch, share):
    """What the handlers do, counted where they do it."""
    layout = alike(8)
    engine, _ = make_engine(layout, 1 << 20, SimDevice(0), host_share=share)
    counts = {"copy": 0, "array": 0}
    copy, submit, kernel = torch.Tensor.copy_, operations.cpu_kernel.submit, engine.device_kernel

    def counted_copy(self, *args, **kwargs):
        counts["copy"] += 1
        return copy(self, *args, **kwargs)

    def counted_submit(pieces, threads):
        counts["array"] += len(pieces)
        return submit(pieces, threads)

    def counted_kernel(*operands):
        counts["array"] += 1
        kernel(*operands)

    monkeypatch.setattr(torch.Tensor, "copy_", counted_copy)
    monkeypatch.setattr(operations.cpu_kernel, "submit", counted_submit)
    engine.device_kernel = counted_kernel
    inputs = inputs_at(layout, 1)
    engine.update(inputs)
    kinds = [op.kind for op in engine.program(inputs.grads).ops]
    copies = {OpKind.GRAD_TO_HOST: 1, OpKind.PARAM_TO_DEVICE: 1, OpKind.STATES_TO_DEVICE: 3, OpKind.STATES_TO_HOST: 3}
    assert counts == {"copy": sum(copies.get(kind, 0) for kind in kinds), "array": 1}


def test_without_slots_nothing_is_staged(monkeypatch):
    layout = alike(8)
    engine, _ = make_engine(layout, 1 << 20, HostDevice(), host_slots=0)
    inputs = inputs_at(layout, 1)
    given = []
    submit = operations.cpu_kernel.submit

    def noted(pieces, threads):
        given.extend(pieces)
        return submit(pieces, threads)

    monkeypatch.setattr(operations.cpu_kernel, "submit", noted)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *_: pytest.fail("a copy"))
    engine.update(inputs)
    ((_, _, _, grad, *_, param),) = given
    assert grad.data_ptr() == inputs.grads[0].data_ptr()
    assert param.data_ptr() == engine.memory.shards[0].data_ptr()
    assert engine.memory.host_grads == engine.memory.host_params == []


def test_parameters_on_a_gpu_are_not_updated_in_place():
    params = [torch.empty(64, device="meta")]
    with pytest.raises(ValueError, match="host_slots"):
        UpdateEngine(partition([OwnedRange(0, (0, 0), 0, 64)], 64), params, EngineOptions(threads=1, host_slots=0))
