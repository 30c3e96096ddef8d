# SPDX-License-Identifier: Apache-2.0
"""The optimizer states: FP32 master params, exp_avg and exp_avg_sq, one flat slab of each in host memory.

Each owned parameter's states are slices of the slabs; they exist nowhere else, neither on the device nor as a
second host copy. The user may have a share of them reside on the device instead: then they are there only.
"""

from __future__ import annotations

import torch

from megatron_dos.node import slab
from megatron_dos.program.partition import BYTES_PER_PARAMETER, STATES
from megatron_dos.refusal import Refusal

__all__ = ["DeviceMemoryError", "HostStates", "ResidentStates"]


class DeviceMemoryError(MemoryError, Refusal):
    """The optimizer states that are to reside on the device do not fit into its free memory."""


class HostStates:
    """Flat FP32 host arrays of `numel` elements each: `master`, `exp_avg`, `exp_avg_sq`.

    All start as zeros. Without a GPU their pages take memory when they are first written; with one they are
    page-locked at once.
    """

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.master = slab.zeros(numel)
        self.exp_avg = slab.zeros(numel)
        self.exp_avg_sq = slab.zeros(numel)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self.numel * BYTES_PER_PARAMETER


class ResidentStates:
    """Flat FP32 arrays of `numel` zeros each on a device: `master`, `exp_avg`, `exp_avg_sq`.

    Raises:
        DeviceMemoryError: they do not fit; nothing has been allocated then.
    """

    def __init__(self, numel: int, device: torch.device) -> None:
        needed = numel * BYTES_PER_PARAMETER
        if device.type == "cuda" and numel:
            torch.cuda.empty_cache()  # what the caching allocator holds unused is free, but does not look so
            free = torch.cuda.mem_get_info(device)[0]
            if needed > free:
                raise DeviceMemoryError(
                    f"--dos-resident-share keeps {needed / 2**30:.2f} GiB of optimizer states on the GPU, but only "
                    f"{free / 2**30:.2f} GiB of its memory are free, before activations. Lower the share."
                )
        self.master = torch.zeros(numel, device=device)
        self.exp_avg = torch.zeros(numel, device=device)
        self.exp_avg_sq = torch.zeros(numel, device=device)

    def move_to(self, device: torch.device) -> None:
        """Move all states, one array after the other."""
        for name in STATES:
            setattr(self, name, getattr(self, name).to(device))


