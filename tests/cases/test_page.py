# SPDX-License-Identifier: Apache-2.0
"""docs/cases.md, the tests and the mutations name the same things."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import mutations
import test_crashes_and_refusals
import test_memory_and_speed
import test_silent_corruption

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "cases.md").read_text(encoding="utf-8")
TESTS = {
    name: function
    for module in (test_silent_corruption, test_crashes_and_refusals, test_memory_and_speed)
    for name, function in vars(module).items()
    if name.startswith("test_case_")
}
ROWS = {int(number): row for number, row in re.findall(r"^\| (\d+) \|(.*)$", PAGE, re.MULTILINE)}


def mutations_of(case: int) -> set[str]:
    """What the tests of a case are run without."""
    shown = set()
    for name, function in TESTS.items():
        if int(name.split("_")[2]) == case:
            for mark in getattr(function, "pytestmark", ()):
                if mark.args[0] == "mutation":
                    shown |= {value for value in mark.args[1] if isinstance(value, str)}
    return shown


def test_every_case_has_a_row_a_test_and_a_mutation():
    assert set(ROWS) == set(range(1, 24)) == {int(name.split("_")[2]) for name in TESTS}
    assert all(mutations_of(case) for case in ROWS)


def test_the_page_names_what_each_test_fails_without():
    for case, row in ROWS.items():
        assert set(re.findall(r"`(\w+_\w+_\w+)`", row.split("|")[-2])) == mutations_of(case), f"case {case}"


def test_every_mutation_says_its_cases_and_is_used():
    for name, function in vars(mutations).items():
        if inspect.isfunction(function) and "replace" in inspect.signature(function).parameters and name[0] != "_":
            if name == "apply":
                continue
            cases = re.match(r"Cases? (\d+)(?: and (\d+))?: ", inspect.getdoc(function) or "")
            assert cases, name
            assert all(name in mutations_of(int(case)) for case in cases.groups() if case), name
