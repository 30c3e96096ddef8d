# SPDX-License-Identifier: Apache-2.0
"""The states as a caller sees and changes them: `optimizer.state`, `optimizer.state[shard]` and the tensors in it.

torch keeps an optimizer's states in a dict of dicts that anybody may change, and what is changed counts from the next
step on. Here the states are slices of slabs, and this module makes the same code have the same effect.

[Note: what a caller holds] A tensor that is handed out is a view of the states wherever that is possible, so that
changes in place write through. It is not possible for the one shard that may lie across the border between host and
device: its tensor is a joined copy. Nor does `tensor.data = other` reach a slab. Handed-out tensors are therefore kept
until the next step. Before anything else uses the states, what is no view of them is copied into them; after a step
joined copies that a caller still holds are given the new values. Nothing of this runs where nobody has looked.

What is *replaced* (`state[shard] = ...`, `del`, `clear()`, `optimizer.state = ...`) must leave alone what a caller
holds of it: code that swaps states keeps the old dicts or tensors and puts them back later. Such tensors, entries and
mappings are given memory of their own first.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch

from megatron_dos.update.handed_out import require_fit

if TYPE_CHECKING:
    from megatron_dos.update.engine import UpdateEngine

__all__ = ["LiveStates", "ShardStates", "StateStore"]

NAMES = {"master_param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""Key of a state in torch's layout -> its name in the engine."""
MOMENTS = ("exp_avg", "exp_avg_sq")


class StateStore:
    """What `LiveStates` and `ShardStates` share: the way to the states of each shard.

    Args:
        engine: holds the states.
        owners: shard -> its index in the engine.
    """

    def __init__(self, engine: UpdateEngine, owners: Mapping[torch.Tensor, int]) -> None:
        self.engine, self.owners = engine, owners
        self._shards = list(owners)
        self._entries: weakref.WeakValueDictionary[int, ShardStates] = weakref.WeakValueDictionary()

    def owner(self, shard: torch.Tensor) -> int:
        """Index of a shard; a KeyError in words if there is none."""
        try:
            return self.owners[shard]
        except (KeyError, TypeError):
            what = f"{tuple(shard.shape)}, {shard.dtype}" if isinstance(shard, torch.Tensor) else type(shard).__name__
            raise KeyError(
                f"not a parameter shard of this optimizer: {what}. The shards are the tensors in param_groups[...]"
                '["params"], as Megatron put them there'
            ) from None

    def entry(self, owner: int) -> ShardStates:
        """The states of a shard: the same object at each call, as long as somebody holds it."""
        entry = self._entries.get(owner)
        if entry is None:
            entry = self._entries[owner] = ShardStates(self, owner)
        return entry

    def checked(self, owner: int, states: Any) -> Mapping[str, torch.Tensor]:
        """States that a shard is to have from now on, by key; nothing for fresh ones.

        Raises:
            TypeError, ValueError: it cannot have them; nothing has been changed.
        """
        if not isinstance(states, Mapping):
            raise TypeError(f"the states of a parameter shard are to be a dict of tensors, not {type(states).__name__}")
        if states and (missing := [key for key in MOMENTS if key not in states]):
            raise ValueError(
                f"the states of a parameter shard lack {' and '.join(missing)}: give both moments, or none ({{}}) to "
                "start them from zero"
            )
        self.check_some(owner, states)
        return states

    def check_some(self, owner: int, states: Mapping[str, Any]) -> None:
        """The same of some of its states."""
        for key, value in states.items():
            if key == "step":
                raise ValueError('the step is not kept in the states: set group["step"] in every param group')
            if key not in NAMES:
                raise ValueError(f"a parameter shard has the states {', '.join(NAMES)} and cannot keep {key!r}")
            require_fit(key, value, len(self._shards[owner]))

    @torch.no_grad()
    def replace(self, owner: int, states: Mapping[str, torch.Tensor], whole: bool = True) -> None:
        """Give a shard other states, which were `checked`. Nothing: both moments start from zero. Master params that
        are not given stay.

        Args:
            whole: the entry of the shard is replaced by another, instead of some of its states.
        """
        entry = self._entries.get(owner)
        if states is entry:
            return
        handed_out = self.engine.handed_out
        new = {NAMES[key]: value for key, value in states.items() if not handed_out.has(owner, NAMES[key], value)}
        same = {NAMES[key] for key in states} - new.keys()
        if whole and entry is not None:
            del self._entries[owner]
            entry.keep()
        handed_out.let_go(owner, set(NAMES.values() if whole else new) - same)
        if not states:
            new = dict.fromkeys(MOMENTS, torch.zeros(()).expand(len(self._shards[owner])))
        self.engine.write_owner_states(owner, new)
        shard = self._shards[owner]
        if "master" in new and shard.dtype == torch.float32:  # its own master, for Megatron
            shard.detach().copy_(new["master"])


