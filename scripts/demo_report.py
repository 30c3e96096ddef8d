# SPDX-License-Identifier: Apache-2.0
"""What the demo reads out of Megatron's log, and what it makes of it: progress, table, picture, verdict.

Nothing here starts a process or imports Megatron.
"""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path

ITERATION = re.compile(r"iteration\s+(\d+)/\s*\d+ \|.*?\blm loss: (\S+) \|")

Losses = dict[int, float]
"""Iteration, counted from 1, to the loss that Megatron logged for it (7 significant digits).

Megatron 0.19 logs the mean of the first two losses as the second one; it is kept as logged.
"""

LARGEST_DIFFERENCE = 5e-3
"""bf16 runs of two AdamW implementations that agree to rounding stay this close (relative) over the demo's steps."""

SMALLEST_DROP = 0.5
"""A loss (nats per byte) that has not dropped by more than this has not learnt anything worth comparing."""


def read_iteration(line: str) -> tuple[int, float] | None:
    """The iteration number and the loss in a line of Megatron's log; None for every other line."""
    match = ITERATION.search(line)
    return (int(match[1]), float(match[2])) if match else None


def progress_line(name: str, iteration: int, steps: int, loss: float, seconds: float, width: int = 30) -> str:
    """One line that tells how far the run `name` is; `seconds` is the time since it was started."""
    filled = width * iteration // steps
    bar = "#" * filled + "." * (width - filled)
    return f"{name:<6} [{bar}] {iteration:>3}/{steps}  loss {loss:.4f}  {seconds:4.0f} s"


def relative_differences(stock: Losses, ours: Losses) -> Losses:
    """|ours - stock| / |stock| for each iteration that both runs logged."""
    return {step: abs(ours[step] - stock[step]) / abs(stock[step]) for step in sorted(stock.keys() & ours.keys())}


def verdict(stock: Losses, ours: Losses, steps: int) -> tuple[bool, str]:
    """Whether the demo has shown what it promises, and its last line."""
    for name, losses in (("the stock optimizer", stock), ("deep optimizer states", ours)):
        if set(losses) != set(range(1, steps + 1)):
            return False, f"demo failed: the run with {name} logged {len(losses)} of {steps} steps"
        unusable = [step for step in sorted(losses) if not (math.isfinite(losses[step]) and losses[step] > 0)]
        if unusable:
            step = unusable[0]
            return False, f"demo failed: the run with {name} has loss {losses[step]} at step {step}"
    first, last = ours[1], ours[steps]
    largest = max(relative_differences(stock, ours).values())
    if not last < first - SMALLEST_DROP:
        return False, f"demo failed: the loss went {first:.4f} -> {last:.4f}, a drop of {SMALLEST_DROP} was expected"
    if not largest <= LARGEST_DIFFERENCE:
        return False, (
            f"demo failed: the losses differ from the stock optimizer's by up to {largest:.1e} relative, "
            f"more than {LARGEST_DIFFERENCE:.0e}"
        )
    return True, (
        f"demo ok: loss {first:.4f} -> {last:.4f} over {steps} steps; "
        f"largest relative loss difference to the stock optimizer {largest:.1e}"
    )


def write_table(path: Path, stock: Losses, ours: Losses) -> None:
    """Writes the losses of both runs as CSV, one row an iteration that both logged."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["iteration", "loss_stock", "loss_deep_optimizer_states", "relative_difference"])
        for step, difference in relative_differences(stock, ours).items():
            rows.writerow([step, f"{stock[step]:.6e}", f"{ours[step]:.6e}", f"{difference:.3e}"])


def draw_picture(path: Path, stock: Losses, ours: Losses) -> None:
    """Draws both loss curves and, below them, their relative difference."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    differences = relative_differences(stock, ours)
    figure, (curves, below) = pyplot.subplots(2, 1, figsize=(8, 7), sharex=True, height_ratios=(3, 2))
    # The curves lie on each other: a wide pale line under a thin dark one shows both.
    curves.plot(list(stock), list(stock.values()), color="tab:orange", linewidth=5, alpha=0.5, label="stock optimizer")
    curves.plot(list(ours), list(ours.values()), color="tab:blue", linewidth=1.2, label="deep optimizer states")
    curves.set_ylabel("loss (nats per byte)")
    curves.set_title("The same Megatron training with two optimizers")
    curves.legend()
    curves.grid(alpha=0.3)
    below.plot(list(differences), list(differences.values()), ".-", color="tab:blue", label="difference of the losses")
    below.axhline(LARGEST_DIFFERENCE, color="tab:red", linestyle="--", label="largest allowed")
    # Equal losses are common at first and have no place on a logarithmic axis: it is linear below one unit of the last
    # digit that Megatron prints.
    below.set_yscale("symlog", linthresh=1e-7)
    below.set_ylim(bottom=0)
    below.set_xlabel("iteration")
    below.set_ylabel("relative difference")
    below.legend(loc="lower right")
    below.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
