# SPDX-License-Identifier: Apache-2.0
"""The control groups of this process: the folders in which the kernel keeps limits on memory and CPU time.

A limit can sit on any group from the process's own up to the root, and a container sees its own group as the root.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["control_groups", "cpu_quotas"]

_MOUNT = Path("/sys/fs/cgroup")
_OF_PROCESS = Path("/proc/self/cgroup")


def control_groups(controller: str) -> Iterator[Path]:
    """Folders of the groups of this process, from its own up to the root, for a controller like 'memory' or 'cpu'.

    Those of version 2, which has one tree for all controllers, are among them. Some folders may not exist.
    """
    roots = {"": _MOUNT, controller: _MOUNT / controller}
    try:
        lines = _OF_PROCESS.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        root = roots.get(controller if controller in controllers.split(",") else controllers)
        if root is not None:
            own = root / name.lstrip("/")
            yield own
            yield from (parent for parent in own.parents if parent.is_relative_to(root))
    yield from roots.values()  # what a container sees of its own group


def cpu_quotas() -> dict[str, float]:
    """Group -> CPUs whose time its processes may use together, of the groups of this process that have such a quota.

    Names of groups are those of the kernel's inodes: the same for all processes in a group, whatever each sees as the
    root.
    """
    quotas = {}
    for group in control_groups("cpu"):
        try:
            quota = _quota(group)
            if quota is not None:
                status = group.stat()
                quotas[f"{status.st_dev}:{status.st_ino}"] = quota
        except OSError:
            continue
    return quotas


def _quota(group: Path) -> float | None:
    """CPUs of one group's quota; None where it has none."""
    if (group / "cpu.max").exists():  # version 2
        quota, period = (group / "cpu.max").read_text().split()
    else:
        quota, period = ((group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    return int(quota) / int(period) if quota.isdigit() else None  # else "max", or -1
