# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in other places than local files: each reader is asked through its own file system, by one rank."""

from __future__ import annotations

import importlib.util

import pytest

LAYOUTS_OF_STATES = ("dp_reshardable", "fully_reshardable")
FILES = {"__0_0.distcp", "__1_0.distcp"}
RANKS = 2


def assert_loaded(outcome):
    assert outcome["spoiled"], "a load has to change something for this to tell anything"
    assert (outcome["error"], outcome["in_states"]) == ("", [])


def looks_of_all(ranks):
    return [rank["looks"] for rank in ranks if rank["looks"]]


@pytest.mark.parametrize("layout", LAYOUTS_OF_STATES)
def test_one_rank_looks_at_each_file_once_a_load(megatron, tmp_path, layout):
    run = megatron.call("checkpoint_readers:looks", RANKS, folder=str(tmp_path / "saved"), layout=layout, times=2)
    for ranks in zip(*run.values, strict=True):
        for rank in ranks:
            assert_loaded(rank)
        assert looks_of_all(ranks) == [dict.fromkeys(FILES, 1)], "by one rank"


def test_without_the_store_every_rank_would_look(megatron, tmp_path):
    run = megatron.call(
        "checkpoint_readers:looks", RANKS, folder=str(tmp_path / "saved"), layout="dp_reshardable", alone=True
    )
    assert looks_of_all([rank[0] for rank in run.values]) == [dict.fromkeys(FILES, 1)] * RANKS


@pytest.mark.parametrize("layout", LAYOUTS_OF_STATES)
def test_a_flipped_bit_is_refused_and_no_step_is_possible_on_the_rank_that_met_it(megatron, tmp_path, layout):
    run = megatron.call("checkpoint_readers:with_flipped_bits", RANKS, folder=str(tmp_path / "saved"), layout=layout)
    for ranks in zip(*run.values, strict=True):
        met = [rank for rank in ranks if rank["error"]]
        assert met
        for rank in met:
            assert "was damaged after it had been written" in rank["error"]
            assert "--ckpt-step" in rank["error"]
            assert rank["step"].startswith("CheckpointError: no step is possible")
        assert all(rank["in_states"] == [] for rank in ranks if not rank["error"])


def test_without_the_checksums_a_flipped_bit_would_be_loaded(megatron, tmp_path):
    run = megatron.call(
        "checkpoint_readers:with_flipped_bits",
        RANKS,
        folder=str(tmp_path / "saved"),
        layout="dp_reshardable",
        protected=False,
    )
    for ranks in zip(*run.values, strict=True):
        assert [rank["error"] for rank in ranks] == [""] * RANKS
        assert any(rank["in_states"] for rank in ranks)


@pytest.mark.parametrize("layout", LAYOUTS_OF_STATES)
def test_a_load_between_backward_and_step_keeps_the_grads(megatron, tmp_path, layout):
    """As with Megatron's optimizer, whose grads are no part of a checkpoint either."""
    run = megatron.call(
        "checkpoint_readers:between_backward_and_step", RANKS, folder=str(tmp_path / "s"), layout=layout
    )
    assert run.values == [{"states": [], "weights": True, "updated": True}] * RANKS


class TestForeignReaders:
    """A subclass of torch's reader whose files are not where torch's own file system would look for them."""

    @pytest.fixture(scope="class", params=LAYOUTS_OF_STATES)
    @staticmethod
    def ranks(megatron, tmp_path_factory, request):
        folder = tmp_path_factory.mktemp("vault") / "saved"
        return megatron.call("checkpoint_readers:from_a_vault", RANKS, folder=str(folder), layout=request.param).values

    def test_what_it_finds_is_loaded(self, ranks):
        for rank in ranks:
            assert_loaded(rank["whole"])
        assert looks_of_all([rank["whole"] for rank in ranks]) == [dict.fromkeys(FILES, 1)], "by one rank"

    @pytest.mark.parametrize("case", ["size not supported", "size not permitted"])
    def test_files_whose_size_nobody_knows_are_loaded(self, ranks, case):
        for rank in ranks:
            assert_loaded(rank[case])

    @pytest.mark.parametrize(
        ("case", "says"),
        [
            ("missing", "missing, or cannot be read: vault://saved:__1_0.distcp (the vault has no vault://saved:__1_0"),
            ("short", "vault://saved:__1_0.distcp has "),
        ],
    )
    def test_all_ranks_refuse_for_the_same_reason_before_anything_is_read(self, ranks, case, says):
        for rank in ranks:
            assert says in rank[case]["error"]
            assert "CheckpointError" in rank[case]["error"]
            assert "--ckpt-step" in rank[case]["error"]
            assert rank[case]["untouched"]

    def test_a_flipped_bit_is_found_by_the_rank_that_reads_it(self, ranks):
        errors = [rank["damaged"]["error"] for rank in ranks]
        assert any("__1_0.distcp of the checkpoint was damaged after it had been written" in error for error in errors)


@pytest.mark.skipif(
    importlib.util.find_spec("multistorageclient") is None,
    reason="multi-storage-client is not installed; `make setup` installs it",
)
@pytest.mark.parametrize("layout", LAYOUTS_OF_STATES)
def test_states_in_multi_storage_load_and_a_missing_file_is_named(megatron, tmp_path, layout):
    run = megatron.call("checkpoint_readers:from_msc", RANKS, folder=str(tmp_path), layout=layout)
    for rank in run.values:
        assert rank["reader"] == "MultiStorageFileSystemReader"
        assert set(rank["files"]) >= FILES
        assert_loaded(rank["whole"])
        assert "__1_0.distcp" in rank["missing"]["error"]
        assert "a file of the checkpoint is missing" in rank["missing"]["error"]
        assert rank["missing"]["untouched"]
