# SPDX-License-Identifier: Apache-2.0
"""Which neighbouring pieces of a subgroup one copy, or one array of a kernel's job, takes as one.

Every copy and every array has a fixed cost, and a model has thousands of small parameters. Pieces of a subgroup follow
one another in the slab and in the staging slots, mostly in Megatron's buffers too: those that also agree in what the
operation needs are joined. The elements and what happens to each stay the same, so joining never shows in a bit.

A joined piece is a `Piece` whose elements go on past its owner's shard, into those of the owners that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from megatron_dos.program.partition import Partition, Piece

__all__ = ["Places", "Runs"]


class Places(NamedTuple):
    """Where flat tensors lie: for each its dtype, its storage and its first element there.

    Storages are told apart by the address of torch's object, which is unique among living tensors, and which fake
    tensors have, too.
    """

    dtypes: list[torch.dtype]
    storages: list[int]
    offsets: list[int]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Places:
        return cls(
            [tensor.dtype for tensor in tensors],
            [tensor.untyped_storage()._cdata for tensor in tensors],
            [int(tensor.storage_offset()) for tensor in tensors],
        )

    def follows(self, piece: Piece, before: Piece) -> bool:
        """Whether `piece` begins where `before` ends, in memory of one dtype."""
        one, other = before.owner, piece.owner
        return (
            self.dtypes[one] == self.dtypes[other]
            and self.storages[one] == self.storages[other]
            and self.offsets[one] + before.offset + before.numel == self.offsets[other] + piece.offset
        )


class Runs:
    """The joined pieces of every subgroup of one step, each found when it is first asked for.

    They hold for every step whose grads have the same places and whose kinds are the same.

    Args:
        partition: the subgroups.
        params, grads: places of the parameter shards and of their grads, by owner.
        kinds: by owner; pieces of one kind have the same Adam scalars and the same factors on the grad.
    """

    def __init__(self, partition: Partition, params: Places, grads: Places, kinds: Sequence[Hashable]) -> None:
        self.grads = grads
        self.kinds = kinds
        self._subgroups = partition.subgroups
        self._params = params
        self._known: dict[tuple[Any, ...], tuple[Piece, ...]] = {}
        self._widths: dict[tuple[int, int], int] = {}

    def grad_width(self, subgroup: int) -> int:
        """Bytes from one element to the next where a slot holds the subgroup's grads in their own dtypes.

        Those of the widest, so that pieces of different dtypes do not overlap.
        """
        return self._width(subgroup, self.grads)

    def param_width(self, subgroup: int) -> int:
        """The same for params."""
        return self._width(subgroup, self._params)

    def of_grads(self, subgroup: int) -> tuple[Piece, ...]:
        """For copies of grads to a slot."""
        return self._copies(subgroup, self.grads)

    def of_params(self, subgroup: int) -> tuple[Piece, ...]:
        """For copies of params from a slot."""
        return self._copies(subgroup, self._params)

    def of_staged_updates(self, subgroup: int, cast: bool) -> tuple[Piece, ...]:
        """For updates that read the grads from a slot, where they are all FP32 if `cast`, and write params to one."""

        def follows(piece: Piece, before: Piece) -> bool:
            return (
                self.kinds[piece.owner] == self.kinds[before.owner]
                and (cast or self._packed(subgroup, self.grads, piece, before))
                and self._packed(subgroup, self._params, piece, before)
            )

        return self._joined((subgroup, cast), follows)

    def of_updates_in_place(self, subgroup: int) -> tuple[Piece, ...]:
        """For updates that read the grads and write the params where they are."""

        def follows(piece: Piece, before: Piece) -> bool:
            return (
                self.kinds[piece.owner] == self.kinds[before.owner]
                and self.grads.follows(piece, before)
                and self._params.follows(piece, before)
            )

        return self._joined((subgroup, "in place"), follows)

    def _copies(self, subgroup: int, places: Places) -> tuple[Piece, ...]:
        def follows(piece: Piece, before: Piece) -> bool:
            return places.follows(piece, before) and self._packed(subgroup, places, piece, before)

        return self._joined((subgroup, id(places)), follows)

    def _packed(self, subgroup: int, places: Places, piece: Piece, before: Piece) -> bool:
        """Whether the two follow one another in a slot without gaps."""
        dtype = places.dtypes[piece.owner]
        return places.dtypes[before.owner] == dtype and dtype.itemsize == self._width(subgroup, places)

    def _width(self, subgroup: int, places: Places) -> int:
        key = (subgroup, id(places))
        if key not in self._widths:
            pieces = self._subgroups[subgroup].pieces
            self._widths[key] = max(places.dtypes[piece.owner].itemsize for piece in pieces)
        return self._widths[key]

    def _joined(self, key: tuple[Any, ...], follows: Callable[[Piece, Piece], bool]) -> tuple[Piece, ...]:
        if key not in self._known:
            self._known[key] = tuple(_join(self._subgroups[key[0]].pieces, follows))
        return self._known[key]


def _join(pieces: Sequence[Piece], follows: Callable[[Piece, Piece], bool]) -> Iterator[Piece]:
    first = before = pieces[0]
    for piece in pieces[1:]:
        if not follows(piece, before):
            yield Piece(first.owner, first.offset, first.slab, before.slab + before.numel - first.slab)
            first = piece
        before = piece
    yield Piece(first.owner, first.offset, first.slab, before.slab + before.numel - first.slab)
