# SPDX-License-Identifier: Apache-2.0
"""Checkpoints without Megatron: what is handed out to writers, and what is refused before it is touched."""

from __future__ import annotations

import io
import os
import resource
import shutil
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from megatron_dos.checkpointing import handouts
from megatron_dos.checkpointing import loads as checkpoint
from megatron_dos.checkpointing.handouts import CheckpointError, Handouts, require_shared_memory
from megatron_dos.checkpointing.loads import require_same_size
from megatron_dos.checkpointing.states_on_file import zero_padding
from megatron_dos.node.memory import HostMemoryError


def views_of(states: torch.Tensor, *ranges: tuple[int, int]) -> list[torch.Tensor]:
    """Views with storages of their own, as the engine makes them."""
    return [torch.from_numpy(states.numpy()[start:stop]) for start, stop in ranges]


class TestHandouts:
    def test_what_is_still_in_use_keeps_its_values(self):
        states, handouts = torch.arange(10.0), Handouts()
        first, second = views_of(states, (0, 4), (4, 10))
        handouts.add([first, second])
        given = first.detach()  # another tensor of the same storage, as Megatron makes them
        del first
        assert handouts.detach() == 40
        states.fill_(-1)
        assert given.tolist() == [0, 1, 2, 3]
        assert second.tolist() == [4, 5, 6, 7, 8, 9]

    def test_what_nobody_holds_is_not_copied(self):
        states, handouts = torch.arange(10.0), Handouts()
        handouts.add(views_of(states, (0, 10)))
        assert handouts.detach() == 0

    @pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # the child does nothing
    def test_a_fork_detaches(self):
        states, handouts = torch.arange(10.0), Handouts()
        (view,) = views_of(states, (0, 10))
        handouts.add([view])
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        states.fill_(-1)
        assert view.tolist() == list(range(10))

    def test_parts_of_a_larger_storage_are_left_alone(self):
        """Resident states on the device are; in place of one part, all would move."""
        states, handouts = torch.arange(10.0), Handouts()
        part = states[2:5]
        handouts.add([part])
        assert handouts.detach() == 0
        states.fill_(-1)
        assert part.tolist() == [-1, -1, -1]

    def test_empty_views_are_no_matter(self):
        handouts = Handouts()
        handouts.add(views_of(torch.zeros(3), (1, 1)))
        assert handouts.detach() == 0


class TestSharedMemory:
    def test_too_little_is_refused_with_numbers_and_the_way_out(self, monkeypatch):
        monkeypatch.setattr(handouts, "ranks_on_node", lambda: 8)
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=7 << 30))
        with pytest.raises(HostMemoryError, match=r"--async-save .*1\.00 GiB.*8\.00 GiB.*7\.00 GiB.*--shm-size"):
            require_shared_memory(1 << 30)

    def test_a_missing_folder_is_no_room(self, tmp_path):
        with pytest.raises(HostMemoryError, match=r"0\.00 GiB are free"):
            require_shared_memory(1, str(tmp_path / "none"))

    def test_as_many_files_may_be_open_as_the_system_allows(self, tmp_path):
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
        try:
            require_shared_memory(1, str(tmp_path))
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limits[1], limits[1])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


STATES = {"param": torch.zeros(6), "exp_avg": torch.zeros(6)}


class TestWhatDoesNotFit:
    def test_a_tensor_of_one_element_is_not_spread_over_all(self):
        with pytest.raises(
            CheckpointError, match=r"exp_avg for p has 1 elements, this rank's shard 6.*--no-load-optim"
        ):
            require_same_size("p", STATES, {"param": torch.ones(6), "exp_avg": torch.ones(1)})

    @pytest.mark.parametrize("given", [{"param": torch.ones(6)}, {"param": torch.ones(6), "exp_avg": None}])
    def test_missing_moments_are_named(self, given):
        with pytest.raises(CheckpointError, match="no exp_avg for p"):
            require_same_size("p", STATES, given)

    def test_what_fits_passes(self):
        require_same_size("p", STATES, {"param": torch.ones(6), "exp_avg": torch.ones(2, 3)})


def test_padding_alone_becomes_zeros():
    def flag(value):
        return SimpleNamespace(unwrap=lambda: value)

    param, padding = torch.ones(3), torch.full((2,), float("nan"))
    state = {
        "per_bucket_numel": object(),
        0: {
            ("bf16", "fp32"): [
                [
                    {"param": SimpleNamespace(data=param), "padding": flag(False)},
                    {"param": SimpleNamespace(data=padding), "padding": flag(True)},
                ]
            ]
        },
    }
    zero_padding(state)
    assert param.tolist() == [1, 1, 1]
    assert padding.tolist() == [0, 0]


class TestOneRankLooks:
    """What ranks leave for each other in a store. With real ranks: e2e/test_checkpoint_readers.py."""

    @pytest.fixture(autouse=True)
    def store(self, monkeypatch):
        store = torch.distributed.HashStore()
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)
        monkeypatch.setattr(checkpoint, "WAIT_S", 0.05)
        return store

    @pytest.fixture
    def asks(self, monkeypatch):
        """Asks as one rank after the other, each of which has asked nothing so far."""

        def ask(answer):
            monkeypatch.setattr(checkpoint, "_times_asked", Counter())
            return checkpoint._asked_once("whole?", answer)

        return ask

    @pytest.mark.parametrize("problem", ["", "a file is missing"])
    def test_those_who_come_later_have_the_answer_of_the_first(self, asks, problem):
        assert asks(lambda: problem) == problem
        assert asks(lambda: pytest.fail("looks again")) == problem

    def test_another_load_asks_again(self):
        assert checkpoint._asked_once("whole?", lambda: "short") == "short"
        assert checkpoint._asked_once("whole?", lambda: "") == ""

    def test_who_waits_in_vain_looks_itself(self, asks, store):
        store.add("megatron_dos/whole?/1/claimed", 1)
        assert asks(lambda: "seen by this rank") == "seen by this rank"

    def test_nobody_waits_for_one_that_broke_down(self, asks):
        def break_down():
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            asks(break_down)
        assert asks(lambda: pytest.fail("has waited in vain")) == ""


def test_a_reader_without_files_is_not_asked_for_any():
    checkpoint._require_whole_files(SimpleNamespace(path="x", storage_data={}))


def test_a_local_look_at_foreign_files_would_find_none(monkeypatch):
    """What made checkpoints of `msc://` unloadable: sizes taken from a local path of that name."""
    files = SimpleNamespace(
        concat_path=lambda folder, name: f"{folder}/{name}",
        create_stream=lambda path, mode: io.BytesIO(b"1234"),
    )
    assert checkpoint._problem_of_files(files, "msc://profile/folder", {"a": 4}) == ""
    assert "has 4 bytes and should have 5: it was cut short" in checkpoint._problem_of_files(files, "msc://p", {"a": 5})
    monkeypatch.setattr(checkpoint, "_size_of", lambda files, path: os.stat(path).st_size)
    assert "missing" in checkpoint._problem_of_files(files, "msc://profile/folder", {"a": 4})
