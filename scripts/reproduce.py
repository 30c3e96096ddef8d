# SPDX-License-Identifier: Apache-2.0
"""Reproduces the published measurements of interleaved offloading with the performance model, and says how well.

`scripts/published.csv` holds the facts: medians of the authors' logs, figures read off their plots, their two stride
sweeps. For each row the program of that system runs on the virtual clock; its step time, the backward pass and the
whole iteration are compared with what was measured. One set of constants describes each of the two testbeds. What no
data sheet tells was fitted to the rows of the 20B model only (`--fit` does it again); all other rows are predictions.

Exit status 0: the median error is at most 15 % and the worst at most 30 %, of all rows and of the predictions alone.
Writes docs/results/reproduce.md.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megatron_dos.planning import rivals
from megatron_dos.planning.machine import Machine, preset
from megatron_dos.planning.rivals import Overheads
from megatron_dos.planning.workload import FUSED_PASS, Workload
from megatron_dos.program.timeline import Timeline

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = ROOT / "scripts" / "published.csv"
RESULT = ROOT / "docs" / "results" / "reproduce.md"

MEDIAN_LIMIT, WORST_LIMIT = 0.15, 0.30
RANKS = 4
SUBGROUP = 100_000_000
TOKENS = 2048  # of a rank's micro-batch


@dataclass(frozen=True)
class Testbed:
    machine: Machine
    overheads: Overheads


TESTBEDS = {
    "4xH100": Testbed(preset("h100-pcie5"), Overheads(fixed=0.31, blocking_grads=4.16e9, flush=65.6e-12)),
    "4xA100": Testbed(preset("a100-pcie4"), Overheads(fixed=0.31, blocking_grads=4.09e9, flush=106e-12)),
}
"""The machine, and what its software cost besides. `fixed` of the A100 node is that of the H100 node: its logs do not
tell forward and backward passes apart."""


@dataclass(frozen=True)
class Row:
    """One published measurement; times in seconds, None where not published."""

    node: str
    label: str
    parameters: float
    static: float
    variant: str
    stride: int
    iteration: float | None
    backward: float | None
    step: float | None
    source: str

    @property
    def fitted(self) -> bool:
        """Whether constants may be fitted to it."""
        return self.label == "20B"

    @property
    def system(self) -> str:
        return f"interleaved, k={self.stride}" if self.stride else self.variant.replace("_", " ")


def rows() -> list[Row]:
    """The published measurements, in the order of the file."""

    def seconds(text: str) -> float | None:
        return float(text) if text else None

    with PUBLISHED.open(newline="", encoding="utf-8") as file:
        return [
            Row(
                r["node"],
                r["label"],
                float(r["actual_params"]),
                float(r["static_gpu_share"]),
                r["variant"],
                int(r["stride"] or 0),
                seconds(r["iteration_s"]),
                seconds(r["backward_s"]),
                seconds(r["step_s"]),
                r["source"],
            )
            for r in csv.DictReader(file)
        ]


def workload(row: Row) -> Workload:
    return Workload(parameters=round(row.parameters / RANKS), ranks=RANKS, subgroup=SUBGROUP, grad_bytes=4)


def step(machine: Machine, row: Row) -> Timeline:
    """The row's step on the virtual clock."""
    return _step(dataclasses.replace(machine, matmul=1.0), row)  # on which it does not depend


@cache
def _step(machine: Machine, row: Row) -> Timeline:
    work = workload(row)
    if row.stride:
        return rivals.published(machine, work, row.static, row.stride)
    return rivals.full_offload(machine, work, row.static)


def simulate(testbed: Testbed, row: Row) -> dict[str, float]:
    """Seconds of the row's step, backward pass and iteration."""
    timeline = step(testbed.machine, row)
    parts = rivals.iteration(
        testbed.machine,
        workload(row),
        timeline,
        forward_flops=2 * row.parameters * TOKENS,
        overheads=testbed.overheads,
        blocking=row.variant == "blocking_grads",
        interleaved=bool(row.stride),
    )
    return {"step": parts.step, "backward": parts.backward, "iteration": parts.seconds}


