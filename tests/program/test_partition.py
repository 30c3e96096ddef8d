# SPDX-License-Identifier: Apache-2.0
"""Every element that a rank owns is in exactly one subgroup, for any buffer layout Megatron can produce."""

import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dos.adapter.buffers import owned_ranges
from megatron_dos.program.partition import (
    AUTOMATIC_MAX,
    AUTOMATIC_MIN,
    CUT_ALIGNMENT,
    OwnedRange,
    automatic_subgroup_size,
    partition,
)


@st.composite
def buffers(draw):
    """Buffers as Megatron lays them out: params padded to 64 elements, buckets padded for the data-parallel size."""
    dp_size = draw(st.integers(1, 8))
    layout = []
    for _ in range(draw(st.integers(1, 3))):
        buckets = []
        for _ in range(draw(st.integers(1, 4))):
            end, params = 0, []
            for numel in draw(st.lists(st.integers(0, 700), max_size=6)):
                start = -(-end // 64) * 64
                params.append((start, start + numel))
                end = start + numel
            shard_multiple = draw(st.sampled_from([1, 4, 128])) * dp_size
            buckets.append((max(-(-end // shard_multiple), 0) * shard_multiple, params))
        layout.append(buckets)
    return dp_size, layout


def shards_of_rank(rank, dp_size, layout):
    """The owned ranges of a rank, and the bucket elements they cover, found element by element."""
    ranges, covered, owner = [], [], 0
    for buffer_index, buckets in enumerate(layout):
        for bucket_index, (numel, params) in enumerate(buckets):
            shard = numel // dp_size
            low, high = rank * shard, (rank + 1) * shard
            for start, stop in params:
                first, last = max(start, low), min(stop, high)
                ranges.append(OwnedRange(owner, (buffer_index, bucket_index), first, max(last - first, 0)))
                covered += [(owner, i - first) for i in range(first, last)]
                owner += 1
    return ranges, covered


@settings(max_examples=300, deadline=None)
@given(buffers(), st.integers(1, 900))
def test_every_owned_element_is_in_exactly_one_subgroup(buffer_layout, size):
    dp_size, layout = buffer_layout
    for rank in range(dp_size):
        ranges, covered = shards_of_rank(rank, dp_size, layout)
        parts = partition(ranges, size)
        seen = {}
        for subgroup in parts.subgroups:
            assert 0 < subgroup.numel <= size
            assert sum(piece.numel for piece in subgroup.pieces) == subgroup.numel
            for piece in subgroup.pieces:
                for i in range(piece.numel):
                    assert (piece.owner, piece.offset + i) not in seen
                    seen[piece.owner, piece.offset + i] = piece.slab + i
                    assert subgroup.start <= piece.slab + i < subgroup.stop
        assert sorted(seen) == sorted(covered)
        assert sorted(seen.values()) == list(range(parts.numel))
        assert all(before.stop == after.start for before, after in pairwise(parts.subgroups))
        for owner, (start, stop) in parts.slab_ranges.items():
            assert [seen[owner, i] for i in range(stop - start)] == list(range(start, stop))
        assert parts.largest == max((s.numel for s in parts.subgroups), default=0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=10), st.integers(64, 3000))
def test_subgroups_of_a_bucket_are_of_equal_size_up_to_the_alignment(numels, size):
    start, ranges = 0, []
    for owner, numel in enumerate(numels):
        ranges.append(OwnedRange(owner, (0, 0), start, numel))
        start += numel
    sizes = [s.numel for s in partition(ranges, size).subgroups]
    even = -(-sum(numels) // -(-sum(numels) // size))
    assert len(set(sizes[:-1])) <= 1
    assert all(even <= s < even + CUT_ALIGNMENT or s == min(even, size) for s in sizes[:-1])


@pytest.mark.parametrize(
    ("numels", "subgroups"),
    [([], 0), ([0], 0), ([0, 0, 0], 0), ([1], 1), ([1, 0], 1), ([64], 1), ([65], 2)],
    ids=["nothing", "empty", "padding only", "1 element or 0-dim", "1 element and empty", "exact", "one more"],
)
def test_degenerate_shards(numels, subgroups):
    ranges = [OwnedRange(owner, (0, 0), 64 * owner, numel) for owner, numel in enumerate(numels)]
    parts = partition(ranges, 64)
    assert len(parts.subgroups) == subgroups
    assert parts.numel == sum(numels)


def test_subgroups_never_span_buckets():
    ranges = [OwnedRange(owner, (0, owner), 0, 10) for owner in range(3)]
    assert [s.bucket for s in partition(ranges, 1000).subgroups] == [(0, 0), (0, 1), (0, 2)]


def test_a_large_parameter_is_split():
    parts = partition([OwnedRange(0, (0, 0), 0, 60_000), OwnedRange(1, (0, 0), 60_032, 40_000)], 10_000)
    assert len(parts.subgroups) == 10 or all(s.numel <= 10_000 for s in parts.subgroups)
    assert sum(any(p.owner == 0 for p in s.pieces) for s in parts.subgroups) >= 6


def check_any_order():
    in_order = [OwnedRange(owner, (0, owner // 3), 70 * (owner % 3), 60) for owner in range(6)]
    expected = partition(in_order, 100)
    assert [piece.owner for subgroup in expected.subgroups for piece in subgroup.pieces] == [0, 1, 1, 2, 3, 4, 4, 5]
    for seed in range(20):
        assert partition(random.Random(seed).sample(in_order, 6), 100) == expected


def test_ranges_may_be_given_in_any_order():
    check_any_order()


def test_without_sorting_the_order_shows(monkeypatch):
    monkeypatch.setattr("megatron_dos.program.partition.sorted", lambda items, key=None: list(items), raising=False)
    with pytest.raises((AssertionError, ValueError)):
        check_any_order()


def test_indices_beyond_32_bits():
    parts = partition([OwnedRange(0, (0, 0), 0, 2**33 + 5), OwnedRange(1, (0, 1), 2**34, 7)], 2**31)
    assert parts.numel == 2**33 + 12
    assert parts.subgroups[-1].pieces[0].slab == 2**33 + 5


def test_refuses_overlap_repetition_and_sizes_below_one():
    a = OwnedRange(0, (0, 0), 0, 10)
    with pytest.raises(ValueError, match="overlap"):
        partition([a, OwnedRange(1, (0, 0), 9, 10)], 10)
    with pytest.raises(ValueError, match="twice"):
        partition([a, OwnedRange(0, (0, 1), 0, 10)], 10)
    with pytest.raises(ValueError, match="at least 1"):
        partition([a], 0)


@pytest.mark.parametrize("owned", [0, 1, AUTOMATIC_MIN, 10**8, 10**9, 10**10])
def test_automatic_size_is_bounded(owned):
    assert AUTOMATIC_MIN <= automatic_subgroup_size(owned) <= AUTOMATIC_MAX


def test_reads_the_range_maps_of_megatron():
    def in_bucket(start, size):
        return {"gbuf_world_in_bucket": SimpleNamespace(start=start, size=size)}

    gbuf_ranges = [
        {("bf16", "fp32"): [{"param_map": {"w": in_bucket(0, 5)}}, {"param_map": {"b": in_bucket(64, 2)}}]},
        {("fp32", "fp32"): [{"param_map": {"norm": in_bucket(3, 1)}}]},
    ]
    assert owned_ranges(gbuf_ranges, {"w": 2, "b": 0, "norm": 1}) == [
        OwnedRange(2, (0, 0), 0, 5),
        OwnedRange(0, (0, 1), 64, 2),
        OwnedRange(1, (1, 0), 3, 1),
    ]
    with pytest.raises(KeyError):
        owned_ranges(gbuf_ranges, {"w": 0})
