# SPDX-License-Identifier: Apache-2.0
"""From the ranges of Megatron's parameter buffers that this rank owns to subgroups of the optimizer states.

[Note: coordinate systems] Megatron's distributed optimizer gives each data-parallel rank one contiguous piece
of every bucket, cut without regard to parameter borders, and names four coordinate systems for it
(`gbuf_world`, `gbuf_world_in_bucket`, `gbuf_local`, `param`). This file adds a fifth, `slab`: the index into the
flat host arrays that hold the states of all owned elements. Owned ranges lie in the slab in buffer order with
the padding between them left out, so that the states take exactly 12 bytes an owned parameter, and a subgroup is
a slice of the slab.

Nothing here knows tensors or devices: buckets, offsets and counts only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = [
    "BYTES_PER_PARAMETER",
    "STATES",
    "OwnedRange",
    "Partition",
    "Piece",
    "Subgroup",
    "automatic_subgroup_size",
    "partition",
]

STATES = ("master", "exp_avg", "exp_avg_sq")
BYTES_PER_PARAMETER = 4 * len(STATES)  # all in FP32

# A cut inside a parameter falls on a multiple of this many elements, so that a piece starts on a cache line
# (64 bytes) in FP32 and in the 16-bit formats alike.
CUT_ALIGNMENT = 64

# Automatic subgroup size: enough subgroups that copies and updates of different subgroups can overlap, each large
# enough to amortise its fixed costs, and small enough that the staging slots stay far below the states themselves.
AUTOMATIC_SUBGROUPS = 16
AUTOMATIC_MIN = 1 << 20
AUTOMATIC_MAX = 1 << 25


@dataclass(frozen=True)
class OwnedRange:
    """The part of one parameter that this rank owns: `numel` elements starting at `start` in bucket coordinates.

    `owner` indexes the caller's list of parameter shards, as it does all over this package; `bucket` is (buffer index,
    bucket index).
    """

    owner: int
    bucket: tuple[int, int]
    start: int
    numel: int


@dataclass(frozen=True)
class Piece:
    """The part of one owned range that lies in one subgroup.

    `offset` counts from the start of the owned range, `slab` from the start of the slab; both in elements.
    """

    owner: int
    offset: int
    slab: int
    numel: int


@dataclass(frozen=True)
class Subgroup:
    """A slice `[start, stop)` of the slab that is updated as one; all of it belongs to one bucket."""

    index: int
    bucket: tuple[int, int]
    start: int
    stop: int
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Partition:
    """All subgroups of this rank, in slab order, and where each owned range lies in the slab.

    `slab_ranges[owner]` is the `(start, stop)` of that owner's elements in the slab.
    """

    numel: int
    subgroups: tuple[Subgroup, ...]
    slab_ranges: Mapping[int, tuple[int, int]]

    @property
    def largest(self) -> int:
        """Elements of the largest subgroup (0 when this rank owns nothing): what a staging slot must hold."""
        return max((subgroup.numel for subgroup in self.subgroups), default=0)


def automatic_subgroup_size(owned: int) -> int:
    """Parameters per subgroup for a rank that owns `owned` parameters, when the user names none."""
    return min(max(-(-owned // AUTOMATIC_SUBGROUPS), AUTOMATIC_MIN), AUTOMATIC_MAX)


def partition(ranges: Iterable[OwnedRange], subgroup_size: int) -> Partition:
    """Lay owned ranges out in the slab and cut them into subgroups of at most `subgroup_size` elements.

    Subgroups never span buckets, because a bucket's parameter all-gather may start when its last subgroup is
    written. Within a bucket they are of equal size up to `CUT_ALIGNMENT`, so no small remainder is left over; a
    parameter larger than a subgroup is split.

    Raises:
        ValueError: `subgroup_size` is below 1, or two ranges overlap, or an owner appears twice.
    """
    if subgroup_size < 1:
        raise ValueError(f"subgroup_size is {subgroup_size}; a subgroup holds at least 1 parameter")
    by_bucket: dict[tuple[int, int], list[OwnedRange]] = {}
    for owned in ranges:
        if owned.numel > 0:
            by_bucket.setdefault(owned.bucket, []).append(owned)

    subgroups: list[Subgroup] = []
    slab_ranges: dict[int, tuple[int, int]] = {}
    slab = 0
    for bucket in sorted(by_bucket):
        members = sorted(by_bucket[bucket], key=lambda owned: owned.start)
        _check_disjoint(members)
        bucket_start = slab
        for owned in members:
            if owned.owner in slab_ranges:
                raise ValueError(f"owner {owned.owner} appears twice among the owned ranges")
            slab_ranges[owned.owner] = (slab, slab + owned.numel)
            slab += owned.numel
        cut = _cut_size(slab - bucket_start, subgroup_size)
        for start in range(bucket_start, slab, cut):
            stop = min(start + cut, slab)
            pieces = tuple(_pieces(members, slab_ranges, start, stop))
            subgroups.append(Subgroup(len(subgroups), bucket, start, stop, pieces))
    return Partition(slab, tuple(subgroups), slab_ranges)


def _check_disjoint(members: Sequence[OwnedRange]) -> None:
    for before, after in pairwise(members):
        if before.start + before.numel > after.start:
            raise ValueError(f"owned ranges overlap in bucket {before.bucket}: {before} and {after}")


def _cut_size(numel: int, subgroup_size: int) -> int:
    """Elements per subgroup of a bucket shard of `numel`: an even share, aligned where that keeps the limit."""
    even = -(-numel // -(-numel // subgroup_size))
    aligned = -(-even // CUT_ALIGNMENT) * CUT_ALIGNMENT
    return aligned if aligned <= subgroup_size else min(even, subgroup_size)


def _pieces(
    members: Sequence[OwnedRange], slab_ranges: Mapping[int, tuple[int, int]], start: int, stop: int
) -> Iterable[Piece]:
    for owned in members:
        owned_start, owned_stop = slab_ranges[owned.owner]
        low, high = max(start, owned_start), min(stop, owned_stop)
        if low < high:
            yield Piece(owned.owner, low - owned_start, low, high - low)
