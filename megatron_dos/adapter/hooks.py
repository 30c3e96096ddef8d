# SPDX-License-Identifier: Apache-2.0
"""Hooks into Megatron's other classes. They behave as before for whoever has no deep-states optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.optimizer.optimizer import ChainedOptimizer

from megatron_dos.checkpointing import parameter_file
from megatron_dos.checkpointing.handouts import (
    CheckpointError,
    require_room_for_copies,
    share_handouts,
)
from megatron_dos.options.options import UnsupportedOptionError
from megatron_dos.wrapping import needed_by, wrap_once

__all__ = ["hook_megatron"]

Method = Callable[..., Any]


def hook_megatron(user: Any) -> None:
    """Wrap what `user`, a deep-states optimizer, needs of Megatron's classes, for as long as it lives.

    All ranks call this, whether or not they own states: in an asynchronous save they tell each other what they find.
    """
    from megatron.core.models.mimo.optimizer import MimoOptimizer  # which imports what imports this module

    needed_by(user)
    kind = type(user)
    wrap_once(ChainedOptimizer, "save_parameter_state", lambda save: _streaming_save(save, kind))
    wrap_once(ChainedOptimizer, "load_parameter_state", lambda load: _streaming_load(load, kind))
    wrap_once(TorchDistSaveShardedStrategy, "save", _at_once)
    wrap_once(TorchDistSaveShardedStrategy, "async_save", _looking_for_room)
    wrap_once(AsyncCallsQueue, "schedule_async_request", _sharing)
    wrap_once(MimoOptimizer, "__init__", lambda init: _refusing(init, kind))


# --- Chains of optimizers, as expert parallelism makes them --------------------------------------------------------
#
# They are Megatron's, and ask each optimizer for all of its states. With deep-states optimizers they save and load as
# one of these alone does.


def _streaming_save(save: Method, kind: type[Any]) -> Method:
    def save_parameter_state(self: ChainedOptimizer, filename: str) -> None:
        if _is_ours(self, kind):
            parameter_file.save([one.on_file for one in self.chained_optimizers], filename)
        else:
            save(self, filename)

    return save_parameter_state


def _streaming_load(load: Method, kind: type[Any]) -> Method:
    def load_parameter_state(self: ChainedOptimizer, filename: str, *, update_legacy_format: bool = False) -> None:
        if _is_ours(self, kind) and not update_legacy_format:
            parameter_file.load([one.on_file for one in self.chained_optimizers], filename)
        else:
            load(self, filename, update_legacy_format=update_legacy_format)

    return load_parameter_state


def _is_ours(chain: ChainedOptimizer, kind: type[Any]) -> bool:
    have_states = (isinstance(one, kind) and not one.is_stub_optimizer for one in chain.chained_optimizers)
    return len(chain.chained_optimizers) > 1 and all(have_states)


# --- Asynchronous saves --------------------------------------------------------------------------------------------
#
# An asynchronous save looks for room in shared memory, whoever starts it: `--async-save` is a flag of
# megatron.training, and other programs have their own. The strategy writes a synchronous save with the same method. All
# ranks plan a save together before any of them sends something, so they find the same.


def _at_once(save: Method) -> Method:
    def at_once(self: TorchDistSaveShardedStrategy, *args: Any, **kwargs: Any) -> None:
        self._saves_at_once = True
        try:
            save(self, *args, **kwargs)
        finally:
            self._saves_at_once = False

    return at_once


def _looking_for_room(async_save: Method) -> Method:
    def looking(self: TorchDistSaveShardedStrategy, *args: Any, **kwargs: Any) -> Any:
        if not getattr(self, "_saves_at_once", False):
            require_room_for_copies()
        return async_save(self, *args, **kwargs)

    return looking


def _sharing(schedule: Method) -> Method:
    """Megatron's queue of asynchronous saves refuses one whose states do not fit into shared memory, on all ranks: it
    would wait for ever for a writer that never gets them. See [Note: saves by reference] in `handouts`."""

    def sharing(self: AsyncCallsQueue, async_request: Any) -> int:
        problem = share_handouts()
        failed = torch.tensor([bool(problem)], dtype=torch.int, device=torch.cuda.current_device())
        torch.distributed.all_reduce(failed, op=torch.distributed.ReduceOp.MAX)  # Megatron has all ranks call this
        if failed.item():
            raise CheckpointError(
                f"{problem or 'another rank has no shared memory left for its optimizer states'}. Nothing was saved, "
                "earlier checkpoints are as they were. Make room in /dev/shm (docker run --shm-size, or a larger "
                "tmpfs), or drop --async-save."
            )
        return schedule(self, async_request)

    return sharing


# --- MimoModel -----------------------------------------------------------------------------------------------------


def _refusing(init: Method, kind: type[Any]) -> Method:
    """Megatron's optimizer of a MimoModel refuses deep-states optimizers: it clips grads itself, and would not find
    these."""

    def refusing(self: Any, module_infos: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        for info in module_infos.values():
            if any(isinstance(one, kind) for one in getattr(info.optimizer, "chained_optimizers", [])):
                raise UnsupportedOptionError(
                    "--use-deep-optimizer-states does not work with a MimoModel: its optimizer clips grads itself, and "
                    "would clip none of these. Drop --use-deep-optimizer-states"
                )
        init(self, module_infos, *args, **kwargs)

    return refusing
