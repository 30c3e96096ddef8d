# SPDX-License-Identifier: Apache-2.0
"""Fully reshardable checkpoints without a gather: each rank writes and reads its own part of every model tensor.

Such a checkpoint has a tensor of the model's shape for each state of each param, so that any layout can load it. A rank
owns a range of the flattened param, though, and Megatron therefore gathers the states of the whole data-parallel group
before a save, and loads whole tensors on every rank. But a distributed checkpoint may hold a tensor in boxes of any
sizes, and a range of a flattened tensor is at most 2 * dimensions - 1 boxes: rows that are begun, whole rows, rows that
are not finished. A box is contiguous in the states as well, so it is written from there, and read into them.

Keys, shapes and dtypes are those of Megatron's own saves; only the cuts differ, which no reader needs to know.

[Note: shifted states] To save in this layout, Megatron joins the gathered states of a buffer's buckets without the
padding at their ends, and then looks for each param where it begins in the buffer, padding included. So behind the
first padded bucket a param is saved with the states of elements further on: by as many as there was padding before it.
The first elements behind that padding are in no file, and the last params end in zeros. Weights are saved as they are.
Where this package has Megatron gather the states, `put_padding_back` puts them where Megatron looks. A file that
Megatron has written by itself cannot be mended, since moments are lost; `misplaced` recognises it by the weights: they
are the rounded master params of other elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.utils import is_torch_min_version
from torch.nn.functional import pad

__all__ = [
    "Box",
    "Slice",
    "boxes",
    "joined",
    "may_be_cut",
    "misplaced",
    "put_padding_back",
    "sharded_boxes",
    "slices_of",
    "tensors_of",
]

# So many elements of a rank's part of a param are compared, and a shift is looked for up to so many elements.
COMPARED = 1 << 12
LONGEST_SHIFT = 1 << 22
# A run of elements that is looked for, and how many of them have to differ from one another: biases may be all zeros.
RUN, DISTINCT = 16, 12
# Elements that have to be there to tell a shift from chance.
FEWEST = 64


class Box(NamedTuple):
    """A part of a tensor that is a range of it when it is flattened."""

    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int  # in the flattened tensor


class Slice(NamedTuple):
    """A range of a flattened param that the checkpoint keeps as a tensor, or a shard of one, of its own."""

    start: int
    sharded: ShardedTensor  # without data


def may_be_cut() -> bool:
    """Whether torch can save and load tensors that are cut unevenly."""
    return is_torch_min_version("2.6a0")


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The boxes, in order, that make up the range [start, stop) of a flattened tensor of that shape."""
    if start >= stop:
        return
    if len(shape) < 2:
        yield Box((start,) if shape else (), (stop - start,) if shape else (), start)
        return
    row = math.prod(shape[1:])
    first_whole, end_whole = -(-start // row), stop // row
    if first_whole > end_whole:  # within one row
        yield from _within(shape, end_whole, start, stop)
        return
    yield from _within(shape, first_whole - 1, start, first_whole * row)
    if first_whole < end_whole:
        yield Box((first_whole, *[0] * (len(shape) - 1)), (end_whole - first_whole, *shape[1:]), first_whole * row)
    yield from _within(shape, end_whole, end_whole * row, stop)


def _within(shape: Sequence[int], index: int, start: int, stop: int) -> Iterator[Box]:
    """The same for a range that lies in one row."""
    first = index * math.prod(shape[1:])
    for box in boxes(shape[1:], start - first, stop - first):
        yield Box((index, *box.offset), (1, *box.sizes), first + box.start)


def slices_of(base: Any) -> list[Slice] | None:
    """How a checkpoint cuts a param before it is cut among ranks, in order; None if not into ranges of it.

    Args:
        base: the param's entry in the model's sharded state dict: a ShardedTensor, or a factory of several, as Megatron
            has them for the halves of a gated MLP.
    """
    whole = torch.empty(base.data.shape, dtype=torch.float32, device="meta")  # only shapes and strides matter
    if isinstance(base, ShardedTensor):
        parts = [replace(base, data=whole, dtype=whole.dtype)]
    else:
        parts = list(nested_values(replace(base, data=whole).build()))
    parts.sort(key=lambda part: part.data.storage_offset())
    slices, start = [], 0
    for part in parts:
        if not part.data.is_contiguous() or part.data.storage_offset() != start:
            return None
        slices.append(Slice(start, part.without_data()))
        start += part.data.numel()
    return slices if start == whole.numel() else None


def sharded_boxes(
    slices: Sequence[Slice], start: int, state: torch.Tensor, key: str, replica: int, is_loading: bool
) -> list[ShardedTensor]:
    """One state of one param, as this rank saves it or wants it loaded.

    Args:
        slices: of the param.
        start: where the range that this rank owns begins in the flattened param.
        state: flat, of that range. The data of the result are views of it, each with a storage of its own, which is
            what Megatron writes without a copy.
        key: of the state; the result's keys are `optimizer.state.{key}.{key of the slice}`.
        replica: 0 where the state is to be written, another number on ranks that hold the same range.
        is_loading: tensors that may be larger or smaller in the checkpoint get memory of their own, since Megatron
            fills them with zeros before it looks for the files.
    """
    result = []
    for first, sharded in slices:
        shape = (1,) * sharded.prepend_axis_num + tuple(sharded.local_shape)
        low, high = max(start, first), min(start + state.numel(), first + math.prod(shape))
        for box in boxes(shape, low - first, high - first):
            begin = first + box.start - start
            data = _with_own_storage(state[begin : begin + math.prod(box.sizes)]).view(box.sizes)
            result.append(
                ShardedTensor(
                    key=_key_of(key, sharded),
                    data=torch.zeros_like(data) if is_loading and sharded.allow_shape_mismatch else data,
                    dtype=data.dtype,
                    local_shape=box.sizes,
                    global_shape=tuple(sharded.global_shape),
                    global_offset=tuple(map(sum, zip(sharded.global_offset, box.offset, strict=True))),
                    axis_fragmentations=None,  # Megatron's word for uneven cuts
                    # The last one counts the data-parallel group, of which this rank alone owns the range.
                    replica_id=(*sharded.replica_id[:-1], replica),
                    allow_shape_mismatch=sharded.allow_shape_mismatch,
                )
            )
    return result


def tensors_of(slices: Iterable[Slice], keys: Iterable[str]) -> dict[str, tuple[int, ...] | None]:
    """Key in the checkpoint -> shape of the tensors that these slices are parts of, for states of these keys; no shape
    where a checkpoint may have another one."""
    return {
        _key_of(key, sharded): None if sharded.allow_shape_mismatch else tuple(sharded.global_shape)
        for _, sharded in slices
        for key in keys
    }


def _key_of(state: str, sharded: ShardedTensor) -> str:
    return f"optimizer.state.{state}.{sharded.key}"


def _with_own_storage(view: torch.Tensor) -> torch.Tensor:
    return view if view.is_cuda else torch.from_numpy(view.numpy())


def joined(parts: Sequence[torch.Tensor], state: torch.Tensor) -> torch.Tensor:
    """Loaded boxes of one state as one flat tensor: `state` itself if they were read into it."""
    address = state.data_ptr()
    for part in parts:
        if part.data_ptr() != address:
            return torch.cat([part.reshape(-1).cpu() for part in parts])
        address += part.nbytes
    return state


# --- Shifted states, see the note above ------------------------------------------------------------------------------


def put_padding_back(states: MutableMapping[str, Any], buckets: Iterable[tuple[int, int]]) -> None:
    """Give the gathered states of a buffer the places of its params, in the mapping itself.

    Args:
        states: key -> state of all buckets, flat and without their padding. What is no tensor is left alone.
        buckets: elements of each bucket with its padding, and without.
    """
    buckets = list(buckets)
    for key, state in states.items():
        if isinstance(state, torch.Tensor):
            parts = state.split([unpadded for _, unpadded in buckets])
            padded = [pad(part, (0, numel - len(part))) for part, (numel, _) in zip(parts, buckets, strict=True)]
            states[key] = torch.cat(padded)


def misplaced(master: torch.Tensor, weights: torch.Tensor) -> str:
    """What the master params of a checkpoint are if Megatron has shifted them; nothing where they are not shifted, or
    where it cannot be seen (a part of a few elements, or all of one value).

    Args:
        master: flat, FP32, of what a rank owns of a param.
        weights: flat, in the param's dtype, from the first of these elements on: those of the same checkpoint, to the
            end of the param or of its buffer.
    """
    found = master[:COMPARED].to(weights.device).to(weights.dtype)
    if _agreement(found, weights) > 0.5:
        return ""
    if not found.any():
        return "zeros, and its weights are not"
    for shift in _shifts(found, weights[: COMPARED + LONGEST_SHIFT]):
        if len(weights) - shift >= FEWEST and _agreement(found, weights[shift:]) > 0.9:
            return f"those of {shift:,} elements further on"
    return ""


def _agreement(found: torch.Tensor, weights: torch.Tensor) -> float:
    """The share of elements that are equal; 1 for parts that are too small to say."""
    both = min(len(found), len(weights))
    return (found[:both] == weights[:both]).float().mean().item() if both >= FEWEST else 1.0


def _shifts(found: torch.Tensor, weights: torch.Tensor) -> list[int]:
    """The shifts with which the first telling run of master params is among the weights."""
    runs = found[: len(found) // RUN * RUN].view(-1, RUN)
    ordered = runs.float().sort(dim=1).values
    telling = ((ordered[:, 1:] != ordered[:, :-1]).sum(dim=1) >= DISTINCT - 1).nonzero()
    if len(telling) == 0:
        return []
    at = int(telling[0]) * RUN
    places = len(weights) - at - RUN + 1
    if places <= 0:
        return []
    equal = torch.ones(places, dtype=torch.bool, device=weights.device)
    for index in range(at, at + RUN):
        equal &= weights[index : index + places] == found[index]
    return equal.nonzero().view(-1).tolist()
