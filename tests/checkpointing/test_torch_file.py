# SPDX-License-Identifier: Apache-2.0
"""Files of torch that are written and read a piece at a time."""

from __future__ import annotations

import mmap
import zipfile
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megatron_dos.checkpointing import torch_file
from megatron_dos.checkpointing.torch_file import FlatTensor

SIZES = {"param": 1000, "exp_avg": 3, "exp_avg_sq": 70_000}


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {name: torch.randn(size) for name, size in SIZES.items()}


def content(tensors: dict[str, Any]) -> list[Any]:
    """Of the kinds that Megatron puts into its files."""
    return [{"buckets_coalesced": True, 0: {(torch.bfloat16, torch.float32): {**tensors, "numel_unpadded": 7}}}, None]


def stand_ins() -> dict[str, FlatTensor]:
    return {name: FlatTensor(size) for name, size in SIZES.items()}


def chunks(tensors: dict[str, torch.Tensor]):
    return (chunk for tensor in tensors.values() for chunk in tensor.split(700))


@pytest.fixture
def file(tmp_path: Path, tensors) -> Path:
    path = tmp_path / ".temporary"
    torch_file.write(path, "states", content(stand_ins()), chunks(tensors))
    return path


class TestWrite:
    @pytest.mark.parametrize("mapped", [False, True])
    def test_torch_reads_what_was_written(self, file, tensors, mapped):
        loaded = torch.load(file, weights_only=True, mmap=mapped)
        assert repr(loaded) == repr(content(tensors))
        found = loaded[0][0][torch.bfloat16, torch.float32]
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())

    def test_the_pickle_and_the_records_are_those_of_torch(self, file, tensors, tmp_path):
        torch.save(content(tensors), tmp_path / "states.pt")
        with zipfile.ZipFile(file) as ours, zipfile.ZipFile(tmp_path / "states.pt") as of_torch:
            for name in ("data.pkl", "byteorder", "data/0", "data/1", "data/2", "version"):
                assert ours.read(f"states/{name}") == of_torch.read(f"states/{name}"), name

    def test_checksums_are_right(self, file):
        with zipfile.ZipFile(file) as archive:
            assert archive.testzip() is None

    def test_mapped_tensors_are_aligned(self, file):
        found = torch_file.read(file)[0][0][torch.bfloat16, torch.float32]
        assert [found[name].data_ptr() % torch_file.ALIGNMENT for name in SIZES] == [0, 0, 0]

    def test_the_same_content_is_the_same_file(self, file, tensors, tmp_path):
        torch_file.write(tmp_path / "another name", "states", content(stand_ins()), chunks(tensors))
        assert (tmp_path / "another name").read_bytes() == file.read_bytes()

    def test_chunks_are_used_one_after_the_other(self, tmp_path):
        buffer = torch.empty(1)

        def values():
            for value in range(5):
                yield buffer.fill_(value)

        torch_file.write(tmp_path / "file", "states", FlatTensor(5), values())
        assert torch.load(tmp_path / "file").tolist() == [0, 1, 2, 3, 4]

    def test_a_tensor_may_be_empty(self, tmp_path):
        torch_file.write(tmp_path / "file", "states", {"a": FlatTensor(0), "b": FlatTensor(1)}, iter([torch.ones(1)]))
        assert {name: tensor.tolist() for name, tensor in torch.load(tmp_path / "file").items()} == {"a": [], "b": [1]}

    @pytest.mark.parametrize(
        ("given", "says"),
        [
            ([2, 2], "tensor 1 lacks 1 of its 3 elements"),
            ([2, 3, 1], "more elements were given than the 2 tensors have"),
            ([3], "tensor 0 has 2 elements, 1 more were given"),
        ],
    )
    def test_other_numbers_of_elements_are_refused(self, tmp_path, given, says):
        with pytest.raises(ValueError, match=says):
            torch_file.write(tmp_path / "file", "f", [FlatTensor(2), FlatTensor(3)], iter(map(torch.ones, given)))


