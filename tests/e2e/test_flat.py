# SPDX-License-Identifier: Apache-2.0
"""FLAT: Megatron's DDP and optimizer around odd-shaped params with known grads; the oracle is numpy."""

import math

import pytest

MODULE = "flat"
RANKS = [1, 2, 4]  # powers of two: averaging equal grads over them is exact


def every_rank(megatron, function, ranks=2, **arguments):
    return megatron.call(f"{MODULE}:{function}", ranks, **arguments).values


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    ("dtype", "grads_in_fp32"),
    [("bfloat16", True), ("bfloat16", False), ("float32", True)],
    ids=["bf16", "bf16 grads", "fp32"],
)
def test_states_have_the_bits_of_the_reference(megatron, ranks, dtype, grads_in_fp32):
    assert (
        every_rank(megatron, "follows_the_reference", ranks, dtype=dtype, grads_in_fp32=grads_in_fp32) == [[]] * ranks
    )


@pytest.mark.parametrize("how", ["zero grads", "real grads", "state_dict"])
def test_case_01_weights_loaded_after_construction(megatron, how):
    for rank in every_rank(megatron, "after_a_load", how=how):
        assert rank["masters"] == []
        assert rank["step"] == []
        assert rank["unchanged"] == (how == "zero grads")


def test_case_05_grads_of_all_micro_batches_count(megatron):
    for rank in every_rank(megatron, "accumulate"):
        assert rank["differences"] == []
        assert rank["ours"] == rank["stock"]
        assert rank["ours"] == pytest.approx(rank["expected"], rel=1e-6)


@pytest.mark.parametrize(
    ("dtype", "grads_in_fp32", "value", "threshold"),
    [
        ("float16", True, math.inf, False),
        ("float16", False, math.nan, False),
        ("bfloat16", True, 1e8, True),
        ("bfloat16", False, 1e8, True),
    ],
    ids=["inf", "NaN in fp16 grads", "norm above the threshold", "the same with bf16 grads"],
)
def test_case_10_a_skipped_step_changes_nothing(megatron, dtype, grads_in_fp32, value, threshold):
    for rank in every_rank(
        megatron, "skips", dtype=dtype, grads_in_fp32=grads_in_fp32, value=value, threshold=threshold
    ):
        assert not rank["success"]
        assert rank["states_same"]
        assert rank["weights_same"]
        assert rank["counter"] == (1, 1)


@pytest.mark.parametrize("grads_in_fp32", [True, False])
def test_case_10_the_first_step_is_clipped(megatron, grads_in_fp32):
    for rank in every_rank(megatron, "one_huge_grad", grads_in_fp32=grads_in_fp32):
        assert rank["differences"] == []
        assert rank["ours"] == rank["stock"]
        assert rank["ours"] > 2**19


def test_case_11_every_parameter_moves(megatron):
    for rank in every_rank(megatron, "constant_grad"):
        assert rank["smallest"] > 0.9e-3
        assert rank["largest"] < 1.1e-3


def test_case_13_construction_changes_no_weight_and_draws_no_number(megatron):
    for rank in every_rank(megatron, "construction_is_quiet"):
        assert rank["weights"]
        assert rank["random"]
        assert not any(rank["moments"])
        assert rank["step"] == 0


def test_case_19_states_exist_once_and_on_the_host(megatron):
    for rank in every_rank(megatron, "memory_of_states"):
        assert rank["bytes"] <= 12 * rank["owned"] + 3 * 4096  # slabs end on a page
        assert rank["on_device"] == 0
        assert rank["fp32_params_on_device"] == 0


def test_offload_and_restore_in_any_order(megatron):
    for rank in every_rank(megatron, "offloads_are_no_ops"):
        assert rank["differences"] == []


def test_states_that_are_moved_off_the_device_leave_nothing_there(megatron):
    assert every_rank(megatron, "resident_states_that_leave_the_device") == [[True] * 3] * 2


def test_the_optimizer_of_a_mimo_model_which_clips_grads_itself_is_refused(megatron):
    (refused,) = every_rank(megatron, "in_a_mimo_optimizer", 1, deep=True)
    assert "does not work with a MimoModel" in refused
    assert "Drop --use-deep-optimizer-states" in refused
    assert every_rank(megatron, "in_a_mimo_optimizer", 1, deep=False) == [""]


def test_a_step_that_fails_in_the_middle_is_the_last_before_a_load(megatron, tmp_path):
    (rank,) = every_rank(megatron, "a_step_that_fails_in_the_middle", 1, filename=str(tmp_path / "states.pt"))
    assert rank["failing"] == "out of luck"
    assert rank["step"].startswith("no step is possible: a step failed in the middle")
    assert rank["file"] == rank["sharded"] == rank["step"].replace("no step", "no save")
    assert rank["after a load"] == ""


@pytest.mark.parametrize("ranks", [1, 4])
def test_case_02_and_14_saved_step_is_one_plain_number_on_every_rank(megatron, ranks):
    results = every_rank(megatron, "state_dict_of_an_empty_rank", ranks)
    groups = results[0]["groups"]
    for rank in results:
        assert rank["steps"] == [[0] * groups, [1] * groups]
        assert set(rank["kinds"]) <= {"int", "float", "bool", "str", "tuple", "list", "NoneType"}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("kept_in_fp32", "built"), [((2, 4), 195.1546), ((), 195.1541)], ids=["mixed", "all bf16"])
def test_the_norm_of_the_params_is_that_of_stock_without_a_flag(megatron, ranks, kept_in_fp32, built):
    for rank in every_rank(megatron, "norms_of_the_parameters", ranks, kept_in_fp32=kept_in_fp32):
        assert rank["ours"] == rank["stock"]
        assert rank["resident"] == pytest.approx(rank["stock"], rel=1e-5)
        assert rank["stock"][0] == pytest.approx(built, abs=1e-3)


@pytest.mark.parametrize(("kept_in_fp32", "wrong"), [((2, 4), 30.1556), ((), 0.0)], ids=["mixed", "all bf16"])
def test_the_norm_of_the_params_would_be_that_of_the_fp32_ones_without_an_answer(megatron, kept_in_fp32, wrong):
    """What `main_params` protects from."""
    for rank in every_rank(megatron, "norms_of_the_parameters", kept_in_fp32=kept_in_fp32, answered=False):
        assert rank["ours"][0] == pytest.approx(wrong, abs=1e-3)
        assert rank["ours"] != rank["stock"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_asynchronous_save_looks_for_room_whoever_starts_it(megatron, ranks, tmp_path):
    for rank in every_rank(megatron, "saves_without_room", ranks, folder=str(tmp_path)):
        assert "--async-save sends 0.00 GiB of optimizer states a rank through /dev/shm" in rank["full"]
        assert rank["nothing was written"] == "True"
        assert [rank[name] for name in ("at once", "with room", "the second")] == [""] * 3


def test_without_looking_an_asynchronous_save_would_begin(megatron, tmp_path):
    for rank in every_rank(megatron, "saves_without_room", folder=str(tmp_path), watched=False):
        assert rank["full"] == ""
