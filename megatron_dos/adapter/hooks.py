# SPDX-License-Identifier: Apache-2.0
"""Hooks into Megatron's other optimizer classes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
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


def let_chains_stream(ours: type) -> None:
    """Have chains of deep-states optimizers save and load their states as one optimizer alone does.

    Expert parallelism makes such chains. They are Megatron's, and ask each optimizer for all of its states, so their
    class is what can be hooked. It behaves as before for chains of others.

    Args:
        ours: the class of deep-states optimizers.
    """
    save, load = ChainedOptimizer.save_parameter_state, ChainedOptimizer.load_parameter_state
    if getattr(save, "_streams_deep_states", False):
        return

    def is_ours(chain: ChainedOptimizer) -> bool:
        have_states = (isinstance(one, ours) and not one.is_stub_optimizer for one in chain.chained_optimizers)
        return len(chain.chained_optimizers) > 1 and all(have_states)

    @functools.wraps(save)
    def save_parameter_state(self: ChainedOptimizer, filename: str) -> None:
        if is_ours(self):
            parameter_file.save(self.chained_optimizers, filename)
        else:
            save(self, filename)

    @functools.wraps(load)
    def load_parameter_state(self: ChainedOptimizer, filename: str, *, update_legacy_format: bool = False) -> None:
        if is_ours(self) and not update_legacy_format:
            parameter_file.load(self.chained_optimizers, filename)
        else:
            load(self, filename, update_legacy_format=update_legacy_format)

    save_parameter_state._streams_deep_states = True
    ChainedOptimizer.save_parameter_state = save_parameter_state
    ChainedOptimizer.load_parameter_state = load_parameter_state


def watch_asynchronous_saves() -> None:
    """Have an asynchronous save look for room in shared memory, whoever starts it: `--async-save` is a flag of
    megatron.training, and other programs have their own.

    The strategy is Megatron's and made for each save, so its class is what can be hooked. It writes a synchronous save
    with the same method. All ranks plan a save together before any of them sends something, so they find the same.
    """
    save, async_save = TorchDistSaveShardedStrategy.save, TorchDistSaveShardedStrategy.async_save
    if getattr(async_save, "_looks_for_room", False):
        return

    @functools.wraps(save)
    def at_once(self: TorchDistSaveShardedStrategy, *args: Any, **kwargs: Any) -> None:
        self._saves_at_once = True
        try:
            save(self, *args, **kwargs)
        finally:
            self._saves_at_once = False

    @functools.wraps(async_save)
    def looking(self: TorchDistSaveShardedStrategy, *args: Any, **kwargs: Any) -> Any:
        if not getattr(self, "_saves_at_once", False):
            require_room_for_copies()
        return async_save(self, *args, **kwargs)

    looking._looks_for_room = True
    TorchDistSaveShardedStrategy.save, TorchDistSaveShardedStrategy.async_save = at_once, looking


def share_before_async_saves() -> None:
    """Have Megatron's queue of asynchronous saves refuse one whose states do not fit into shared memory, on all ranks.

    The queue would wait for ever for a writer that never gets them, see [Note: saves by reference] in `checkpoint`.
    """
    schedule = AsyncCallsQueue.schedule_async_request
    if getattr(schedule, "_shares_deep_states", False):
        return

    @functools.wraps(schedule)
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

    sharing._shares_deep_states = True
    AsyncCallsQueue.schedule_async_request = sharing


def refuse_mimo(ours: type) -> None:
    """Have Megatron's optimizer of a MimoModel refuse deep-states optimizers: it clips grads itself, and looks for them
    where these are not."""
    from megatron.core.models.mimo.optimizer import MimoOptimizer  # which imports what imports this module

    if getattr(MimoOptimizer.__init__, "_refuses_deep_states", False):
        return
    init = MimoOptimizer.__init__

    @functools.wraps(init)
    def refusing(self: MimoOptimizer, module_infos: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        for info in module_infos.values():
            if any(isinstance(one, ours) for one in getattr(info.optimizer, "chained_optimizers", [])):
                raise UnsupportedOptionError(
                    "--use-deep-optimizer-states does not work with a MimoModel: its optimizer clips grads itself, and "
                    "would clip none of these. Drop --use-deep-optimizer-states"
                )
        init(self, module_infos, *args, **kwargs)

    refusing._refuses_deep_states = True
    MimoOptimizer.__init__ = refusing
