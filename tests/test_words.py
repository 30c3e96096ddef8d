# SPDX-License-Identifier: Apache-2.0
"""How messages write counts and amounts, and that none of them mixes units."""

from __future__ import annotations

import re

import pytest
from repository import ROOT

from megatron_dos.words import gib, plural

SOURCES = [*(ROOT / "megatron_dos").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]


def test_one_is_no_plural():
    assert [plural(count, "subgroup") for count in (0, 1, 2, 1234)] == [
        *("0 subgroups", "1 subgroup", "2 subgroups", "1,234 subgroups"),
    ]


def test_memory_is_in_gib():
    assert (gib(80e9), gib(2**30, 3), gib(5000 * 2**30, 0)) == ("74.5 GiB", "1.000 GiB", "5,000 GiB")


@pytest.mark.parametrize("file", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_message_computes_decimal_bytes_or_leaves_a_plural_open(file):
    text = file.read_text(encoding="utf-8")
    assert not re.findall(r"\} ?[GM]B(?![/\w])", text), "memory is in GiB"
    assert not re.findall(r"\} \w+\(s\)", text), "use words.plural"
