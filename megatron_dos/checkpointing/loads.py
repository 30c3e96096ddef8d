# SPDX-License-Identifier: Apache-2.0
"""Loads from a distributed checkpoint that cannot leave half a state behind unnoticed.

[Note: loads in place] A load from a distributed checkpoint reads into the states themselves, which is how it takes no
second copy. So nothing may be read before it is known that all can be: `_require_whole_files` compares the sizes of
the files with what the checkpoint says they hold; torch and Megatron compare names, shapes and dtypes of what a rank
reads before it reads, and `_require_tensors` those of what its peers read. From then on until the whole load is over,
the optimizer refuses to step and to save: reading may fail in the middle, and Megatron may give up a load afterwards.
What is read is compared with its checksum, a tensor at a time before it is copied: see `torch_file`.

[Note: one rank looks] All ranks need to know whether the files are whole, but a thousand ranks that look at thousands
of files each are a burden for a file system. A collective would hang: torch has every rank read on its own, and ranks
without states take no part. So the first rank that comes claims the question in the store with which the process group
was set up, looks, and leaves the answer there for those who come later. Nobody waits for a rank that takes no part. A
rank that waits in vain, since the one that looks has died, looks itself.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from megatron_dos.checkpointing import torch_file
from megatron_dos.checkpointing.handouts import CheckpointError
from megatron_dos.checkpointing.state_stream import first_problem
from megatron_dos.wrapping import wrap_once

__all__ = ["LoadsInPlace", "require_same_size"]


def require_same_size(name: str, states: Mapping[str, torch.Tensor], given: Mapping[str, Any]) -> None:
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
    """Reports what goes wrong while torch reads a distributed checkpoint into the states. See [Note: loads in place].

    `begin` when the states are handed out, `end` when their load is over.

    Args:
        read: called with the reason, in words, why the states must not be used until a load has ended.
    """

    def __init__(self, read: Callable[[str], None]) -> None:
        self.read = read
        self.tensors: Mapping[str, tuple[int, ...] | None] = {}
        self.known_to_be_whole: set[str] = set()  # checkpoints, in the load that goes on
        self._peers: Any = None
        self._number = 0

    def begin(self, tensors: Mapping[str, tuple[int, ...] | None], peers: Any = None) -> None:
        """States have been handed out to be read into.

        Args:
            tensors: key -> shape of what the checkpoint has to hold, for this rank or its peers; no shape where it may
                have another one.
            peers: the process group whose other ranks ask for the first problem when they have read theirs, or None.
        """
        self.tensors, self._peers, self._number = tensors, peers, next(_begun)
        self.known_to_be_whole = set()
        _watch_reader()
        with _lock:
            _loading.add(self)

    def end(self) -> None:
        """The load is over, or was given up."""
        with _lock:
            _loading.discard(self)

    @staticmethod
    def tell_peers(loads: Iterable[LoadsInPlace], problem: str) -> None:
        """Reading failed here alone. Peers that wait for an answer get it, instead of waiting for ever.

        They ask for one optimizer after the other, in the order in which states were handed out, and stop at the first
        problem. So one answer is enough, and a second one would never be asked for.
        """
        first = min(loads, key=lambda load: load._number, default=None)
        if first is not None and first._peers is not None:
            first_problem(f"rank {torch.distributed.get_rank()} could not read it: {problem}", first._peers)


_begun = itertools.count(1)
_lock = threading.Lock()
_loading: weakref.WeakSet[LoadsInPlace] = weakref.WeakSet()


def _watch_reader() -> None:
    """Have torch's reader of distributed checkpoints look at the files before it reads any, and report failures.

    The reader is torch's, and Megatron makes a new one for each load, so its class is what can be hooked. It behaves
    as before for whoever loads anything else.
    """
    wrap_once(FileSystemReader, "read_data", _watched)


def _watched(read_data: Callable[..., Any]) -> Callable[..., Any]:
    def watched(self: FileSystemReader, plan: Any, planner: Any) -> Any:
        if _loading and not all(str(self.path) in load.known_to_be_whole for load in _loading):
            _require_whole_files(self)
            for load in _loading:
                load.known_to_be_whole.add(str(self.path))
        # A load may be made of several reads. One that was given up may be followed by another, without these states.
        reads_states = any(map(_is_of_states, plan.items))
        loads = list(_loading) if reads_states else []
        for load in loads:
            _require_tensors(planner.metadata.state_dict_metadata, load.tensors)
        for load in loads:
            load.read("a checkpoint was read into the optimizer states, and its load did not come to its end")
        try:
            with _comparing_checksums(self) if _loading else nullcontext():
                return read_data(self, plan, planner)
        except BaseException as error:
            for load in loads:
                load.read(f"reading a checkpoint into the optimizer states failed in the middle ({error})")
                load.end()
            LoadsInPlace.tell_peers(loads, str(error))
            raise

    return watched


def _is_of_states(item: ReadItem) -> bool:
    """Whether what is read is a part of a state, by Megatron's names for them."""
    is_tensor = item.type is not LoadItemType.BYTE_IO
    return is_tensor and bool(re.search(r"(^|\.)optimizer\.(state|distributed)\.", item.dest_index.fqn))


