# SPDX-License-Identifier: Apache-2.0
"""Files as `torch.save` makes them, written and read a piece at a time.

[Note: files in pieces] `torch.save` wants every tensor whole and in memory. Its files are plain zip archives, though:
a pickle that names a record for each tensor, and the records, which hold the elements as they lie in memory. Here a
`FlatTensor` stands in the pickle for a tensor whose elements come later, and Python's `zipfile` writes the records as
the elements arrive. `torch.load` reads such a file like any other, mapped or not; so does every other reader of zips.

[Note: damaged files] A zip archive holds a checksum (CRC-32) of every record. `torch.save` computes them, `write` does
too, and `torch.load` compares none. `check` does: so a flipped bit is found in whatever either of them wrote,
no second file is needed that could be missing or of another save, and no save reads or waits for it.
"""

from __future__ import annotations

import ctypes
import functools
import io
import mmap
import os
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

import torch

__all__ = ["FlatTensor", "check", "check_stream", "forget", "read", "write"]

ALIGNMENT = 64
"""Of every record in the file, in bytes, as torch does it: a mapped tensor is aligned then."""


class FlatTensor:
    """Stands for a flat FP32 tensor of `numel` elements in what is given to `write`."""

    def __init__(self, numel: int) -> None:
        self.numel = numel

    def __reduce__(self) -> tuple[Any, ...]:
        # What torch's tensors are pickled as; all versions of torch have to be able to load it.
        like, record = torch.empty(self.numel, device="meta"), _Record(self.numel)
        return torch._utils._rebuild_tensor_v2, (record, 0, tuple(like.shape), like.stride(), False, OrderedDict())


class _Record:
    """The elements of a tensor, which are not part of the pickle."""

    def __init__(self, numel: int) -> None:
        self.numel = numel


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.records: list[_Record] = []

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        if not isinstance(value, _Record):
            return None
        self.records.append(value)
        return "storage", torch.FloatStorage, str(len(self.records) - 1), "cpu", value.numel


def write(path: str | os.PathLike[str], folder: str, content: Any, chunks: Iterator[torch.Tensor]) -> None:
    """Write `content` to the file `path`. See [Note: files in pieces].

    Args:
        folder: of the records in the archive. torch takes the name of the file without its suffix.
        content: plain values, with a `FlatTensor` for each tensor.
        chunks: the elements of these tensors in the order of the pickle, FP32 in host memory; no chunk has elements of
            two tensors. Each is used before the next is asked for, and they are asked for until there are no more.

    Raises:
        ValueError: there are more or fewer elements than the tensors have.
        OSError: the file cannot be written.
    """
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    pickler.dump(content)
    with open(path, "wb") as file, zipfile.ZipFile(file, "w") as archive:
        for name, text in (("data.pkl", pickled.getvalue()), ("byteorder", sys.byteorder.encode())):
            with archive.open(_entry(f"{folder}/{name}", file.tell()), "w", force_zip64=True) as out:
                out.write(text)
        for number, record in enumerate(pickler.records):
            with archive.open(_entry(f"{folder}/data/{number}", file.tell()), "w", force_zip64=True) as out:
                missing = record.numel
                while missing > 0:
                    chunk = next(chunks, None)
                    if chunk is None:
                        raise ValueError(f"tensor {number} lacks {missing:,} of its {record.numel:,} elements")
                    out.write(chunk.view(torch.uint8).numpy())
                    missing -= chunk.numel()
            if missing:
                raise ValueError(f"tensor {number} has {record.numel:,} elements, {-missing:,} more were given")
        if next(chunks, None) is not None:
            raise ValueError(f"more elements were given than the {len(pickler.records)} tensors have")
        with archive.open(_entry(f"{folder}/version", file.tell()), "w", force_zip64=True) as out:
            out.write(b"3\n")


def _entry(name: str, start: int) -> zipfile.ZipInfo:
    """The header of a record, for byte `start` of the file, with padding that aligns what follows it."""
    sizes = 20  # the field that zipfile puts in front of ours
    header = zipfile.sizeFileHeader  # type: ignore[attr-defined]  # not in its types
    padding = -(start + header + len(name) + sizes + 4) % ALIGNMENT
    entry = zipfile.ZipInfo(name)  # of 1980: two files with the same content are the same
    entry.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    return entry


def read(path: str | os.PathLike[str]) -> Any:
    """What is in a file of `torch.save`, its tensors mapped: their elements are read when they are looked at."""
    return torch.load(path, map_location="cpu", mmap=True)


def check(path: str | os.PathLike[str], threads: int) -> None:
    """Compare the bytes of all records with their checksums. See [Note: damaged files].

    Args:
        path: of a file of `torch.save` or `write`. It is read whole, a MiB at a time for each thread.

    Raises:
        zipfile.BadZipFile: names a record whose bytes are not those that were written.
    """
    with zipfile.ZipFile(path) as archive:
        records = _with_checksums(archive)
    with ThreadPoolExecutor(threads) as pool:
        deque(pool.map(functools.partial(_check_in, path), records), maxlen=0)


def _check_in(path: str | os.PathLike[str], record: zipfile.ZipInfo) -> None:
    with zipfile.ZipFile(path) as archive:  # of this thread alone: an archive has one position in the file
        _check(archive, record)


def check_stream(file: IO[bytes]) -> None:
    """The same for an archive that is already open. It is left at its start."""
    with zipfile.ZipFile(file) as archive:
        for record in _with_checksums(archive):
            _check(archive, record)
    file.seek(0)


def _with_checksums(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """All records; none if they were written without, by `torch.serialization.set_crc32_options(False)`."""
    records = archive.infolist()
    return records if any(record.CRC for record in records) else []


def _check(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> None:
    with archive.open(record) as content:
        while content.read(1 << 20):  # zipfile compares when it comes to the end
            pass


def forget(part: torch.Tensor) -> None:
    """Give back the memory of a part of a tensor that `read` has mapped; looked at again, it is read again."""
    start = -(-part.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (part.data_ptr() + part.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)
