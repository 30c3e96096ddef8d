# SPDX-License-Identifier: Apache-2.0
"""The measured machine of this node: where its file is kept, and when it may be used.

`megatron-dos calibrate` writes a `Machine` below the user's cache folder, one file for each node and fingerprint. The
fingerprint says on what it was measured; a file is used only where that is the same. Files are replaced atomically, so
a reader finds a whole one or none, and a lock lets one process of a node measure while the others wait for its result.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from megatron_dos.files import new_file
from megatron_dos.node.gpu import _gpu_names, driver_version, gpu_count
from megatron_dos.node.topology import cpu_model, node_memory
from megatron_dos.planning.machine import Machine, MachineError, load
from megatron_dos.version import RELEASE

__all__ = ["CacheError", "cache_file", "cached_machine", "fingerprint", "gpu_count", "locked", "store"]

_logger = logging.getLogger(__name__)


class CacheError(Exception):
    """The cache folder cannot be written; the message says why and what to do."""


def cached_machine() -> Machine | None:
    """The machine that `megatron-dos calibrate` measured here; None where it has not, or something has changed since.

    Initialises CUDA where there is a GPU, to learn its name.
    """
    expected = fingerprint()
    path = cache_file(expected)
    if not path.exists():
        return None
    try:
        machine = load(path)
    except MachineError as error:
        _logger.warning("the calibration of this machine is not used: %s. Run: megatron-dos calibrate --again", error)
        return None
    return machine if machine.fingerprint == expected else None


def store(machine: Machine) -> Path:
    """Keep a machine, whose fingerprint is that of this node, for `cached_machine`; its file.

    Raises:
        CacheError: it cannot be kept.
    """
    path = cache_file(machine.fingerprint)
    with _cache_errors():
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path, overwrite=True) as temporary:
            temporary.write_text(machine.as_json(), encoding="utf-8")
    return path


@contextlib.contextmanager
def _cache_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CacheError(
            f"the calibration cannot be kept: {error}. Set XDG_CACHE_HOME to a folder that can be written"
        ) from error


@contextlib.contextmanager
def locked(expected: str) -> Iterator[Machine | None]:
    """Hold off other processes that would measure this machine; what one of them measured while this one waited.

    Where the file system has no locks, several may measure; each file that they write is whole all the same.

    Raises:
        CacheError: the cache folder cannot be written.
    """
    began = time.time()
    path = cache_file(expected)
    with _cache_errors():
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(path.with_suffix(".lock"), "a")  # noqa: SIM115 (closed below)
    with lock:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        fresh = path.exists() and path.stat().st_mtime >= began
        yield cached_machine() if fresh else None


def cache_file(of: str) -> Path:
    """Where the machine with the fingerprint `of` is kept: below $XDG_CACHE_HOME, else ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(base) if os.path.isabs(base) else Path.home() / ".cache"  # a relative one is to be ignored
    node = re.sub(r"[^\w.-]", "-", socket.gethostname()) or "node"
    return folder / "megatron-dos" / f"{node}-{hashlib.sha256(of.encode()).hexdigest()[:12]}.json"


def fingerprint() -> str:
    """What this process sees of the machine, and the release that measures: 'name: value' pairs, on one line."""
    parts = {
        "cpu": cpu_model(),
        "cpus allowed": len(os.sched_getaffinity(0)),
        "memory": f"{round(node_memory() / 2**30)} GiB",
        # Not their number: a process may see one GPU of several, as under Slurm's --gpus-per-task.
        "gpu": " + ".join(sorted(set(_gpu_names()))) or "none",
        "driver": driver_version() or "none",
        "megatron-dos": RELEASE,
    }
    return ", ".join(f"{name}: {value}" for name, value in parts.items())


