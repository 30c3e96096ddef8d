# SPDX-License-Identifier: Apache-2.0
"""Code that changes Adam's state from outside has the effect that it has on the stock optimizer, or is refused.

Ours and the stock optimizer run the same code, `caller_states`, through Megatron's own classes."""

import pytest
from caller_states import ACROSS_THE_BORDER, ACTIONS, IDENTITIES

MODULE = "caller_states"


def every_rank(megatron, function, ranks=1, **arguments):
    return megatron.call(f"{MODULE}:{function}", ranks, **arguments).values


@pytest.mark.parametrize(("ranks", "share"), [(1, ACROSS_THE_BORDER), (2, 0.0), (2, ACROSS_THE_BORDER)])
@pytest.mark.parametrize("action", ACTIONS)
def test_a_change_has_the_effect_that_it_has_on_stock(megatron, action, ranks, share):
    outcomes = every_rank(megatron, "on_both", ranks, action=action, share=share)
    for outcome in outcomes:
        assert outcome["differences"] == []
        assert outcome["steps"][0] == outcome["steps"][1]
        assert outcome["has_effect"] != []
    assert any(outcome["straddles"] for outcome in outcomes) == bool(share)
    assert len({str(outcome["keys"][0]) for outcome in outcomes}) == 1  # a checkpoint's common part


@pytest.mark.parametrize("action", ["reset_in_place", "whole_rollback", "references_put_back", "adapters"])
def test_with_params_in_fp32(megatron, action):
    (outcome,) = every_rank(megatron, "on_both", action=action, share=ACROSS_THE_BORDER, dtype="float32")
    assert outcome["differences"] == []
    assert bool(outcome["has_effect"]) == (action in ACTIONS)


@pytest.mark.parametrize("action", IDENTITIES)
def test_what_changes_nothing_with_stock_changes_nothing(megatron, action):
    for outcome in every_rank(megatron, "on_both", 2, action=action, share=ACROSS_THE_BORDER):
        assert outcome["differences"] == outcome["has_effect"] == []


@pytest.mark.parametrize("share", [0.0, ACROSS_THE_BORDER, 1.0])
@pytest.mark.parametrize("step", [5, 5000])
def test_the_first_update_after_a_reset_is_one_learning_rate(megatron, step, share):
    (updates,) = every_rank(megatron, "first_update", step=step, resets=True, share=share)
    assert updates["ours"] == updates["stock"] == pytest.approx([1.0, 1.0], abs=1e-3)


@pytest.mark.parametrize(("step", "update"), [(5, 0.52), (5000, 3.15)])
def test_where_only_the_moments_are_reset_the_step_goes_on_as_with_stock(megatron, step, update):
    (updates,) = every_rank(megatron, "first_update", step=step, resets=False, share=0.0)
    assert updates["ours"] == updates["stock"] == pytest.approx([update, update], abs=5e-3)


def test_a_reset_reaches_all_moments_of_a_param_across_the_border(megatron):
    (outcome,) = every_rank(megatron, "reset_moments", share=ACROSS_THE_BORDER)
    assert outcome == {"numel": 32_768, "zeros": 32_768, "cut": True}


REFUSALS = {
    "groups disagree": ("ValueError", "disagree on the step: 7 in group 0, 1 in group 1", "Set group"),
    "a step that is none": ("ValueError", "is 1.5", "whole number"),
    "clones": ("ValueError", "no longer hold each of its 6", "Keep the tensors"),
    "a shard is dropped": ("ValueError", "1 missing, 0 tensors of another", "requires_grad = False"),
    "a shard twice": ("ValueError", "1 listed twice", "Keep the tensors"),
    "states of a clone": ("KeyError", "not a parameter shard", "param_groups"),
    "states of whole params": ("ValueError", "has shape", "flat shard"),
    "a number for a state": ("TypeError", "not int", "floating-point tensor of"),
    "step in the states": ("ValueError", "step is not kept in the states", 'group["step"] in every'),
    "a state of its own": ("ValueError", "cannot keep 'ema'", "master_param, exp_avg, exp_avg_sq"),
    "a state is removed": ("TypeError", "cannot be removed alone", "assign zeros"),
    "half an entry": ("ValueError", "lack exp_avg_sq", "give both moments"),
    "no dict": ("TypeError", "not NoneType", "dict of tensors"),
    "a foreign key": ("KeyError", "not a parameter shard", "param_groups"),
    "popitem": ("TypeError", "no popitem()", "state.clear()"),
    "a new group": ("ValueError", "cannot be added", "get_megatron_optimizer()"),
    "fewer params": ("ValueError", "params on this rank", "another model or layout"),
    "a view is kept": ("ValueError", "while a view of it", "Clone"),
}


@pytest.mark.parametrize("share", [0.0, ACROSS_THE_BORDER])
def test_what_cannot_be_obeyed_is_refused_in_one_sentence_before_anything_changes(megatron, share):
    (outcomes,) = every_rank(megatron, "refusals", share=share)
    assert outcomes.keys() == REFUSALS.keys()
    for name, (message, changed) in outcomes.items():
        kind, cause, way_out = REFUSALS[name]
        assert message.startswith(f"{kind}: "), (name, message)
        assert cause in message, (name, message)
        assert way_out in message, (name, message)
        assert "tensor(" not in message, (name, message)
        assert len(message) < 450, (name, message)
        assert changed == [], name


