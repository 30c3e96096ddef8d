# SPDX-License-Identifier: Apache-2.0
"""`megatron-dos compare-loss`: by how much the losses of two trainings differ, and from which iteration on."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_dos.commands import CommandError
from megatron_dos.commands.text import table, wrapped
from megatron_dos.files import new_file
from megatron_dos.words import plural

__all__ = ["Log", "add", "read_log", "run"]

_TOLERANCE = 5e-3
_HELP = """\
Compare Megatron's logs of two trainings: for each figure of the log lines, show the largest difference, absolute and
relative to A, and the first iteration where it differs. Lines of other ranks, colours and prefixes are ignored.
Times and rates are not compared. Megatron logs an average over the iterations since its last line, and the second line
of each run includes the first iteration: losses that average different iterations are left out, and counted.

A loss is within the tolerance if it differs by at most that part of A's. Megatron omits a loss that is negative or not
a number: a loss in only one of the logs is beyond any tolerance, and so is another number of skipped or nan iterations.
Other figures, such as the grad norm, and iterations in only one of the logs are shown but not judged.

Exit status: 0 within the tolerance, 1 beyond it, 2 if the logs cannot be compared or the options make no sense."""

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_RECORD = re.compile(r"iteration\s+(\d+)/\s*\d+\s*\|")
_FIELD = re.compile(r"\s*([A-Za-z][^|:]*?)\s*:\s*(\S+)\s*$")
_START = "before the start of training step"
_COUNTS = ("number of skipped iterations", "number of nan iterations")
_NOT_COMPARED = re.compile(r"time|throughput|energy|power|TFLOP|tokens|memory", re.IGNORECASE)


@dataclass
class Log:
    """The log lines of a training.

    Attributes:
        path: of the file.
        values: figures by name, for each iteration that has a line, in order.
        windows: the first of the iterations that a line averages over; the last is its own.
        notes: sentences for the user.
    """

    path: str
    values: dict[int, dict[str, float]] = field(default_factory=dict)
    windows: dict[int, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "compare-loss",
        help="the largest difference between the losses of two logs, and where they part",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("a", metavar="A.log", help="the output of the reference")
    parser.add_argument("b", metavar="B.log", help="the output of the training that is compared with it")
    parser.add_argument(
        "--tolerance",
        type=_tolerance,
        default=_TOLERANCE,
        metavar="PART",
        help="relative difference that a loss may have; 0 for equal figures (default: %(default)s)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw losses and difference (matplotlib)")
    parser.add_argument("--overwrite", action="store_true", help="replace that file")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a page")
    parser.set_defaults(run=run)


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 0")
    return value


def run(options: argparse.Namespace) -> int:
    if options.plot is not None:
        _check_plot(options)
    a, b = read_log(options.a), read_log(options.b)
    report = compare(a, b, options.tolerance)
    if options.plot is not None:
        _draw(a, b, report, options)
    print(json.dumps(report, indent=1) if options.json else _page(report))
    return 0 if report["within_tolerance"] else 1


# --- Reading


def read_log(path: str) -> Log:
    """The log lines in a training's output.

    Raises:
        CommandError: the file cannot be read, or has none.
    """
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror or error}") from error
    log = Log(path)
    cut = previous = begun = None
    repeated, is_new_run = set(), True
    for line in re.split(r"[\r\n]+", _COLOURS.sub("", text)):
        is_new_run |= _START in line
        for iteration, values in _records(line):
            if values is None:
                cut = iteration
                continue
            if log.values.get(iteration) == values and iteration == previous:
                continue  # the same line, from another rank or stream
            if is_new_run or previous is None or iteration <= previous:
                begun, is_new_run = iteration, False
                start = iteration
            else:
                # The first line of a run does not begin a new average.
                start = begun if previous == begun else previous + 1
            if iteration in log.values and log.values[iteration] != values:
                repeated.add(iteration)
            log.values[iteration], log.windows[iteration], previous = values, start, iteration
    if not log.values:
        raise CommandError(
            f"{path} has no complete log line of Megatron's (iteration 1/ 100 | ... | lm loss: ... |); the last rank "
            "prints them, every --log-interval iterations: give the output of that rank"
        )
    if cut is not None:
        log.notes.append(f"{path}: a line of iteration {cut} is cut short and left out")
    if repeated:
        log.notes.append(f"{path}: {_ranges(repeated)} logged more than once; the last counts")
    log.values = dict(sorted(log.values.items()))
    return log


def _records(line: str) -> Iterator[tuple[int, dict[str, float] | None]]:
    """The log lines in a line of text, which ranks may have run together; None for the values of one cut short."""
    found = list(_RECORD.finditer(line))
    for index, record in enumerate(found):
        end = found[index + 1].start() if index + 1 < len(found) else len(line)
        fields = line[record.end() : end].split("|")[:-1]  # what follows the last bar may be cut
        values = {}
        for text in fields:
            pair = _FIELD.fullmatch(text)
            number = _number(pair[2]) if pair else None
            if pair and number is not None:
                values[pair[1]] = number
        yield int(record[1]), values if _COUNTS[0] in values else None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


# --- Comparing


def compare(a: Log, b: Log, tolerance: float) -> dict[str, Any]:
    """What the command prints, as plain values.

    Raises:
        CommandError: there is nothing in common.
    """
    common = [iteration for iteration in a.values if iteration in b.values]
    if not common:
        raise CommandError(f"{a.path} and {b.path} have no iteration in common: {_span(a)} and {_span(b)}")
    other_windows = [one for one in common if a.windows[one] != b.windows[one]]
    names = dict.fromkeys(name for log in (a, b) for values in log.values.values() for name in values)
    figures = []
    for name in names:
        if _NOT_COMPARED.search(name):
            continue
        averaged = _is_loss(name) or name in _COUNTS
        iterations = [one for one in common if not averaged or a.windows[one] == b.windows[one]]
        if rows := [(one, *_pair(a, b, one, name)) for one in iterations]:
            figures.append(_figure(name, rows, tolerance))
    if not any(figure["loss"] for figure in figures):
        raise CommandError(f"{a.path} and {b.path} have no loss in common that averages over the same iterations")
    return {
        "a": {"path": a.path, "iterations": len(a.values), "only": [one for one in a.values if one not in b.values]},
        "b": {"path": b.path, "iterations": len(b.values), "only": [one for one in b.values if one not in a.values]},
        "compared": len(common),
        "averaged_differently": other_windows,
        "tolerance": tolerance,
        "figures": figures,
        "within_tolerance": all(figure["beyond"] is None for figure in figures if figure["judged"]),
        "notes": [*a.notes, *b.notes],
    }


def _is_loss(name: str) -> bool:
    return "loss" in name and name != "loss scale"


def _pair(a: Log, b: Log, iteration: int, name: str) -> tuple[float, float]:
    """The values of both logs; NaN for one that Megatron has not printed."""
    return a.values[iteration].get(name, math.nan), b.values[iteration].get(name, math.nan)


def _figure(name: str, rows: Sequence[tuple[int, float, float]], tolerance: float) -> dict[str, Any]:
    differences = [(one, *_difference(left, right)) for one, left, right in rows]
    largest = max(differences, key=lambda row: row[1])
    relative = max(differences, key=lambda row: row[2])
    allowed = tolerance if _is_loss(name) else 0.0
    return {
        "name": name,
        "loss": _is_loss(name),
        "judged": _is_loss(name) or name in _COUNTS,
        "compared": len(rows),
        "largest": _plain(largest[1]),
        "largest_at": largest[0],
        "largest_relative": _plain(relative[2]),
        "largest_relative_at": relative[0],
        "first": next((one for one, absolute, _ in differences if absolute), None),
        "beyond": next((one for one, _, part in differences if part > allowed), None),
    }


def _difference(a: float, b: float) -> tuple[float, float]:
    """Absolute and relative to `a`; infinite where one alone is not a number."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0, 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf, math.inf
    return abs(b - a), abs(b - a) / abs(a) if a else math.inf


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else "infinite"


