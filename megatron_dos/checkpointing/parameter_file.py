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
from megatron_dos.checkpointing.state_stream import DividedTensor, first_problem, gather, scatter
from megatron_dos.files import new_file, remove_leftovers

__all__ = ["DividedStates", "Optimizer", "load", "load_content", "save"]

DividedStates = Mapping[int, Mapping[Any, Mapping[str, DividedTensor]]]
"""Buffer -> its dtypes -> name of a state -> the file's tensor, and what this rank owns of it."""

CHECKING_THREADS = 4
"""Enough for a file whose tensors are the params and two moments of one buffer."""

UNCHANGED = (
    "The optimizer states are as they were. Load another checkpoint (--ckpt-step), or the weights alone with "
    "--no-load-optim or --finetune."
)


class Optimizer(Protocol):
    """One that holds a part of the states."""

    @property
    def data_parallel_group_gloo(self) -> Any:
        """The process group over which the states are sent."""

    def require_whole_states(self, what: str) -> None:
        """Raise CheckpointError if `what` must not be done with the states as they are."""

    def divided_states(self) -> DividedStates:
        """All states."""

    def parameters_loaded(self, problem: str) -> None:
        """All states were loaded; or, with a problem, some of them."""


def save(optimizers: Sequence[Optimizer], filename: str) -> None:
    """Write the states of one optimizer, or of those of a chain. All ranks of their groups call this together.

    Raises:
        CheckpointError: on all ranks. What was at `filename` before is there still.
    """
    problem = ""
    for optimizer in optimizers:
        try:
            optimizer.require_whole_states("save")
        except CheckpointError as error:
            problem = problem or str(error)
    _raise_together(optimizers, problem)
    states = [optimizer.divided_states() for optimizer in optimizers]
    streams = [
        gather([tensor for _, tensor in _in_order(of_one)], optimizer.data_parallel_group_gloo)
        for optimizer, of_one in zip(optimizers, states, strict=True)
    ]
    chunks = itertools.chain(*streams)
    try:
        if any(map(_is_first, optimizers)):
            contents = [
                _content(of_one) if _is_first(optimizer) else None
                for optimizer, of_one in zip(optimizers, states, strict=True)
            ]
            for other in _of_other_iterations(Path(filename)):
                remove_leftovers(other)
            with new_file(filename, overwrite=True) as temporary:
                content = contents if len(optimizers) > 1 else contents[0]
                torch_file.write(temporary, Path(filename).stem, content, chunks)
        _exhaust(chunks)
    except Exception as error:  # the disk is full, say: all ranks are to hear of it
        problem = f"{filename} cannot be written: {error}. Earlier checkpoints are as they were."
        for stream in streams:
            with suppress(Exception):
                _exhaust(stream)
    _raise_together(optimizers, problem)


def _of_other_iterations(path: Path) -> Iterator[Path]:
    """Where Megatron has the same file of other checkpoints: a save that was killed may never come to its own again."""
    iteration = path.parent.parent
    if iteration.name.startswith("iter_"):
        yield from (other / path.parent.name / path.name for other in iteration.parent.glob("iter_*"))


def load(optimizers: Sequence[Optimizer], filename: str) -> None:
    """Read what `save` or Megatron has written. All ranks of the groups call this together.

    Raises:
        CheckpointError: on all ranks. The states are as they were, if the message does not say something else.
    """
    content, problem = None, ""
    if any(map(_is_first, optimizers)):
        try:
            content = torch_file.read(filename)
            torch_file.check(filename, CHECKING_THREADS)
        except Exception as error:  # whatever is wrong with it, all ranks are to hear of it
            problem = f"{filename} cannot be loaded: {error}. {UNCHANGED}"
        else:
            content = content if len(optimizers) > 1 else [content]
            if not isinstance(content, list) or len(content) != len(optimizers):
                problem = f"{filename} does not hold the states of {len(optimizers)} optimizers. {UNCHANGED}"
    _raise_together(optimizers, problem)
    load_content(optimizers, content or [None] * len(optimizers), torch_file.forget)


def load_content(
    optimizers: Sequence[Optimizer], contents: Sequence[Any], used: Callable[[torch.Tensor], None] = lambda part: None
) -> None:
    """The same from what is in the file, for each optimizer; None on all but the first rank of its group.

    Args:
        used: called with each part of the tensors that is no longer needed.
    """
    states = [optimizer.divided_states() for optimizer in optimizers]
    misfits = (
        _misfit(of_one, content)
        for optimizer, of_one, content in zip(optimizers, states, contents, strict=True)
        if _is_first(optimizer)
    )
    problem = next(filter(None, misfits), "")
    _raise_together(optimizers, problem and f"{problem}. {UNCHANGED}")
    for optimizer, of_one, content in zip(optimizers, states, contents, strict=True):
        sources, failed = None, ""
        if _is_first(optimizer):
            sources = [content[index][dtypes][key].reshape(-1) for (index, dtypes, key), _ in _in_order(of_one)]
        try:
            scatter([tensor for _, tensor in _in_order(of_one)], sources, optimizer.data_parallel_group_gloo, used)
        except Exception as error:
            failed = f"reading a checkpoint into the optimizer states failed in the middle ({error})"
        optimizer.parameters_loaded(failed)
        problem = problem or failed
    _raise_together(optimizers, problem)


def _is_first(optimizer: Optimizer) -> bool:
    return optimizer.data_parallel_group_gloo.rank() == 0


def _in_order(states: DividedStates) -> Iterator[tuple[tuple[int, Any, str], DividedTensor]]:
    """As they are in the file."""
    for index, of_buffer in states.items():
        for dtypes, of_dtypes in of_buffer.items():
            for key, tensor in of_dtypes.items():
                yield (index, dtypes, key), tensor


def _content(states: DividedStates) -> dict[Any, Any]:
    """What Megatron puts into the file, with stand-ins for the tensors."""
    content: dict[Any, Any] = {"buckets_coalesced": True}
    for index, of_buffer in states.items():
        content[index] = {}
        for dtypes, of_dtypes in of_buffer.items():
            tensors = {key: torch_file.FlatTensor(tensor.numel) for key, tensor in of_dtypes.items()}
            content[index][dtypes] = {**tensors, "numel_unpadded": next(iter(of_dtypes.values())).numel}
    return content


def _misfit(states: DividedStates, content: Any) -> str:
    """Why the states of a checkpoint do not fit this model; nothing if they do."""
    for index, of_buffer in states.items():
        for dtypes, of_dtypes in of_buffer.items():
            expected = next(iter(of_dtypes.values())).numel
            try:
                found = {key: content[index][dtypes][key].numel() for key in of_dtypes}
            except (KeyError, TypeError, AttributeError) as error:
                return f"the checkpoint has no optimizer states of buffer {index} ({dtypes}): {error!r}"
            if set(found.values()) != {expected}:
                return f"the checkpoint has {found} elements for buffer {index}, which has {expected:,}"
    return ""


def _exhaust(chunks: Iterator[torch.Tensor]) -> None:
    deque(chunks, maxlen=0)


def _raise_together(optimizers: Sequence[Optimizer], problem: str) -> None:
    """Raise on all ranks of the groups what one has found; nothing if none has found anything."""
    for optimizer in optimizers:
        problem = first_problem(problem, optimizer.data_parallel_group_gloo) or problem
    if problem:
        raise CheckpointError(problem)
