# SPDX-License-Identifier: Apache-2.0
"""`megatron-dos simulate`: a whole iteration on the virtual clock, as a table, a picture and a trace."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dos import __version__
from megatron_dos.commands import CommandError
from megatron_dos.commands.megatron_flags import add_layout_flags, layout_overrides, read_job
from megatron_dos.commands.scenario import (
    MOST_PARAMETERS,
    Scenario,
    add_machine_flag,
    iteration_spans,
    scenario_of,
    scenario_of_count,
)
from megatron_dos.commands.text import count, short, table, wrapped
from megatron_dos.files import new_files
from megatron_dos.observing import trace
from megatron_dos.planning.systems import OURS, RIVALS, System
from megatron_dos.words import plural

if TYPE_CHECKING:
    from megatron_dos.program.timeline import Timeline

__all__ = ["add", "run"]

_HELP = """\
Run forward pass, backward pass and update of one rank on the virtual clock, for deep optimizer states and for the
programs of other systems, with the rates of a machine. Prints a table; with --out, writes

  iteration.png        the lanes of every program: when each operation runs, and how busy each lane is (needs
                       matplotlib; omitted without it)
  iteration.trace.json the same for https://ui.perfetto.dev, a row a lane

The communication of parallel groups is not simulated, and memory is not checked: `megatron-dos plan` checks memory.

{programs}"""

_SYSTEMS = (OURS, *RIVALS.values())
_DEFAULT = ("ours", "published-k2", "full-offload", "gpu-streaming")
_FILES = ("iteration.png", "iteration.trace.json")
_LANES = ("cpu", "h2d", "d2h", "gpu")


def add(commands: Any) -> None:
    programs = [system.word for system in _SYSTEMS]
    parser = commands.add_parser(
        "simulate",
        help="a timeline of a whole iteration, for this and other systems",
        description=_HELP.format(programs=wrapped(f"Programs: {', '.join(programs)}", indent="")),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", metavar="NAME|FILE", help="as for megatron-dos plan")
    model.add_argument("--parameters", metavar="N", help="parameters of a model without a shape, such as 13B or 15.3e9")
    add_machine_flag(parser)
    add_layout_flags(parser, argparse.SUPPRESS)
    parser.add_argument(
        "--programs",
        nargs="+",
        choices=[*programs, "all"],
        default=list(_DEFAULT),
        metavar="NAME",
        help=f"which to run, or all (default: {' '.join(_DEFAULT)})",
    )
    parser.add_argument(
        "--share", type=float, metavar="SHARE", help="for ours: the GPU's share of the parameters that are not resident"
    )
    parser.add_argument("--stride", type=int, metavar="K", help="for ours: update one subgroup in K on the GPU instead")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write the picture and the trace there")
    parser.add_argument("--overwrite", action="store_true", help="replace files of an earlier run in that folder")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run, takes_more=True)


def run(options: argparse.Namespace) -> int:
    if options.share is not None and options.stride is not None:
        raise CommandError("--share and --stride both say what the GPU updates: give one")
    if options.share is not None and not 0 <= options.share <= 1:
        raise CommandError(f"--share {options.share}: give 0 to 1")
    if options.stride is not None and options.stride < 1:
        raise CommandError(f"--stride {options.stride}: give at least 1")
    if (options.share is not None or options.stride is not None) and not {OURS.word, "all"} & set(options.programs):
        raise CommandError("--share and --stride are of ours, which --programs leaves out: add it, or drop them")
    if options.out is not None:
        _check_out(options)
    elif options.overwrite:
        raise CommandError("--overwrite has no effect without --out: add it, or drop the former")
    scenario = _scenario(options)
    tracks, rows = {}, []
    for system, timeline in _timelines(scenario, options):
        spans = iteration_spans(scenario, system.design, timeline)
        tracks[system.name] = spans
        rows.append(_row(scenario, system.name, timeline, spans))
    written = _write(options, scenario, tracks) if options.out is not None else []
    if options.json:
        about = {
            "model": scenario.name,
            "machine": scenario.machine.name,
            "queues": scenario.work.queues.value,
            "notes": list(scenario.notes),
        }
        print(json.dumps({**about, "programs": rows, "files": [str(path) for path in written]}, indent=1))
    else:
        print(_page(scenario, rows, written))
    return 0


def _scenario(options: argparse.Namespace) -> Scenario:
    overrides = [*layout_overrides(options), *options.more]
    if options.model is not None:
        return scenario_of(read_job(options.model, overrides), options)
    try:
        parameters = count(options.parameters)
    except ValueError:
        raise CommandError(f"--parameters {options.parameters}: give a number, such as 13B, 350M or 15.3e9") from None
    if not 1 <= parameters <= MOST_PARAMETERS:
        raise CommandError(f"--parameters {options.parameters}: give 1 to {MOST_PARAMETERS:.0e}")
    gpus = getattr(options, "gpus", 1)
    others = [word for word in overrides if word not in ("--gpus", str(gpus))]
    if others:
        raise CommandError(f"{' '.join(others)}: only --gpus goes with --parameters; give a --model to divide it")
    return scenario_of_count(parameters, gpus, options)


def _timelines(scenario: Scenario, options: argparse.Namespace) -> Iterator[tuple[System, Timeline]]:
    from megatron_dos.planning import rivals

    resident = Fraction(scenario.resident_share)
    for system in _SYSTEMS:
        if "all" not in options.programs and system.word not in options.programs:
            continue
        if system is OURS and _asked(scenario, options):
            yield _ours_as_asked(scenario, options, resident)
        else:
            yield system, rivals.step_of(system, scenario.machine, scenario.work, resident)


def _asked(scenario: Scenario, options: argparse.Namespace) -> dict[str, float]:
    """The argument of `choose` that says what the GPU updates: of --share, --stride, or the job's own flags."""
    if options.stride is not None:
        return {"stride": options.stride}
    return {"gpu_share": options.share} if options.share is not None else scenario.asked


