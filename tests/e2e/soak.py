# SPDX-License-Identifier: Apache-2.0
"""Trains for thousands of steps while everything that may change does, and compares with a run that nothing disturbs.

`make soak` runs it. Two ranks of real Megatron train a tiny GPT in fp16 on the CPU, three times:

undisturbed  no checkpoints, every subgroup updated in place, one after the other.
disturbed    a checkpoint at every interval; after every step another share of the subgroups is streamed through the
             device, where the states of some stay; grads are sent in the backward pass; operations in random orders.
resumed      from the checkpoint before the last, in new processes, to the end.

The loss scale grows until grads overflow and then falls, over and over, so steps are skipped, in all three alike.
All losses, grad norms, loss scales and skips, and at the end all weights, master params, moments and steps have to be
the same to the bit, and the resident memory of each rank has to stay where it was after the second checkpoint.

Exit status 0 when all of this holds, 1 otherwise; what does not hold is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import psutil
from harness import LAYOUTS, PRECISIONS, TINY, CaseFailure, Megatron, Result, differences, same_bits
from tqdm import tqdm

__all__ = ["disturb", "main", "observe", "soak"]

RANKS = 2
COMMON = [*TINY, *LAYOUTS["overlap-buckets"][1], "--global-batch-size", "4", *PRECISIONS["fp16"]]
COMMON += ["--dos-subgroup-size", "20000"]
DISTURBED = ["--dos-overlap-grad-d2h", "on", "--dos-resident-share", "0.2", "--dos-gpu-share", "0.5"]
GROWTH_LIMIT = 10 * 2**20
"""Bytes by which a rank may grow between the second checkpoint and the end. The allocators of a process settle within a
few MiB, and the harness notes about 1 KiB a step; a copy of the states at each checkpoint would be 1.4 MiB."""
PROGRESS = "SOAK_PROGRESS"
SECONDS_A_STEP = 5.0  # far more than a step takes on two busy cores: for what hangs


# ---- In the ranks ---------------------------------------------------------------------------------------------------


def disturb() -> None:
    """Before set-up: operations run in random orders that only streams and dependencies limit."""
    from hooks import use_adversarial_device

    use_adversarial_device(seed=2026)


def observe(point: str, model: Any, optimizer: Any, args: Any) -> int | None:
    """After each step: report progress, change the share of the GPU if this run is disturbed; the resident bytes."""
    if point != "step":
        return None
    if args.rank == 0:
        with open(os.environ[PROGRESS], "ab") as file:
            file.write(b".")
    if args.dos_gpu_share >= 0:
        _change_share(optimizer)
    gc.collect(0)
    return psutil.Process().memory_info().rss


def _change_share(optimizer: Any) -> None:
    from rank_main import distributed_optimizers

    for one in distributed_optimizers(optimizer):
        # 7 of 11 and so on: every share from none to all, in leaps.
        share = Fraction(one.optimizer.step_count * 7 % 11, 10)
        one._engine.set_host_share(share)


# ---- The program ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Soaked:
    """What a soak found: `faults` in words, none when all is well; the rest is for the report."""

    faults: list[str]
    skipped: int
    checkpoints: int
    resident: list[tuple[int, int]]  # of each rank of the disturbed run: after the second checkpoint, at the end


def soak(megatron: Megatron, folder: Path, steps: int, interval: int, bar: tqdm) -> Soaked:
    """Run the three trainings in `folder` and compare them.

    Raises:
        CaseFailure: a training did not get to its end.
    """
    saved = folder / "checkpoints"

    def train(name: str, length: int, *arguments: str, **settings: Any) -> Result:
        bar.set_description(name)
        with _progress(bar, folder / f"{name}.progress", length) as progress:
            return megatron.train(
                [*COMMON, *arguments],
                *(RANKS, "dos", steps),
                inspect="soak:observe",
                planned_iterations=steps,
                environment={PROGRESS: str(progress)},
                timeout_s=60 + SECONDS_A_STEP * length,
                **settings,
            )

    undisturbed = train("undisturbed", steps)
    disturbed = train("disturbed", steps, *DISTURBED, prepare="soak:disturb", save=saved, save_interval=interval)
    checkpoints = len(list(saved.glob("iter_*")))
    (saved / "latest_checkpointed_iteration.txt").write_text(str(steps - interval))
    resumed = train("resumed", interval, load=saved)

    faults = differences(disturbed, undisturbed)
    faults += [f"resumed: {fault}" for fault in _other_ends(resumed, undisturbed)]
    if checkpoints != steps // interval:
        faults.append(f"{checkpoints} checkpoints were saved, not {steps // interval}")
    if not any(undisturbed.skipped):
        faults.append("no step was skipped: the run is no test of skips")
    sizes = [rank.inspected["step"] for rank in disturbed.of_rank]
    resident = [(of_rank[2 * interval - 1], of_rank[-1]) for of_rank in sizes]
    for rank, (early, end) in enumerate(resident):
        if end - early > GROWTH_LIMIT:
            faults.append(
                f"the resident memory of rank {rank} grew by {(end - early) / 2**20:.1f} MiB between steps "
                f"{2 * interval} and {steps}"
            )
    return Soaked(faults, sum(undisturbed.skipped), checkpoints, resident)


def _other_ends(run: Result, reference: Result) -> list[str]:
    """Losses of the last steps, weights and states at the end that differ by a bit."""
    count = len(run.losses)
    found = [] if run.losses == reference.losses[-count:] else ["the losses differ"]
    for rank, (mine, theirs) in enumerate(zip(run.of_rank, reference.of_rank, strict=True)):
        weights = all(same_bits(weight, theirs.weights[name]) for name, weight in mine.weights.items())
        states = all(
            state["step"] == theirs.states[name]["step"] and same_bits(state[key], theirs.states[name][key])
            for name, state in mine.states.items()
            for key in ("param", "exp_avg", "exp_avg_sq")
        )
        found += [] if weights else [f"the weights of rank {rank} differ"]
        found += [] if states else [f"the states of rank {rank} differ"]
    return found


@contextlib.contextmanager
def _progress(bar: tqdm, file: Path, length: int) -> Iterator[Path]:
    """Advance the bar as `file` grows, by `length` in the end."""
    file.touch()
    start, ended = bar.n, threading.Event()

    def watch() -> None:
        while not ended.wait(0.5):
            bar.update(start + min(file.stat().st_size, length) - bar.n)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield file
        ended.set()
        watcher.join()
        bar.update(start + length - bar.n)
    finally:
        ended.set()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000, help="of each long training (default %(default)s)")
    parser.add_argument("--interval", type=int, default=100, help="steps between checkpoints (default %(default)s)")
    args = parser.parse_args(argv)
    if args.interval < 1 or args.steps % args.interval or args.steps < 3 * args.interval:
        parser.error(f"--steps {args.steps}: give a multiple of --interval {args.interval}, and at least three of them")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        with (
            Megatron(folder / "cases") as megatron,
            tqdm(total=2 * args.steps + args.interval, unit="step") as bar,
        ):
            try:
                found = soak(megatron, folder, args.steps, args.interval, bar)
            except CaseFailure as failure:
                bar.close()
                print(f"soak: FAILED\n{failure}", file=sys.stderr)
                return 1
    for fault in found.faults:
        print(f"fault: {fault}")
    resident = ", ".join(f"{early / 2**20:.1f} -> {end / 2**20:.1f} MiB" for early, end in found.resident)
    print(
        f"steps: {args.steps}, {found.skipped} of them skipped; {found.checkpoints} checkpoints, last but one resumed\n"
        f"resident memory of the ranks after step {2 * args.interval} and at the end: {resident}\n"
        f"soak: {'FAILED' if found.faults else 'all the same to the bit'}, {time.monotonic() - began:.0f} s"
    )
    return 1 if found.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
