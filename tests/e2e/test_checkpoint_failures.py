# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are written while the training goes on, cannot be written, or cannot be read."""

from __future__ import annotations

import json
import re

import pytest
from harness import LAYOUTS, PRECISIONS, TINY, CaseFailure, assert_same_bits

COMMON = [*TINY, *LAYOUTS["dp2"][1], *PRECISIONS["bf16"], "--dos-subgroup-size", "3000"]
LAYOUTS_OF_STATES = ("dp_reshardable", "fully_reshardable")
TORCH_DIST = ("torch_dist", "torch_dist, fully reshardable")
WAYS = ("torch", *TORCH_DIST)


def differing(one, other):
    """Names of what differs in two digests. Setting up the data draws random numbers after a load."""
    return [key for key in one if key != "random" and one[key] != other[key]]


@pytest.mark.parametrize("persistent", [True, False], ids=["persistent writer", "forked writer"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared states", "private states"])
@pytest.mark.parametrize("layout", LAYOUTS_OF_STATES)
def test_a_file_written_while_stepping_holds_the_states_at_the_call(megatron, tmp_path, layout, persistent, shared):
    run = megatron.call(
        "checkpoint_faults:written_while_stepping",
        2,
        folder=str(tmp_path),
        layout=layout,
        persistent=persistent,
        shared=shared,
    )
    for rank in run.values:
        assert len(rank["went_on"]) > 3, "the steps have to change the states for this to tell anything"
        assert rank["in_file"] == []
        assert rank["step"] == 2


@pytest.mark.parametrize("layout", LAYOUTS_OF_STATES)
def test_without_the_copy_before_a_fork_the_file_would_be_torn(megatron, tmp_path, layout):
    run = megatron.call(
        "checkpoint_faults:written_while_stepping",
        2,
        folder=str(tmp_path),
        layout=layout,
        persistent=False,
        shared=True,
        protected=False,
    )
    assert all(rank["in_file"] for rank in run.values)


@pytest.mark.parametrize("persistent", [True, False], ids=["persistent writer", "forked writer"])
@pytest.mark.parametrize("layout", LAYOUTS_OF_STATES)
def test_an_async_save_without_room_in_shared_memory_fails_on_all_ranks(megatron, tmp_path, layout, persistent):
    """One of them has none. Nothing waits, the training may go on, and the checkpoint before is whole."""
    ranks = without_room(megatron, tmp_path, layout=layout, persistent=persistent)
    assert "No space left on device" in ranks[1]["full"]
    assert "another rank has no shared memory left" in ranks[0]["full"]
    for rank in ranks:
        assert rank["full"].startswith("CheckpointError: ")
        assert "--shm-size" in rank["full"]
        assert not rank["complete"]
        assert (rank["step"], rank["before"]) == ("", [])
        assert (rank["with room"], rank["after"]) == ("", [])


def test_a_forked_writer_whose_states_could_not_be_copied_writes_no_checkpoint(megatron, tmp_path):
    """The second line: whoever forks without Megatron's queue is not stopped before."""
    ranks = without_room(megatron, tmp_path, layout="dp_reshardable", persistent=False, protected=False)
    for rank in ranks:
        assert rank["full"]
        assert not rank["complete"]
        assert rank["before"] == []


def without_room(megatron, folder, **arguments):
    ranks = megatron.call("checkpoint_faults:without_room", 2, folder=str(folder), **arguments).values
    if not all(ranks):
        pytest.skip("needs the right to mount a /dev/shm of its own (CAP_SYS_ADMIN)")
    return ranks


def test_async_save_of_a_training_holds_the_moment_of_the_call_and_disturbs_nothing(megatron, tmp_path):
    run = megatron.train(
        [*COMMON, "--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore"],
        2,
        "dos",
        6,
        save=tmp_path / "saved",
        save_interval=2,
        inspect="checkpoint_faults:open_gate_after_later_steps",
        prepare="checkpoint_faults:async_training",
        environment={"GATE": str(tmp_path / "gate")},
    )
    at_the_call, two_steps_later = run.of_rank[0].inspected["step"]
    assert two_steps_later["written"] == []
    loaded = megatron.train(
        [*COMMON, "--ckpt-step", "2"], 2, "dos", 0, load=tmp_path / "saved", inspect="checkpoint_faults:digest_at_start"
    )
    assert differing(loaded.of_rank[0].inspected["start"][0], at_the_call) == []
    assert_same_bits(run, megatron.train(COMMON, 2, "dos", 6))


@pytest.mark.parametrize("way", ["torch", "torch_dist"])
def test_a_rank_killed_while_it_saves_leaves_the_checkpoint_before(megatron, tmp_path, way):
    common = [*COMMON, "--ckpt-format", way]
    with pytest.raises(CaseFailure):
        megatron.train(
            common, 2, "dos", 4, save=tmp_path, save_interval=2, prepare="checkpoint_faults:kill_in_the_second_save"
        )
    halves = [
        path
        for path in (tmp_path / "iter_0000004").rglob("*")
        if path.is_file() and b"half a file" in path.read_bytes()
    ]
    assert halves, "it was killed in the middle of the second save"
    expected = megatron.train(COMMON, 2, "dos", 2, inspect="checkpoint_faults:digest_at_end").of_rank[0]
    loaded = megatron.train(common, 2, "dos", 0, load=tmp_path, inspect="checkpoint_faults:digest_at_start").of_rank[0]
    assert differing(loaded.inspected["start"][0], expected.inspected["end"][0]) == []
    if way == "torch":  # Megatron itself overwrites the files of the other format
        assert all(path.name.startswith(".distrib_optim.pt.") for path in halves)
        megatron.train(common, 2, "dos", 3, load=tmp_path, save=tmp_path)
        assert not any(path.exists() for path in halves), "the next save removes it, also of another iteration"
        assert (tmp_path / "iter_0000003" / "mp_rank_00" / "distrib_optim.pt").exists()


@pytest.fixture(scope="module")
def outcomes(megatron, tmp_path_factory):
    """Of all faults of a training, by name; per rank."""
    folder = tmp_path_factory.mktemp("faults")
    order = {"folder": str(folder / "foreign"), "ways": WAYS}
    megatron.train(
        [*COMMON, "--ffn-hidden-size", "128"],
        2,
        "dos",
        1,
        inspect="checkpoints:save_in_all_ways",
        environment={"CHECKPOINTS": json.dumps(order)},
        keep_state=False,
    )
    run = megatron.train(
        COMMON,
        2,
        "dos",
        3,
        inspect="checkpoint_faults:faults",
        environment={"FAULTS": str(folder), "FOREIGN": str(folder / "foreign"), "WAYS": json.dumps(WAYS)},
        keep_state=False,
    )
    ranks = [rank.inspected["end"][0] for rank in run.of_rank]
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


@pytest.mark.parametrize("way", WAYS)
def test_a_full_disk_is_an_error_on_all_ranks_that_changes_nothing(outcomes, way):
    for rank in outcomes[f"{way}: full disk"]:
        assert rank["error"]
        assert rank["changed"] == []
        assert rank["tracker"] == "5", "the checkpoint before is still the latest"
    assert any("cannot be written" in rank["error"] or "Worker failure" in rank["error"]
               for rank in outcomes[f"{way}: full disk"])  # fmt: skip


@pytest.mark.parametrize(
    "fault", ["full disk", "cut short", "missing", "garbage", "foreign", "incomplete", "given up", "of another model"]
)
@pytest.mark.parametrize("way", WAYS)
def test_the_checkpoint_before_loads_after_a_fault(outcomes, way, fault):
    expected = [rank["after"] for rank in outcomes[f"{way}: after full disk"]]
    after = outcomes[f"{way}: after {fault}"]
    assert [rank["error"] for rank in after] == ["", ""]
    assert [rank["step"] for rank in after] == ["", ""]
    for one, other in zip(after, expected, strict=True):
        assert {**one["after"], "scheduler": None} == {**other, "scheduler": None}  # each load adds to its counter


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("cut short", r"__0_0\.distcp has [\d,]+ bytes and should have [\d,]+: it was cut short.*--ckpt-step"),
        ("missing", r"a file of the checkpoint is missing.*__1_0\.distcp.*--ckpt-step"),
        ("foreign", r"metadata"),
        ("of another model", r"Global shape mismatch"),
    ],
)
@pytest.mark.parametrize("way", TORCH_DIST)
def test_a_torch_dist_checkpoint_that_cannot_be_read_leaves_states_and_training_alone(outcomes, way, fault, says):
    for rank in outcomes[f"{way}: {fault}"]:
        assert re.search(says, rank["error"], re.DOTALL)
        # Before it compares shapes, Megatron empties the word embeddings, which may have another size in a checkpoint.
        assert rank["changed"] == (["weights"] if fault == "of another model" else [])
        assert rank["step"] == ""


