"""Grads that Megatron keeps in bf16 or fp16: unscaled, measured and clipped without an FP32 copy of them all.

[Note: one-element stand-ins] Megatron's own optimizer up-casts such grads to FP32 first and then unscales, takes
the norm and clips in FP32. Scaling them in place in 16 bits would round differently, and an FP32 copy of all of
them is memory the user does not have. Megatron's code for these stages only ever looks at a list of FP32 tensors,
one per parameter shard, so a small tensor that answers the same question can stand in for each large one:

  - non-finite check: the largest magnitude is finite exactly when all elements are;
  - norm: the norm of per-shard norms is how Megatron computes the norm of the shards in the first place;
  - clipping: a 1.0 that is scaled in place ends up holding the clip factor;
  - number of zeros: as many zeros as the shard holds, behind that 1.0.

The factors found this way are applied where the update reads the grad, in FP32 and in Megatron's order: unscale
first, then clip. Every result has the bits of the up-casting path.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["LowPrecisionGrads"]


class LowPrecisionGrads:
    """The 16-bit grads of one step and the stand-ins Megatron's grad code sees in their place.

    Attributes:
        unscale: the inverse loss scale of the step, by which the grads are still to be multiplied; 1.0 without
            loss scaling, and when all grads are FP32.
    """

    def __init__(self) -> None:
        self._grads: dict[int, torch.Tensor] = {}  # shard index -> flat 16-bit view into Megatron's grad buffer
        self._clips: dict[int, torch.Tensor] = {}
        self._shard_of: dict[int, int] = {}  # id of a clip stand-in -> shard index
        self._inv_scale: torch.Tensor | None = None
        self.unscale = 1.0

    def collect(self, shards: Sequence[torch.Tensor], inv_scale: torch.Tensor | None, count_zeros: bool) -> None:
        """Take the 16-bit grads of `shards` and put stand-ins into their `decoupled_grad` attribute.

        Args:
            shards: parameter shards whose `decoupled_grad` is the reduced grad, in the dtype of the grad buffer.
            inv_scale: the inverse loss scale of this step, an FP32 device tensor of one element, or None. The grad
                scaler changes its scale before the update runs, so it is kept here.
            count_zeros: whether the stand-ins have to answer Megatron's count of zeros.
        """
        self.clear()
        for index, shard in enumerate(shards):
            grad = shard.decoupled_grad
            if grad is None or grad.dtype == torch.float32:
                continue
            zeros = grad.numel() - int(torch.count_nonzero(grad)) if count_zeros else 0
            clip = torch.zeros(1 + zeros, dtype=torch.float32, device=grad.device)
            clip[0] = 1.0
            shard.decoupled_grad = clip
            self._grads[index] = grad
            self._clips[index] = clip
            self._shard_of[id(clip)] = index
        if self._grads and inv_scale is not None:
            self._inv_scale, self.unscale = inv_scale, inv_scale.item()

    def clear(self) -> None:
        """Forget the step's grads."""
        self._grads.clear()
        self._clips.clear()
        self._shard_of.clear()
        self._inv_scale, self.unscale = None, 1.0

    def grad(self, index: int) -> torch.Tensor | None:
        """The 16-bit grad of shard `index`, or None when its grad is FP32."""
        return self._grads.get(index)

    def magnitudes(self) -> list[torch.Tensor]:
        """For each 16-bit grad its largest magnitude, as an FP32 tensor of one element; NaN or inf if it has one."""
        return [
            torch.linalg.vector_norm(grad, ord=float("inf"), dtype=torch.float32).reshape(1)
            for grad in self._grads.values()
        ]

    def for_norm(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Replace the stand-ins in `grads` by one-element tensors that hold the norm of the unscaled FP32 grad.

        The FP32 copy that the norm is taken of lives for one parameter shard at a time.
        """
        return [self._norm(self._shard_of[id(grad)]) if id(grad) in self._shard_of else grad for grad in grads]

    def _norm(self, index: int) -> torch.Tensor:
        grad = self._grads[index].float()
        if self._inv_scale is not None:
            grad.mul_(self._inv_scale)
        return torch.norm(grad).reshape(1)

    def clip_factors(self) -> dict[int, float]:
        """Shard index -> the factor by which Megatron clipped its grad (1.0 where it did not).

        Reads all factors from the device at once.
        """
        if not self._clips:
            return {}
        factors = torch.cat([clip[:1] for clip in self._clips.values()]).tolist()
        return dict(zip(self._clips, factors, strict=True))
