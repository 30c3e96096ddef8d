# SPDX-License-Identifier: Apache-2.0
"""The published measurements come out of the model, within stated errors, from constants fitted to one model only."""

from __future__ import annotations

import dataclasses

import performance_page
import pytest
import reproduce


@pytest.fixture(scope="module")
def compared() -> list[reproduce.Comparison]:
    return reproduce.comparisons()


def test_errors_are_within_bounds_for_predictions_too(compared):
    groups = reproduce.groups(compared)
    for name in ("all", "predictions (not the 20B model)", "step times", "iteration times"):
        assert groups[name].median <= 0.15, name
        assert groups[name].worst <= 0.30, name
    assert groups["all"].count == len(compared)


def test_all_published_measurements_are_compared(compared):
    def compares(node, label, static, variant, stride, what) -> bool:
        wanted = (node, label, static, variant, stride)
        return any(
            (c.row.node, c.row.label, c.row.static, c.row.variant, c.row.stride) == wanted
            for c in compared
            if c.what == what
        )

    for static in (0.0, 0.2, 0.5):
        for variant, stride in (("blocking_grads", 0), ("async_grads", 0), ("interleaved", 2)):
            assert all(compares("4xH100", "20B", static, variant, stride, what) for what in ("iteration", "step"))
    for label in ("7B", "8.3B", "10B", "13B"):
        assert compares("4xH100", label, 0.0, "interleaved", 2, "iteration")
    for stride in (2, 3, 4, 6, 8, 10):
        for node, label in (("4xH100", "20B"), ("4xA100", "20B"), ("4xA100", "7B")):
            assert compares(node, label, 0.0, "interleaved", stride, "step")


@pytest.mark.slow
def test_constants_are_those_that_fit_the_20b_rows_best():
    for node, testbed in reproduce.TESTBEDS.items():
        found = reproduce.fit(node)
        for name in ("dram", "cpu_update_max", "h2d_pageable", "matmul"):
            assert getattr(testbed.machine, name) == pytest.approx(getattr(found.machine, name), rel=0.005), (
                node,
                name,
            )
        for name, value in dataclasses.asdict(found.overheads).items():
            assert getattr(testbed.overheads, name) == pytest.approx(value, rel=0.01), (node, name)


def test_no_constant_depends_on_the_row(compared):
    """The same model size, share and system give the same times, whichever row asks."""
    by_input: dict[tuple[reproduce.Row, str], list[float]] = {}
    for each in compared:
        row = dataclasses.replace(each.row, source="", iteration=None, backward=None, step=None, label="")
        by_input.setdefault((row, each.what), []).append(each.simulated)
    assert all(len(set(times)) == 1 for times in by_input.values())
    assert any(len(times) > 1 for times in by_input.values()), "no two rows have the same input: the test shows nothing"


@pytest.mark.slow
def test_pages_are_those_of_the_model(compared):
    hint = "out of date: run `make reproduce` and commit"
    assert reproduce.RESULT.read_text(encoding="utf-8") == reproduce.page(compared), f"{reproduce.RESULT} is {hint}"
    text = performance_page.PAGE.read_text(encoding="utf-8")
    assert performance_page.with_tables(text) == text, f"{performance_page.PAGE} is {hint}"


def test_lost_markers_are_an_error():
    with pytest.raises(ValueError, match="markers <!-- accuracy -->"):
        performance_page.with_tables("no markers here")


def test_the_command_prints_the_table_and_succeeds(tmp_path, capsys):
    assert reproduce.main(["--output", str(tmp_path / "page.md")]) == 0
    assert "| 4xA100 | 7B | 0% | interleaved, k=10 | 1.474" in capsys.readouterr().out
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == reproduce.RESULT.read_text(encoding="utf-8")


def test_the_command_fails_when_errors_are_too_large(tmp_path, monkeypatch, capsys):
    h100 = reproduce.TESTBEDS["4xH100"]
    slow = dataclasses.replace(h100, machine=dataclasses.replace(h100.machine, dram=200e9))
    monkeypatch.setitem(reproduce.TESTBEDS, "4xH100", slow)
    assert reproduce.main(["--output", str(tmp_path / "page.md")]) == 1
    assert "errors exceed" in capsys.readouterr().err
