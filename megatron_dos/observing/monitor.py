# SPDX-License-Identifier: Apache-2.0
"""Watches the steps of one optimizer: which are measured, what comes of it, and the traces and profiles of them.

The first steps are measured, since the share is chosen by them, and later ones from time to time. Measuring costs two
events, or two looks at the clock, an operation, and no step waits for it: times are collected when the step has ended
on all its streams, at the end of the step itself or at the start of the next one.
"""

from __future__ import annotations

import atexit
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from megatron_dos.device.protocol import Handlers
from megatron_dos.observing.figures import StepFigures, SubgroupTraffic, bytes_moved, figures
from megatron_dos.observing.reporting import Training, report, training
from megatron_dos.observing.stopwatch import Stopwatch, TimedRun
from megatron_dos.observing.trace import Span, spans_of, write_chrome_trace
from megatron_dos.observing.tuner import Decision, ShareTuner
from megatron_dos.options.options import DosOptions, UnsupportedOptionError, parse_steps
from megatron_dos.program.schedule import Op, OpKind, Program
from megatron_dos.update.engine import UpdateEngine

__all__ = ["StepMonitor"]

FIRST = 20  # steps at the beginning that are all measured
EVERY = 10  # then every tenth step is measured


@dataclass
class _Step:
    """What has to be known of a step when its times are: its number, and what to do with them."""

    number: int
    iteration: int | None
    traced: bool
    traffic: Sequence[SubgroupTraffic] = ()
    phases: list[Span] = field(default_factory=list)