@contextmanager
def _comparing_checksums(reader: FileSystemReader) -> Iterator[None]:
    """Until the end of the block, `reader` refuses bytes that are not those that torch has written.

    Archives of torch have checksums, which torch does not compare. What is something else is read as it is.
    """
    slice_file, is_local = reader._slice_file, type(getattr(reader, "fs", None)) is FileSystem

    def checked(file: Any, part: Any) -> IO[bytes]:
        content = slice_file(file, part)
        if not is_local:
            content = io.BytesIO(content.read())  # reading again may mean sending again
        is_archive = content.read(4) == b"PK\x03\x04"
        content.seek(0)
        if is_archive:
            try:
                torch_file.check_stream(cast("IO[bytes]", _FromItsEnd(content, part.length)))
            except OSError:
                raise
            except Exception as error:  # whatever zipfile stumbles over in an archive that was whole once
                raise CheckpointError(
                    f"{part.relative_path} of the checkpoint was damaged after it had been written, in bytes "
                    f"{part.offset:,} to {part.offset + part.length:,} ({error}). Load an earlier checkpoint: "
                    "--ckpt-step ITERATION."
                ) from error
        return content

    reader._slice_file = checked  # type: ignore[assignment,method-assign]  # of this reader alone
    try:
        yield
    finally:
        del reader._slice_file


class _FromItsEnd:
    """A part of a file that can be sought from its end, which torch's views of a part cannot be."""

    def __init__(self, content: IO[bytes], length: int) -> None:
        self._content, self._length = content, length
        self.read, self.tell, self.seekable = content.read, content.tell, content.seekable

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_END:
            offset, whence = self._length + offset, os.SEEK_SET
        self._content.seek(offset, whence)
        return self.tell()


def _require_whole_files(reader: FileSystemReader) -> None:
    """Refuse a checkpoint whose files are missing or shorter than its metadata says. See [Note: one rank looks].

    All files, not only those that this rank reads: so all ranks refuse, and none is left waiting for the others.

    Raises:
        CheckpointError: names the file.
    """
    files = getattr(reader, "fs", None)
    ends: dict[str, int] = {}
    for part in reader.storage_data.values():
        ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    if files is None:  # a reader of something else than files
        return
    question = hashlib.sha256(repr((str(reader.path), sorted(ends.items()))).encode()).hexdigest()
    if problem := _asked_once(question, lambda: _problem_of_files(files, reader.path, ends)):
        raise CheckpointError(f"{problem}. {_WAY_OUT}")


def _problem_of_files(files: Any, folder: Any, ends: Mapping[str, int]) -> str:
    """Which of the files is missing or shorter than `ends` says; nothing if none is, as far as can be seen."""
    for name, end in ends.items():
        path = files.concat_path(folder, name)
        try:
            size = _size_of(files, path)
        except OSError as error:
            return f"a file of the checkpoint is missing, or cannot be read: {path} ({error})"
        if size is not None and size < end:
            return f"{path} has {size:,} bytes and should have {end:,}: it was cut short"
    return ""


def _size_of(files: Any, path: Any) -> int | None:
    """Size of a file in the file system of a reader, in bytes; None where there is no telling.

    Raises:
        OSError: it is not there.
    """
    try:
        # A path that knows its file system asks that. To open a file instead may mean to fetch all of it.
        if hasattr(path, "stat") and (type(files) is FileSystem or type(path) is not type(Path())):
            return path.stat().st_size
        with files.create_stream(path, "rb") as stream:
            return stream.seek(0, os.SEEK_END) if stream.seekable() else None
    except io.UnsupportedOperation:  # an OSError as well
        return None
    except OSError:
        raise
    except Exception:  # of a library of remote storage, say: if it matters, reading will fail too
        return None


WAIT_S = 30 * 60.0
"""For the answer of another rank; what a process group waits by default."""

_NO_PROBLEM = "-"  # a store holds no empty values
_times_asked: Counter[str] = Counter()


def _asked_once(question: str, answer: Callable[[], str]) -> str:
    """`answer()` of one of the ranks that ask this, on all of them. See [Note: one rank looks]."""
    if not torch.distributed.is_initialized():
        return answer()
    store = torch.distributed.distributed_c10d._get_default_store()
    _times_asked[question] += 1
    key = f"megatron_dos/{question}/{_times_asked[question]}"
    if store.add(f"{key}/claimed", 1) == 1:
        given = ""
        try:
            given = answer()
        finally:  # nobody waits for what never comes
            store.set(key, given or _NO_PROBLEM)
        return given
    if not _appears(store, key):
        return answer()
    given = store.get(key).decode()
    return "" if given == _NO_PROBLEM else given


def _appears(store: Any, key: str) -> bool:
    """Wait for a key, without keeping the store from other threads."""
    end, pause = time.monotonic() + WAIT_S, 0.005
    while time.monotonic() < end:
        if store.check([key]):
            return True
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
    return False


def _require_tensors(held: Mapping[str, Any], wanted: Mapping[str, tuple[int, ...] | None]) -> None:
    """Refuse a checkpoint that lacks one of the tensors, or has it in another shape.

    Raises:
        CheckpointError: names the tensor.
    """
    # Optimizers of a chain may have a prefix of their own.
    shapes: dict[str, Any] = {
        key[max(key.find("optimizer.state."), 0) :]: getattr(held[key], "size", None) for key in held
    }
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
