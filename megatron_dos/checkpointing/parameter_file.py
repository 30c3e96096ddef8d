# SPDX-License-Identifier: Apache-2.0
"""The file of optimizer states beside a `torch` checkpoint (Megatron calls them its parameter state), without a copy.

The file is Megatron's: for each buffer its states gathered from all data-parallel ranks, on the first of them; a list
of such, if there are several optimizers in a chain. Only nobody gathers: what a rank owns is sent when its place in the
file comes, see `state_stream` and `torch_file`.

[Note: checked before it is loaded] The first rank reads the file twice: once to compare it with its checksums, and once
to send it. In a single pass, a flipped bit would be found when some states have been sent already, and half a load is
of no use. The second pass finds in memory what of the file fits there.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron_dos.checkpointing import torch_file
from megatron_dos.checkpointing.handouts import CheckpointError
from megatron_dos.checkpointing.state_stream import Share, first_problem, gather, scatter
from megatron_dos.files import new_file, remove_leftovers

__all__ = ["Owner", "Shares", "load", "load_content", "save"]

Shares = Mapping[int, Mapping[Any, Mapping[str, Share]]]
"""Buffer -> its dtypes -> name of a state -> the file's tensor, and what this rank owns of it."""

CHECKING_THREADS = 4
"""Enough for a file whose tensors are the params and two moments of one buffer."""

UNCHANGED = (
    "The optimizer states are as they were. Load another checkpoint (--ckpt-step), or the weights alone with "
    "--no-load-optim or --finetune."
)


class Owner(Protocol):
    """An optimizer that owns a part of the states."""

    data_parallel_group_gloo: Any

    def require_whole_states(self, what: str) -> None:
        """Raise CheckpointError if `what` must not be done with the states as they are."""

    def parameter_shares(self) -> Shares:
        """All states."""

    def parameters_loaded(self, problem: str) -> None:
        """All states were loaded; or, with a problem, some of them."""


def save(owners: Sequence[Owner], filename: str) -> None:
    """Write the states of one optimizer, or of those of a chain. All ranks of their groups call this together.

    Raises:
        CheckpointError: on all ranks. What was at `filename` before is there still.
    """
    problem = ""
    for owner in owners:
        try:
            owner.require_whole_states("save")
        except CheckpointError as error:
            problem = problem or str(error)
    _raise_together(owners, problem)
    shares = [owner.parameter_shares() for owner in owners]
    streams = [
        gather([share for _, share in _in_order(of_owner)], owner.data_parallel_group_gloo)
        for owner, of_owner in zip(owners, shares, strict=True)
    ]
    chunks = itertools.chain(*streams)
    try:
        if any(map(_is_first, owners)):
            contents = [
                _content(of_owner) if _is_first(owner) else None for owner, of_owner in zip(owners, shares, strict=True)
            ]
            for other in _of_other_iterations(Path(filename)):
                remove_leftovers(other)
            with new_file(filename, overwrite=True) as temporary:
                torch_file.write(temporary, Path(filename).stem, contents if len(owners) > 1 else contents[0], chunks)
        _exhaust(chunks)
    except Exception as error:  # the disk is full, say: all ranks are to hear of it
        problem = f"{filename} cannot be written: {error}. Earlier checkpoints are as they were."
        for stream in streams:
            with suppress(Exception):
                _exhaust(stream)
    _raise_together(owners, problem)


def _of_other_iterations(path: Path) -> Iterator[Path]:
    """Where Megatron has the same file of other checkpoints: a save that was killed may never come to its own again."""
    iteration = path.parent.parent
    if iteration.name.startswith("iter_"):
        yield from (other / path.parent.name / path.name for other in iteration.parent.glob("iter_*"))


