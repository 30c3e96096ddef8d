# SPDX-License-Identifier: Apache-2.0
"""How the cases run Megatron, and how they compare two runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness import LAYOUTS, PRECISIONS, TINY, Megatron, Result, same_bits

__all__ = ["CHECKPOINT_FORMATS", "arguments_of", "different_ends", "in_ranks", "prepare", "rewind"]

CHECKPOINT_FORMATS = {
    "torch_dist": [],
    "torch_dist, fully reshardable": ["--dist-ckpt-optim-fully-reshardable"],
    "torch": ["--ckpt-format", "torch"],
}


def arguments_of(layout: str, *more: str, precision: str = "bf16") -> list[str]:
    """Arguments of a training of TINY, cut into many subgroups."""
    return [*TINY, *LAYOUTS[layout][1], *PRECISIONS[precision], "--dos-subgroup-size", "3000", *more]


def in_ranks(megatron: Megatron, function: str, ranks: int = 2, mutation: str | None = None, **arguments: Any) -> list:
    """What a function of `case_ranks` returns, by rank."""
    return megatron.call("case_ranks:call", ranks, what=function, mutation=mutation, **arguments).values


def prepare(mutation: str | None, *hooks: str) -> list[str]:
    """The `prepare` of a training with this mutation."""
    return [*hooks, *([f"mutations:{mutation}"] if mutation else [])]


def rewind(folder: Path, iteration: int) -> Path:
    """Let an earlier checkpoint of `folder` be the last, as if the run had ended there."""
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return folder


def different_ends(run: Result, reference: Result) -> list[str]:
    """Weights, states and steps in which two runs end differently, by a bit, on any rank."""
    found = []
    for rank, (mine, theirs) in enumerate(zip(run.of_rank, reference.of_rank, strict=True)):
        assert mine.weights.keys() == theirs.weights.keys()
        assert mine.states.keys() == theirs.states.keys()
        found += [f"weight {n} of rank {rank}" for n, w in mine.weights.items() if not same_bits(w, theirs.weights[n])]
        for name, state in mine.states.items():
            expected = theirs.states[name]
            found += [] if state["step"] == expected["step"] else [f"step of {name} of rank {rank}"]
            keys = ("param", "exp_avg", "exp_avg_sq")
            found += [f"{key} of {name} of rank {rank}" for key in keys if not same_bits(state[key], expected[key])]
    return found
