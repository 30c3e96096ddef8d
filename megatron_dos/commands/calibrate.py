# SPDX-License-Identifier: Apache-2.0
"""`megatron-dos calibrate`: measures this machine's rates, and keeps them for the runs on it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from megatron_dos.calibration import cache as calibration
from megatron_dos.calibration.worker import GPU_PHASES, HOST_PHASES, Sizes
from megatron_dos.commands import CommandError
from megatron_dos.commands.text import table
from megatron_dos.files import new_file
from megatron_dos.node import topology
from megatron_dos.planning.machine import Machine, MachineError, Source, preset
from megatron_dos.words import gib, plural

__all__ = ["Ranks", "add", "measure", "run", "sizes_for"]

_HELP = """\
Measure how fast this machine's lanes are: the fused update on the CPU, host memory, and with a GPU the link in both
directions and the update on it. One process a rank measures, all at once, as in a training. This takes about a minute.
Runs on this machine then begin with the best share at these rates, instead of half.

The result is kept below $XDG_CACHE_HOME (else ~/.cache), one file a node, and used while processor, allowed CPUs,
memory, GPU, driver and version of megatron-dos stay the same. Until then a second calibrate finds it and measures
nothing. Each rank of a job may call this: one measures, the others wait for it. Let nothing else run meanwhile.

