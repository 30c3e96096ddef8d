"""How many worker threads the CPU update gets, and on which CPUs they run.

The default is this rank's share of the CPUs the process may use, whatever OMP_NUM_THREADS says: torchrun sets that
to 1, and ranks that each take every CPU slow one another down.
"""

from __future__ import annotations

import os

__all__ = ["cpus_of_rank", "default_threads"]


def _local(name: str, default: int, least: int) -> int:
    """An integer environment variable of torchrun."""
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise ValueError(f"environment variable {name}: expected an integer of at least {least}, got {text!r}")
    return value


def default_threads() -> int:
    """This rank's share of the allowed CPUs: their number over LOCAL_WORLD_SIZE, at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // _local("LOCAL_WORLD_SIZE", 1, 1))


def cpus_of_rank() -> list[int]:
    """The allowed CPUs on which this rank's workers run; ranks of one node do not share them where there are enough."""
    allowed = sorted(os.sched_getaffinity(0))
    ranks = _local("LOCAL_WORLD_SIZE", 1, 1)
    rank = _local("LOCAL_RANK", 0, 0)
    share = len(allowed) // ranks
    if share == 0 or rank >= ranks:
        return allowed
    return allowed[rank * share : (rank + 1) * share]
