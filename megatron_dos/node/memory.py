# SPDX-License-Identifier: Apache-2.0
"""How much host memory this node has, and whether the states of its ranks fit."""

from __future__ import annotations

import psutil

from megatron_dos.node import gpu, reservations
from megatron_dos.node.control_groups import control_groups
from megatron_dos.node.threads import ranks_on_node
from megatron_dos.refusal import Refusal
from megatron_dos.words import plural

__all__ = ["HostMemoryError", "host_memory_taken", "require_host_memory"]


class HostMemoryError(MemoryError, Refusal):
    """The optimizer states of this node's ranks do not fit into its free host memory."""


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
        HostMemoryError: the need exceeds the available memory.
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
            "raise the memory limit of the container, or lower --dos-subgroup-size if the staging slots do not "
            "fit."
        )


def host_memory_taken() -> None:
    """The memory granted by `require_host_memory` has been allocated; from now on other ranks see it as used."""
    if gpu.in_use():
        reservations.release()
