# SPDX-License-Identifier: Apache-2.0
"""The optimizer states: FP32 master params, exp_avg and exp_avg_sq, one flat slab of each in host memory.

Each owned parameter's states are slices of the slabs; they exist nowhere else, neither on the device nor as a
second host copy. The user may have a share of them reside on the device instead: then they are there only.
"""

from __future__ import annotations

import psutil
import torch

from megatron_dos.node import gpu, reservations, slab
from megatron_dos.node.control_groups import control_groups
from megatron_dos.node.threads import ranks_on_node
from megatron_dos.program.partition import BYTES_PER_PARAMETER, STATES
from megatron_dos.refusal import Refusal
from megatron_dos.words import plural

__all__ = [
    "DeviceMemoryError",
    "HostMemoryError",
    "HostStates",
    "ResidentStates",
    "host_memory_taken",
    "require_host_memory",
]


class HostMemoryError(MemoryError, Refusal):
    """The optimizer states of this node's ranks do not fit into its free host memory."""


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


def available_host_memory() -> int:
    """Bytes this process may still take: the machine's, or those of the tightest of its control groups."""
    available = psutil.virtual_memory().available
    for group in control_groups("memory"):
        for limit_name, usage_name, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            try:
                limit = (group / limit_name).read_text().strip()
                usage = (group / usage_name).read_text().strip()
                statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            except OSError:
                continue
            if limit.isdigit() and usage.isdigit():  # "max" where there is no limit
                used = int(usage) - int(statistics.get(cache, 0))  # file cache is given up when memory is asked for
                available = min(available, max(int(limit) - used, 0))
    return available


def require_host_memory(needed: int) -> None:
    """Refuse before anything is allocated when the states would not fit.

    With a GPU memory is taken at once: each rank compares its own need with what the ranks before it have left, and
    calls `host_memory_taken` when it has allocated. Without one pages are taken when they are first written, so the
    need of all ranks of the node is compared.

    Args:
        needed: bytes of states and staging of this rank; other ranks of the node are taken to need as much.

    Raises:
        HostMemoryError: the need exceeds what is available.
    """
    ranks = ranks_on_node()
    if gpu.in_use():
        available, counted = reservations.reserve(needed, available_host_memory), 1
    else:
        available, counted = available_host_memory(), ranks
    if needed * counted > available:
        raise HostMemoryError(
            f"--use-deep-optimizer-states needs {needed / 2**30:.2f} GiB of host memory for the optimizer states of "
            f"each rank, {needed * ranks / 2**30:.2f} GiB for the {plural(ranks, 'rank')} of this node, but only "
            f"{available / 2**30:.2f} GiB are available. Spread the states over more data-parallel ranks or nodes, "
            "raise the memory limit of the container, or lower --dos-subgroup-size if the staging slots are what "
            "does not fit."
        )


def host_memory_taken() -> None:
    """What `require_host_memory` has allowed is allocated: other ranks see it themselves from now on."""
    if gpu.in_use():
        reservations.release()