def fit(node: str) -> Testbed:
    """The testbed's constants, each chosen so that the rows of the 20B model which depend on it are met best.

    In this order, so that each depends on one only: the host memory's rate on the interleaved steps, the rate of
    pageable copies on those of full offload; the processor's rate on the backward passes with asynchronous copies, the
    rate of blocking ones on the others; what is left of the iterations. Best means least squares of the logarithms.
    """
    known = [row for row in rows() if row.node == node and row.fitted]
    found = TESTBEDS[node]

    def with_machine(**values: float) -> Testbed:
        return dataclasses.replace(found, machine=dataclasses.replace(found.machine, **values))

    def with_overheads(**values: float) -> Testbed:
        return dataclasses.replace(found, overheads=dataclasses.replace(found.overheads, **values))

    def best(what: str, chosen: list[Row], make: Callable[[float], Testbed], low: float, high: float) -> Testbed:
        pairs = [(row, getattr(row, what)) for row in chosen if getattr(row, what) is not None]

        def misses(value: float) -> float:
            return sum(math.log(simulate(make(value), row)[what] / seconds) ** 2 for row, seconds in pairs)

        return make(minimum(misses, low, high))

    interleaved = [row for row in known if row.stride]
    blocking = [row for row in known if row.variant == "blocking_grads"]
    asynchronous = [row for row in known if row.variant == "async_grads"]
    found = best("step", interleaved, lambda x: with_machine(dram=x, cpu_update_max=x / FUSED_PASS), 5e10, 1e12)
    found = best("step", blocking + asynchronous, lambda x: with_machine(h2d_pageable=x), 1e9, 5e10)
    # Only the H100 node's logs tell the passes apart.
    if any(row.backward for row in known):
        found = best("backward", asynchronous + interleaved, lambda x: with_machine(matmul=x), 1e13, 1e15)
        found = best("backward", blocking, lambda x: with_overheads(blocking_grads=x), 1e9, 5e10)
        found = best("iteration", asynchronous, lambda x: with_overheads(fixed=x), 1e-3, 1.0)
    else:
        found = best("iteration", asynchronous, lambda x: with_machine(matmul=x), 1e13, 1e15)
        found = best("iteration", blocking, lambda x: with_overheads(blocking_grads=x), 1e9, 5e10)
    return best("iteration", interleaved, lambda x: with_overheads(flush=x), 1e-13, 1e-9)


def fit_memory(node: str, passes: float) -> float:
    """The host memory's rate that fits the interleaved steps of the 20B model if the CPU's passes move so much."""
    known = [row for row in rows() if row.node == node and row.fitted and row.stride and row.step]
    machine = TESTBEDS[node].machine

    def misses(memory: float) -> float:
        tried = dataclasses.replace(machine, dram=memory, cpu_update_max=memory / FUSED_PASS)
        steps = [rivals.published(tried, workload(row), row.static, row.stride, passes).makespan for row in known]
        return sum(math.log(step / row.step) ** 2 for step, row in zip(steps, known, strict=True))

    return minimum(misses, 5e10, 1e12)


