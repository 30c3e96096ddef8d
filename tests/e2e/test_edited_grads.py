# SPDX-License-Identifier: Apache-2.0
"""Grads that are sent in the backward pass and edited before the step: the step has the bits of the stock optimizer.

With an edit before Megatron's prepare_grads, bf16 params and FP32 grads it is a case of tests/cases.
"""

import pytest


@pytest.mark.parametrize(
    "settings",
    [
        {"grads_in_fp32": False},
        {"dtype": "float16", "inf_at": 2},
        {"when": "after prepare_grads"},
        {"when": "after prepare_grads", "dtype": "float16"},
        {"when": "in a hook"},
    ],
    ids=["bf16 grads", "a skipped step", "after prepare_grads", "unscaled in between", "in a hook"],
)
def test_edited_grads(megatron, settings):
    for of_rank in megatron.call("edited_grads:edit_reduced_grads", 2, **settings).values:
        assert of_rank["a matrix zeroed"]["moved"][3] == 0
        for name, outcome in of_rank.items():
            assert outcome["differences"] == [], name
            assert all(ours == stock for ours, stock in outcome["steps"]), name
            assert all(taken for (taken, _), _ in outcome["steps"]) == ("inf_at" not in settings), name
            assert outcome["again"] == outcome["expected again"], name
