# SPDX-License-Identifier: Apache-2.0
"""The file of optimizer states of `--ckpt-format torch`: it is Megatron's, but nobody holds all of it."""

from __future__ import annotations

import pytest


class TestFile:
    @pytest.fixture(scope="class")
    @staticmethod
    def ranks(megatron, tmp_path_factory):
        return megatron.call("parameter_files:beside_megatrons", 3, folder=str(tmp_path_factory.mktemp("files"))).values

    def test_it_is_the_file_that_megatron_writes_of_the_same_states(self, ranks):
        assert all(count > 1 for count in ranks[0]["buckets"][:1]), "the case is one of several buckets"
        assert ranks[0]["differences"] == []

    def test_two_saves_are_the_same_bytes(self, ranks):
        assert ranks[0]["repeated"]

    @pytest.mark.parametrize("who", ["theirs loads ours", "ours loads theirs", "ours loads what Megatron has read"])
    def test_all_bits_come_back(self, ranks, who):
        assert all(rank["spoiled"] and rank[who] for rank in ranks)

    def test_what_the_caller_has_read_is_left_alone(self, ranks):
        assert all(rank["what Megatron has read is as it was"] for rank in ranks)

    def test_fp32_params_are_their_own_masters_after_a_load(self, ranks):
        assert all(rank["fp32 params"] for rank in ranks)


class TestChains:
    @pytest.fixture(scope="class")
    @staticmethod
    def ranks(megatron, tmp_path_factory):
        return megatron.call("parameter_files:chained", 2, folder=str(tmp_path_factory.mktemp("chain"))).values

    @pytest.mark.parametrize("loader", ["ours", "Megatron's"])
    def test_all_bits_of_all_optimizers_come_back(self, ranks, loader):
        assert [rank[loader] for rank in ranks] == [True, True]

    def test_nothing_is_gathered(self, ranks):
        assert [rank["gathers"] for rank in ranks] == [0, 0]

    def test_a_full_disk_is_an_error_on_all_ranks_and_leaves_the_file_before(self, ranks):
        for rank in ranks:
            assert "distrib_optim.pt cannot be written" in rank["full disk"]
            assert rank["kept"]
            assert rank["files"] == ["distrib_optim.pt"]

    def test_the_file_of_a_chain_is_refused_by_a_single_optimizer(self, ranks):
        assert all("the checkpoint has no optimizer states of buffer 0" in rank["of one"] for rank in ranks)


class TestFaults:
    """Of 2 ranks, the first of which writes and reads the file."""

    @pytest.fixture(scope="class")
    @staticmethod
    def ranks(megatron, tmp_path_factory):
        return megatron.call("parameter_files:faults", 2, folder=str(tmp_path_factory.mktemp("faults"))).values

    @pytest.mark.parametrize(
        ("fault", "says"),
        [
            ("full disk", "File too large"),
            ("no folder", "there is no folder"),
            ("a rank cannot read its states", "rank 1: out of luck"),
        ],
    )
    def test_a_save_that_fails_in_the_middle_changes_nothing(self, ranks, fault, says):
        for rank in ranks:
            outcome = rank[fault]
            assert outcome["error"].startswith("CheckpointError: ")
            assert "distrib_optim.pt cannot be written" in outcome["error"]
            assert says in outcome["error"]
            assert outcome["states"]
            assert outcome["file"], "the file of before is as it was"
            assert outcome["files"] == ["distrib_optim.pt"]
            assert outcome["step"] == ""

    def test_a_load_that_fails_in_the_middle_allows_no_step_on_any_rank(self, ranks):
        for rank in ranks:
            outcome = rank["a rank cannot write its states"]
            assert outcome["error"].startswith("CheckpointError: reading a checkpoint into the optimizer states failed")
            assert "rank 1: out of luck" in outcome["error"]
            assert outcome["step"].startswith("CheckpointError: no step is possible")

    def test_a_flipped_bit_is_an_error_on_all_ranks_before_any_state_is_touched(self, ranks):
        for rank in ranks:
            outcome = rank["flipped bit"]
            assert outcome["error"].startswith("CheckpointError: ")
            assert "distrib_optim.pt cannot be loaded: Bad CRC-32" in outcome["error"]
            assert "The optimizer states are as they were" in outcome["error"]
            assert outcome["states"]

    def test_without_the_checksums_a_flipped_bit_would_be_loaded(self, ranks):
        assert [rank["flipped bit, unchecked"]["error"] for rank in ranks] == ["", ""]
        assert not all(rank["flipped bit, unchecked"]["states"] for rank in ranks)

    def test_afterwards_the_checkpoint_loads_and_the_training_goes_on(self, ranks):
        for rank in ranks:
            assert (rank["load after"]["error"], rank["load after"]["step"]) == ("", "")
            assert (rank["save after"]["error"], rank["save after"]["files"]) == ("", ["distrib_optim.pt"])


@pytest.mark.parametrize("what", ["save", "load"])
def test_the_rank_that_writes_and_reads_the_file_takes_a_chunk_of_it_only(two_ranks, what):
    assert all(rank[what] < 0.3 for rank in two_ranks)


@pytest.fixture(scope="module")
def two_ranks(megatron, tmp_path_factory):
    return megatron.call("parameter_files:peaks", 2, folder=str(tmp_path_factory.mktemp("memory"))).values