class ShardStates(MutableMapping[str, torch.Tensor]):
    """The states of one parameter shard: `master_param`, `exp_avg` and `exp_avg_sq`, flat FP32 tensors of its size.

    Changes in place write through. What is assigned is copied into the states, cast to FP32. The entry stays that of
    the shard until the shard is given another one; then it keeps what it had.
    """

    def __init__(self, store: StateStore, owner: int) -> None:
        self._store, self._owner = store, owner
        self._kept: dict[str, torch.Tensor] | None = None

    def keep(self) -> None:
        """The shard is about to get other states: this entry is to have those of now."""
        self._kept = dict(self)

    def __getitem__(self, key: str) -> torch.Tensor:
        if self._kept is not None:
            return self._kept[key]
        return self._store.engine.handed_out.tensor(self._owner, NAMES[key])

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        if self._kept is not None:
            self._kept[key] = value
        else:
            self._store.check_some(self._owner, {key: value})
            self._store.replace(self._owner, {key: value}, whole=False)

    def __delitem__(self, key: str) -> None:
        if self._kept is not None:
            del self._kept[key]
            return
        raise TypeError(
            f"{key} of a parameter shard cannot be removed alone: assign zeros to it, or start both moments from zero "
            "with state[shard].clear()"
        )

    def clear(self) -> None:
        """Both moments start from zero; the master params stay."""
        if self._kept is not None:
            self._kept.clear()
        else:
            self._store.replace(self._owner, {}, whole=False)

    def __iter__(self) -> Iterator[str]:
        return iter(NAMES if self._kept is None else self._kept)

    def __len__(self) -> int:
        return len(NAMES if self._kept is None else self._kept)

    def __repr__(self) -> str:
        return repr(dict(self))


class LiveStates(MutableMapping[torch.Tensor, Mapping[str, torch.Tensor]]):
    """Parameter shard -> its states, as torch's `optimizer.state`.

    Every shard always has states: one that is removed gets fresh ones, with moments of zero and the master params that
    it had, as the stock optimizer makes them at its next step.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._kept: dict[torch.Tensor, Mapping[str, torch.Tensor]] | None = None

    def keep(self) -> None:
        """All states are about to be replaced: this mapping is to have those of now."""
        self._kept = dict(self)

    def __getitem__(self, shard: torch.Tensor) -> Mapping[str, torch.Tensor]:
        if self._kept is not None:
            return self._kept[shard]
        return self._store.entry(self._store.owner(shard))

    def __setitem__(self, shard: torch.Tensor, states: Mapping[str, torch.Tensor]) -> None:
        if self._kept is not None:
            self._kept[shard] = states
        else:
            owner = self._store.owner(shard)
            self._store.replace(owner, self._store.checked(owner, states))

    def __delitem__(self, shard: torch.Tensor) -> None:
        if self._kept is not None:
            del self._kept[shard]
        else:
            self._store.replace(self._store.owner(shard), {})

    def clear(self) -> None:
        """The moments of all shards start from zero; the master params stay."""
        for shard in list(self):
            del self[shard]

    def popitem(self) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Refused: every shard always has states, and a loop until none is left would not end."""
        raise TypeError("optimizer.state has no popitem(): reset all states with optimizer.state.clear()")

    def __contains__(self, shard: object) -> bool:
        return shard in (self._store.owners if self._kept is None else self._kept)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._store.owners if self._kept is None else self._kept)

    def __len__(self) -> int:
        return len(self._store.owners if self._kept is None else self._kept)