def minimum(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function with one valley between two positive numbers is least, to 3 digits: golden section."""
    golden = (math.sqrt(5) - 1) / 2
    low, high = math.log(low), math.log(high)
    value = cache(lambda at: function(math.exp(at)))
    while high - low > 5e-4:
        left, right = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, right) if value(left) < value(right) else (left, high)
    return math.exp((low + high) / 2)


@dataclass(frozen=True)
class Comparison:
    """One published number and what the model makes of it, in seconds."""

    row: Row
    what: str
    published: float
    simulated: float

    @property
    def error(self) -> float:
        return self.simulated / self.published - 1


def comparisons() -> list[Comparison]:
    """All published numbers, in the order of the file."""
    found = []
    for row in rows():
        simulated = simulate(TESTBEDS[row.node], row)
        for what in ("step", "backward", "iteration"):
            published = getattr(row, what)
            if published is not None:
                found.append(Comparison(row, what, published, simulated[what]))
    return found


@dataclass(frozen=True)
class Errors:
    """How far a number of simulated times are off, as parts of the published ones."""

    count: int
    median: float
    worst: float

    @classmethod
    def of(cls, chosen: Sequence[Comparison]) -> Errors:
        sizes = [abs(each.error) for each in chosen]
        return cls(len(sizes), statistics.median(sizes), max(sizes))

    @property
    def within_bounds(self) -> bool:
        return self.median <= MEDIAN_LIMIT and self.worst <= WORST_LIMIT

    def __str__(self) -> str:
        return f"{self.count} times, median error {self.median:.1%}, worst {self.worst:.1%}"


def groups(found: Sequence[Comparison]) -> dict[str, Errors]:
    """Errors of all comparisons and of the parts that are told apart: name -> errors."""
    chosen: dict[str, Callable[[Comparison], bool]] = {
        "all": lambda c: True,
        "predictions (not the 20B model)": lambda c: not c.row.fitted,
        "step times": lambda c: c.what == "step",
        "iteration times": lambda c: c.what == "iteration",
        "4xH100, 20B, by static share": lambda c: _on(c, "4xH100", "20B") and "sweep" not in c.row.source,
        "4xH100, 7B to 13B": lambda c: c.row.node == "4xH100" and not c.row.fitted,
        "4xH100, stride sweep": lambda c: c.row.node == "4xH100" and "sweep" in c.row.source,
        "4xA100, 20B": lambda c: _on(c, "4xA100", "20B"),
        "4xA100, 7B": lambda c: _on(c, "4xA100", "7B"),
    }
    return {name: Errors.of([each for each in found if take(each)]) for name, take in chosen.items()}


def _on(comparison: Comparison, node: str, label: str) -> bool:
    return (comparison.row.node, comparison.row.label) == (node, label)


def table(found: Sequence[Comparison]) -> list[str]:
    """The comparisons as lines of a Markdown table, one a row of the file."""
    lines = [
        "| node | model | static | system | step s | backward s | iteration s | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    by_row: dict[int, dict[str, Comparison]] = {}
    for each in found:
        by_row.setdefault(id(each.row), {})[each.what] = each
    for cells in by_row.values():
        row = next(iter(cells.values())).row
        times = [_cell(cells.get(what)) for what in ("step", "backward", "iteration")]
        kind = "fitted" if row.fitted else "predicted"
        lines.append(f"| {row.node} | {row.label} | {row.static:.0%} | {row.system} | {' | '.join(times)} | {kind} |")
    return lines


def _cell(comparison: Comparison | None) -> str:
    if comparison is None:
        return "-"
    return f"{comparison.published:.3f} → {comparison.simulated:.3f} ({comparison.error:+.0%})"


def constants() -> list[str]:
    """What describes the testbeds, as lines of a Markdown table."""
    fitted = "fitted to 20B rows"
    lines = ["| constant | 4xH100 | 4xA100 | from |", "|---|---|---|---|"]
    a, b = TESTBEDS["4xH100"], TESTBEDS["4xA100"]
    for name, values, source in (
        ("host memory, GB/s", (a.machine.dram / 1e9, b.machine.dram / 1e9), f"{fitted}: interleaved steps"),
        (
            "pageable copies to the GPU, GB/s",
            (a.machine.h2d_pageable / 1e9, b.machine.h2d_pageable / 1e9),
            f"{fitted}: steps of full offload",
        ),
        (
            "matrix products, TFLOP/s",
            (a.machine.matmul / 1e12, b.machine.matmul / 1e12),
            f"{fitted}: backward passes, iterations",
        ),
        (
            "blocking copies of grads, GB/s",
            (a.overheads.blocking_grads / 1e9, b.overheads.blocking_grads / 1e9),
            f"{fitted}: backward passes, iterations",
        ),
        ("fixed, s an iteration", (a.overheads.fixed, b.overheads.fixed), f"{fitted} of 4xH100"),
        (
            "interleaving, ps a parameter in the forward pass",
            (a.overheads.flush * 1e12, b.overheads.flush * 1e12),
            f"{fitted}: iterations",
        ),
        ("link alone, GB/s each way", (a.machine.h2d_alone / 1e9, b.machine.h2d_alone / 1e9), "measured"),
        (
            "host memory that CPU passes touch, bytes a parameter",
            (rivals.PASSES, rivals.PASSES),
            "counted: megatron_dos/planning/rivals.py",
        ),
    ):
        lines.append(f"| {name} | {values[0]:.3g} | {values[1]:.3g} | {source} |")
    return lines


def page(found: Sequence[Comparison]) -> str:
    """The text of docs/results/reproduce.md."""
    errors = "\n".join(f"| {name} | {e.count} | {e.median:.1%} | {e.worst:.1%} |" for name, e in groups(found).items())
    return f"""# Published against simulated

Written by `make reproduce` (scripts/reproduce.py); what it means is in [performance.md](../performance.md).

| what | times | median error | worst error |
|---|---|---|---|
{errors}

## Constants

{chr(10).join(constants())}

## All rows

Published → simulated (error). Times of the sweep on 4xH100 follow from published rates, those marked 0% static of 7B to
13B were read off plots, all others are medians of the authors' logs.

{chr(10).join(table(found))}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Published measurements against the performance model.")
    parser.add_argument("--fit", action="store_true", help="fit the constants again and print them")
    parser.add_argument("--output", type=Path, default=RESULT, metavar="FILE", help="write the page to this file")
    options = parser.parse_args(arguments)
    if options.fit:
        for node in TESTBEDS:
            found = fit(node)
            rates = {name: getattr(found.machine, name) for name in ("dram", "h2d_pageable", "matmul")}
            both = {**rates, **dataclasses.asdict(found.overheads)}
            print(node, ", ".join(f"{name} {value:.3g}" for name, value in both.items()))
        return 0
    compared = comparisons()
    print("\n".join(table(compared)), end="\n\n")
    for name, errors in groups(compared).items():
        print(f"{name}: {errors}")
    options.output.write_text(page(compared), encoding="utf-8")
    print(f"\nwritten to {options.output}")
    judged = [groups(compared)[name] for name in ("all", "predictions (not the 20B model)")]
    if all(errors.within_bounds for errors in judged):
        return 0
    print(f"errors exceed {MEDIAN_LIMIT:.0%} (median) or {WORST_LIMIT:.0%} (worst)", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
