# SPDX-License-Identifier: Apache-2.0
"""The tensors of states that callers outside were given, kept in step with the states."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import dlpack

__all__ = ["HandedOut"]


Parts = Callable[[int], Mapping[str, Sequence[torch.Tensor]]]


class HandedOut:
    """The tensors of states that callers were given. See [Note: what a caller holds].

    Args:
        parts_of: parameter shard -> for each state, views of its one or two parts.
    """

    def __init__(self, parts_of: Parts) -> None:
        self._parts_of = parts_of
        self._tensors: dict[int, dict[str, torch.Tensor]] = {}
        self._storages: dict[tuple[int, str], list[StorageWeakRef]] = {}

    def tensor(self, owner: int, name: str) -> torch.Tensor:
        """A state of a shard, flat FP32: the same tensor at each call, as long as somebody holds it."""
        tensors = self._tensors.setdefault(owner, {})
        if name not in tensors:
            tensors[name] = self._made(owner, name, self._parts_of(owner)[name])
        return tensors[name]

    def settle(self, owner: int) -> None:
        """Bring into the states of a shard what was written to tensors that are no views of them.

        Raises:
            ValueError: a tensor's `data` was replaced by one that does not fit.
        """
        for name, tensor, parts in self._no_views(owner):
            require_fit(name, tensor, sum(map(len, parts)))
            copy_into(parts, tensor)
            self._update(owner, name, tensor, parts)

    def refresh(self, owner: int) -> None:
        """The states of a shard were written: tensors that are no views of them get their values."""
        for name, tensor, parts in self._no_views(owner):
            self._update(owner, name, tensor, parts)

    def _no_views(self, owner: int) -> Iterator[tuple[str, torch.Tensor, Sequence[torch.Tensor]]]:
        if owner in self._tensors:
            parts_of = self._parts_of(owner)
            for name, tensor in self._tensors[owner].items():
                if not _is_view(tensor, parts_of[name]):
                    yield name, tensor, parts_of[name]

    def _update(self, owner: int, name: str, tensor: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Make a tensor a view of the states, or else a copy of their values."""
        if len(parts) == 1:
            tensor.data = self._made(owner, name, parts)
        else:
            tensor.copy_(_one_tensor(parts))

    def _made(self, owner: int, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        made = _one_tensor(parts)
        if len(parts) == 1:
            alive = [one for one in self._storages.get((owner, name), ()) if not one.expired()]
            self._storages[owner, name] = [*alive, StorageWeakRef(made.untyped_storage())]
        return made

    def has(self, owner: int, name: str, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the memory of a state, or of the copy that was handed out for it."""
        self.settle(owner)
        parts, held = self._parts_of(owner)[name], self._tensors.get(owner, {}).get(name)
        return _is_view(tensor, parts) or (held is not None and _is_view(tensor, [held]))

    @contextmanager
    def through_a_change(self) -> Iterator[None]:
        """Around a step, or a move of states: they have what was written before, and what callers still hold
        afterwards has the states. What nobody holds is forgotten."""
        for owner in self._tensors:
            self.settle(owner)
        held = {
            (owner, name): weakref.ref(tensor)
            for owner, tensors in self._tensors.items()
            for name, tensor in tensors.items()
        }
        self._tensors = {}
        try:
            yield
        finally:
            for (owner, name), reference in held.items():
                if (tensor := reference()) is not None:
                    self._tensors.setdefault(owner, {})[name] = tensor
            for owner in self._tensors:
                self.refresh(owner)

    def let_go(self, owner: int, names: Iterable[str]) -> None:
        """Before states are replaced: whoever holds a tensor of them keeps it, with its values, in memory of its own.

        Raises:
            ValueError: somebody holds another view of that memory, which cannot be found. Nothing has been changed.
        """
        for name in names:
            tensor = self._tensors.get(owner, {}).pop(name, None)
            if tensor is not None:
                reference = weakref.ref(tensor)
                del tensor  # or it would be held by this function
                if (tensor := reference()) is not None and _is_view(tensor, self._parts_of(owner)[name]):
                    tensor.data = tensor.clone()
            if any(not one.expired() for one in self._storages.pop((owner, name), ())):
                raise ValueError(
                    f"the {name} of a parameter shard cannot be replaced while a view of it, such as its detach() or a "
                    "slice, is kept elsewhere: the view would change as well. Clone what is to be kept, or change "
                    "the state in place with copy_()"
                )


def _one_tensor(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Parts of a state as one tensor, with a storage of its own that cannot be resized: it may be the states'."""
    if len(parts) > 1:
        return torch.from_numpy(torch.cat([part.cpu() for part in parts]).numpy())
    (one,) = parts
    return dlpack.from_dlpack(dlpack.to_dlpack(one)) if one.untyped_storage().resizable() else one


def _is_view(tensor: torch.Tensor, parts: Sequence[torch.Tensor]) -> bool:
    """Whether a tensor is the memory of a state."""
    (first, *others) = parts
    return (
        not others
        and tensor.data_ptr() == first.data_ptr()
        and (tensor.dtype, tensor.device, tensor.shape, tensor.stride())
        == (first.dtype, first.device, first.shape, first.stride())
    )


def copy_into(parts: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
    """Copy a flat tensor into the parts of a state."""
    for part, new in zip(parts, tensor.detach().split([len(part) for part in parts]), strict=True):
        part.copy_(new)


def require_fit(key: str, value: Any, numel: int) -> None:
    """Refuse what cannot be a state of a shard of `numel` elements.

    Raises:
        TypeError: it is no tensor of floating-point numbers.
        ValueError: it has another shape.
    """
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        kind = f"a tensor of {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise TypeError(f"{key} of a parameter shard is a floating-point tensor of {numel:,} elements, not {kind}")
    if tuple(value.shape) != (numel,):
        raise ValueError(
            f"{key} of a parameter shard has shape ({numel},), the given tensor {tuple(value.shape)}: states belong to "
            "the flat shard that this rank owns, not to the whole param"
        )
