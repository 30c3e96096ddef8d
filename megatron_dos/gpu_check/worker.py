# SPDX-License-Identifier: Apache-2.0
"""A worker process: runs stages one after the other and tells the supervisor about each on a line of JSON.

After a stage that raised it ends, since a GPU that has met an error may answer nothing more: the supervisor starts a
fresh worker for the stages that are left.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from megatron_dos.gpu_check import STAGES

__all__ = ["main", "run_stages"]

GRACE = 5.0  # seconds between a stage's soft limit and the end of the whole run
REQUIRED = 15.0  # seconds past its limit for a stage's required cases; the supervisor kills it later than that


def main(argv: Sequence[str] | None = None) -> None:
    """The command of a worker, which the supervisor starts."""
    parser = argparse.ArgumentParser(prog="gpu_check worker")
    parser.add_argument("earlier", nargs="?", type=Path)
    parser.add_argument("--stages", required=True)
    parser.add_argument("--until", type=float, required=True)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--parameters", type=int, default=0)
    args = parser.parse_args(argv)
    run_stages(args.stages.split(","), args.dry_run, args.until, args.earlier, args.parameters)


def run_stages(names: Sequence[str], dry: bool, until: float, results: Path | None, parameters: int) -> None:
    """Run stages and report them on the standard output, one JSON object a line.

    Args:
        names: of the stages.
        dry: without a GPU.
        until: end of the whole run on `time.monotonic()`, which is the same clock in every process.
        results: the file with what earlier stages gave; None or a missing file for no results.
        parameters: of the step time; 0 for the default.
    """
    out = _take_stdout()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _prepare_imports(dry)
    import dataclasses

    import torch

    from megatron_dos.gpu_check.context import Context, Sizes
    from megatron_dos.gpu_check.environment import NoGpuError

    sizes = Sizes.dry() if dry else Sizes()
    if parameters:
        sizes = dataclasses.replace(sizes, parameters=parameters)
    earlier = _earlier(results)
    for name in names:
        stage = next(stage for stage in STAGES if stage.name == name)
        began = time.monotonic()
        limit = min(stage.limit, until - began - GRACE)
        if dry and name != "environment" and name != "kernels":
            from megatron_dos import cpu_emulation

            cpu_emulation.activate(force=True)

        def send(result: dict[str, Any], event: str = "update", name: str = name, began: float = began) -> None:
            message = {"stage": name, "event": event, "seconds": round(time.monotonic() - began, 3), **result}
            print(json.dumps(message, default=str), file=out, flush=True)

        required_until = min(began + stage.limit + REQUIRED, until - GRACE)
        context = Context(dry, sizes, began + limit, send, earlier, required_until=required_until)
        send({}, "start")
        context.initialize()
        if limit <= 0:
            send({"reason": "no time was left"}, "skipped")
            continue
        try:
            importlib.import_module(f"megatron_dos.gpu_check.{stage.module or name}").run(context)
        except NoGpuError as error:
            send({"reason": str(error)}, "no_gpu")
            return
        except BaseException as error:
            send(
                {**context.result, "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()},
                "failed",
            )
            return
        earlier[name] = context.result["values"]
        send(context.result, "end")
        gc.collect()  # what a stage leaves in cycles holds memory that the next one needs
        torch.cuda.empty_cache()


def _take_stdout() -> TextIO:
    """The standard output for messages; whatever else is printed goes to the standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


def _prepare_imports(dry: bool) -> None:
    if dry:
        os.environ["TRITON_INTERPRET"] = "1"  # Triton's kernel on numpy
    try:
        import psutil  # noqa: F401
    except ImportError:
        sys.modules["psutil"] = _psutil()


def _psutil() -> types.ModuleType:
    """What of psutil an update uses, for machines that have Python and torch and little else."""
    module = types.ModuleType("psutil")

    class NoSuchProcess(Exception):
        """As in psutil."""

    class Process:
        """A process, and when it was started: in ticks of the machine's clock, which tells processes apart."""

        def __init__(self, pid: int | None = None) -> None:
            self._stat = Path(f"/proc/{os.getpid() if pid is None else pid}/stat")

        def create_time(self) -> float:
            try:
                fields = self._stat.read_text().rpartition(")")[2].split()  # proc_pid_stat(5), from the third on
            except OSError as error:
                raise NoSuchProcess from error
            return float(fields[22 - 3])

    def virtual_memory() -> types.SimpleNamespace:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return types.SimpleNamespace(available=int(fields["MemAvailable"].split()[0]) * 1024)

    vars(module).update(
        NoSuchProcess=NoSuchProcess, Process=Process, virtual_memory=virtual_memory, is_stand_in=True
    )
    return module


def _earlier(results: Path | None) -> dict[str, dict[str, Any]]:
    if results is None or not results.exists():
        return {}
    stages = json.loads(results.read_text())["stages"]
    return {name: stage.get("values", {}) for name, stage in stages.items() if stage["state"] == "done"}
