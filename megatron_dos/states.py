"""The optimizer states in host memory: FP32 master params, exp_avg and exp_avg_sq, one flat slab of each.

Each owned parameter's states are slices of the slabs; they exist nowhere else, neither on the device nor as a
second host copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

from megatron_dos.kernels import gpu, slab
from megatron_dos.kernels.threads import ranks_on_node

__all__ = ["BYTES_PER_PARAMETER", "STATES", "HostMemoryError", "HostStates", "require_host_memory"]

STATES = ("master", "exp_avg", "exp_avg_sq")
BYTES_PER_PARAMETER = 4 * len(STATES)  # all in FP32


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

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self.numel * BYTES_PER_PARAMETER


def available_host_memory() -> int:
    """Bytes this process may still take: the machine's, or those of the tightest of its control groups."""
    available = psutil.virtual_memory().available
    for group in _control_groups():
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


def _control_groups() -> Iterator[Path]:
    """Folders of the control groups of this process, from its own up to the root: a job's limit can sit on any."""
    roots = {"": Path("/sys/fs/cgroup"), "memory": Path("/sys/fs/cgroup/memory")}
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        root = roots.get("memory" if "memory" in controllers.split(",") else controllers)
        if root is not None:
            own = root / name.lstrip("/")
            yield own
            yield from (parent for parent in own.parents if parent.is_relative_to(root))
    yield from roots.values()  # what a container sees of its own group


def require_host_memory(needed: int) -> None:
    """Refuse before anything is allocated when the states would not fit.

    With a GPU memory is taken at once, so each rank compares its own need with what the ranks before it have left.
    Without one pages are taken when they are first written, so the need of all ranks of the node is compared.

    Args:
        needed: bytes of states and staging of this rank; other ranks of the node are taken to need as much.

    Raises:
        HostMemoryError: the need exceeds what is available.
    """
    ranks = ranks_on_node()
    available = available_host_memory()
    counted = 1 if gpu.in_use() else ranks
    if needed * counted > available:
        raise HostMemoryError(
            f"--use-deep-optimizer-states needs {needed / 2**30:.2f} GiB of host memory for the optimizer states of "
            f"each rank, {needed * ranks / 2**30:.2f} GiB for the {ranks} rank(s) of this node, but only "
            f"{available / 2**30:.2f} GiB are available. Spread the states over more data-parallel ranks or nodes, "
            "raise the memory limit of the container, or lower --dos-subgroup-size if the staging slots are what "
            "does not fit."
        )
