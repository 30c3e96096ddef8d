# SPDX-License-Identifier: Apache-2.0
"""What the CPU backend asks about GPUs: whether a real one is in use, and which NUMA node it hangs on.

`torch.cuda` may be an emulation on a machine without a GPU, so the answers come from torch's C bindings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["driver_version", "gpu_count", "in_use", "numa_node", "numa_nodes", "pci_address"]


def in_use() -> bool:
    """Whether torch is a CUDA build that sees a GPU and has initialised CUDA in this process."""
    import torch  # not above: the command line asks for drivers and names without it

    count = getattr(torch._C, "_cuda_getDeviceCount", None)
    if torch.version.cuda is None or count is None:
        return False
    return torch.cuda.is_initialized() and not torch.cuda._is_in_bad_fork() and count() > 0


def numa_node() -> tuple[int | None, str]:
    """The NUMA node of the GPU that this process uses, or None and why it is not known, '' where no GPU is in use."""
    import torch

    return _numa_node(torch._C._cuda_getDevice()) if in_use() else (None, "")


def numa_nodes(ranks: int) -> list[int | None]:
    """The NUMA node of the GPU of each local rank, if rank i uses GPU i; None where that is not known."""
    import torch

    if not in_use() or torch._C._cuda_getDeviceCount() < ranks:
        return [None] * ranks
    return [_numa_node(index)[0] for index in range(ranks)]


def _numa_node(index: int) -> tuple[int | None, str]:
    import torch

    address = pci_address(index)
    if not address:
        return None, f"torch {torch.__version__} does not report PCI addresses"
    path = Path(f"/sys/bus/pci/devices/{address}/numa_node")
    try:
        node = int(path.read_text())
    except (OSError, ValueError) as error:  # a hidden bus
        return None, f"{path} cannot be read ({error})"
    return (node, "") if node >= 0 else (None, f"{path} is {node}")


def pci_address(index: int) -> str:
    """The PCI address of a GPU; empty where torch does not report it."""
    import torch

    properties: Any = torch.cuda.get_device_properties(index)
    try:
        return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:
        return ""


def driver_version() -> str:
    """The version of the NVIDIA driver; empty where none is loaded."""
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return ""


def _gpu_names() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(index) for index in range(gpu_count())]


def gpu_count() -> int:
    """Real GPUs that this process sees, whether or not torch.cuda is emulated."""
    import torch

    return getattr(torch._C, "_cuda_getDeviceCount", lambda: 0)()
