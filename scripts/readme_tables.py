"""Writes the tables of README.md: the flags, the settings that are refused, measurements, the reproduction.

`make readme` runs it; a test fails while README.md is not what it would write.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections.abc import Iterable
from pathlib import Path

from megatron_dos.arguments import REFUSALS, add_arguments

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "docs" / "results"
PERFORMANCE = ROOT / "docs" / "performance.md"

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


def adam_table() -> str:
    """The CPU kernel against others, from the last `make bench-adam`: its largest size with all threads."""
    rows = _csv("adam")
    largest = max(int(row["numel"]) for row in rows)
    threads = max(int(row["threads"]) for row in rows)
    shown = [
        (row["group"], row["what"], f"{float(row['median_ms']):.1f}", row["of_limit"], row["times_ours"])
        for row in rows
        if int(row["threads"]) == threads
        and (int(row["numel"]) == largest or "pieces" in row["group"])
        and not row["what"].startswith("limit")
    ]
    cpu, date = rows[0]["cpu"], rows[0]["date"]
    shown.sort(key=lambda row: row[0])
    caption = f"{largest >> 20}M parameters (or as said), {threads} threads, {cpu}, {date}; medians.\n\n"
    return caption + table(("Job", "Who", "ms", "Of the limit", "Time, ours = 1"), shown)


def step_table() -> str:
    """The optimizer step against Megatron's own optimizers, from the last `make bench-step`."""
    rows = _csv("step")
    shown = [
        (row["what"], row["grads"], f"{float(row['median_ms']):.0f}", row["times_ours"], row["rss_bytes_per_param"])
        for row in rows
    ]
    first = rows[0]
    caption = (
        f"{round(int(first['parameters']) / 1e6)}M parameters, {first['threads']} threads, {first['cpu']}, "
        f"{first['date']}; medians, resident memory (the states of stock optimizers would be on the GPU).\n\n"
    )
    return caption + table(("Who", "Grads", "ms", "Time, ours = 1", "Bytes a parameter"), shown)


def reproduced_table() -> str:
    """How well the model meets the published measurements, and what it says of the published step."""
    (accuracy,) = _cells(RESULTS / "reproduce.md", "all")
    published, ours, resident = (
        _cells(PERFORMANCE, name)[0] for name in ("published, k=2", "ours", "ours, .* resident")
    )
    return table(
        ("Of the published measurements", "Value"),
        [
            ("times compared", accuracy[1]),
            ("median error, worst error", f"{accuracy[2]}, {accuracy[3]}"),
            ("simulated step of the 20B model on 4 x H100, the published system", f"{published[1]} s"),
            ("the same, this package", f"{ours[1]} s"),
            (
                f"the same, {resident[0].removeprefix('ours, ')}, which is the published system's GPU memory",
                f"{resident[1]} s",
            ),
        ],
    )


def _csv(name: str) -> list[dict[str, str]]:
    with (RESULTS / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _cells(page: Path, first: str) -> list[list[str]]:
    """The rows of a page's tables whose first cell matches."""
    lines = page.read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [row for row in rows if re.fullmatch(first, row[0])]


TABLES = {
    "flags": flags_table,
    "refusals": refusals_table,
    "reproduced": reproduced_table,
    "adam": adam_table,
    "step": step_table,
}


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
