# SPDX-License-Identifier: Apache-2.0
"""The figures of measured steps where the user looks: beside Megatron's log line, in its TensorBoard and W&B writers.

Megatron keeps its arguments and writers in megatron.training.global_vars. They are looked up there at each report, if a
training has set them up; a framework that does without megatron.training gets no reports. Nothing is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron_dos.observing.figures import LANES, StepFigures

__all__ = ["Training", "line", "report", "scalars", "training"]


class Training(NamedTuple):
    """What megatron.training has set up in this process.

    Attributes:
        args: its arguments.
        tensorboard: a SummaryWriter, or None: on most ranks, and where the user wants none.
        wandb: likewise, the wandb module.
    """

    args: Any
    tensorboard: Any = None
    wandb: Any = None

    @property
    def iteration(self) -> int | None:
        """The number of the iteration that is under way, as Megatron logs it; None outside of its training loop."""
        begun = getattr(self.args, "curr_iteration", None)  # counted from 0
        return None if begun is None else begun + 1

    @property
    def logs_here(self) -> bool:
        """Whether this is the rank that prints Megatron's log line."""
        return self.args.rank == self.args.world_size - 1

    def logs_at(self, iteration: int) -> bool:
        """Whether Megatron's log line is printed for an iteration."""
        return iteration % self.args.log_interval == 0


def training() -> Training | None:
    """The training of megatron.training in this process, if there is one."""
    variables = sys.modules.get("megatron.training.global_vars")
    if variables is None:
        return None
    try:
        args = variables.get_args()
    except AssertionError:  # it is imported, but not set up
        return None
    return Training(args, variables.get_tensorboard_writer(), variables.get_wandb_writer())


def report(figures: StepFigures, iteration: int, here: Training, label: str = "") -> None:
    """Write the figures of an iteration's step wherever the user looks.

    Args:
        figures: of the step.
        iteration: Megatron's number of it.
        here: where to.
        label: distinguishes several optimizers of one model.
    """
    if here.tensorboard is not None or here.wandb is not None:
        values = scalars(figures, label)
        if here.tensorboard is not None:
            for name, value in values.items():
                here.tensorboard.add_scalar(name, value, iteration)
        if here.wandb is not None:
            here.wandb.log(dict(values), iteration)
    if here.logs_here and here.logs_at(iteration):
        of = f" ({label})" if label else ""
        print(f" deep optimizer states{of}, iteration {iteration}: {line(figures)}", flush=True)


def scalars(figures: StepFigures, label: str = "") -> Mapping[str, float]:
    """The figures by their names in TensorBoard and W&B, in seconds, 1e9 parameters, 1e9 bytes and shares of 1."""
    prefix = f"dos-{label}" if label else "dos"
    values = {
        "update-seconds": figures.seconds,
        "update-gparams-per-second": figures.params_per_second / 1e9,
        "gpu-share": figures.device_share,
        "slot-stall-seconds": sum(figures.slot_stalls.values()),
    }
    for lane in LANES:
        values[f"busy-seconds/{lane}"] = figures.lanes[lane].busy
        values[f"wait-seconds/{lane}"] = figures.waiting(lane)
    for lane in ("h2d", "d2h"):
        values[f"gbytes-per-second/{lane}"] = figures.bytes_per_second(lane) / 1e9
    return {f"{prefix}/{name}": value for name, value in values.items()}


def line(figures: StepFigures) -> str:
    """The figures in a line of text."""
    used = [(lane, figures.lanes[lane].busy, figures.waiting(lane)) for lane in LANES if figures.lanes[lane].busy]
    busy = " ".join(f"{lane} {worked * 1e3:.1f}/{waited * 1e3:.1f}" for lane, worked, waited in used)
    return (
        f"update {figures.seconds * 1e3:.1f} ms, {figures.params_per_second / 1e9:.3f} G params/s | "
        f"{figures.device_share:.0%} on the GPU | busy/wait ms: {busy} | "
        f"GB/s: h2d {figures.bytes_per_second('h2d') / 1e9:.1f} d2h {figures.bytes_per_second('d2h') / 1e9:.1f} | "
        f"slot stalls {sum(figures.slot_stalls.values()) * 1e3:.1f} ms"
    )
