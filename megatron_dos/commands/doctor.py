# SPDX-License-Identifier: Apache-2.0
"""`megatron-dos doctor`: what this machine has for training with deep optimizer states, on one page."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from megatron_dos import __version__
from megatron_dos.calibration import cache as calibration
from megatron_dos.commands.text import hanging, wrapped
from megatron_dos.node import gpu, topology
from megatron_dos.patching import on_disk as patching
from megatron_dos.supported import MEGATRON, MEGATRON_PYTHON, TORCH
from megatron_dos.words import gib, plural

__all__ = ["Finding", "add", "examine", "run"]

_HELP = """\
Show this machine's fitness for training with deep optimizer states: versions, the CPU kernel and its threads, memory,
GPUs, optional packages, and whether a Megatron-LM checkout is patched. Nothing is changed or measured.

Each finding that is not ok names a remedy after an arrow, and the last line is the verdict.

Exit status: 0 if training can run here, 1 if something is missing."""



class State(str, Enum):
    """How a finding stands."""

    OK = "ok"
    NOTE = "note"
    """Training runs, but something could be better."""
    MISSING = "MISSING"
    """Training cannot run."""


OK, NOTE, MISSING = State.OK, State.NOTE, State.MISSING
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SHARED_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")  # page-locked states are mapped shared


@dataclass(frozen=True)
class Finding:
    """One line of the page.

    Attributes:
        subject: what was looked at.
        state: how it stands.
        text: what there is.
        way_out: what to do about it; '' where the state is OK.
    """

    subject: str
    state: State
    text: str
    way_out: str = ""

    def __post_init__(self) -> None:
        if self.state != OK and not self.way_out:
            raise ValueError(f"{self.subject}: a finding other than {OK} needs a remedy")


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="show this machine's equipment, and the missing pieces for training",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkout", nargs="?", metavar="PATH", help="a Megatron-LM checkout: is it patched?")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a page")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    findings = list(examine(options.checkout))
    missing = [finding.subject for finding in findings if finding.state == MISSING]
    if options.json:
        report = {"version": __version__, "can_train": not missing, "findings": [asdict(each) for each in findings]}
        print(json.dumps(report, indent=1))
        return 1 if missing else 0
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        print(_lines(finding, width))
    print()
    print(wrapped(f"Training cannot run here; missing: {', '.join(missing)}." if missing else "Training can run here."))
    return 1 if missing else 0


def _lines(finding: Finding, width: int) -> str:
    """A finding on the page, its text and its remedy in a column to the right of subjects of `width`."""
    margin = " " * (width + 11)
    lines = hanging(finding.text, f"{finding.state.value:7}  {finding.subject:{width}}  ", margin)
    return lines + (f"\n{hanging(finding.way_out, f'{margin}-> ', f'{margin}   ')}" if finding.way_out else "")


def examine(checkout: str | None = None) -> Iterator[Finding]:
    """All findings about this machine, and about a checkout where one is given."""
    yield Finding("megatron-dos", OK, f"{__version__} in {Path(__file__).resolve().parent.parent}")
    yield _python()
    yield from _torch()
    yield _kernel()
    yield from _processors()
    yield from _memory()
    yield from _gpu()
    yield from _optional_packages()
    yield _calibration()
    yield from _megatron(checkout)


def _python() -> Finding:
    version = platform.python_version()
    if not MEGATRON_PYTHON.include(version):
        text = f"{version}, {sys.executable}: Megatron core {MEGATRON.least} needs {MEGATRON_PYTHON}"
        return Finding("python", MISSING, text, f"make an environment with Python {MEGATRON_PYTHON.least}")
    return Finding("python", OK, f"{version}, {sys.executable}")


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except Exception as error:  # a broken installation raises whatever it likes
        yield Finding("torch", MISSING, f"cannot be imported: {error}", f"install PyTorch {TORCH}: pytorch.org")
        return
    if not TORCH.include(torch.__version__):
        text = f"{torch.__version__} is not supported: {TORCH} is"
        yield Finding("torch", MISSING, text, "install one of these, built for CUDA: pytorch.org")
    elif torch.version.cuda is None:
        yield Finding("torch", MISSING, f"{torch.__version__}, built without CUDA", "install a CUDA build: pytorch.org")
    else:
        yield Finding("torch", OK, f"{torch.__version__}, built for CUDA {torch.version.cuda}")


def _kernel() -> Finding:
    try:
        from megatron_dos.kernels import cpu

        return Finding("CPU kernel", OK, cpu.summary())
    except ImportError as error:
        way_out = "install megatron-dos again with this Python; building its C++ module takes a compiler and Python.h"
        return Finding("CPU kernel", MISSING, f"cannot be loaded: {error}", way_out)
    except ValueError as error:  # a launcher's variable, or MEGATRON_DOS_ISA, makes no sense
        return Finding("CPU kernel", MISSING, str(error), "correct the environment variable")


def _processors() -> Iterator[Finding]:
    from megatron_dos.node.control_groups import cpu_quotas

    allowed, all_of_them = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    text = f"{topology.cpu_model()}: {allowed} of {plural(all_of_them, 'CPU')} allowed, {plural(nodes, 'NUMA node')}"
    quota = min(cpu_quotas().values(), default=allowed)
    if quota < allowed:
        text += f", CPU quota {quota:g}"
        yield Finding("processors", NOTE, text, "a larger CPU quota of the container makes updates faster")
    elif allowed < all_of_them:
        yield Finding("processors", NOTE, text, "more CPUs for this job (taskset, the scheduler) make updates faster")
    else:
        yield Finding("processors", OK, text)


def _memory() -> Iterator[Finding]:
    try:
        import psutil

        from megatron_dos.node.memory import available_host_memory
        from megatron_dos.program.partition import BYTES_PER_PARAMETER
    except ImportError as error:
        yield Finding("host memory", MISSING, f"cannot be examined: {error}", "pip install what that names")
    else:
        total, free = psutil.virtual_memory().total, available_host_memory()
        room = free / BYTES_PER_PARAMETER / 1e9
        yield Finding(
            "host memory", OK, f"{gib(free)} free of {gib(total)}: states of about {room:.1f}e9 params on this node"
        )
    yield _pages("huge pages", _HUGE_PAGES, "madvise", ("never",))
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        yield Finding("locked memory", OK, "unlimited")
    else:
        way_out = "should page-locking fail: ulimit -l unlimited, or the container's memlock setting"
        yield Finding("locked memory", NOTE, f"limited to {limit // 1024:,} KiB", way_out)


def _pages(subject: str, file: Path, better: str, without: tuple[str, ...]) -> Finding:
    try:
        pages = file.read_text().strip()
    except OSError:
        pages = "not reported by this kernel"
    chosen = pages.partition("[")[2].partition("]")[0] or pages
    if chosen in without:
        return Finding(subject, NOTE, chosen, f"as root: echo {better} > {file} (updates gain 5 to 15 %)")
    return Finding(subject, OK, chosen)


def _gpu() -> Iterator[Finding]:
    try:
        import torch

        gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    except Exception as error:  # no torch, or a driver that does not fit
        yield Finding("GPU", MISSING, f"cannot be asked for: {error}", "see torch above; check nvidia-smi")
        return
    driver = gpu.driver_version()
    driver = f", driver {driver}" if driver else ""
    if not gpus:
        way_out = "training needs one; check nvidia-smi and CUDA_VISIBLE_DEVICES. `make demo` does without"
        yield Finding("GPU", MISSING, f"torch sees none{driver}", way_out)
    for index, properties in enumerate(gpus):
        text = f"{properties.name}, {gib(properties.total_memory)}, compute capability {properties.major}."
        yield Finding(f"GPU {index}", OK, f"{text}{properties.minor}{driver}")
    if gpus:
        yield _pages("huge locked pages", _SHARED_HUGE_PAGES, "advise", ("never", "deny"))


def _optional_packages() -> Iterator[Finding]:
    for name, without in (
        ("triton", "updates on the GPU use plain torch operations then, which are slower: pip install triton"),
        ("transformer-engine", "for --dos-gpu-kernel te and Megatron's layers of it: pip install transformer-engine"),
        ("apex", "for --dos-gpu-kernel apex: build it from github.com/NVIDIA/apex"),
        ("matplotlib", "for the pictures of simulate and compare-loss: pip install matplotlib"),
    ):
        found = _version(name)
        yield Finding(name, OK, found) if found else Finding(name, NOTE, "not installed", without)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _calibration() -> Finding:
    try:
        known = calibration.cached_machine()
    except Exception as error:  # no torch, or a driver that does not answer: reported above
        way_out = "add the missing pieces named above, then run megatron-dos calibrate"
        return Finding("calibration", NOTE, f"cannot be looked up: {error}", way_out)
    if known is None:
        text = "this machine has not been measured; runs begin with half on each side"
        return Finding("calibration", NOTE, text, "megatron-dos calibrate")
    return Finding("calibration", OK, str(calibration.cache_file(known.fingerprint)))


def _megatron(checkout: str | None) -> Iterator[Finding]:
    yield _megatron_core(_version("megatron-core"), checkout)
    if checkout is not None:
        yield _checkout(checkout)


def _megatron_core(installed: str | None, checkout: str | None) -> Finding:
    """What pip has installed, which training uses where no checkout comes first."""
    supported = installed is not None and MEGATRON.include(installed)
    if checkout is not None and (installed is None or supported):
        return Finding("megatron-core", OK, f"{installed} is installed" if installed else "none but the checkout's own")
    if installed and supported:
        return Finding("megatron-core", OK, installed)
    text = f"{installed} is not supported: {patching.known_versions()} are" if installed else "not installed"
    if checkout is not None:
        return Finding("megatron-core", NOTE, text, f"keep the checkout first on PYTHONPATH: {checkout}")
    install = f"pip install '{MEGATRON.requirement}'"
    return Finding("megatron-core", MISSING, text, f"{install}, or name a checkout: megatron-dos doctor PATH")


def _checkout(path: str) -> Finding:
    try:
        status = patching.examine(path)
    except patching.PatchError as error:
        return Finding("checkout", MISSING, error.problem, error.way_out or "name the folder that holds megatron/")
    where = f"{status.root} (Megatron core {status.version})"
    done, all_of_them = len(status.patched), len(status.patch.files)
    patch = f"megatron-dos patch {shlex.quote(str(status.root))}"
    if done == all_of_them:
        return Finding("checkout", OK, f"{where} is patched")
    if done == 0:
        return Finding("checkout", MISSING, f"{where} is not patched", patch)
    return Finding("checkout", MISSING, f"{where} is patched in part: {done} of {all_of_them} files", patch)
