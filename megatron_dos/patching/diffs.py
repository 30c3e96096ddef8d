# SPDX-License-Identifier: Apache-2.0
"""Unified diffs of Megatron's files: read, and applied to bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Hunk:
    """A place of a file that a diff changes."""

    start: int
    """Index of the first old line, from 0; where there is none, of the line that the new ones come before."""
    lines: tuple[tuple[bytes, bytes], ...]
    """Pairs of b" " (in both files), b"-" (old only) or b"+" (new only), and the line with its end."""

    @property
    def old(self) -> list[bytes]:
        return [text for kind, text in self.lines if kind != b"+"]

    @property
    def new(self) -> list[bytes]:
        return [text for kind, text in self.lines if kind != b"-"]

    def count(self, kind: bytes) -> int:
        return sum(line_kind == kind for line_kind, _ in self.lines)


_HUNK_HEADER = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


def parse_diff(diff: bytes) -> dict[str, list[Hunk]]:
    """Read a unified diff of changed files: hunks by path, the path without its `a/` and `b/`.

    Strict: anything that is not a file header or a complete hunk raises ValueError with its line number.
    """
    lines = diff.split(b"\n")
    if lines.pop() != b"":
        raise ValueError("the diff does not end with a line feed")
    files: dict[str, list[Hunk]] = {}
    hunks: list[Hunk] | None = None
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith(b"--- a/") and at + 1 < len(lines) and lines[at + 1] == b"+++ b/" + line[6:]:
            hunks = files.setdefault(line[6:].decode(), [])
            at += 2
            continue
        header = _HUNK_HEADER.match(line)
        if header is None or hunks is None:
            raise ValueError(f"line {at + 1} of the diff is neither a file header nor a hunk: {line!r}")
        old_start, old_count, _, new_count = (1 if number is None else int(number) for number in header.groups())
        at += 1
        body: list[tuple[bytes, bytes]] = []
        old_left, new_left = old_count, new_count
        while old_left or new_left:
            kind, text = (lines[at][:1], lines[at][1:] + b"\n") if at < len(lines) else (b"", b"")
            old_left -= kind in (b" ", b"-")
            new_left -= kind in (b" ", b"+")
            if kind not in (b" ", b"-", b"+") or old_left < 0 or new_left < 0:
                raise ValueError(f"line {at + 1} of the diff does not fit the header of its hunk")
            body.append((kind, text))
            at += 1
        # A hunk without old lines names the line it follows, all others the line they start at.
        hunks.append(Hunk(old_start - 1 if old_count else old_start, tuple(body)))
    return files


def apply_hunks(content: bytes, hunks: Iterable[Hunk], *, reverse: bool = False) -> bytes:
    """`content` with the hunks applied, at exactly their lines, or taken back with `reverse`.

    Raises:
        ValueError: the lines are not those that the hunks expect.
    """
    lines = content.split(b"\n")
    lines = [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    result: list[bytes] = []
    done = shift = 0
    for hunk in hunks:
        before, after = (hunk.new, hunk.old) if reverse else (hunk.old, hunk.new)
        # Taken back, a hunk lies where the hunks before it have moved its lines.
        start = hunk.start + (shift if reverse else 0)
        shift += len(hunk.new) - len(hunk.old)
        if start < done or lines[start : start + len(before)] != before:
            raise ValueError(f"line {start + 1} and following are not what the diff expects")
        result += lines[done:start]
        result += after
        done = start + len(before)
    return b"".join(result + lines[done:])
