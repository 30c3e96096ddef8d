"""With --overlap-grad-reduce: grads of CPU subgroups go to the host in the backward pass, as buckets are reduced.

Nothing is updated with them before Megatron has taken the norm of all grads and checked that they are finite; what it
then finds, the loss scale and the clip factor, is applied inside the update.

[Note: grads that change] Some grads are not final when their bucket is reduced: Megatron sums those of norms over
tensor-parallel ranks and those of embeddings over pipeline stages afterwards. Their part of a subgroup is sent once
more in the step. Which they are cannot be seen from the tensors, so every parameter that Megatron may treat in this way
in some configuration counts: all but matrices, and all with one of the marks it looks for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from megatron_dos.engine import UpdateEngine
from megatron_dos.partition import bucket_groups

__all__ = ["EarlyGrads", "may_change"]

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


class EarlyGrads:
    """Watches the grad reductions of one optimizer's buckets and sends what the engine has a slot for.

    Args:
        model_chunks: Megatron's DDP-wrapped chunks.
        buffers: the optimizer's buffers, in its order.
        engine: where the grads go.
        grad_of: parameter shard -> its grad, a flat view into the grad buffer.
    """

    def __init__(
        self,
        model_chunks: Sequence[Any],
        buffers: Sequence[Any],
        engine: UpdateEngine,
        grad_of: Callable[[int], torch.Tensor],
    ) -> None:
        self._engine = engine
        self._grad_of = grad_of
        # In the first step Megatron reduces when the backward pass has ended, so there is little to gain; and where it
        # captures CUDA graphs at the end of that step, its trial runs overwrite the reduced grads for a while.
        self._is_first_step, self._has_reduced = True, False
        for group, buckets in bucket_groups(model_chunks, buffers):
            group.start_grad_sync = partial(self._start_grad_sync, group, group.start_grad_sync, buckets)
        for buffer in buffers:
            # What is about to be zeroed or scaled is no longer what was sent, and may still be being read.
            buffer.reset = partial(self._change_all, buffer.reset)
            buffer.scale_gradients = partial(self._change_all, buffer.scale_gradients)

    def _start_grad_sync(
        self, group: Any, start: Callable[..., None], buckets: set[tuple[int, int]], *args: Any, **kwargs: Any
    ) -> None:
        start(*args, **kwargs)
        self._has_reduced = True
        if group.grad_reduce_handle is not None and not self._is_first_step:
            self._engine.send_early(buckets, self._grad_of, group.grad_reduce_handle.wait)

    def _change_all(self, change: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._engine.forget_early()
        self._is_first_step = not self._has_reduced
        change(*args, **kwargs)
