# SPDX-License-Identifier: Apache-2.0
"""Checks and measures megatron-dos on one GPU, in under five minutes; see docs/gpu-check.md.

This file supervises: it runs the stages in worker processes, writes their results to a JSON file as they come, kills
what hangs and starts a fresh worker after what fails, and prints a summary. In a checkout it first builds the C++
module if that is missing. It needs Python alone; the workers need torch, Triton and numpy.

`megatron-dos check` runs it, and so does `scripts/gpu_check`, from a checkout that is not installed.

Exit status: 0 when every correctness check was made and holds and no stage failed; 1 when a correctness check fails or
was not made; 2 when there is nothing to check, as without a GPU; 3 when all checks hold but a measurement failed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_dos.gpu_check import STAGES, Stage, variables
from megatron_dos.gpu_check.summary import summary, summary_of_stage
from megatron_dos.version import __version__

__all__ = ["DESCRIPTION", "EPILOG", "Supervisor", "add_arguments", "main", "run", "verdict"]

PACKAGE = Path(__file__).resolve().parent.parent
CHECKOUT = PACKAGE.parent if (PACKAGE.parent / "cpp_adam" / "flags.mk").is_file() else None
"""The source tree that this package is part of; None for an installed copy, which builds nothing and has no docs/."""

BUDGET = 285  # seconds, the building included
GRACE = 20  # seconds past its limit after which a stage is killed
START = 90  # seconds that a worker may take to import torch and to begin
STACKS = 1.0  # seconds that a hung worker is given to print where it is


DESCRIPTION = "Check and measure megatron-dos on this machine's GPU; writes one JSON file."
EPILOG = f"Stages: {', '.join(f'{stage.name} ({stage.title})' for stage in STAGES)}."

_NO_GPU = "This check needs a GPU: run it where `nvidia-smi` lists one. --dry-run tries the script without"


class NothingToCheckError(RuntimeError):
    """This machine cannot run the check; the message says why and what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command `scripts/gpu_check`; the exit status."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=DESCRIPTION, epilog=EPILOG)
    add_arguments(parser)
    return run(parser.parse_args(argv), parser.prog)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the check."""
    parser.add_argument(
        "result",
        nargs="?",
        type=Path,
        help="the JSON file; default gpu-check-<gpu>-<date>.json in $OUT where that is set, else in docs/results; in "
        "the current folder where megatron-dos runs without its checkout",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="without a GPU: tiny tensors and a CPU stand-in, to try the script itself; the figures mean nothing",
    )
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds in all (default %(default)s)")
    parser.add_argument("--stages", help="only these, separated by commas")
    parser.add_argument("--parameters", type=int, default=0, help="of the step time, about (default 1e9)")


def run(args: argparse.Namespace, command: str) -> int:
    """Check, measure and report; the exit status.

    Args:
        args: the options of `add_arguments`.
        command: whose name is before a message on the standard error.
    """
    began = time.monotonic()
    names = args.stages.split(",") if args.stages else [stage.name for stage in STAGES]
    unknown = set(names) - {stage.name for stage in STAGES}
    if unknown:
        print(f"--stages: {', '.join(sorted(unknown))}: the stages are {', '.join(s.name for s in STAGES)}")
        return 2
    stages = [stage for stage in STAGES if stage.name in names or stage.name == "environment"]
    supervisor = Supervisor(stages, args.dry_run, args.result, began + args.budget, args.parameters)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the worker does not outlive this process
    try:
        if not args.dry_run:
            look_for_gpu()
        supervisor.build()
        supervisor.run()
    except NothingToCheckError as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 2
    return supervisor.finish()


def look_for_gpu() -> None:
    """Find out before anything is built whether there is a GPU.

    Raises:
        NothingToCheckError: there is none, or nothing answers.
    """
    command = _python("from megatron_dos.gpu_check.gpu_there import why_not; print(why_not())")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=START)
    except subprocess.TimeoutExpired:
        reason = f"the look for a GPU took more than {START} s: does `nvidia-smi` answer?"
    else:
        # Libraries print what they like before the answer.
        reason = done.stdout.removesuffix("\n").rpartition("\n")[2]
        if done.returncode:
            last = done.stderr.strip().rpartition("\n")[2]
            reason = f"the look for a GPU ended with status {done.returncode}: {last or 'nothing was printed'}"
    if reason:
        raise NothingToCheckError(f"{reason}. {_NO_GPU}")


class Supervisor:
    """Runs stages in workers and keeps their results.

    Args:
        stages: in the order in which they run.
        dry: without a GPU.
        path: the JSON file; None for the default, which has the GPU's name in it.
        until: when the run ends, on `time.monotonic()`.
        parameters: of the step time; 0 for the default.
        worker: the command of a worker, to which the stages and the rest are added; None for that of this package.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        dry: bool,
        path: Path | None,
        until: float,
        parameters: int = 0,
        worker: Sequence[str] | None = None,
    ) -> None:
        self.path = path
        self._stages = list(stages)
        self._dry = dry
        self._until = until
        self._parameters = parameters
        self._worker = list(worker or _python("from megatron_dos.gpu_check.worker import main; main()"))
        self._began = time.monotonic()
        self.results: dict[str, Any] = {
            "what": "megatron-dos GPU check",
            "dry_run": dry,
            "started": _now(),
            "commit": _commit(),
            "arguments": sys.argv[1:],
            "environment": {"given": variables.named(os.environ), "used": {}},
            "stages": {stage.name: {"state": "not run", "title": stage.title} for stage in stages},
        }
        if dry:
            self.results["warning"] = "DRY RUN WITHOUT A GPU: the figures are those of a stand-in and mean nothing"

    # --- the C++ module

    def build(self) -> None:
        """Build the C++ module of a checkout where it is missing or was built for another Python.

        Raises:
            NothingToCheckError: it cannot be built, and the compiler's output is in the message; or an installed copy
                lacks it.
        """
        if _module_loads():
            self.results["build"] = {"built": False}
            return
        if CHECKOUT is None:
            raise NothingToCheckError(
                f"the C++ module in {PACKAGE} does not load here: install megatron-dos again, with {sys.executable}"
            )
        began = time.monotonic()
        print("building the C++ module ...", flush=True)
        with tempfile.TemporaryDirectory() as temporary:
            environment = dict(os.environ)
            if importlib.util.find_spec("pybind11") is None:
                environment["PYTHONPATH"] = os.pathsep.join(
                    [_bundled_pybind11(Path(temporary)), *filter(None, [environment.get("PYTHONPATH")])]
                )
            command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--build-temp", temporary]
            limit = max(self._until - time.monotonic(), 1.0)
            try:
                done = subprocess.run(
                    command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=limit
                )
            except subprocess.TimeoutExpired:
                raise NothingToCheckError(f"the C++ module was not built within {limit:.0f} s") from None
        if done.returncode != 0 or not _module_loads():
            raise NothingToCheckError(
                "the C++ module does not build here. It needs setuptools, a C++ compiler and Python's headers "
                f"(Python.h):\n{(done.stdout + done.stderr)[-3000:]}"
            )
        seconds = time.monotonic() - began
        self.results["build"] = {"built": True, "seconds": round(seconds, 2)}
        print(f"built in {seconds:.0f} s", flush=True)

    # --- the stages

    def run(self) -> None:
        """Run all stages.

        Raises:
            NothingToCheckError: there is no GPU. No file has been written then.
        """
        pending = list(self._stages)
        while pending:
            together = [pending[0]]
            for stage in pending[1:]:
                if stage.environment != pending[0].environment:
                    break
                together.append(stage)
            ended = self._run_worker(together)
            pending = pending[max(ended, 1) :]

    def _run_worker(self, stages: list[Stage]) -> int:
        """Run stages in one worker; how many of them are over, well or badly."""
        if self._until - time.monotonic() <= 0:
            for stage in stages:
                self._end(stage, "skipped", {"reason": "no time was left"})
            return len(stages)
        with tempfile.TemporaryDirectory() as temporary:
            earlier = Path(temporary) / "earlier.json"
            earlier.write_text(json.dumps(self.results))
            errors = (Path(temporary) / "stderr").open("w+")
            command = [*self._worker, str(earlier), "--stages", ",".join(stage.name for stage in stages)]
            command += ["--until", str(self._until), *(["--dry-run"] if self._dry else [])]
            command += ["--parameters", str(self._parameters)] if self._parameters else []
            environment = variables.of_worker(os.environ, stages[0].environment)
            used = self.results["environment"]["used"]
            used.update((stage.name, variables.named(environment)) for stage in stages)
            process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
            try:
                return self._follow(process, stages, errors)
            finally:
                if process.poll() is None:
                    process.kill()
                process.wait()
                errors.close()

    def _follow(self, process: subprocess.Popen[str], stages: list[Stage], errors: Any) -> int:
        """Take a worker's messages until it ends, or has to be ended."""
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_read_lines, args=(process, lines), daemon=True).start()
        over, deadline = 0, min(time.monotonic() + START, self._until + GRACE)
        while over < len(stages):
            stage = stages[over]
            try:
                line = lines.get(timeout=max(deadline - time.monotonic(), 0.01))
            except queue.Empty:
                self._end(stage, "killed", {"reason": "it did not end in time", "trace": _stacks(process, errors)})
                return over + 1
            if line is None:
                code = process.wait()
                if self.results["stages"][stage.name]["state"] in ("running", "not run"):
                    reason = f"the worker ended with status {code} and said nothing"
                    self._end(stage, "crashed", {"reason": reason, "trace": _tail(errors)})
                    return over + 1
                return over
            message = json.loads(line)
            event, result = message.pop("event"), message
            result.pop("stage")
            if event == "no_gpu":
                raise NothingToCheckError(f"{result['reason']}. {_NO_GPU}")
            if event == "start":
                deadline = min(time.monotonic() + stage.limit + GRACE, self._until + 0.0)
                self._update(stage, "running", result)
            elif event == "update":
                self._update(stage, "running", result)
            else:
                state = {"end": "done"}.get(event, event)
                if state == "failed":
                    result["trace"] = f"{result.get('trace', '')}\n{_tail(errors)}"
                self._end(stage, state, result)
                over += 1
                deadline = min(time.monotonic() + START, self._until)
                if state == "failed":
                    return over
        return over

    # --- results

    def _update(self, stage: Stage, state: str, result: dict[str, Any]) -> None:
        known = self.results["stages"][stage.name]
        known.update({**result, "state": state})
        if self.path is None:
            name = known.get("values", {}).get("gpu", {}).get("name")
            if stage.name != "environment" or name is None:
                return
            self.path = _default_path(name, self._dry)
        self.write()

    def _end(self, stage: Stage, state: str, result: dict[str, Any]) -> None:
        self._update(stage, state, result)
        print(summary_of_stage(stage.name, self.results["stages"][stage.name]), flush=True)

    def write(self) -> None:
        """Write the file anew, so that it is whole at any moment."""
        self.results["seconds"] = round(time.monotonic() - self._began, 2)
        self.results["verdict"] = verdict(self.results, self._stages)
        assert self.path is not None, "the first stage, or its end, chooses it"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(self.path.name + ".part")
        temporary.write_text(json.dumps(self.results, indent=1) + "\n")
        temporary.replace(self.path)

    def finish(self) -> int:
        """Write the last state, print the summary; the exit status."""
        self.results["ended"] = _now()
        if self.path is None:  # the environment stage itself failed
            self.path = _default_path("unknown", self._dry)
        self.write()
        print(summary(self.results))
        print(f"written to {self.path}")
        return self.results["verdict"]["exit_status"]


