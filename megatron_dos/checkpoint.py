"""What checkpoints need beyond reading and writing the host states: saves that steps cannot tear, loads that cannot
leave half a state behind unnoticed.

[Note: saves by reference] A save hands out views of the host states, not copies: that is how a synchronous save takes
no second copy of them. An asynchronous one must not see the steps that follow. Megatron's persistent writer is sent the
tensors through a queue, which copies host tensors into shared memory before the save call returns. A writer that is
forked instead inherits the memory, and page-locked states are mapped shared (see `kernels/slab.py`), so it would see
every later step. `Handouts` therefore copies what is handed out and still in use just before a fork. Either way the
file holds the states at the moment of the call, no step ever waits for a writer, and the copy lives as long as the
writer needs it.

[Note: loads in place] A load from a distributed checkpoint reads into the states themselves, which is how it takes no
second copy. So nothing may be read before it is known that all can be: `_require_whole_files` compares the sizes of
the files with what the checkpoint says they hold; torch and Megatron compare names, shapes and dtypes of what a rank
reads before it reads, and `_require_tensors` those of what its peers read. From then on until the whole load is over,
the optimizer refuses to step and to save: reading may fail in the middle, and Megatron may give up a load afterwards.
"""

from __future__ import annotations

import functools
import os
import re
import resource
import shutil
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_dos.kernels.threads import ranks_on_node
from megatron_dos.refusal import Refusal
from megatron_dos.states import HostMemoryError
from megatron_dos.words import gib, plural

__all__ = [
    "CheckpointError",
    "Handouts",
    "LoadsInPlace",
    "require_same_size",
    "require_shared_memory",
    "zero_padding",
]


class CheckpointError(RuntimeError, Refusal):
    """A checkpoint cannot be loaded, or was loaded in part only."""


# --- Saves by reference ----------------------------------------------------------------------------------------------


class Handouts:
    """Views of the states that somebody outside may still read. See [Note: saves by reference]."""

    def __init__(self) -> None:
        self._storages: list[StorageWeakRef] = []
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
        for reference in self._storages:
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None and not storage.is_shared():
                storage.share_memory_()  # in place: whoever holds the storage sees the copy from now on
                copied += storage.nbytes()
        self._storages = []
        return copied


_all_handouts: weakref.WeakSet[Handouts] = weakref.WeakSet()


def _detach_all() -> None:
    for handouts in list(_all_handouts):
        handouts.detach()


os.register_at_fork(before=_detach_all)


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


def zero_padding(param_state: dict[Any, Any]) -> None:
    """Fill with zeros what Megatron adds between the params of a `dp_reshardable` state to save, else uninitialised.

    Args:
        param_state: what `sharded_param_state_dp_reshardable` returns: buffer index -> dtypes -> per bucket the list
            of its params' sharded tensors, with `padding` telling which are none.
    """
    for of_buffer in param_state.values():
        if not isinstance(of_buffer, dict):
            continue
        for buckets in of_buffer.values():
            for tensors in (tensors for bucket in buckets for tensors in bucket):
                if tensors["padding"].unwrap():
                    for tensor in tensors.values():
                        if hasattr(tensor, "data"):
                            tensor.data.zero_()


# --- Loads in place --------------------------------------------------------------------------------------------------


def require_same_size(name: str, states: dict[str, torch.Tensor], given: dict[str, Any]) -> None:
    """Refuse tensors of a checkpoint that do not fit the states they are for, before any is copied.

    Raises:
        CheckpointError: one is missing, or has another number of elements.
    """
    for key, state in states.items():
        tensor = given.get(key)
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(
                f"the checkpoint has no {key} for {name}: it was not saved by Adam's distributed optimizer. Load the "
                "weights alone with --no-load-optim or --finetune."
            )
        if tensor.numel() != state.numel():
            raise CheckpointError(
                f"the checkpoint's {key} for {name} has {tensor.numel():,} elements, this rank's shard "
                f"{state.numel():,}: it is of another model or layout. Save with --dist-ckpt-optim-fully-reshardable "
                "to change the layout, or load the weights alone with --no-load-optim or --finetune."
            )


