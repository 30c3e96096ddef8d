# SPDX-License-Identifier: Apache-2.0
"""Draws docs/architecture.svg: the rooms of the package, and which imports which.

    python scripts/architecture_picture.py

What is drawn is read from the source. An arrow that others imply is left out: a room that imports `update`, which
imports `program`, may import `program` as well.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Mapping
from html import escape
from itertools import pairwise

from package_imports import PACKAGE, rooms_between

PICTURE = PACKAGE.parent / "docs" / "architecture.svg"

GROUND = ("files", "refusal", "supported", "version", "words", "wrapping")
"""Small files that any room may import: one box, and no arrows."""
LEFT_OUT = ("__main__", "_version")

WIDTH, BOX_WIDTH, BOX_HEIGHT, ROW, GAP, PASSAGE = 1080, 180, 66, 108, 20, 12
LINE = 30
"""Characters of a description in a line of a box."""


def rows_of(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Rooms from the top down, each below all that import it and as far down as what it imports allows."""
    height: dict[str, int] = {}

    def of(room: str) -> int:
        if room not in height:
            height[room] = 1 + max((of(below) for below in imports[room]), default=-1)
        return height[room]

    top = max(map(of, imports))
    return [sorted(room for room in imports if height[room] == row) for row in range(top, -1, -1)]


def direct(imports: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The imports that no others imply."""

    def below(room: str) -> set[str]:
        return imports[room].union(*(below(other) for other in imports[room]))

    return {
        room: {one for one in ours if not any(one in below(other) for other in ours - {one})}
        for room, ours in imports.items()
    }


def description(room: str) -> str:
    """The first sentence of a room's docstring, up to its first colon."""
    folder = PACKAGE / room
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split()).partition(":")[0].rstrip(".").replace("`", "")


def routes(rows: list[list[str]], arrows: Mapping[str, set[str]]) -> dict[tuple[str, str], list[str]]:
    """For each arrow what it passes on its way: its room, a place of its own in each row between, the room below."""
    row_of = {room: number for number, row in enumerate(rows) for room in row}
    found = {}
    for room in sorted(arrows):
        for below in sorted(arrows[room]):
            between = range(row_of[room] + 1, row_of[below])
            found[room, below] = [room, *[f"{room}->{below}@{number}" for number in between], below]
            for number, stop in zip(between, found[room, below][1:-1], strict=True):
                rows[number].append(stop)
    return found


def places(rows: list[list[str]], ways: Iterable[list[str]]) -> dict[str, tuple[float, float]]:
    """Where the middle of each box, and of each place between, is: as near as may be to those that point to it."""
    above: dict[str, list[str]] = {}
    for way in ways:
        for one, other in pairwise(way):
            above.setdefault(other, []).append(one)
    found: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(rows):
        middle = {
            one: sum(found[other][0] for other in above[one]) / len(above[one]) if one in above else WIDTH / 2
            for one in row
        }
        ordered = sorted(row, key=lambda one: (middle[one], one))
        widths = [PASSAGE if "@" in one else BOX_WIDTH for one in ordered]
        left = WIDTH / 2 - (sum(widths) + GAP * (len(row) - 1)) / 2
        for one, width in zip(ordered, widths, strict=True):
            found[one] = left + width / 2, 20 + BOX_HEIGHT / 2 + number * ROW
            left += width + GAP
    return found


def line_along(way: list[str], at: Mapping[str, tuple[float, float]]) -> str:
    """An arrow through the places on its way."""
    points = [(at[way[0]][0], at[way[0]][1] + BOX_HEIGHT / 2)]
    for one in way[1:-1]:
        x, y = at[one]
        points += [(x, y - BOX_HEIGHT / 2), (x, y + BOX_HEIGHT / 2)]
    points.append((at[way[-1]][0], at[way[-1]][1] - BOX_HEIGHT / 2))
    path = " ".join(f"{x:.0f},{y:.0f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="#5b6b7b" marker-end="url(#head)"/>'


def box(room: str, text: str, x: float, y: float, width: float = BOX_WIDTH, line: int = LINE) -> list[str]:
    """A box with a name and at most three lines."""
    is_folder = (PACKAGE / room).is_dir()
    lines = textwrap.wrap(text, line)[:3]
    return [
        f'<rect x="{x - width / 2:.0f}" y="{y - BOX_HEIGHT / 2:.0f}" width="{width:.0f}" height="{BOX_HEIGHT}" rx="6" '
        f'fill="{"#eef4fb" if is_folder else "#fdf6e7"}" stroke="#5b6b7b"/>',
        f'<text x="{x:.0f}" y="{y - 16:.0f}" font-weight="bold" font-size="14">{escape(room)}'
        f"{'/' if is_folder else ''}</text>",
        *[
            f'<text x="{x:.0f}" y="{y + 1 + 13 * number:.0f}" font-size="10.5">{escape(text)}</text>'
            for number, text in enumerate(lines)
        ],
    ]


def drawn() -> str:
    """The picture, as SVG."""
    whole = rooms_between()
    shown = {room: ours - {*GROUND} for room, ours in whole.items() if room not in (*GROUND, *LEFT_OUT)}
    rows = rows_of(shown)
    ways = routes(rows, direct(shown))
    at = places(rows, ways.values())
    height = 20 + ROW * len(rows) + BOX_HEIGHT + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'text-anchor="middle">',
        "<title>The rooms of megatron_dos. An arrow leads from a room to one that it imports.</title>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#5b6b7b"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    parts += [line_along(way, at) for way in ways.values()]
    for room in sorted(shown):
        parts += box(room, description(room), *at[room])
    names = "small files that any room may import"
    parts += box(", ".join(GROUND), names, WIDTH / 2, height - 20 - BOX_HEIGHT / 2, WIDTH - 2 * GAP, WIDTH)
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(drawn(), encoding="utf-8")
    print(f"{PICTURE.relative_to(PACKAGE.parent)}: written")
