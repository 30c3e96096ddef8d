# SPDX-License-Identifier: Apache-2.0
"""What processors and how much memory this machine has."""

from __future__ import annotations

import os
import platform
from pathlib import Path

__all__ = ["cpu_model", "node_memory", "physical_cores"]


def cpu_model() -> str:
    """The processor's name as Linux gives it, or the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def physical_cores() -> int:
    """Cores of the CPUs that this process may use: two hardware threads of one core count once."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        try:
            cores.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:  # not reported, as in some virtual machines
            cores.add(str(cpu))
    return len(cores)


def node_memory() -> int:
    """Bytes of memory of the node."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