@pytest.mark.parametrize("way", TORCH_DIST)
def test_no_step_is_possible_after_a_read_that_failed_in_the_middle(outcomes, way):
    ranks = outcomes[f"{way}: garbage"]
    assert any("states" in rank["changed"] for rank in ranks), "the case is one of half a load"
    for rank in ranks:
        # A tensor that reaches from one into another is refused as damaged; torch cannot read what has no archive left.
        assert re.search(r"was damaged after it had been written|corrupted|weights_only", rank["error"])
        assert rank["step"].startswith("CheckpointError: no step is possible: reading a checkpoint into the optimizer")
        assert rank["save"].startswith("CheckpointError: no save is possible: reading a checkpoint into the optimizer")


@pytest.mark.parametrize("way", TORCH_DIST)
def test_neither_step_nor_save_is_possible_after_a_load_that_was_given_up_when_all_was_read(outcomes, way):
    for rank in outcomes[f"{way}: given up"]:
        assert "num_attention_heads" in rank["error"]
        assert rank["step"].startswith("CheckpointError: no step is possible: a checkpoint was read into the optimizer")
        assert rank["save"].startswith("CheckpointError: no save is possible: a checkpoint was read into the optimizer")


@pytest.mark.parametrize("way", TORCH_DIST)
def test_a_load_of_the_weights_alone_after_one_that_failed_does_not_stand_in_the_way_of_a_step(outcomes, way):
    for rank in outcomes[f"{way}: weights alone"]:
        assert (rank["error"], rank["step"]) == ("", "")


