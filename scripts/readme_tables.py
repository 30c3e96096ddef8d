"""Writes the tables of README.md that the code defines: the flags, and the settings that are refused.

`make readme` runs it; a test fails while README.md is not what it would write.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from pathlib import Path

from megatron_dos.arguments import REFUSALS, add_arguments

README = Path(__file__).resolve().parent.parent / "README.md"

FLAG = re.compile(r"(?<![\w`-])(--[a-z0-9-]+)")


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table; flags in the cells are set as code, a bar in a cell is escaped."""
    lines = [header, ("---",) * len(header)]
    lines += [tuple(FLAG.sub(r"`\1`", cell.replace("|", "\\|")) for cell in row) for row in rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def flags_table() -> str:
    """One row a flag, read off the argument parser that Megatron gets."""
    parser = add_arguments(argparse.ArgumentParser(add_help=False))
    rows = []
    for action in parser._actions:
        takes = f" {action.metavar}" if action.metavar else ""
        default = "off" if action.default is False else str(action.default)
        rows.append((f"{action.option_strings[0]}{takes}", default, (action.help or "").replace("%%", "%")))
    return table(("Flag", "Default", "Meaning"), rows)


def refusals_table() -> str:
    """One row for each of Megatron's settings that cannot work together with ours."""
    rows = []
    for row in REFUSALS:
        flag = row.flag.replace(" {value}", "")
        setting = f"no {flag}" if row.verb == "needs" else flag
        rows.append((setting, row.reason, row.way_out.format(flag=flag)))
    return table(("Setting", "Why it cannot work", "Instead"), rows)


TABLES = {"flags": flags_table, "refusals": refusals_table}


def with_tables(text: str) -> str:
    """`text` with each table between its two marker comments written anew.

    Raises ValueError when the markers of a table are not there exactly once.
    """
    for name, make in TABLES.items():
        begin, end = f"<!-- {name}: written by `make readme` -->", f"<!-- end of {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise ValueError(f"README.md needs the markers {begin!r} and {end!r}, in this order, once")
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{make()}\n{end}{rest.split(end)[1]}"
    return text


def main() -> None:
    old = README.read_text(encoding="utf-8")
    new = with_tables(old)
    README.write_text(new, encoding="utf-8")
    print("README.md: " + ("unchanged" if new == old else "tables written"))


if __name__ == "__main__":
    main()
