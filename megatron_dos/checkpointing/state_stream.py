# SPDX-License-Identifier: Apache-2.0
"""Tensors whose parts are on many ranks, brought to the first rank or from it a chunk at a time.

[Note: nobody waits for ever] The ranks of a stream take turns that all of them know beforehand, so a rank that fails
has to keep its turns. One that cannot read or write its part goes on with what it has; the first rank, if it cannot use
what it gets, lets the stream run to its end. Then all tell each other, and all raise the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["DividedTensor", "first_problem", "gather", "scatter"]

CHUNK = 1 << 21
"""Elements that travel at once, 8 MiB: so much more takes the first rank twice, and another rank once."""


@dataclass(frozen=True)
class DividedTensor:
    """A flat FP32 tensor that is divided over the ranks of a group, and what this rank owns of it.

    Attributes:
        buckets: elements of each bucket with its padding and without. Every rank owns an equal part of a bucket with
            its padding; in the tensor the buckets follow each other without it.
        views: start in the tensor -> flat FP32 views of this rank's parts, on any device. What no view covers is zero.
    """

    buckets: Sequence[tuple[int, int]]
    views: list[tuple[int, torch.Tensor]]

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return sum(unpadded for _, unpadded in self.buckets)

    def chunks(self, ranks: int) -> Iterator[tuple[int, int, int]]:
        """The whole tensor cut into pieces of one rank and at most CHUNK elements: rank, start, stop."""
        base = 0
        for padded, unpadded in self.buckets:
            part = padded // ranks
            for rank in range(ranks):
                end = min((rank + 1) * part, unpadded)
                for start in range(rank * part, end, CHUNK):
                    yield rank, base + start, base + min(start + CHUNK, end)
            base += unpadded

    def copy_to(self, chunk: torch.Tensor, start: int) -> None:
        """Fill `chunk` with this rank's elements from `start` on."""
        chunk.zero_()
        for mine, of_chunk in self._overlaps(chunk, start):
            of_chunk.copy_(mine)

    @torch.no_grad()
    def copy_from(self, chunk: torch.Tensor, start: int) -> None:
        """Take this rank's elements from `start` on from `chunk`."""
        for mine, of_chunk in self._overlaps(chunk, start):
            mine.copy_(of_chunk)

    def _overlaps(self, chunk: torch.Tensor, start: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for first, view in self.views:
            low, high = max(first, start), min(first + len(view), start + len(chunk))
            if low < high:
                yield view[low - first : high - first], chunk[low - start : high - start]


def gather(tensors: Sequence[DividedTensor], group: Any) -> Iterator[torch.Tensor]:
    """Bring the tensors to the first rank: there their elements come out, one tensor after the other.

    All ranks have to run to the end, as others yield nothing. A chunk is valid until the next is asked for.

    Args:
        tensors: the same ones on all ranks.
        group: a process group for host memory.

    Raises:
        RuntimeError: on all ranks, at the end: one could not read its part.
    """
    me, first, problem = group.rank(), torch.distributed.get_global_rank(group, 0), ""
    buffers = [torch.empty(CHUNK, dtype=torch.float32, device="cpu") for _ in range(2 if me == 0 else 1)]
    waiting: tuple[Any, torch.Tensor] | None = None  # being received while the one before is used
    turns = ((tensor, turn) for tensor in tensors for turn in tensor.chunks(group.size()))
    for count, (tensor, (rank, start, stop)) in enumerate(turns):
        chunk, work = buffers[count % len(buffers)][: stop - start], None
        if rank == me:
            try:
                tensor.copy_to(chunk, start)
            except Exception as error:  # see [Note: nobody waits for ever]
                problem = f"rank {torch.distributed.get_rank()}: {error}"
            if me != 0:
                torch.distributed.send(chunk, first, group)
        elif me == 0:
            work = torch.distributed.irecv(chunk, torch.distributed.get_global_rank(group, rank), group)
        if me == 0:
            if waiting is not None:
                yield _arrived(*waiting)
            waiting = work, chunk
    if waiting is not None:
        yield _arrived(*waiting)
    if problem := first_problem(problem, group):
        raise RuntimeError(problem)


def _arrived(work: Any, chunk: torch.Tensor) -> torch.Tensor:
    if work is not None:
        work.wait()
    return chunk


def scatter(
    tensors: Sequence[DividedTensor],
    sources: Sequence[torch.Tensor] | None,
    group: Any,
    used: Callable[[torch.Tensor], None] = lambda part: None,
) -> None:
    """Bring the elements of `sources`, which the first rank has, into what each rank owns of them.

    Args:
        sources: a flat tensor in host memory for each tensor; only on the first rank.
        group: a process group for host memory.
        used: called with each part of the sources that is no longer needed.

    Raises:
        RuntimeError: on all ranks, at the end: one could not write its part.
    """
    me, first, problem = group.rank(), torch.distributed.get_global_rank(group, 0), ""
    buffer = torch.empty(CHUNK if me != 0 else 0, dtype=torch.float32, device="cpu")
    for number, tensor in enumerate(tensors):
        for rank, start, stop in tensor.chunks(group.size()):
            if me == 0:
                assert sources is not None, "the first rank has the sources"
                part = sources[number][start:stop]
                chunk = part.float()
            elif rank == me:
                chunk = buffer[: stop - start]
                torch.distributed.recv(chunk, first, group)
            if rank == me:
                try:
                    tensor.copy_from(chunk, start)
                except Exception as error:  # see [Note: nobody waits for ever]
                    problem = f"rank {torch.distributed.get_rank()}: {error}"
            elif me == 0:
                torch.distributed.send(chunk, torch.distributed.get_global_rank(group, rank), group)
            if me == 0:
                used(part)
    if problem := first_problem(problem, group):
        raise RuntimeError(problem)


def first_problem(problem: str, group: Any) -> str:
    """The problem of the first rank that has one, on all ranks of the group; nothing if none has."""
    problems = [""] * group.size()
    torch.distributed.all_gather_object(problems, problem, group)
    return next(filter(None, problems), "")
