# SPDX-License-Identifier: Apache-2.0
"""Grads that Megatron's code must not scale in place: unscaled, measured and clipped without an FP32 copy of them all.

They are those in bf16 and fp16, and all grads where some are sent to the host before the step.

[Note: one-element stand-ins] Megatron's own optimizer up-casts such grads to FP32 first and then unscales, takes
the norm and clips in FP32. Scaling them in place in 16 bits would round differently, and an FP32 copy of all of
them is memory the user does not have. FP32 grads that are on their way to the host cannot be scaled in place either.
Megatron's code for these stages only ever looks at a list of FP32 tensors, one per parameter shard, so a small tensor
that answers the same question can stand in for each large one:

  - non-finite check: the largest magnitude is finite exactly when all elements are;
  - norm: the norm of per-shard norms is how Megatron computes the norm of the shards in the first place;
  - clipping: a 1.0 that is scaled in place ends up holding the clip factor;
  - number of zeros: as many zeros as the shard holds, behind that 1.0.

The factors found this way are applied where the update reads the grad, in FP32 and in Megatron's order: unscale
first, then clip. Every result has the bits of the up-casting path where Megatron's own code takes the norm; Transformer
Engine's and Apex's sum squares over all tensors at once, which may differ in the last bits of the norm.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_dos.kernels.fp_environment import ieee_environment

__all__ = ["DeferredGrads"]


class DeferredGrads:
    """The grads of one step that are not scaled in place, and the stand-ins Megatron's grad code sees for them.

    Args:
        fp32_too: treat FP32 grads in this way as well as 16-bit ones.
    """

    def __init__(self, fp32_too: bool = False) -> None:
        self._fp32_too = fp32_too
        self._grads: dict[int, torch.Tensor] = {}  # shard index -> flat view into Megatron's grad buffer
        self._clips: dict[int, torch.Tensor] = {}
        self._shard_of: dict[int, int] = {}  # id of a clip stand-in -> shard index
        self._inv_scale: torch.Tensor | None = None
        self._unscale = 1.0

    @ieee_environment()
    def collect(self, shards: Sequence[torch.Tensor], inv_scale: torch.Tensor | None, count_zeros: bool) -> None:
        """Take grads of `shards` and put stand-ins into their `decoupled_grad` attribute.

        Args:
            shards: parameter shards whose `decoupled_grad` is the reduced grad, in the dtype of the grad buffer.
            inv_scale: the inverse loss scale of this step, an FP32 device tensor of one element, or None. The grad
                scaler changes its scale before the update runs, so it is kept here.
            count_zeros: whether the stand-ins have to answer Megatron's count of zeros.
        """
        self.clear()
        for index, shard in enumerate(shards):
            grad = shard.decoupled_grad  # type: ignore[attr-defined]  # Megatron's attribute
            if grad is not None and (grad.dtype != torch.float32 or self._fp32_too):
                self._grads[index] = grad
        if not self._grads:
            return
        device = next(iter(self._grads.values())).device
        clips = torch.ones(len(self._grads), dtype=torch.float32, device=device).split(1)
        for (index, grad), clip in zip(self._grads.items(), clips, strict=True):
            if count_zeros:
                clip = torch.cat([clip, clip.new_zeros(grad.numel() - int(torch.count_nonzero(grad)))])
            shards[index].decoupled_grad = clip  # type: ignore[attr-defined]
            self._clips[index] = clip
            self._shard_of[id(clip)] = index
        if inv_scale is not None:
            self._inv_scale, self._unscale = inv_scale, inv_scale.item()

    def clear(self) -> None:
        """Forget the step's grads."""
        self._grads.clear()
        self._clips.clear()
        self._shard_of.clear()
        self._inv_scale, self._unscale = None, 1.0

    def grad(self, index: int) -> torch.Tensor | None:
        """The grad of shard `index`, or None when it is scaled in place."""
        return self._grads.get(index)

    def magnitudes(self) -> list[torch.Tensor]:
        """For each grad its largest magnitude, as an FP32 tensor of one element; NaN or inf if it has one."""
        return [
            torch.linalg.vector_norm(grad, ord=float("inf"), dtype=torch.float32).reshape(1)
            for grad in self._grads.values()
        ]

    def for_norm(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Replace the stand-ins in `grads` by tensors of the same norm as the unscaled FP32 grad.

        An FP32 grad without a loss scale is that itself; for others it is a tensor of one element. The FP32 copy that
        its norm is taken of lives for one parameter shard at a time. It is one copy of the whole shard: the norm of
        norms of its parts has other bits than Megatron's norm of the shard.
        """
        return [self._norm(self._shard_of[id(grad)]) if id(grad) in self._shard_of else grad for grad in grads]

    def _norm(self, index: int) -> torch.Tensor:
        grad = self._grads[index]
        if grad.dtype != torch.float32:
            scaled = grad.float()
            if self._inv_scale is not None:
                scaled *= self._inv_scale  # in place: one copy of the shard, not two
            return torch.norm(scaled).reshape(1)
        return grad if self._inv_scale is None else torch.norm(grad * self._inv_scale).reshape(1)

    @ieee_environment()
    def factors(self) -> dict[int, tuple[float, float]]:
        """Shard index -> the inverse loss scale and the factor by which Megatron clipped the grad, or 1.0.

        Reads all clip factors from the device at once.
        """
        if not self._clips:
            return {}
        factors = torch.cat([clip[:1] for clip in self._clips.values()]).tolist()
        return {index: (self._unscale, clip) for index, clip in zip(self._clips, factors, strict=True)}
