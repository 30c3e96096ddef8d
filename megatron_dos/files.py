# SPDX-License-Identifier: Apache-2.0
"""Files that appear whole or not at all.

[Note: leftovers] A process that is killed leaves the temporary file that it was writing. Its name tells the process,
so that the next writer of the same file can remove it, but never that of a process that still writes. Process ids of
another machine or container tell nothing here; what is from there goes when nothing has been written to it for a day.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

__all__ = ["new_file", "new_files", "remove_leftovers"]

ABANDONED_AFTER_S = 24 * 60 * 60
"""Without a change. Ranks that write a checkpoint wait for each other, and give up far sooner."""


@contextmanager
def new_file(path: str | os.PathLike[str], overwrite: bool = False) -> Iterator[Path]:
    """A temporary path to write to, which becomes `path` at the end of the block; after an error nothing is left.

    Raises:
        FileNotFoundError: there is no such folder.
        FileExistsError: `path` is there, and `overwrite` is false.
    """
    with new_files([path], overwrite) as (temporary,):
        yield temporary


@contextmanager
def new_files(paths: Sequence[str | os.PathLike[str]], overwrite: bool = False) -> Iterator[list[Path]]:
    """The same for several files: none of them appears before all are written.

    Raises:
        FileNotFoundError: a folder is missing.
        FileExistsError: one of the files is there, and `overwrite` is false.
    """
    targets = [Path(path) for path in paths]
    _check(targets, overwrite)
    for target in targets:
        remove_leftovers(target)
    temporaries = [target.with_name(f".{target.name}.{_writer()}.{secrets.token_hex(4)}") for target in targets]
    with ExitStack() as leftovers:
        for temporary in temporaries:
            leftovers.callback(temporary.unlink, missing_ok=True)
        yield temporaries
        _check(targets, overwrite)
        for temporary, target in zip(temporaries, targets, strict=True):
            temporary.replace(target)


def _check(targets: Sequence[Path], overwrite: bool) -> None:
    for target in targets:
        if not target.parent.is_dir():
            raise FileNotFoundError(f"{target}: there is no folder {target.parent}")
        if not overwrite and target.exists():
            raise FileExistsError(f"{target} is there already")


# --- What killed processes have left: see [Note: leftovers] ----------------------------------------------------------

# What follows the name of the file. Once there was no writer in it.
_TEMPORARY = re.compile(r"(?:\.(?P<place>[0-9a-f]{8})-(?P<pid>\d+)-(?P<start>\d+))?\.[0-9a-f]{8}")


def remove_leftovers(path: str | os.PathLike[str]) -> None:
    """Remove the temporary files from which `path` would have become, if their writers live no more."""
    target = Path(path)
    with suppress(OSError):  # whatever they are, they are in nobody's way
        for found in target.parent.glob(f".{glob.escape(target.name)}.*"):
            written_by = _TEMPORARY.fullmatch(found.name.removeprefix(f".{target.name}"))
            if written_by and _is_abandoned(found, written_by):
                found.unlink(missing_ok=True)


def _is_abandoned(temporary: Path, written_by: re.Match[str]) -> bool:
    if written_by["place"] and written_by["place"] == _place():
        return not _is_running(int(written_by["pid"]), written_by["start"])
    return time.time() - temporary.stat().st_mtime > ABANDONED_AFTER_S


def _writer() -> str:
    """This process, as no other is called, neither here nor elsewhere."""
    return f"{_place()}-{os.getpid()}-{_start_of(os.getpid())}"


@functools.cache
def _place() -> str:
    """Where process ids mean the same: this boot of this machine, and in it this container."""
    try:
        boot, container = Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")
    except OSError:
        return secrets.token_hex(4)  # of no other process
    return hashlib.sha256(f"{boot} {container}".encode()).hexdigest()[:8]


def _is_running(pid: int, start: str) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    return _start_of(pid) == start


def _start_of(pid: int) -> str:
    """When the process was started, in the kernel's ticks; 0 if that is unknown, or if it has ended already."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "0"
    return "0" if state in "ZX" else fields[18]
