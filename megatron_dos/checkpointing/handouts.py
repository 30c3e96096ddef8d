# SPDX-License-Identifier: Apache-2.0
"""Saves that later steps cannot tear: what was handed out is copied before a writer is forked.

[Note: saves by reference] A save hands out views of the host states, not copies: that is how a synchronous save takes
no second copy of them. An asynchronous one must not see the steps that follow. Megatron's persistent writer is sent the
tensors through a queue, which copies host tensors into shared memory before the save call returns. A writer that is
forked instead inherits the memory, and page-locked states are mapped shared (see `node/slab.py`), so it would see
every later step. `Handouts` therefore copies what is handed out and still in use just before a fork. Either way the
file holds the states at the moment of the call, no step ever waits for a writer, and the copy lives as long as the
writer needs it.

Shared memory may be full when a save comes. The queue copies in a thread of its own, which drops what it cannot copy,
and the save call would wait for ever; a fork cannot be stopped, and its writer would write a torn file. So
`share_handouts` makes the copy before a save is scheduled, where an error is one of the save; and a fork that comes
without, when the copy fails, is not allowed to live.
"""

from __future__ import annotations

import os
import resource
import shutil
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_dos.node.memory import HostMemoryError
from megatron_dos.node.threads import ranks_on_node
from megatron_dos.refusal import Refusal
from megatron_dos.words import gib, plural

__all__ = ["CheckpointError", "Handouts", "require_room_for_copies", "require_shared_memory", "share_handouts"]


class CheckpointError(RuntimeError, Refusal):
    """A checkpoint cannot be saved or loaded, or was loaded in part only."""


class Handouts:
    """Views of the states that somebody outside may still read. See [Note: saves by reference]."""

    def __init__(self) -> None:
        self._storages: list[StorageWeakRef] = []
        self._has_room = False  # for copies, as an asynchronous save has found
        _all_handouts.add(self)

    def add(self, views: Iterable[torch.Tensor]) -> None:
        """Watch those of `views` that have a storage of their own in host memory. The others are on the device, which
        is copied from before a fork."""
        self._storages = [reference for reference in self._storages if not reference.expired()]
        for view in views:
            storage = view.untyped_storage()
            if view.device.type == "cpu" and storage.nbytes() == view.nbytes > 0:
                self._storages.append(StorageWeakRef(storage))

    def detach(self) -> int:
        """Give every view that is still in use its own copy of its values; returns how many bytes were copied."""
        copied = 0
        for storage in self._to_copy():
            storage.share_memory_()  # in place: whoever holds the storage sees the copy from now on
            copied += storage.nbytes()
        self._storages = []
        return copied

    def require_room(self) -> None:
        """Of the first asynchronous save, before it copies anything: see `require_shared_memory`.

        Later ones may find copies there that other ranks have made already.
        """
        needed = 0 if self._has_room else sum(storage.nbytes() for storage in self._to_copy())
        if needed:
            require_shared_memory(needed)
            self._has_room = True

    def _to_copy(self) -> Iterator[torch.UntypedStorage]:
        for reference in self._storages:
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None and not storage.is_shared():
                yield storage


_all_handouts: weakref.WeakSet[Handouts] = weakref.WeakSet()


def require_room_for_copies() -> None:
    """Called when an asynchronous save begins: refuse the first one whose copies would not fit into shared memory.

    Raises:
        HostMemoryError: see `require_shared_memory`.
    """
    for handouts in list(_all_handouts):
        handouts.require_room()


def share_handouts() -> str:
    """Copy into shared memory what has been handed out to a writer in another process, before it is sent there.

    Returns: why that is not possible; nothing if it is done.
    """
    try:
        for handouts in list(_all_handouts):
            handouts.detach()
    except RuntimeError as error:  # as torch reports that no memory is left
        return f"the optimizer states cannot be copied for an asynchronous save: {error}"
    return ""


_torn = ""  # why a process that is being forked would see states that change


def _before_fork() -> None:
    global _torn
    _torn = share_handouts()


def _end_if_torn() -> None:
    if _torn:
        os.write(2, f"megatron-dos: this process ends, as it could write a torn checkpoint: {_torn}\n".encode())
        os._exit(1)


os.register_at_fork(before=_before_fork, after_in_child=_end_if_torn)


def require_shared_memory(needed: int, folder: str = "/dev/shm") -> None:
    """Refuse asynchronous saves whose copies would not fit, and allow as many open files as they take.

    torch puts tensors that it sends to another process into `folder`, a file each. Without room for one, the process
    is killed with SIGBUS in the middle of the save.

    Args:
        needed: bytes of the states of this rank; the other ranks of the node are taken to need as much.

    Raises:
        HostMemoryError: less than that is free.
    """
    ranks = ranks_on_node()
    free = shutil.disk_usage(folder).free if os.path.isdir(folder) else 0
    if needed * ranks > free:
        raise HostMemoryError(
            f"--async-save sends {gib(needed, 2)} of optimizer states a rank through {folder}, "
            f"{gib(needed * ranks, 2)} for the {plural(ranks, 'rank')} of this node, and {gib(free, 2)} are "
            "free there. Give the container more (docker run --shm-size, or a larger tmpfs), or drop --async-save."
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