# --- The page


def _page(report: dict[str, Any]) -> str:
    rows = [
        [
            figure["name"],
            str(figure["compared"]),
            *(_cell(figure[key], figure[f"{key}_at"]) for key in ("largest", "largest_relative")),
            *("-" if figure[key] is None else str(figure[key]) for key in ("first", "beyond")),
        ]
        for figure in report["figures"]
    ]
    for row, figure in zip(rows, report["figures"], strict=True):
        row[-1] = row[-1] if figure["judged"] else "not judged"
    header = ["figure", "compared", "largest difference", "relative to A", "first differs", "beyond tolerance"]
    lines = [
        *(f"{name.upper()}: {report[name]['path']}, {plural(report[name]['iterations'], 'line')}" for name in "ab"),
        "",
        table(header, rows),
        "",
    ]
    for name in "ab":
        if only := report[name]["only"]:
            lines.append(wrapped(f"only in {name.upper()}: {_ranges(only)}"))
    if other := report["averaged_differently"]:
        lines.append(wrapped(f"losses averaged over other iterations, and not compared: {_ranges(other)}"))
    lines += [wrapped(f"note: {note}") for note in report["notes"]]
    return "\n".join([*lines, wrapped(_verdict(report))])


def _cell(value: float | str, iteration: int) -> str:
    if value == 0:
        return "0"
    return f"{value if isinstance(value, str) else format(value, '.3g')} at {iteration}"


