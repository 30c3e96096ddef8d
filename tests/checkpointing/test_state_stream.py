# SPDX-License-Identifier: Apache-2.0
"""Tensors that are divided over ranks. What goes between ranks is tested in e2e/test_parameter_files.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_dos.checkpointing import state_stream
from megatron_dos.checkpointing.state_stream import DividedTensor

BUCKETS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30)), max_size=4)  # of a rank; padding


@given(BUCKETS, st.integers(1, 4), st.integers(1, 50))
def test_every_element_has_one_turn_in_order_and_one_rank(parts, ranks, most):
    buckets = [(part * ranks, max(part * ranks - padding, 0)) for part, padding in parts]
    tensor = DividedTensor(buckets, [])
    ranks_of = [
        rank
        for part, (_, unpadded) in zip(parts, buckets, strict=True)
        for rank in range(ranks)
        for _ in range(part[0])
    ]
    expected, base = [], 0
    for padded, unpadded in buckets:
        expected += ranks_of[base : base + unpadded]
        base += padded
    found: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_stream, "CHUNK", most)
        for rank, start, stop in tensor.chunks(ranks):
            assert start == len(found)
            assert 0 < stop - start <= most
            found += [rank] * (stop - start)
    assert found == expected
    assert tensor.numel == len(expected)


def tensor_of(*ranges: tuple[int, int]) -> DividedTensor:
    """With a view for each range, whose elements are their places in the tensor and one more."""
    return DividedTensor([(20, 18)], [(start, torch.arange(start + 1.0, stop + 1.0)) for start, stop in ranges])


@pytest.mark.parametrize(
    ("start", "expected"),
    [(0, [0, 0, 3, 4, 5]), (3, [4, 5, 6, 0, 8]), (6, [0, 8, 9, 0, 0]), (12, [0, 0, 0, 0, 0])],
)
def test_a_chunk_has_what_lies_in_it_and_zeros_between(start, expected):
    chunk = torch.full((5,), float("nan"))
    tensor_of((2, 6), (7, 9)).copy_to(chunk, start)
    assert chunk.tolist() == expected


def test_views_take_their_elements_of_a_chunk_and_no_others():
    tensor = tensor_of((2, 6), (7, 9))
    tensor.copy_from(torch.arange(100.0, 105.0), 4)
    assert [view.tolist() for _, view in tensor.views] == [[3, 4, 100, 101], [103, 104]]