def verdict(results: dict[str, Any], stages: Sequence[Stage]) -> dict[str, Any]:
    """Whether the correctness checks hold, from the results of the stages so far."""
    false, not_made, failed = [], [], []
    for stage in stages:
        result = results["stages"][stage.name]
        false += [f"{stage.name}: {check['name']}" for check in result.get("checks", ()) if not check["ok"]]
        if result["state"] in ("failed", "killed", "crashed"):
            failed.append(stage.name)
        if stage.checks and (result["state"] != "done" or not result.get("checks")):
            not_made.append(stage.name)
        not_made += [f"{stage.name}: {what}" for what in result.get("not_made", ())]
    return {
        "correct": not false and not not_made,
        "checks_that_fail": false,
        "checks_not_made": not_made,
        "stages_that_failed": failed,
        "exit_status": 1 if false or not_made else 3 if failed else 0,
    }


# --- helpers


def _python(code: str) -> list[str]:
    """The command of a process that imports from the folders from which this one does, whatever the current folder is.

    It needs no installed package then, and `python -m` would look into the current folder first.
    """
    path = [entry or os.getcwd() for entry in sys.path]
    return [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; {code}"]


def _read_lines(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    for line in process.stdout or ():
        lines.put(line)
    lines.put(None)


def _stacks(process: subprocess.Popen[str], errors: Any) -> str:
    """Where every thread of a hung worker is; the worker is then killed."""
    process.send_signal(signal.SIGUSR1)  # its handler prints the stacks, also while the GIL is held
    time.sleep(STACKS)
    process.kill()
    process.wait()
    return _tail(errors)


def _tail(errors: Any, length: int = 6000) -> str:
    errors.flush()
    return Path(errors.name).read_text(errors="replace")[-length:]


def _module_loads() -> bool:
    """Whether the C++ module is there for this Python, in a process of its own: a failed import is remembered."""
    code = "import importlib.util as u; s = u.spec_from_file_location('_cpp_adam', __import__('sys').argv[1]); "
    code += "m = u.module_from_spec(s); s.loader.exec_module(m); m.isa()"
    for path in PACKAGE.glob("_cpp_adam*.so"):
        if subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True).returncode == 0:
            return True
    return False


def _bundled_pybind11(temporary: Path) -> str:
    """A folder with a module pybind11 that names the headers which torch carries, for setup.py.

    Raises:
        NothingToCheckError: torch is not installed, or without them.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise NothingToCheckError(f"torch is not installed for {sys.executable}; PYTHON=... names another interpreter")
    include = Path(spec.submodule_search_locations[0]) / "include"
    if not (include / "pybind11" / "pybind11.h").exists():
        raise NothingToCheckError(f"pybind11 is not installed, and torch has no headers of it in {include}")
    folder = temporary / "site" / "pybind11"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(f"def get_include(user=False):\n    return {str(include)!r}\n")
    return str(folder.parent)


def _default_path(gpu: str, dry: bool) -> Path:
    """A file that is not there yet. A dry run's is never in docs/results."""
    if given := os.environ.get("OUT"):
        folder = Path(given)
    else:
        folder = Path.cwd() if CHECKOUT is None else CHECKOUT / "build" if dry else CHECKOUT / "docs" / "results"
    kind = "dry-run" if dry else re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    stem = f"gpu-check-{kind}-{datetime.date.today().isoformat()}"
    path, number = folder / f"{stem}.json", 2
    while path.exists():
        path, number = folder / f"{stem}-{number}.json", number + 1
    return path


def _commit() -> str | None:
    """The commit of the code, with a + where files differ from it."""
    if CHECKOUT is None:  # git would tell of a repository around the installed copy
        built = re.search(r"\+g([0-9a-f]+)(\.dirty)?$", __version__)
        return built[1] + ("+" if built[2] else "") if built else None
    try:
        git = ["git", "-C", str(CHECKOUT)]
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changed.stdout.strip() else "")


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")

