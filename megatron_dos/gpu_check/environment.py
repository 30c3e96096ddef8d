# SPDX-License-Identifier: Apache-2.0
"""What the figures were measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import sys
from pathlib import Path
from typing import Any

import numpy
import torch

from megatron_dos.gpu_check.context import Context
from megatron_dos.gpu_check.gpu_there import nvidia_smi, why_not
from megatron_dos.node import gpu

__all__ = ["NoGpuError", "run"]

QUERIES = (
    *("driver_version", "pcie.link.gen.max", "pcie.link.width.max", "pcie.link.gen.current"),
    *("pcie.link.width.current", "clocks.max.sm", "clocks.max.memory", "power.limit", "mig.mode.current"),
)
"""What nvidia-smi is asked about the GPU."""
PACKAGES = ("triton", "megatron-core", "transformer-engine", "apex", "psutil", "pybind11", "setuptools")


class NoGpuError(RuntimeError):
    """There is nothing to check."""


def run(context: Context) -> None:
    if not context.dry:
        context.value("gpu", _gpu())
    else:
        context.value("gpu", {"name": "none: dry run"})
        context.note("Dry run without a GPU: the figures are those of a stand-in and mean nothing.")
    context.value("software", _software())
    context.value("cpu", _cpu(context))
    context.value("host_memory", _host_memory())
    context.value("numa", _numa(context))
    if getattr(sys.modules.get("psutil"), "is_stand_in", False):
        context.note("psutil is not installed: free host memory was read from /proc/meminfo.")


def _gpu() -> dict[str, Any]:
    if reason := why_not():
        raise NoGpuError(reason)
    torch.cuda.init()
    torch.zeros(1, device="cuda")  # makes the context
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    found = {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": total,
        "memory_free_bytes": free,
        "visible_gpus": torch.cuda.device_count(),
    }
    answers = nvidia_smi(QUERIES, gpu.pci_address(0))
    return {**found, **{name.replace(".", "_"): answer for name, answer in answers.items()}}


def _software() -> dict[str, Any]:
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "numpy": numpy.__version__,
        "kernel": platform.release(),
    }
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _cpu(context: Context) -> dict[str, Any]:
    from megatron_dos.kernels import cpu
    from megatron_dos.node.threads import default_threads

    fields: dict[str, str] = {}
    packages = set()
    for line in _text("/proc/cpuinfo").splitlines():
        key, _, value = (part.strip() for part in line.partition(":"))
        fields.setdefault(key, value)
        if key == "physical id":
            packages.add(value)
    return {
        "name": fields.get("model name", platform.machine()),
        "family_model": f"{fields.get('cpu family', '?')}/{fields.get('model', '?')}",
        "sockets": len(packages) or None,
        "cpus": os.cpu_count(),
        "allowed_cpus": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "update": cpu.describe(),
        "update_threads": default_threads(),
    }


def _host_memory() -> dict[str, Any]:
    from megatron_dos.node.memory import available_host_memory

    fields = dict(line.split(":", 1) for line in _text("/proc/meminfo").splitlines())
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "total_bytes": int(fields["MemTotal"].split()[0]) * 1024,
        "available_bytes": available_host_memory(),
        "memlock_limit_bytes": [None if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard)],
        "transparent_huge_pages": _text("/sys/kernel/mm/transparent_hugepage/enabled").strip(),
        "shared_huge_pages": _text("/sys/kernel/mm/transparent_hugepage/shmem_enabled").strip(),
    }


def _numa(context: Context) -> dict[str, Any]:
    from megatron_dos.node.threads import memory_node

    nodes = {
        path.parent.name: path.read_text().strip()
        for path in sorted(Path("/sys/devices/system/node").glob("node[0-9]*/cpulist"))
    }
    return {"cpus_of_nodes": nodes, "gpu_node": gpu.numa_node()[0], "slabs_prefer_node": memory_node()}


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
