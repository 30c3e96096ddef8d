# SPDX-License-Identifier: Apache-2.0
"""How the subcommands write tables and figures."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

__all__ = ["WIDTH", "count", "hanging", "short", "table", "wrapped"]

WIDTH = 118
"""Columns of a page at most."""


def wrapped(text: str, indent: str = "  ") -> str:
    """A sentence in lines that fit, those after the first indented; words with hyphens stay whole."""
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def hanging(text: str, first: str, others: str) -> str:
    """Text in lines that fit: the first after `first`, the others after `others`. Words are cut where they have to be,
    as a path may be longer than a line."""
    return textwrap.fill(
        text, WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False, break_long_words=True
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Lines of aligned columns: those numbered in `left` flush left, the others, figures, flush right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def aligned(line: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join([aligned(lines[0]), "  ".join("-" * width for width in widths), *map(aligned, lines[1:])])


_UNITS = {"T": 1e12, "B": 1e9, "M": 1e6, "k": 1e3}


def short(count: float) -> str:
    """A large number in words that people use for models: 15.33B, 124.4M, 900."""
    for unit, size in _UNITS.items():
        if count >= size:
            return f"{count / size:.4g}{unit}"
    return f"{count:g}"


def count(text: str) -> int:
    """The number that `short`, or a person, writes: '13B', '11.3b', '350M', '13e9', '11,315,860,480'.

    Raises:
        ValueError: it is none.
    """
    digits = r"[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+|[0-9]*\.[0-9]+"
    number = re.fullmatch(rf"((?:{digits})(?:e\+?[0-9]+)?) ?([kmbt]?)", text.strip(), re.IGNORECASE)
    if number is None:
        raise ValueError(f"{text!r} is not a number of parameters")
    sizes = {unit.lower(): size for unit, size in _UNITS.items()}
    try:
        return round(float(number[1].replace(",", "")) * sizes.get(number[2].lower(), 1))
    except OverflowError:
        raise ValueError(f"{text!r} is too large a number") from None
