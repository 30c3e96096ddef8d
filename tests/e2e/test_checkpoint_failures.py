"""Checkpoints that are written while the training goes on, cannot be written, or cannot be read."""

from __future__ import annotations

import pytest
from checkpoints import folder_of  # noqa: F401
from harness import LAYOUTS, PRECISIONS, TINY, CaseFailure

COMMON = [*TINY, *LAYOUTS["dp2"][1], *PRECISIONS["bf16"], "--dos-subgroup-size", "3000"]


@pytest.mark.parametrize("persistent", [True, False], ids=["persistent writer", "forked writer"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared states", "private states"])
def test_a_file_written_while_stepping_holds_the_states_at_the_call(megatron, tmp_path, persistent, shared):
    run = megatron.call(
        "checkpoint_faults:written_while_stepping", 2, folder=str(tmp_path), persistent=persistent, shared=shared
    )
    for rank in run.values:
        assert len(rank["went_on"]) > 3, "the steps have to change the states for this to tell anything"
        assert rank["in_file"] == []
        assert rank["step"] == 2


def test_without_the_copy_before_a_fork_the_file_would_be_torn(megatron, tmp_path):
    run = megatron.call(
        "checkpoint_faults:written_while_stepping",
        2,
        folder=str(tmp_path),
        persistent=False,
        shared=True,
        protected=False,
    )
    assert all(rank["in_file"] for rank in run.values)
