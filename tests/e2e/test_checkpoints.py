"""Checkpoints: what is saved in one process comes back in another to the bit, whoever saved it and whatever the layout.

`UPDATE_DOCS=1 python -m pytest tests/e2e/test_checkpoints.py` writes the table of docs/checkpoints.md anew.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from checkpoints import WAYS
from harness import LAYOUTS, PRECISIONS, ROOT, TINY, Megatron

PAGE = ROOT / "docs" / "checkpoints.md"
BEGIN, END = "<!-- table of tests/e2e/test_checkpoints.py: begin -->", "<!-- end -->"
# dp4 needs eight sequences a batch, and a checkpoint can only be loaded with the batch that it was saved with.
COMMON = [*TINY, *PRECISIONS["bf16"], "--dos-subgroup-size", "3000", "--global-batch-size", "8"]
STOCK = [argument for argument in COMMON if argument not in ("--dos-subgroup-size", "3000")]
EXPERTS = ["--num-experts", "4", "--expert-model-parallel-size"]

SOURCES = {"dp2": LAYOUTS["dp2"], "ep2": (2, [*EXPERTS, "2"])}
CHANGES = {
    "none": ("dp2", *LAYOUTS["dp2"]),
    "DP 2 → 1": ("dp2", *LAYOUTS["dp1"]),
    "DP 2 → 4": ("dp2", *LAYOUTS["dp4"]),
    "TP 1 → 2": ("dp2", *LAYOUTS["tp2"]),
    "PP 1 → 2": ("dp2", *LAYOUTS["pp2"]),
    "none, EP 2": ("ep2", *SOURCES["ep2"]),
    "EP 2 → 4": ("ep2", 4, [*EXPERTS, "4"]),
    "EP 2 → 1": ("ep2", 2, [*EXPERTS, "1"]),
}
"""Change of the layout -> the source, and ranks and arguments of the process that loads."""
DIRECTIONS = {"ours → ours": ("dos", "dos"), "ours → stock": ("dos", "numpy"), "stock → ours": ("numpy", "dos")}
"""Direction -> who saves and who loads."""


def arguments(optimizer: str, layout: list[str]) -> list[str]:
    return (COMMON if optimizer == "dos" else STOCK) + [*layout, "--global-batch-size", "8"]


class Matrix:
    """All saves and loads of this module, each run once."""

    def __init__(self, megatron: Megatron, folder: Path) -> None:
        self.saved = {}
        self.failed_saves = {}
        for source, (ranks, layout) in SOURCES.items():
            for saver in ("dos", "numpy"):
                order = {"folder": str(folder / source / saver), "ways": list(WAYS)}
                run = self._run(megatron, saver, ranks, layout, 4, "save_in_all_ways", order)
                self.saved[source, saver] = [rank["digest"] for rank in run]
                self.failed_saves[source, saver] = run[0]["failed"]
        self.loaded = {}
        for change, (source, ranks, layout) in CHANGES.items():
            ways = [way for way in WAYS if way not in self.failed_saves[source, "dos"]]
            for loader in ("dos", "numpy"):
                # What the stock optimizer makes of its own files is needed where something may fail.
                savers = ("dos",) if loader == "numpy" and change.startswith(("none", "DP")) else ("dos", "numpy")
                folders = {saver: str(folder / source / saver) for saver in savers}
                order = {"folders": list(folders.values()), "ways": ways}
                run = self._run(megatron, loader, ranks, layout, 0, "load_from_all", order)
                for saver, of_saver in folders.items():
                    for way in ways:
                        self.loaded[change, saver, loader, way] = [rank[f"{of_saver}: {way}"] for rank in run]

    @staticmethod
    def _run(megatron, optimizer, ranks, layout, iterations, hook, order):
        run = megatron.train(
            arguments(optimizer, layout),
            ranks,
            optimizer,
            iterations,
            inspect=f"checkpoints:{hook}",
            environment={"CHECKPOINTS": json.dumps(order)},
            keep_state=False,
        )
        return [rank.inspected["end" if iterations else "start"][0] for rank in run.of_rank]

    def errors(self, change: str, saver: str, loader: str, way: str) -> list[str]:
        """What the ranks that load have raised; empty strings where all went well."""
        source = CHANGES[change][0]
        if way in self.failed_saves[source, saver]:
            return [self.failed_saves[source, saver][way]]
        return [rank["error"] for rank in self.loaded[change, saver, loader, way]]

    def differs(self, change: str, saver: str, loader: str, way: str) -> list[str]:
        """What of the training did not come back to the bit, of a load without errors."""
        expected = self.saved[CHANGES[change][0], saver][0]
        loaded = self.loaded[change, saver, loader, way]
        # Megatron leaves the random state alone where TP or PP has changed.
        keys = [key for key in expected if not (key == "random" and change.startswith(("TP", "PP")))]
        found = [key for key in keys if loaded[0][key] != expected[key]]
        return found + [f"{key} of rank {rank}" for key in ("step", "scheduler", "scaler") for rank, one in
                        enumerate(loaded) if set(map(repr, one[key])) - set(map(repr, expected[key]))]  # fmt: skip

    def cell(self, change: str, direction: str, way: str) -> str:
        saver, loader = DIRECTIONS[direction]
        if any(self.errors(change, saver, loader, way)):
            return "no"
        return "DIFFERS" if self.differs(change, saver, loader, way) else "yes"

    def table(self) -> str:
        """The table of the page."""
        lines = ["| saved as | direction | " + " | ".join(CHANGES) + " |", "|---|---|" + "---|" * len(CHANGES)]
        for way in WAYS:
            for direction in DIRECTIONS:
                cells = " | ".join(self.cell(change, direction, way) for change in CHANGES)
                lines.append(f"| {way} | {direction} | {cells} |")
        return "\n".join(lines)


@pytest.fixture(scope="module")
def matrix(megatron, tmp_path_factory) -> Matrix:
    return Matrix(megatron, tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize("source", SOURCES)
def test_both_optimizers_have_trained_to_the_same_bits(matrix, source):
    assert matrix.saved[source, "dos"] == matrix.saved[source, "numpy"]
    assert matrix.failed_saves[source, "dos"] == matrix.failed_saves[source, "numpy"]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_was_saved_comes_back_to_the_bit_or_the_stock_optimizer_fails_too(matrix, change, direction):
    saver, loader = DIRECTIONS[direction]
    for way in WAYS:
        errors = matrix.errors(change, saver, loader, way)
        if any(errors):
            # The limit is Megatron's own: its optimizer says the same of its own files.
            assert errors == matrix.errors(change, "numpy", "numpy", way), way
        else:
            assert matrix.differs(change, saver, loader, way) == [], way


def test_layouts_that_can_change_are_not_refused(matrix):
    """The table has no more 'no' than Megatron's documentation lets expect."""
    kept = [way for way in WAYS if "in the space of" not in way]
    for direction in DIRECTIONS:
        for way in kept:
            for change in CHANGES:
                if "fully reshardable" in way or change.startswith(("none", "DP")):
                    assert matrix.cell(change, direction, way) == "yes", (way, direction, change)


def test_the_page_has_the_table_of_these_tests(matrix):
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END, 1)[1]
    expected = f"{before}{BEGIN}\n\n{matrix.table()}\n\n{END}{after}"
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(expected, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == expected, "UPDATE_DOCS=1 writes the table anew"
