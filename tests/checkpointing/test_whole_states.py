# SPDX-License-Identifier: Apache-2.0
"""The keeper of whether the states are whole: nothing is done with half of them."""

from __future__ import annotations

import pytest

from megatron_dos.checkpointing.handouts import CheckpointError
from megatron_dos.checkpointing.whole_states import WholeStates


@pytest.fixture
def whole() -> WholeStates:
    return WholeStates()


def state_dict(whole: WholeStates) -> dict:
    groups = [{"lr": 1.0}]
    whole.gave(groups)
    return {"optimizer": {"param_groups": groups}}


def test_states_are_whole_until_something_fails(whole):
    whole.require("step")
    whole.failed("a load has ended early")
    with pytest.raises(CheckpointError, match=r"no save is possible: a load has ended early\. Load a whole checkpoint"):
        whole.require("save")
    whole.done()
    whole.require("save")


def test_a_step_that_fails_in_its_middle_leaves_them_torn(whole):
    with whole.step():
        pass
    whole.require("step")
    with pytest.raises(ZeroDivisionError), whole.step():
        raise ZeroDivisionError
    with pytest.raises(CheckpointError, match="a step failed in the middle"):
        whole.require("step")


def test_a_step_mends_nothing(whole):
    whole.failed("half a load")
    with whole.step():
        pass
    assert whole.problem == "half a load"


def test_a_state_dict_is_its_own_until_the_states_change(whole):
    first, second = state_dict(whole), state_dict(whole)
    assert whole.has_given(first)
    assert whole.has_given(second)
    assert not whole.has_given({"optimizer": {"param_groups": [{"lr": 1.0}]}})  # an equal one may come from a file
    assert not whole.has_given({**first, "param_state": {}})
    assert not whole.has_given({})
    whole.begin()
    assert not whole.has_given(first)
    whole.require("step")
    whole.begin("half loaded")
    with pytest.raises(CheckpointError, match="half loaded"):
        whole.require("step")


def test_what_reading_reports_counts(whole):
    whole.loads.read("a checkpoint was read into the states, and its load did not come to its end")
    with pytest.raises(CheckpointError, match="did not come to its end"):
        whole.require("step")