def _ours_as_asked(scenario: Scenario, options: argparse.Namespace, resident: Fraction) -> tuple[System, Timeline]:
    from megatron_dos.planning.choice import choose
    from megatron_dos.planning.model import on_the_clock, program_for

    gpu: dict[str, Any] = _asked(scenario, options)
    # `plan` reports whether it fits: here memory is unlimited.
    machine = replace(scenario.machine, gpu_memory=1e18, host_memory=1e18)
    choice = choose(machine, scenario.work, resident_share=resident, **gpu)
    work = replace(scenario.work, threads=choice.threads)
    program = program_for(work, choice.host_share, resident)
    asked = f"k={gpu['stride']}" if "stride" in gpu else f"GPU share {gpu['gpu_share']:g}"
    return replace(OURS, name=f"{OURS.name}, {asked}"), on_the_clock(scenario.machine, work, program)


def _row(scenario: Scenario, name: str, timeline: Timeline, spans: Sequence[trace.Span]) -> dict[str, Any]:
    placed = list(zip(scenario.work.subgroups, timeline.program.placements, strict=True))
    whole = sum(numel for numel, _ in placed)
    began = max(span.end_s for span in spans) - timeline.makespan
    lanes = trace.lanes_of(span for span in spans if span.start_s >= began)
    return {
        "program": name,
        "iteration_s": began + timeline.makespan,
        "forward_s": scenario.passes.forward,
        "backward_s": began - scenario.passes.forward,
        "update_s": timeline.makespan,
        "parameters_per_second": scenario.work.parameters / timeline.makespan,
        "share": {
            place.value: sum(numel for numel, its in placed if its is place) / whole
            for place in dict.fromkeys(its for _, its in placed)
        },
        "busy_in_update": {
            lane: trace.busy_fraction(members, began, began + timeline.makespan)
            for lane, members in lanes.items()
            if lane in _LANES
        },
    }


def _page(scenario: Scenario, rows: Sequence[dict[str, Any]], written: Sequence[Path]) -> str:
    first = rows[0]["iteration_s"]
    times = [
        [
            row["program"],
            *(f"{row[part]:.3f}" for part in ("forward_s", "backward_s", "update_s", "iteration_s")),
            f"{row['iteration_s'] / first:.2f}",
            f"{row['parameters_per_second'] / 1e9:.2f}",
        ]
        for row in rows
    ]
    # A table of its own, so that lines stay below 120 columns.
    lanes = [
        [
            row["program"],
            *(f"{row['share'].get(place, 0):.0%}" for place in ("host", "streamed", "resident")),
            *(f"{row['busy_in_update'].get(lane, 0):.0%}" for lane in _LANES),
        ]
        for row in rows
    ]
    times_header = ["program", "forward s", "backward s", "update s", "iteration s", "of first", "G params/s"]
    lanes_header = ["in the update", "on CPU", "streamed", "resident", *(f"{lane} busy" for lane in _LANES)]
    work = scenario.work
    parts = [
        f"{scenario.name} on {scenario.machine_name}: one rank of {work.ranks} on its node, states of "
        f"{short(work.parameters)} parameters in {plural(len(work.subgroups), 'subgroup')}",
        table(times_header, times),
        table(lanes_header, lanes),
        *(wrapped(f"note: {note}") for note in scenario.notes),
        *(f"written: {path}" for path in written),
    ]
    return "\n\n".join(parts[:3]) + "".join(f"\n{part}" for part in parts[3:])


# --- Files


def _targets(options: argparse.Namespace) -> list[Path]:
    return [options.out / name for name in _FILES]


def _check_out(options: argparse.Namespace) -> None:
    """Complain before anything is computed."""
    if options.out.exists() and not options.out.is_dir():
        raise CommandError(f"--out {options.out} is a file; give a folder")
    there = [path.name for path in _targets(options) if path.exists()]
    if there and not options.overwrite:
        raise CommandError(f"--out {options.out} holds {', '.join(there)} already; name another folder, or --overwrite")


def _write(options: argparse.Namespace, scenario: Scenario, tracks: trace.Tracks) -> list[Path]:
    """Both files, or neither; the trace alone, and a word on stderr, where matplotlib is missing."""
    title = f"{scenario.name} on {scenario.machine_name}, one rank of {scenario.work.ranks}"
    about = {"made by": f"megatron-dos {__version__} simulate", "scenario": title, "notes": list(scenario.notes)}
    targets = _targets(options)
    if not _can_draw():
        old = "; the one that is there is of an earlier run" if targets[0].exists() else ""
        print(f"megatron-dos: no {targets[0].name}: the picture needs pip install matplotlib{old}", file=sys.stderr)
        targets = targets[1:]
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        with new_files(targets, options.overwrite) as (*picture, events):
            for path in picture:
                trace.draw(path, tracks, title)
            trace.write_chrome_trace(events, tracks, about=about)
    except OSError as error:
        raise CommandError(f"--out {options.out}: {error}") from error
    return targets


def _can_draw() -> bool:
    try:
        import matplotlib.figure  # noqa: F401 (only whether it is there)
    except ImportError:
        return False
    return True