Values that cannot be measured, as without a GPU, come from a preset, and the table marks each of them; plan and
simulate use such a machine only if --machine names its file."""

_PRESET = "h100-pcie5"
_BYTES_PER_RANK = 48  # a parameter: update, its single-thread part, copies and room to spare
_MATMUL_PART = 0.5  # of a bare product's rate that a training step reaches; an estimate
_LEAD = 0.05  # seconds from the request to measure until all ranks begin


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "calibrate",
        help="measure this machine's rates and keep them for runs on it",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks of this node; default: one a GPU, else 1")
    parser.add_argument(
        "--threads", type=int, default=0, metavar="N", help="CPU threads of a rank; default: its share of the CPUs"
    )
    parser.add_argument(
        "--preset", default=_PRESET, metavar="NAME", help="source of values that cannot be measured (%(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=2.0, metavar="S", help="for each of the rates (%(default)s)")
    parser.add_argument("--again", action="store_true", help="measure again even if there is a result for this machine")
    parser.add_argument("--output", metavar="FILE", help="write the machine to this file, too; for --machine FILE")
    parser.add_argument("--json", action="store_true", help="print the machine as JSON instead of a table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    fallback = _checked(options)
    known = None if options.again else calibration.cached_machine()
    found = known or _measured_by_one(options, fallback)
    if options.output:
        try:
            with new_file(options.output) as temporary:
                temporary.write_text(found.as_json(), encoding="utf-8")
        except OSError as error:
            raise CommandError(f"--output {options.output}: {error}") from error
    print(found.as_json() if options.json else _page(found), end="" if options.json else "\n")
    if known:  # not on stdout, where JSON may be read
        print("measured before, whatever the options; --again measures anew", file=sys.stderr)
    return 0


def _checked(options: argparse.Namespace) -> Machine:
    """The preset, after a look at all the options."""
    allowed = len(os.sched_getaffinity(0))
    if options.ranks is not None and not 1 <= options.ranks <= 1024:
        raise CommandError(f"--ranks {options.ranks}: give 1 to 1024")
    if not 0 <= options.threads <= allowed:
        raise CommandError(f"--threads {options.threads}: give 1 to {allowed}, the CPUs allowed here, or 0")
    if not 0 < options.seconds <= 60:
        raise CommandError(f"--seconds {options.seconds:g}: give more than 0 and at most 60")
    if options.output:
        _check_output(Path(options.output))
    try:
        return preset(options.preset)
    except MachineError as error:
        raise CommandError(f"--preset: {error}") from error


def _check_output(output: Path) -> None:
    """Complain before anything is measured."""
    if output.exists():
        raise CommandError(f"--output {output} is there already; name another file")
    if not output.parent.is_dir():
        raise CommandError(f"--output {output}: there is no folder {output.parent}")
    try:
        with tempfile.TemporaryFile(dir=output.parent):
            pass
    except OSError as error:
        raise CommandError(f"--output {output}: cannot write to {output.parent}: {error.strerror}") from error


def _measured_by_one(options: argparse.Namespace, fallback: Machine) -> Machine:
    """Measure, or take what another process measured in the meantime."""
    expected = calibration.fingerprint()
    try:
        with calibration.locked(expected) as fresh:
            if fresh is not None:
                return fresh
            ranks = options.ranks or max(calibration.gpu_count(), 1)
            found = measure(ranks, sizes_for(ranks, options.threads), options.seconds, fallback, expected)
            calibration.store(found)
            return found
    except calibration.CacheError as error:
        raise CommandError(str(error)) from error


def sizes_for(ranks: int, threads: int = 0) -> Sizes:
    """Sizes of the measurements of each rank, so that all ranks together stay below half of the free memory.

    Raises:
        CommandError: that leaves too little to measure with.
    """
    from megatron_dos.node.memory import available_host_memory

    wanted = Sizes(threads=threads)
    room = available_host_memory() // 2 // ranks
    update = min(wanted.update, room // _BYTES_PER_RANK)
    if update < 1 << 20:
        raise CommandError(
            f"{gib(available_host_memory(), 2)} of free host memory are too little for {plural(ranks, 'rank')} to "
            "measure with; give fewer --ranks, or free memory"
        )
    copy_bytes = min(wanted.copy_bytes, room // 8) // 2**16 * 2**16
    return dataclasses.replace(wanted, update=update, copy_bytes=copy_bytes)


# --- Measuring


def measure(ranks: int, sizes: Sizes, seconds: float, fallback: Machine, fingerprint: str) -> Machine:
    """Measure this node with `ranks` processes at once.

    Args:
        ranks: processes; rank i uses GPU i.
        sizes: of each.
        seconds: that each rate is measured for.
        fallback: where what cannot be measured is taken from.
        fingerprint: of the result.

    Raises:
        CommandError: a rank failed; the message says why.
    """
    from tqdm import tqdm

    # Only a terminal is shown progress.
    bar_format = "{desc} {bar} {n}/{total}"
    with (
        tqdm(total=len(HOST_PHASES), desc="starting", disable=None, leave=False, bar_format=bar_format) as bar,
        Ranks(ranks, sizes) as together,
    ):
        about = together.about[0]
        phases = HOST_PHASES + (GPU_PHASES if about["has_gpu"] else ())
        bar.total = len(phases)
        results = {}
        for phase in phases:
            bar.set_description_str(phase.replace("_", " "))
            results[phase] = together.measure(phase, seconds, first_only=phase in ("one_core", "submit"))
            bar.update()
    return _machine(results, about, ranks, fallback, fingerprint)


class Ranks:
    """The processes that measure; `about` is what each says of itself.

    Raises:
        CommandError: a rank failed, here or later; the message says why.
    """

    def __init__(self, ranks: int, sizes: Sizes) -> None:
        self._processes: list[subprocess.Popen[str]] = []
        # A rank gives its reason on stdout; what was said on stderr is shown where it could not.
        self._errors = [tempfile.TemporaryFile("w+") for _ in range(ranks)]  # noqa: SIM115 (closed in `close`)
        try:
            for rank in range(ranks):
                self._processes.append(_start(rank, ranks, self._errors[rank]))
            self._tell(asdict(sizes), self._processes)
            self.about = self._answers(self._processes)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def measure(self, phase: str, seconds: float, first_only: bool = False) -> list[dict[str, float]]:
        """The medians of each rank, all measured at once; or of the first rank, the others being idle."""
        processes = self._processes[: 1 if first_only else None]
        self._tell({"phase": phase}, processes)
        self._answers(processes)
        self._tell({"begin": time.monotonic() + _LEAD, "seconds": seconds}, processes)
        return self._answers(processes)

    def close(self) -> None:
        for process in self._processes:
            with contextlib.suppress(OSError):
                _of(process.stdin).close()  # the end of its requests
        for process in self._processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _of(process.stdout).close()
        for errors in self._errors:
            errors.close()

    def _tell(self, request: Mapping[str, Any], processes: Sequence[subprocess.Popen[str]]) -> None:
        for process in processes:
            with contextlib.suppress(BrokenPipeError):  # its answer reports that
                _of(process.stdin).write(json.dumps(request) + "\n")
                _of(process.stdin).flush()

    def _answers(self, processes: Sequence[subprocess.Popen[str]]) -> list[dict[str, Any]]:
        answers = []
        for rank, process in enumerate(processes):
            line = _of(process.stdout).readline()
            found = json.loads(line) if line else {"error": self._last_words(rank)}
            if "error" in found:
                raise CommandError(f"rank {rank} cannot measure: {found['error']}")
            answers.append(found)
        return answers

    def _last_words(self, rank: int) -> str:
        status = self._processes[rank].wait()
        self._errors[rank].seek(0)
        words = self._errors[rank].read().strip().splitlines()[-1:]
        return f"it ended with status {status}; {words[0] if words else 'it said nothing'}"


def _start(rank: int, ranks: int, errors: IO[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_dos.calibration.worker"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
    )


# --- The result


def _machine(
    results: Mapping[str, Sequence[Mapping[str, float]]],
    about: Mapping[str, Any],
    ranks: int,
    fallback: Machine,
    fingerprint: str,
) -> Machine:
    """The machine, from the medians of each rank in each phase, and from `fallback`."""
    from megatron_dos.planning.workload import FUSED_PASS

    when = f"measured {datetime.date.today().isoformat()}, {ranks} rank{'s' if ranks > 1 else ''} at once"
    values: dict[str, float] = {}
    sources: dict[str, Source] = {}

    def take(name: str, value: float, words: str, preset: str = "") -> None:
        values[name], sources[name] = value, Source(words, preset)

    def total(phase: str, name: str = "rate") -> float:
        return sum(rank[name] for rank in results[phase])

    take("cores", topology.physical_cores(), "counted: cores of the CPUs that are allowed here")
    take("host_memory", topology.node_memory(), "counted")
    take("cpu_update_per_core", total("one_core"), "measured: one thread, all else idle")
    take("cpu_update_max", total("host_update"), f"{when}, {about['threads']} threads each")
    take("cpu_latency", results["submit"][0]["seconds"], "measured: an update of 64 parameters")
    # What was moved at once in any of these; a bound from below where nothing was short of memory's rate.
    traffic = {
        "a plain copy": total("host_copy"),
        "the fused update": total("host_update") * FUSED_PASS,
        **({"update and copies over the link": total("all", "host_memory")} if about["has_gpu"] else {}),
    }
    most = max(traffic, key=traffic.__getitem__)
    take("dram", traffic[most], f"{when}: the most that was moved, by {most}")
    if about["has_gpu"]:
        for direction in ("h2d", "d2h"):
            take(f"{direction}_alone", total(direction, direction) / ranks, when)
            take(f"{direction}_together", total("both", direction) / ranks, f"{when}, both directions")
        take("gpus", about["gpus"], "counted: GPUs that are visible here")
        take("gpu_memory", about["gpu_memory"], "reported by the driver")
        take("gpu_update", total("gpu_update") / ranks, when)
        take("copy_latency", total("launch", "seconds") / ranks, f"{when}: a copy of 256 bytes and an event")
        take("h2d_pageable", total("pageable") / ranks, f"{when}, from ordinary memory")
        reached = f"estimate: {_MATMUL_PART:.0%} of the measured rate of products of bf16 matrices"
        take("matmul", total("matmul") / ranks * _MATMUL_PART, reached)
    for name, source in fallback.sources.items():
        if name not in values:
            take(name, getattr(fallback, name), str(source), fallback.name)
    facts: dict[str, Any] = values
    return Machine(name=socket.gethostname(), sources=sources, fingerprint=fingerprint, **facts)


_UNITS = {
    **dict.fromkeys(("cpu_update_per_core", "cpu_update_max", "gpu_update"), (1e9, "G params/s")),
    **dict.fromkeys(("h2d_alone", "d2h_alone", "h2d_together", "d2h_together", "h2d_pageable", "dram"), (1e9, "GB/s")),
    **dict.fromkeys(("gpu_memory", "host_memory"), (2**30, "GiB")),
    **dict.fromkeys(("copy_latency", "cpu_latency"), (1e-6, "us")),
    "matmul": (1e12, "TFLOP/s"),
}


_SOURCE_WIDTH = 72  # the table as a whole has less than 120 columns


def _page(machine: Machine) -> str:
    """The machine as a table, with the source of each value."""
    rows = []
    for name, source in machine.sources.items():
        size, unit = _UNITS.get(name, (1, ""))
        first, *others = textwrap.wrap(str(source), _SOURCE_WIDTH)
        rows.append([name, f"{getattr(machine, name) / size:,.4g}", unit, first])
        rows += [["", "", "", line] for line in others]
    kept = calibration.cache_file(machine.fingerprint)
    head = f"{machine.name}: {machine.fingerprint}\nkept in {kept}\n"
    if preset_name := machine.preset_of_gpu:
        head += f"host measured, GPU values of preset {preset_name}: plan and simulate take it by --machine FILE only\n"
    return f"{head}\n{table(['value', 'figure', 'unit', 'from'], rows, left=(0, 2, 3))}"


def _of(pipe: IO[str] | None) -> IO[str]:
    """A pipe of a process that was started with pipes."""
    assert pipe is not None
    return pipe
