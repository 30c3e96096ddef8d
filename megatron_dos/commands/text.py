"""How the subcommands write tables and figures."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

__all__ = ["WIDTH", "gib", "hanging", "plural", "short", "table", "wrapped"]

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


def plural(count: int, what: str) -> str:
    """'1 GPU', '8 GPUs'."""
    return f"{count} {what}{'' if count == 1 else 's'}"


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


def gib(nbytes: float) -> str:
    """Bytes as GiB: '12.3 GiB'."""
    return f"{nbytes / 2**30:,.1f} GiB"


def short(count: float) -> str:
    """A large number in words that people use for models: 15.33B, 124.4M, 900."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.4g}{unit}"
    return f"{count:g}"