@pytest.mark.parametrize("share", [ACROSS_THE_BORDER, 1.0])
def test_memory_of_states_cannot_be_freed_behind_their_back(megatron, share):
    (outcome,) = every_rank(megatron, "resized", share=share)
    assert all("not resizable" in message for message in outcome["messages"])
    assert outcome["changed"] == []


@pytest.mark.parametrize("share", [ACROSS_THE_BORDER, 1.0])
def test_what_a_caller_holds_follows_states_that_are_moved(megatron, share):
    assert every_rank(megatron, "offloaded", share=share) == [[]]


@pytest.mark.parametrize("kind", ["stateless", "derived"])
def test_an_inner_optimizer_that_is_not_megatrons_adam_is_refused_by_name(megatron, kind):
    (message,) = every_rank(megatron, "inner_class", kind=kind)
    name = {"stateless": "StatelessAdam", "derived": "AdamW"}[kind]
    assert message.startswith("UnsupportedOptionError: --use-deep-optimizer-states replaces Megatron's Adam")
    assert f"caller_states.inner_class.<locals>.{name}," in message
    assert "drop --use-deep-optimizer-states" in message


@pytest.mark.parametrize("kind", ["as it is", "L2"])
def test_the_adams_that_megatron_builds_are_taken(megatron, kind):
    assert every_rank(megatron, "inner_class", kind=kind) == [""]


def test_only_its_own_state_dict_loads_in_memory(megatron):
    refused = "CheckpointError: no step is possible: a checkpoint was loaded in part"
    for outcome in every_rank(megatron, "in_memory_and_half_loaded", 2):
        assert outcome.pop("own") == ""
        assert outcome.pop("own, half loaded").startswith("CheckpointError: no step is possible: a load has failed")
        for name in ("own, before a step", "equal to its own", "of another"):
            assert outcome.pop(name).startswith(refused), name
        assert set(map(str, outcome.values())) == {"[]"}


@pytest.mark.parametrize(("ranks", "share"), [(1, ACROSS_THE_BORDER), (2, ACROSS_THE_BORDER), (2, 0.0)])
def test_files_hold_what_was_changed_and_loads_reach_what_is_held(megatron, tmp_path, ranks, share):
    for outcome in every_rank(megatron, "through_files", ranks, folder=str(tmp_path), share=share):
        assert set(outcome.pop("kinds")) <= {"int", "float", "bool", "str", "tuple", "list", "NoneType"}
        for layout in ("dp_reshardable", "fully_reshardable"):
            assert set(outcome.pop(f"{layout}: step")) == {40}
        for name, value in outcome.items():
            assert set(value) == {0.25} if name.endswith(": held") else value == [], name


# ---- Each protection taken away -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "update"), [(5, 0.52), (5000, 3.15)])
def test_without_a_public_step_a_reset_is_half_obeyed(megatron, step, update):
    (updates,) = every_rank(megatron, "first_update", step=step, resets=True, share=0.0, protection="private_counter")
    assert updates["stock"] == pytest.approx([1.0, 1.0], abs=1e-3)
    assert updates["ours"] == pytest.approx([update, update], abs=5e-3)


@pytest.mark.parametrize(
    ("protection", "action", "symptom"),
    [
        ("nothing_is_replaced", "empty_dict", "exp_avg"),
        ("nothing_is_replaced", "reset_by_assignment", "exp_avg"),
        ("nothing_is_replaced", "rollback", "exp_avg"),
        ("copies_stay_copies", "reset_in_place", "exp_avg of p5"),
        ("copies_stay_copies", "data_is_exchanged", "exp_avg of p3"),
        ("held_is_not_kept", "references_put_back", "exp_avg"),
        ("held_is_not_kept", "mapping_put_back", "exp_avg"),
        ("held_is_not_kept", "tensors_put_back", "exp_avg"),
        ("private_counter", "adapters", "param"),
    ],
)
def test_without_its_protection_a_change_has_another_effect(megatron, protection, action, symptom):
    (outcome,) = every_rank(megatron, "on_both", action=action, share=ACROSS_THE_BORDER, protection=protection)
    assert any(difference.startswith(symptom) for difference in outcome["differences"])


def test_without_write_back_a_reset_leaves_moments_across_the_border(megatron):
    (outcome,) = every_rank(megatron, "reset_moments", share=ACROSS_THE_BORDER, protection="copies_stay_copies")
    assert outcome["zeros"] < 32_768


def test_without_the_check_of_its_type_any_inner_optimizer_is_replaced(megatron):
    assert every_rank(megatron, "inner_class", kind="derived", protection="any_class_is_taken") == [""]


@pytest.mark.parametrize(
    ("protection", "name", "refuses"),
    [("every_state_dict_is_of_a_file", "own", True), ("every_state_dict_is_its_own", "of another", False)],
)
def test_without_knowing_its_own_state_dicts(megatron, protection, name, refuses):
    (outcome,) = every_rank(megatron, "in_memory_and_half_loaded", protection=protection)
    assert bool(outcome[name]) == refuses
