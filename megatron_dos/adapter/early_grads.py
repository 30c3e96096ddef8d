# SPDX-License-Identifier: Apache-2.0
"""With --overlap-grad-reduce: grads of CPU subgroups go to the host in the backward pass, as buckets are reduced.

Nothing is updated with them before Megatron has taken the norm of all grads and checked that they are finite; what it
then finds, the loss scale and the clip factor, is applied inside the update.

[Note: grads that change] The update must see the grads that the step would read, so those that change between their
reduction and the step are sent once more. There are two kinds of them:

  - Megatron sums some grads again: those of norms over tensor-parallel ranks, those of embeddings over pipeline stages.
    Torch does not count what a collective writes, and which grads they are cannot be seen from the tensors. So every
    parameter that Megatron may treat in this way in some configuration is sent again in each step: all but matrices,
    and all with one of the marks it looks for.
  - A training loop edits grads: it masks, freezes or scales them. Torch counts the in-place operations on a tensor and
    on all its views, so the counts at the sending are compared with those at the step.

Megatron's grads are views of one tensor for all buckets, with one count, which moves throughout the backward pass. So
the grad of each parameter and the memory of each bucket are replaced by aliases of the same memory, each with a count
of its own. An edit is then seen wherever it is made: of `param.main_grad` (that parameter is sent again), of
`bucket.grad_data` (all of the bucket) or of `buffer.grad_data` (all of the buffer, as for `scale_gradients`).

Torch does not count writes through `.data`, NumPy or raw pointers, collectives, or the replay of a CUDA graph.
`torch.autograd.graph.increment_version(param.main_grad)` counts one by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from megatron_dos.adapter.buffers import bucket_groups
from megatron_dos.update.engine import UpdateEngine
from megatron_dos.wrapping import wrap_method

__all__ = ["EarlyGrads", "changing_shards", "may_change"]

MARKS = (
    "average_gradients_across_tp_domain",
    "flextron_router_pp_sync",
    "is_embedding_or_output_parameter",
    "is_embedding_parameter",
    "pipeline_parallel",
    "sequence_parallel",
    "shared",
    "shared_embedding",
)


def may_change(name: str, param: torch.nn.Parameter) -> bool:
    """Whether Megatron may change the grad of a parameter after its reduction. See [Note: grads that change].

    Args:
        name: the parameter's name in the model.
    """
    return (
        param.ndim < 2
        or "embedding" in name
        or any(getattr(param, mark, False) for mark in MARKS)
        # Its grad is copied out of the grad buffer when the reduction has ended.
        or getattr(param, "main_grad_copy_in_grad_buffer", None) is not None
    )


def changing_shards(params: Sequence[torch.nn.Parameter], names: Mapping[torch.nn.Parameter, str]) -> list[int]:
    """The shards whose grads may change after their reduction.

    Args:
        params: by parameter shard, the model parameter that it is a part of.
        names: of the params, in their model.
    """
    return [owner for owner, param in enumerate(params) if may_change(names[param], param)]


class EarlyGrads:
    """Watches the grad reductions of one optimizer's buckets and sends what the engine has a slot for.

    Args:
        model_chunks: Megatron's DDP-wrapped chunks.
        buffers: the optimizer's buffers, in its order.
        engine: where the grads go.
        params: by parameter shard, the model parameter that it is a part of.
        grad_of: parameter shard -> its grad, a flat view of `main_grad`.
    """

    def __init__(
        self,
        model_chunks: Sequence[Any],
        buffers: Sequence[Any],
        engine: UpdateEngine,
        params: Sequence[torch.nn.Parameter],
        grad_of: Callable[[int], torch.Tensor],
    ) -> None:
        self._engine = engine
        self._params = params
        _count_edits_apart(buffers)
        self._main_grads = [param.main_grad for param in params]  # type: ignore[attr-defined]  # Megatron's attribute
        self._grads = [grad_of(owner) for owner in range(len(params))]
        self._owners: dict[tuple[int, int], set[int]] = {bucket: set() for bucket in engine.memory.buckets}
        for subgroup in engine.partition.subgroups:
            self._owners[subgroup.bucket].update(piece.owner for piece in subgroup.pieces)
        self._homes = {
            owner: (buffers[buffer].buckets[bucket], buffers[buffer])
            for (buffer, bucket), owners in self._owners.items()
            for owner in owners
        }
        # Of each shard whose grads were sent: the counts of edits then, or None if they were reduced once more.
        self._sent: dict[int, tuple[int, ...] | None] = {}
        # In the first step Megatron reduces when the backward pass has ended, so there is little to gain; and where it
        # captures CUDA graphs at the end of that step, its trial runs overwrite the reduced grads for a while.
        self._is_first_step, self._has_reduced = True, False
        for group, buckets in bucket_groups(model_chunks, buffers):
            wrap_method(group, "start_grad_sync", partial(partial, self._start_grad_sync, group, buckets))
            wrap_method(group, "finish_grad_sync", partial(partial, self._finish_grad_sync, buckets))
        for buffer in buffers:
            # What is about to be zeroed may still be being read.
            wrap_method(buffer, "reset", partial(partial, self._reset))

    def edited(self) -> frozenset[int]:
        """The shards whose grads may no longer be those that were sent. See [Note: grads that change]."""
        if self._are_replaced(self._sent):
            return frozenset(self._sent)
        return frozenset(filter(self._is_edited, self._sent))

    def _start_grad_sync(
        self, group: Any, buckets: set[tuple[int, int]], start: Callable[..., None], *args: Any, **kwargs: Any
    ) -> None:
        start(*args, **kwargs)
        self._has_reduced = True
        owners = self._owners_in(buckets)
        if owners & self._sent.keys():
            self._sent.update(dict.fromkeys(owners))
        elif group.grad_reduce_handle is not None and not self._is_first_step and not self._are_replaced(owners):
            self._engine.send_early(buckets, self._grads.__getitem__, group.grad_reduce_handle.wait)
            self._count(owners)

    def _finish_grad_sync(
        self, buckets: set[tuple[int, int]], finish: Callable[..., None], *args: Any, **kwargs: Any
    ) -> None:
        as_sent = {owner for owner in self._owners_in(buckets) & self._sent.keys() if not self._is_edited(owner)}
        finish(*args, **kwargs)
        self._count(as_sent)  # gloo writes what it has reduced when it is waited for

    def _reset(self, reset: Callable[[], None]) -> None:
        self._engine.forget_early()
        self._sent.clear()
        self._is_first_step = not self._has_reduced
        reset()

    def _owners_in(self, buckets: set[tuple[int, int]]) -> set[int]:
        return set().union(*(self._owners.get(bucket, ()) for bucket in buckets))

    def _count(self, owners: Iterable[int]) -> None:
        """Take the grads as they are now for those that were sent."""
        self._sent.update((owner, self._edits(owner)) for owner in owners)

    def _is_edited(self, owner: int) -> bool:
        return self._sent[owner] != self._edits(owner)

    def _are_replaced(self, owners: Iterable[int]) -> bool:
        """Whether a parameter has another tensor for its grad than it had."""
        return any(
            self._params[owner].main_grad is not self._main_grads[owner]  # type: ignore[attr-defined]
            for owner in owners
        )

    def _edits(self, owner: int) -> tuple[int, ...]:
        """How often what a shard's grad lies in has been written to: its parameter's grad, its bucket, its buffer."""
        bucket, buffer = self._homes[owner]
        return self._main_grads[owner]._version, bucket.grad_data._version, buffer.grad_data._version


def _count_edits_apart(buffers: Sequence[Any]) -> None:
    """Give each bucket's and each parameter's grads a count of edits of their own. See [Note: grads that change]."""
    for buffer in buffers:
        for bucket in buffer.buckets:
            bucket.grad_data = bucket.grad_data.data
            for param in bucket.params_list:
                for name in ("main_grad", "main_grad_copy_in_grad_buffer"):
                    if getattr(param, name, None) is not None:
                        setattr(param, name, getattr(param, name).data)