def test_all_ranks_refuse_a_fully_reshardable_checkpoint_without_a_state_that_one_of_them_owns(outcomes):
    missing = "optimizer.state.exp_avg.decoder.final_layernorm.bias"
    for rank in outcomes["torch_dist, fully reshardable: incomplete"]:
        assert missing in rank["error"]
        assert "states" not in rank["changed"]
        assert rank["step"] == ""


@pytest.mark.parametrize("fault", ["cut short", "missing", "garbage", "foreign"])
def test_a_torch_checkpoint_that_cannot_be_read_leaves_the_states_alone_and_allows_no_step(outcomes, fault):
    # Megatron has loaded the weights and the step by the time it comes to the file of the optimizer states.
    for rank in outcomes[f"torch: {fault}"]:
        assert "distrib_optim.pt cannot be loaded" in rank["error"]
        assert "The optimizer states are as they were" in rank["error"]
        assert "states" not in rank["changed"]
        assert rank["step"].startswith(
            "CheckpointError: no step is possible: a checkpoint was loaded in part, its step"
        )


def test_a_torch_checkpoint_of_another_model_leaves_the_states_alone(outcomes):
    for rank in outcomes["torch: of another model"]:
        assert "size mismatch" in rank["error"]
        assert "states" not in rank["changed"]