def _verdict(report: dict[str, Any]) -> str:
    beyond = [figure for figure in report["figures"] if figure["judged"] and figure["beyond"] is not None]
    if not beyond:
        return f"within the tolerance: no loss differs by more than {report['tolerance']:g} of its value"
    first = min(beyond, key=lambda figure: figure["beyond"])
    return (
        f"NOT within the tolerance of {report['tolerance']:g}: {first['name']} from iteration {first['beyond']} on, "
        f"{', '.join(figure['name'] for figure in beyond)} in all"
    )


def _span(log: Log) -> str:
    return f"{min(log.values)} to {max(log.values)}"


def _ranges(iterations: Sequence[int] | set[int]) -> str:
    """'iteration 3', 'iterations 3-5, 9'."""
    runs: list[list[int]] = []
    for one in sorted(iterations):
        if runs and one == runs[-1][-1] + 1:
            runs[-1][1:] = [one]
        else:
            runs.append([one])
    return f"iteration{'' if len(iterations) == 1 else 's'} {', '.join('-'.join(map(str, run)) for run in runs)}"


# --- The picture


def _check_plot(options: argparse.Namespace) -> None:
    """Complain before anything is read."""
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError("--plot needs matplotlib: pip install matplotlib, or megatron-dos with its extra [plots]")
    if options.plot.suffix not in (".png", ".pdf", ".svg"):
        raise CommandError(f"--plot {options.plot}: name a file that ends in .png, .pdf or .svg")
    if options.plot.exists() and not options.overwrite:
        raise CommandError(f"--plot {options.plot} is there already; name another file, or --overwrite")


def _draw(a: Log, b: Log, report: dict[str, Any], options: argparse.Namespace) -> None:
    """The losses above, their relative difference below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    skipped = set(report["averaged_differently"])
    for name in (found["name"] for found in report["figures"] if found["loss"]):
        for log, style in ((a, "-"), (b, "--")):
            above.plot(list(log.values), [values.get(name, math.nan) for values in log.values.values()], style,
                       label=f"{name}, {log.path}")  # fmt: skip
        common = [one for one in a.values if one in b.values and one not in skipped]
        below.plot(common, [_difference(*_pair(a, b, one, name))[1] for one in common], ".-", label=name)
    above.set_ylabel("loss")
    below.set_ylabel("relative difference to A")
    below.set_xlabel("iteration")
    above.legend()
    below.legend()
    try:
        with new_file(options.plot, options.overwrite) as temporary:
            figure.savefig(temporary, format=options.plot.suffix[1:], dpi=120)
    except OSError as error:
        raise CommandError(f"--plot {options.plot}: {error}") from error