class LoadsInPlace:
    """Told of what goes wrong while torch reads a distributed checkpoint into the states. See [Note: loads in place].

    `begin` when the states are handed out, `end` when their load is over.

    Args:
        read: told, in words, why the states are not to be used before a load has come to its end.
    """

    def __init__(self, read: Callable[[str], None]) -> None:
        self.read = read
        self.tensors: Mapping[str, tuple[int, ...] | None] = {}

    def begin(self, tensors: Mapping[str, tuple[int, ...] | None]) -> None:
        """States have been handed out to be read into.

        Args:
            tensors: key -> shape of what the checkpoint has to hold, for this rank or its peers; no shape where it may
                have another one.
        """
        self.tensors = tensors
        _watch_reader()
        with _lock:
            _loading.add(self)

    def end(self) -> None:
        """The load is over, or was given up."""
        with _lock:
            _loading.discard(self)


_lock = threading.Lock()
_loading: weakref.WeakSet[LoadsInPlace] = weakref.WeakSet()


def _watch_reader() -> None:
    """Have torch's reader of distributed checkpoints look at the files before it reads any, and report failures.

    The reader is torch's, and Megatron makes a new one for each load, so its class is what can be hooked. It behaves
    as before for whoever loads anything else.
    """
    if getattr(FileSystemReader.read_data, "_watched_by_megatron_dos", False):
        return
    read_data = FileSystemReader.read_data

    @functools.wraps(read_data)
    def watched(self: FileSystemReader, plan: Any, planner: Any) -> Any:
        if _loading:
            _require_whole_files(self.path, self.storage_data)
        # A load may be made of several reads. One that was given up may be followed by another, without these states.
        reads_states = any(map(_is_of_states, plan.items))
        loads = list(_loading) if reads_states else []
        for load in loads:
            _require_tensors(planner.metadata.state_dict_metadata, load.tensors)
        for load in loads:
            load.read("a checkpoint was read into the optimizer states, and its load did not come to its end")
        try:
            return read_data(self, plan, planner)
        except BaseException as error:
            for load in loads:
                load.read(f"reading a checkpoint into the optimizer states failed in the middle ({error})")
                load.end()
            raise

    watched._watched_by_megatron_dos = True
    FileSystemReader.read_data = watched


def _is_of_states(item: ReadItem) -> bool:
    """Whether what is read is a part of a state, by Megatron's names for them."""
    is_tensor = item.type is not LoadItemType.BYTE_IO
    return is_tensor and bool(re.search(r"(^|\.)optimizer\.(state|distributed)\.", item.dest_index.fqn))


def _require_whole_files(folder: Any, storage_data: dict[Any, Any]) -> None:
    """Refuse a checkpoint whose files are missing or shorter than its metadata says.

    All files, not only those that this rank reads: so all ranks refuse, and none is left waiting for the others.

    Raises:
        CheckpointError: names the file.
    """
    ends: dict[str, int] = {}
    for part in storage_data.values():
        ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    for name, end in ends.items():
        path = Path(folder) / name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"a file of the checkpoint is missing ({error}). {_WAY_OUT}") from error
        if size < end:
            raise CheckpointError(f"{path} has {size:,} bytes and should have {end:,}: it was cut short. {_WAY_OUT}")


def _require_tensors(held: Mapping[str, Any], wanted: Mapping[str, tuple[int, ...] | None]) -> None:
    """Refuse a checkpoint that lacks one of the tensors, or has it in another shape.

    Raises:
        CheckpointError: names the tensor.
    """
    # Optimizers of a chain may have a prefix of their own.
    shapes = {key[max(key.find("optimizer.state."), 0) :]: getattr(held[key], "size", None) for key in held}
    for key, shape in wanted.items():
        if key not in shapes:
            raise CheckpointError(
                f"the checkpoint has no {key}: it is of another model, or was saved without its optimizer states. "
                f"{_WAY_OUT} Or load the weights alone, with --no-load-optim or --finetune."
            )
        if shape is not None and tuple(shapes[key]) != shape:
            raise CheckpointError(
                f"Global shape mismatch: the checkpoint's {key} has shape {tuple(shapes[key])}, this model's {shape}. "
                f"{_WAY_OUT}"
            )


_WAY_OUT = "Nothing has been loaded. Load an earlier checkpoint: --ckpt-step ITERATION."