# ---- Damaged files --------------------------------------------------------------------------------------------------


def read_checked(path: Path) -> Any:
    """Both ways to check; what was read, if the file is whole for both."""
    torch_file.check(path, threads=3)
    with path.open("rb") as file:
        torch_file.check_stream(file)
        assert file.tell() == 0
    return torch_file.read(path)


def reading_fails(path: Path) -> bool:
    try:
        read_checked(path)
    except Exception:  # of the checks, or of torch
        return True
    return False


def saved_by_torch(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    torch.save(content(tensors), path)


def saved_by_us(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    sizes = {name: FlatTensor(tensor.numel()) for name, tensor in tensors.items()}
    torch_file.write(path, "states", content(sizes), chunks(tensors))


@pytest.mark.parametrize("save", [saved_by_us, saved_by_torch])
class TestDamage:
    def test_whole_files_pass(self, tmp_path, tensors, save):
        save(tmp_path / "file", tensors)
        assert repr(read_checked(tmp_path / "file")) == repr(content(tensors))

    @pytest.mark.parametrize("tensor", SIZES)
    def test_a_flipped_bit_of_a_tensor_is_found_which_torch_does_not_see(self, tmp_path, tensors, save, tensor):
        path = tmp_path / "file"
        save(path, tensors)
        elements = tensors[tensor].numpy().tobytes()
        data = bytearray(path.read_bytes())
        data[data.index(elements) + len(elements) // 2] ^= 0x40
        path.write_bytes(data)
        assert repr(torch.load(path)) != "", "torch loads it"
        for check in (lambda: torch_file.check(path, 3), lambda: torch_file.check_stream(path.open("rb"))):
            with pytest.raises(zipfile.BadZipFile, match=rf"Bad CRC-32.*data/{list(SIZES).index(tensor)}"):
                check()

    @pytest.mark.slow
    def test_no_flipped_bit_anywhere_in_the_file_changes_what_is_loaded(self, tmp_path, save):
        """Wherever it is: in an element, a name, a length, an offset or a checksum."""
        small, path = {"param": torch.arange(1.0, 4), "exp_avg": torch.ones(2)}, tmp_path / "file"
        save(path, small)
        whole, found = path.read_bytes(), 0
        for place in range(0, len(whole), 5):
            data = bytearray(whole)
            data[place] ^= 1 << place % 8
            path.write_bytes(data)
            if reading_fails(path):
                found += 1
            else:
                assert repr(read_checked(path)) == repr(content(small)), f"byte {place}"
        assert found > 40


def test_a_file_without_checksums_passes(tmp_path, tensors):
    torch.serialization.set_crc32_options(False)
    try:
        saved_by_torch(tmp_path / "file", tensors)
    finally:
        torch.serialization.set_crc32_options(True)
    assert repr(read_checked(tmp_path / "file")) == repr(content(tensors))


def test_memory_of_mapped_tensors_is_given_back(tmp_path):
    torch.save(torch.ones(8 << 20), tmp_path / "file")
    tensor, process = torch_file.read(tmp_path / "file"), psutil.Process()
    before = process.memory_info().rss
    assert float(tensor.sum()) == len(tensor)
    taken = process.memory_info().rss - before
    assert taken > 0.8 * tensor.nbytes
    for part in tensor.split(100_001):
        torch_file.forget(part)
    assert process.memory_info().rss - before < 0.1 * tensor.nbytes
    assert float(tensor.sum()) == len(tensor), "it is read again"


def test_parts_beside_one_that_is_forgotten_stay():
    """Only pages that lie wholly in the part are given back."""
    anonymous = mmap.mmap(-1, 40_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # what is given back here is lost
    tensor = torch.frombuffer(anonymous, dtype=torch.float32).fill_(1)
    torch_file.forget(tensor[3000:7000])
    assert tensor[:3000].tolist() == [1] * 3000
    assert tensor[5000] == 0
    assert tensor[7000:].tolist() == [1] * 3000
