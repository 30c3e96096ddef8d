# SPDX-License-Identifier: Apache-2.0
"""The systems that are compared on the virtual clock: their names, and the facts in which their steps differ.

`rivals` has the programs of these designs. They are apart so that a command can list the systems without loading the
model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

__all__ = ["OURS", "RIVALS", "Design", "GradTransfer", "System"]


class GradTransfer(Enum):
    """When the grads of CPU subgroups are sent to the host, and whether that takes time."""

    IN_STEP = auto()
    SHOWN = auto()
    """In the backward pass, which is longer by the copies: the published logs of DeepSpeed's code show it."""
    HIDDEN = auto()
    """In the backward pass, beside its computations."""


class Design(Enum):
    """How a system goes through a step."""

    OURS = auto()
    FULL_OFFLOAD = auto()
    PUBLISHED = auto()
    DEVICE_STREAMING = auto()
    SUPEROFFLOAD = auto()
    HYBRID_DEVICE_OPTIMIZER = auto()

    @property
    def travels_in_fp32(self) -> bool:
        """Whether grads and params travel in FP32, whatever the dtypes of the model."""
        return self in (Design.SUPEROFFLOAD, Design.HYBRID_DEVICE_OPTIMIZER)

    @property
    def keeps_grads_on_host(self) -> bool:
        """Whether the host holds FP32 grads of all CPU subgroups at once, instead of slots."""
        return self in (Design.FULL_OFFLOAD, Design.PUBLISHED, Design.HYBRID_DEVICE_OPTIMIZER)

    def grad_transfer(self, early_grads: bool) -> GradTransfer:
        """When grads are sent, where `early_grads` allows the backward pass."""
        if self in (Design.FULL_OFFLOAD, Design.PUBLISHED):
            return GradTransfer.SHOWN
        if early_grads and self in (Design.OURS, Design.SUPEROFFLOAD):
            return GradTransfer.HIDDEN
        return GradTransfer.IN_STEP


@dataclass(frozen=True)
class System:
    """A system with its settings.

    Attributes:
        name: as tables have it.
        word: as the command line has it.
        design: how it goes through a step.
        pinned: of full offload: whether params are sent from page-locked memory.
        stride: of the published interleaving: one subgroup in `stride` is updated on the GPU.
    """

    name: str
    word: str
    design: Design
    pinned: bool = False
    stride: int = 2


OURS = System("ours", "ours", Design.OURS)

RIVALS: Mapping[str, System] = {
    system.name: system
    for system in (
        System("full offload", "full-offload", Design.FULL_OFFLOAD),
        System(
            "full offload, page-locked params", "full-offload-page-locked-params", Design.FULL_OFFLOAD, pinned=True
        ),
        System("published, k=2", "published-k2", Design.PUBLISHED, stride=2),
        System("published, k=3", "published-k3", Design.PUBLISHED, stride=3),
        System("published, k=1", "published-k1", Design.PUBLISHED, stride=1),
        System("GPU streaming", "gpu-streaming", Design.DEVICE_STREAMING),
        System("SuperOffload, no speculation", "superoffload-no-speculation", Design.SUPEROFFLOAD),
        System("HybridDeviceOptimizer", "hybriddeviceoptimizer", Design.HYBRID_DEVICE_OPTIMIZER),
    )
}
"""By name. With a resident part, full offload is TwinFlow's static split."""
