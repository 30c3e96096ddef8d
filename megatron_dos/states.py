"""The optimizer states in host memory: FP32 master params, exp_avg and exp_avg_sq, one flat slab of each.

Each owned parameter's states are slices of the slabs; they exist nowhere else, neither on the device nor as a
second host copy.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from megatron_dos.kernels import slab

__all__ = ["BYTES_PER_PARAMETER", "HostMemoryError", "HostStates", "require_host_memory"]

BYTES_PER_PARAMETER = 12  # FP32 master, exp_avg, exp_avg_sq


class HostMemoryError(MemoryError):
    """The optimizer states of this node's ranks do not fit into its free host memory."""


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


def available_host_memory() -> int:
    """Bytes this process may still take: the machine's, or its container's limit where that is lower."""
    available = psutil.virtual_memory().available
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit = Path(limit_file).read_text().strip()
            usage = Path(usage_file).read_text().strip()
        except OSError:
            continue
        if limit.isdigit() and usage.isdigit():  # "max" where there is no limit
            available = min(available, max(int(limit) - int(usage), 0))
    return available


def require_host_memory(needed: int, ranks_on_node: int | None = None) -> None:
    """Refuse before anything is allocated when the node's ranks would not fit.

    Args:
        needed: bytes of states and staging of this rank; the other ranks of the node are taken to need as much.
        ranks_on_node: default LOCAL_WORLD_SIZE, as torchrun sets it, or 1.

    Raises:
        HostMemoryError: the sum exceeds what is available.
    """
    ranks = ranks_on_node or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    available = available_host_memory()
    if needed * ranks > available:
        raise HostMemoryError(
            f"--use-deep-optimizer-states needs {needed / 2**30:.2f} GiB of host memory for the optimizer states of "
            f"each rank, {needed * ranks / 2**30:.2f} GiB for the {ranks} rank(s) of this node, but only "
            f"{available / 2**30:.2f} GiB are available. Spread the states over more data-parallel ranks or nodes, "
            "raise the memory limit of the container, or lower --dos-subgroup-size if the staging slots are what "
            "does not fit."
        )
