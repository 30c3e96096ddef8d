# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of README.md and of two pages of docs/: flags, refused settings, plans, measurements.

`make readme` runs it; a test fails while one of the pages is not what it would write.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import io
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_dos import cli
from megatron_dos.arguments import add_arguments
from megatron_dos.options.refusals import REFUSALS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
RESULTS = DOCS / "results"
PERFORMANCE = DOCS / "performance.md"

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


NODES = (
    ("4 x 80 GB (H100)", "h100-pcie5", ""),
    ("4 x 80 GB (H100)", "h100-pcie5", "--grad-reduce-in-bf16"),
    ("4 x 40 GB (A100)", "a100-pcie4", "--tensor-parallel 2"),
)
"""A node in words, its preset, and further flags of `megatron-dos plan --model 13b --gpus 4`."""


def memory_table() -> str:
    """GPU and host memory of the 13b model on nodes of 4 GPUs, as `megatron-dos plan` computes them."""
    rows = []
    for node, machine, flags in NODES:
        plan = _plan(machine, flags)
        gpu, host = plan["gpu_memory_bytes"], plan["host_memory_bytes"]
        without, ours = (
            f"{_gib(gpu[which])}{', **does not fit**' if gpu[which] > gpu['there'] else ''}"
            for which in ("without", "with")
        )
        rows.append((node, flags or "none", f"{_gib(gpu['there'])}", without, ours, _gib(host["with"])))
    return table(("GPUs", "Further flags", "Each has", "Needs without", "Needs with", "Host memory of the node"), rows)


def gain_table() -> str:
    """Seconds of an iteration of the 13b model for several batches, ours and others, as `megatron-dos plan` says."""
    _, machine, _ = NODES[0]
    rows = []
    for batch in (4, 16, 64):
        systems = {row["name"]: row for row in _plan(machine, f"--global-batch-size {batch}")["systems"]}
        ours, offload, stock = (
            systems[name] for name in ("ours", "HybridDeviceOptimizer", "states on the GPU: stock Megatron")
        )
        gain = f"{offload['iteration_s'] / ours['iteration_s']:.2f} x"
        updates = f"{ours['update_s']:.2f} s, {offload['update_s']:.2f} s"
        iterations = (f"{system['iteration_s']:.2f} s" for system in (ours, offload))
        rows.append((str(batch), updates, *iterations, gain, f"{stock['iteration_s']:.2f} s"))
    rival = "`--optimizer-cpu-offload`"
    header = ("Update: ours, offload", "Iteration: ours", f"{rival}, overlapping", "Gain", "Stock, were there room")
    return table(("Global batch", *header), rows)


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


@functools.cache
def _plan(machine: str, flags: str) -> dict[str, Any]:
    """What `megatron-dos plan --model 13b --gpus 4` prints with --json."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        cli.main(["plan", "--model", "13b", "--gpus", "4", "--machine", machine, "--json", *flags.split()])
    return json.loads(printed.getvalue())


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f} GiB"


def _csv(name: str) -> list[dict[str, str]]:
    with (RESULTS / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _cells(page: Path, first: str) -> list[list[str]]:
    """The rows of a page's tables whose first cell matches."""
    lines = page.read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [row for row in rows if re.fullmatch(first, row[0])]


PAGES = {
    ROOT / "README.md": {"memory": memory_table, "gain": gain_table, "reproduced": reproduced_table},
    DOCS / "flags-and-limits.md": {"flags": flags_table, "refusals": refusals_table},
    DOCS / "benchmarks.md": {"adam": adam_table, "step": step_table},
}
"""Page -> name of a table in its marker comments -> what makes it."""


def with_tables(page: Path, text: str) -> str:
    """`text` of `page`, with each of its tables between two marker comments written anew.

    Raises ValueError when the markers of a table are not there exactly once.
    """
    for name, make in PAGES[page].items():
        begin, end = f"<!-- {name}: written by `make readme` -->", f"<!-- end of {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise ValueError(f"{page.name} needs the markers {begin!r} and {end!r}, in this order, once")
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{make()}\n{end}{rest.split(end)[1]}"
    return text


def main() -> None:
    for page in PAGES:
        old = page.read_text(encoding="utf-8")
        new = with_tables(page, old)
        page.write_text(new, encoding="utf-8")
        print(f"{page.relative_to(ROOT)}: " + ("unchanged" if new == old else "tables written"))


if __name__ == "__main__":
    main()
