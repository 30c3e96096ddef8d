# SPDX-License-Identifier: Apache-2.0
"""Host memory that ranks of this node have been promised and have not taken yet.

Ranks page-lock their states at the same time, so what one of them sees as available the others may be about to take. A
small file in shared memory, one for each user and locked while it is read and written, holds what is promised to whom.
Processes that have ended count for nothing, so a rank that was killed leaves nothing behind.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

__all__ = ["release", "reserve"]


def reserve(needed: int, available: Callable[[], int]) -> int:
    """Promise `needed` bytes to this process, unless that would exceed the available memory.

    Args:
        needed: bytes.
        available: asked, while no other process can reserve, for what is free now.

    Returns:
        Bytes that are left for this process: available ones that are not promised to others. Nothing is promised where
        they are fewer than `needed`.
    """
    with _promises() as promises:
        left = available() - sum(nbytes for _, nbytes in promises.values())
        if needed <= left:
            promises[str(os.getpid())] = (psutil.Process().create_time(), needed)
        return left


def release() -> None:
    """What was promised to this process has been taken, or is not needed."""
    with _promises() as promises:
        promises.pop(str(os.getpid()), None)


@contextmanager
def _promises() -> Iterator[dict[str, tuple[float, int]]]:
    """Process id -> its time of creation and its bytes; written back at the end. One process at a time."""
    with os.fdopen(os.open(_path(), os.O_RDWR | os.O_CREAT, 0o600), "r+", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            written = json.loads(file.read() or "{}")
        except ValueError:  # whoever wrote it was killed in the middle
            written = {}
        promises = {pid: (created, nbytes) for pid, (created, nbytes) in written.items() if _lives(int(pid), created)}
        yield promises
        file.seek(0)
        file.truncate()
        json.dump(promises, file)


def _lives(pid: int, created: float) -> bool:
    try:
        return psutil.Process(pid).create_time() == created
    except psutil.NoSuchProcess:
        return False


def _path() -> Path:
    shared = Path("/dev/shm")
    folder = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    return folder / f"megatron-dos-{os.getuid()}.promised"