class StepMonitor:
    """Measures steps of an engine, and does with it what was asked for.

    Args:
        engine: whose steps.
        device: of the parameters.
        options: the user's.
        costs: kind of operation -> seconds a parameter, as far as they are known of this machine.
        tunes: whether the CPU's share is to be found.
        rank: of this process, for the names of files.
        announces: whether this rank prints the choice.
        label: distinguishes several optimizers of one process.

    Raises:
        UnsupportedOptionError: the folder for traces cannot be written to.
    """

    def __init__(
        self,
        engine: UpdateEngine,
        device: torch.device,
        options: DosOptions,
        *,
        tunes: bool = False,
        costs: Mapping[OpKind, float] | None = None,
        rank: int = 0,
        announces: bool = True,
        label: str = "",
    ) -> None:
        self._engine = engine
        self._on_cuda = device.type == "cuda"
        self._watch = Stopwatch(device)
        self._tunes, self._costs = tunes, costs
        self._tuner: ShareTuner | None = None
        self._rank, self._announces, self._label = rank, announces, label
        self._folder = _trace_folder(options.dos_trace_dir)
        self._traced_steps = parse_steps(options.dos_trace_steps) if self._folder else ()
        self._step: _Step | None = None
        self._traffic: tuple[Program | None, Sequence[SubgroupTraffic]] = None, ()
        self._ranges = False  # whether NVTX ranges are wanted of this step
        self._seen = 0
        engine.observed = self._observed
        if self._folder:
            atexit.register(_finish, weakref.ref(self))

    def begin(self, step: int) -> None:
        """A step begins: decide what is noted of it."""
        here = training()
        iteration = here.iteration if here else None
        traced = any(step in steps for steps in self._traced_steps)
        seen = self._seen + 1  # if it is not skipped
        measured = traced or seen <= FIRST or seen % EVERY == 0 or _is_logged(here, iteration)
        self._step = _Step(step, iteration, traced) if measured else None
        self._ranges = self._on_cuda and (traced or _is_profiled(here, iteration))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of the step, on the host's clock."""
        began = time.perf_counter()
        with _nvtx_range(f"dos {name}", self._ranges):
            yield
        if self._step is not None and self._step.traced:
            self._step.phases.append(Span("host", name, began, time.perf_counter() - began))

    @contextmanager
    def _observed(self, program: Program, handlers: Handlers, grads: Sequence[torch.Tensor]) -> Iterator[Handlers]:
        self._seen += 1
        if self._ranges:
            handlers = {kind: _in_range(handler) for kind, handler in handlers.items()}
        if self._step is None:
            yield handlers
            return
        if self._traffic[0] is not program:
            self._traffic = program, self._traffic_of(program, grads)
        self._step.traffic = self._traffic[1]
        with self._watch.timing(program, handlers, self._step) as timed:
            yield timed

    def _traffic_of(self, program: Program, grads: Sequence[torch.Tensor]) -> list[SubgroupTraffic]:
        casts = {op.subgroup for op in program.ops if op.kind is OpKind.CAST_GRAD}
        return [
            SubgroupTraffic(
                subgroup.numel,
                4 * subgroup.numel
                if index in casts
                else sum(piece.numel * grads[piece.owner].element_size() for piece in subgroup.pieces),
                sum(piece.numel * self._engine.memory.shards[piece.owner].element_size() for piece in subgroup.pieces),
            )
            for index, subgroup in enumerate(self._engine.partition.subgroups)
        ]

    def collect(self, wait: bool = False) -> None:
        """Take in the steps that have ended since, between two steps: the share may change.

        Args:
            wait: for those that have not.
        """
        for run in self._watch.finished(wait):
            step: _Step = run.what
            found = figures(step.number, run.timeline, step.traffic)
            here = training()
            if here is not None and step.iteration is not None:
                report(found, step.iteration, here, self._label)
            if step.traced:
                self._write_trace(run, found)
            if self._tunes:
                self._tune(found, step.traffic)

    def _tune(self, found: StepFigures, traffic: Sequence[SubgroupTraffic]) -> None:
        if self._tuner is None:
            share = Fraction(self._engine.options.host_share)
            self._tuner = ShareTuner(traffic, self._engine.program_at, share, self._costs)
        decision = self._tuner.observe(found)
        if decision is not None:
            before = self._engine.options.host_share
            self._engine.set_host_share(decision.host_share)
            if self._announces:
                print(self._told(decision, Fraction(before)), flush=True)

    def _told(self, decision: Decision, before: Fraction) -> str:
        of = f" ({self._label})" if self._label else ""
        now, then = f"{float(1 - decision.host_share):.0%}", f"{float(1 - before):.0%}"
        what = f"GPU share stays {now}" if now == then else f"GPU share {then} -> {now}"
        return f"deep optimizer states{of}, rank {self._rank}, step {decision.step}: {what}: {decision.reason}"

    def _write_trace(self, run: TimedRun, found: StepFigures) -> None:
        """A file for this step and rank, with times of the node's monotonic clock: those of its ranks can be merged."""
        step: _Step = run.what
        name = f"rank{self._rank:05d}-step{step.number:07d}{f'-{self._label}' if self._label else ''}.json"
        spans = [*step.phases, *spans_of(run.timeline, bytes_moved(step.traffic), offset_s=run.began)]
        about = {
            "rank": self._rank,
            "step": step.number,
            "iteration": step.iteration,
            "update_seconds": found.seconds,
            "params_per_second": found.params_per_second,
            "gpu_share": found.device_share,
            "slot_stalls": dict(found.slot_stalls),
        }
        assert self._folder is not None, "no step is traced without one"
        try:
            write_chrome_trace(
                self._folder / name, {f"rank {self._rank}": spans}, first_pid=self._rank, about=about, overwrite=True
            )
        except OSError as error:  # a full disk is no reason to end a training
            warnings.warn(f"--dos-trace-dir: {name} was not written: {error}", RuntimeWarning, stacklevel=2)


def _finish(reference: weakref.ref[StepMonitor]) -> None:
    """At exit: the last step may have been one to be traced."""
    monitor = reference()
    if monitor is not None:
        with suppress(RuntimeError):  # where the device has failed, that has been said
            monitor.collect(wait=True)


def _trace_folder(given: str) -> Path | None:
    if not given:
        return None
    folder = Path(given)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # under a name of its own: other ranks try at the same time
            pass
    except OSError as error:
        raise UnsupportedOptionError(
            f"--dos-trace-dir {given} cannot be written to: {error}. Name a folder that can."
        ) from error
    return folder


def _is_logged(here: Training | None, iteration: int | None) -> bool:
    return here is not None and iteration is not None and here.logs_here and here.logs_at(iteration)


def _is_profiled(here: Training | None, iteration: int | None) -> bool:
    """Whether Megatron's own profiler flags (--profile and related ones) cover this iteration on this rank."""
    args: Any = here.args if here else None
    return (
        iteration is not None
        and getattr(args, "profile", False)
        and args.profile_step_start < iteration <= args.profile_step_end
        and (not args.profile_ranks or args.rank in args.profile_ranks)
    )


@contextmanager
def _nvtx_range(name: str, wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


def _in_range(handler: Callable[[Op], Any]) -> Callable[[Op], Any]:
    def handle(op: Op) -> Any:
        with _nvtx_range(f"dos {op.kind.value} {op.subgroup}", wanted=True):
            return handler(op)

    return handle