def load(owners: Sequence[Owner], filename: str) -> None:
    """Read what `save` or Megatron has written. All ranks of the groups call this together.

    Raises:
        CheckpointError: on all ranks. The states are as they were, if the message does not say something else.
    """
    content, problem = None, ""
    if any(map(_is_first, owners)):
        try:
            content = torch_file.read(filename)
            torch_file.check(filename, CHECKING_THREADS)
        except Exception as error:  # whatever is wrong with it, all ranks are to hear of it
            problem = f"{filename} cannot be loaded: {error}. {UNCHANGED}"
        else:
            content = content if len(owners) > 1 else [content]
            if not isinstance(content, list) or len(content) != len(owners):
                problem = f"{filename} does not hold the states of {len(owners)} optimizers. {UNCHANGED}"
    _raise_together(owners, problem)
    load_content(owners, content or [None] * len(owners), torch_file.forget)


def load_content(
    owners: Sequence[Owner], contents: Sequence[Any], used: Callable[[torch.Tensor], None] = lambda part: None
) -> None:
    """The same from what is in the file, for each optimizer; None on all but the first rank of its group.

    Args:
        used: told of each part of the tensors that is no longer needed.
    """
    shares = [owner.parameter_shares() for owner in owners]
    misfits = (
        _misfit(of_owner, content)
        for owner, of_owner, content in zip(owners, shares, contents, strict=True)
        if _is_first(owner)
    )
    problem = next(filter(None, misfits), "")
    _raise_together(owners, problem and f"{problem}. {UNCHANGED}")
    for owner, of_owner, content in zip(owners, shares, contents, strict=True):
        sources, failed = None, ""
        if _is_first(owner):
            sources = [content[index][dtypes][key].reshape(-1) for (index, dtypes, key), _ in _in_order(of_owner)]
        try:
            scatter([share for _, share in _in_order(of_owner)], sources, owner.data_parallel_group_gloo, used)
        except Exception as error:
            failed = f"reading a checkpoint into the optimizer states failed in the middle ({error})"
        owner.parameters_loaded(failed)
        problem = problem or failed
    _raise_together(owners, problem)


def _is_first(owner: Owner) -> bool:
    return owner.data_parallel_group_gloo.rank() == 0


def _in_order(shares: Shares) -> Iterator[tuple[tuple[int, Any, str], Share]]:
    """As they are in the file."""
    for index, of_buffer in shares.items():
        for dtypes, states in of_buffer.items():
            for key, share in states.items():
                yield (index, dtypes, key), share


def _content(shares: Shares) -> dict[Any, Any]:
    """What Megatron puts into the file, with stand-ins for the tensors."""
    content: dict[Any, Any] = {"buckets_coalesced": True}
    for index, of_buffer in shares.items():
        content[index] = {}
        for dtypes, states in of_buffer.items():
            tensors = {key: torch_file.FlatTensor(share.numel) for key, share in states.items()}
            content[index][dtypes] = {**tensors, "numel_unpadded": next(iter(states.values())).numel}
    return content


def _misfit(shares: Shares, content: Any) -> str:
    """Why the states of a checkpoint do not fit this model; nothing if they do."""
    for index, of_buffer in shares.items():
        for dtypes, states in of_buffer.items():
            expected = next(iter(states.values())).numel
            try:
                found = {key: content[index][dtypes][key].numel() for key in states}
            except (KeyError, TypeError, AttributeError) as error:
                return f"the checkpoint has no optimizer states of buffer {index} ({dtypes}): {error!r}"
            if set(found.values()) != {expected}:
                return f"the checkpoint has {found} elements for buffer {index}, which has {expected:,}"
    return ""


def _exhaust(chunks: Iterator[torch.Tensor]) -> None:
    deque(chunks, maxlen=0)


def _raise_together(owners: Sequence[Owner], problem: str) -> None:
    """Raise on all ranks of the groups what one has found; nothing if none has found anything."""
    for owner in owners:
        problem = first_problem(problem, owner.data_parallel_group_gloo) or problem
    if problem:
        raise CheckpointError(problem)
