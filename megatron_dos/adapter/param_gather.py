# SPDX-License-Identifier: Apache-2.0
"""With --overlap-param-gather: each bucket's parameter all-gather starts when its last subgroup is written.

Megatron itself starts the gathers when the next forward pass asks for the first parameters. Started from within the
step, bucket by bucket, they overlap with the updates that are still to come. The forward pass waits for them as before.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from megatron_dos.adapter.buffers import bucket_groups

__all__ = ["EarlyParamGather", "is_possible"]


def is_possible(config: Any, ddp_config: Any, model_config: Any) -> bool:
    """Whether Megatron lets somebody else start the gathers: not where it starts them at moments of its own, nor
    where a CUDA graph of the whole iteration holds the waits for them."""
    return (
        ddp_config.overlap_param_gather
        and getattr(model_config, "cuda_graph_impl", "none") != "full_iteration"
        and not ddp_config.align_param_gather
        and not config.overlap_param_gather_with_optimizer_step
    )


class EarlyParamGather:
    """Starts the all-gathers of one optimizer's buckets in one order on all ranks.

    Collectives must be started in the same order everywhere, but a rank that owns nothing of a bucket is never told
    that the bucket is written. So the order is fixed, such buckets count as written from the start, and a gather
    waits for those before it.

    Args:
        model_chunks: Megatron's DDP-wrapped chunks.
        buffers: the optimizer's buffers, in its order.
        owned_buckets: (buffer, bucket) indices of which this rank owns a part.
    """

    def __init__(
        self, model_chunks: Sequence[Any], buffers: Sequence[Any], owned_buckets: Iterable[tuple[int, int]]
    ) -> None:
        owned = set(owned_buckets)
        # As the engine goes through the buckets: last first, which is what the forward pass needs first.
        groups = sorted(bucket_groups(model_chunks, buffers), key=lambda found: min(found[1]), reverse=True)
        self._groups = [(members & owned, group) for group, members in groups]
        self._written: set[tuple[int, int]] = set()
        self._started = 0
        # Megatron takes a gather that is under way already for a sign of a wrong order of parameters.
        warnings.filterwarnings("ignore", message="The next bucket's parameter all-gather operation has already been")

    def begin(self) -> None:
        """A new step: nothing is written yet, and no gather of an earlier one may still be under way.

        The forward pass has waited for all that it used; what it did not use is waited for here.
        """
        for _, group in self._groups:
            if group.param_gather_handle is not None:
                group.param_gather_handle.wait()
                group.param_gather_handle = None
        self._written.clear()
        self._started = 0

    def release(self, bucket: tuple[int, int]) -> None:
        """The bucket's params are written on this rank: start what can be started."""
        self._written.add(bucket)
        self._start()

    def finish(self) -> None:
        """The step's program is enqueued: every gather has been started, also on ranks that own nothing."""
        self._start()
        if self._started != len(self._groups):
            raise RuntimeError(f"{len(self._groups) - self._started} param all-gathers were not started in the step")

    def _start(self) -> None:
        while self._started < len(self._groups) and self._groups[self._started][0] <= self._written:
            self._groups[self._started][1].start_param_sync()
            self._started += 1
