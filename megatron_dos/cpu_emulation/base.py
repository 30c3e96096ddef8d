# SPDX-License-Identifier: Apache-2.0
"""Ground of the stand-in: the real torch.cuda, whether the stand-in is in place, and how it refuses."""

from __future__ import annotations

import torch

REAL_CUDA = torch.cuda  # as it is before activate() replaces it

_active = False


class NotCoveredError(RuntimeError):
    """Something of a GPU was asked for that the CPU stand-in does not have."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} is not covered by megatron_dos.cpu_emulation. Run this on a GPU, or choose Megatron arguments "
            "that do not need it."
        )


def is_active() -> bool:
    """Whether the stand-in is in place in this process."""
    return _active


def set_active() -> None:
    """Record that the stand-in is in place. Nothing takes it out again."""
    global _active
    _active = True
