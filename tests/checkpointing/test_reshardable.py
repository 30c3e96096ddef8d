# SPDX-License-Identifier: Apache-2.0
"""A range of a flattened tensor as boxes of the tensor."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

from megatron_dos.checkpointing import reshardable
from megatron_dos.checkpointing.reshardable import (
    Slice,
    boxes,
    joined,
    misplaced,
    put_padding_back,
    sharded_boxes,
    slices_of,
)

SHAPES = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_boxes_are_the_range_in_order(shape, data):
    numbered = torch.arange(math.prod(shape)).view(shape)
    start = data.draw(st.integers(0, numbered.numel()))
    stop = data.draw(st.integers(start, numbered.numel()))
    found = []
    for box in boxes(shape, start, stop):
        part = numbered[tuple(slice(at, at + size) for at, size in zip(box.offset, box.sizes, strict=True))]
        assert part.shape == box.sizes
        assert box.start == start + len(found)
        assert 0 not in box.sizes
        found += part.reshape(-1).tolist()
    assert found == list(range(start, stop))


@given(SHAPES, st.data())
def test_there_are_few_boxes(shape, data):
    start = data.draw(st.integers(0, math.prod(shape)))
    stop = data.draw(st.integers(start, math.prod(shape)))
    assert len(list(boxes(shape, start, stop))) <= max(1, 2 * len(shape) - 1)


def entry(shape: tuple[int, ...], *offsets: tuple[int, int, int], layers: int = 0) -> ShardedTensor:
    param = torch.zeros(shape, dtype=torch.bfloat16)
    return ShardedTensor.from_rank_offsets("weight", param, *offsets, replica_id=(0, 0, 1), prepend_axis_num=layers)


def test_a_plain_param_is_one_slice():
    (only,) = slices_of(entry((4, 6), (0, 1, 2)))
    assert only.start == 0
    assert only.sharded.data is None
    assert (only.sharded.global_shape, only.sharded.global_offset) == ((8, 6), (4, 0))


def test_the_halves_of_a_gated_mlp_are_two_slices():
    first, second = slices_of(apply_swiglu_sharded_factory(entry((4, 6), (0, 1, 2)), ()))
    assert (first.start, second.start) == (0, 12)
    assert (first.sharded.global_offset, second.sharded.global_offset) == ((2, 0), (6, 0))
    assert first.sharded.global_shape == second.sharded.global_shape == (8, 6)


def test_a_param_that_is_not_cut_into_ranges_is_told_apart():
    factory = apply_swiglu_sharded_factory(entry((4, 6)), ())

    def columns(key, tensor, replica_id, flattened_range):
        return [
            replace(entry((4, 3), (1, half, 2)), key=key, data=part, dtype=part.dtype)
            for half, part in enumerate(tensor.chunk(2, dim=1))
        ]

    assert slices_of(replace(factory, build_fn=columns)) is None


@pytest.mark.parametrize("is_loading", [False, True])
def test_the_parts_of_a_state_are_views_with_storages_of_their_own(is_loading):
    state = torch.arange(20.0)  # elements 4 to 24 of the third layer's 5 x 6
    parts = sharded_boxes(slices_of(entry((5, 6), (0, 2, 4), layers=1)), 4, state, "exp_avg", 0, is_loading)
    assert [(part.global_offset, part.local_shape) for part in parts] == [
        ((2, 0, 4), (1, 1, 2)),
        ((2, 1, 0), (1, 3, 6)),
    ]
    for part in parts:
        assert part.key == "optimizer.state.exp_avg.weight"
        assert part.global_shape == (4, 5, 6)
        assert part.replica_id == (0, 0, 0)
        assert part.data.untyped_storage().nbytes() == part.data.nbytes
    assert joined([part.data for part in parts], state) is state
    assert torch.cat([part.data.reshape(-1) for part in parts]).equal(state)


def test_what_is_loaded_elsewhere_is_put_together():
    state = torch.arange(20.0)
    parts = [torch.ones(1, 2), torch.full((3, 6), 2.0)]
    assert joined(parts, state).tolist() == [1.0] * 2 + [2.0] * 18


def test_a_tensor_that_may_have_another_size_in_the_file_is_not_read_in_place():
    (only,) = slices_of(entry((5, 4)))
    state = torch.ones(20)
    resizable = [Slice(0, replace(only.sharded, allow_shape_mismatch=True))]
    (saved,) = sharded_boxes(resizable, 0, state, "param", 0, is_loading=False)
    (wanted,) = sharded_boxes(resizable, 0, state, "param", 0, is_loading=True)
    assert saved.data.data_ptr() == state.data_ptr() != wanted.data.data_ptr()


# ---- States that Megatron has shifted -------------------------------------------------------------------------------


def masters(numel: int = 5000, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 0.02


DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


def test_padding_goes_back_behind_each_bucket():
    states = {"param": torch.arange(1.0, 8.0), "numel_unpadded": 7}
    put_padding_back(states, [(4, 3), (4, 4)])
    assert states["param"].tolist() == [1, 2, 3, 0, 4, 5, 6, 7]
    assert states["numel_unpadded"] == 7


@DTYPES
@pytest.mark.parametrize("shift", [1, 32, 4000])
def test_a_shift_is_found(dtype, shift):
    whole = masters()
    assert misplaced(whole[shift:], whole.to(dtype)) == f"those of {shift:,} elements further on"


@DTYPES
def test_masters_of_the_weights_are_in_their_places(dtype):
    assert misplaced(masters(), masters().to(dtype)) == ""


def test_masters_that_are_zeros_are_shifted_beyond_all_states():
    assert misplaced(torch.zeros(100), masters().bfloat16()) == "zeros, and its weights are not"
    assert misplaced(torch.zeros(100), torch.zeros(100)) == ""


def test_a_shift_is_found_behind_elements_of_one_value():
    whole = torch.cat([torch.ones(64), torch.zeros(64), masters()])
    assert misplaced(whole[32:], whole.bfloat16()) == "those of 32 elements further on"


@pytest.mark.parametrize(
    ("master", "weights"),
    [
        (masters(), masters(seed=1).bfloat16()),  # weights that are loaded later
        (masters()[32:95], masters().bfloat16()),  # too few
        (torch.ones(500), torch.zeros(500)),
        (torch.tensor([1.0, 2.0]).repeat(300), torch.tensor([2.0, 1.0]).repeat(300)),
        (masters(), masters()[32:].bfloat16()),  # of elements before
        (torch.cat([masters()[32:112], masters(seed=2)]), masters().bfloat16()),  # a run that is there by chance
    ],
)
def test_other_differences_are_no_shift(master, weights):
    assert misplaced(master, weights) == ""


def test_a_few_elements_may_be_rounded_otherwise():
    whole, rounded = masters(), masters().bfloat16()
    rounded[::20] *= 1.01
    assert misplaced(whole, rounded) == ""
    rounded[::3] *= 1.5
    assert misplaced(whole, rounded) == ""


@pytest.mark.parametrize(
    ("constant", "value", "check"),
    [
        ("FEWEST", 16, lambda: misplaced(masters()[32:95], masters().bfloat16())),
        ("DISTINCT", 2, lambda: misplaced(*(torch.tensor(v).repeat(300) for v in ([1.0, 2.0], [2.0, 1.0])))),
    ],
)
def test_the_thresholds_are_what_keeps_chance_out(monkeypatch, constant, value, check):
    assert check() == ""
    monkeypatch.setattr(reshardable, constant, value)
    assert check() != ""
