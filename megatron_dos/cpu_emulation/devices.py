# SPDX-License-Identifier: Apache-2.0
"""Devices of the stand-in: how many there are, which one is current, and the figures reported about it."""

from __future__ import annotations

import os
import types
from typing import Any

import torch

from megatron_dos.cpu_emulation.host_tensors import device_kind


class _State:
    device = 0


def device_count() -> int:
    """One device for each rank of this machine, as on a real node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)


def current_device() -> int:
    return _State.device


def set_device(device: Any) -> None:
    index = device_index(device)
    if not 0 <= index < device_count():
        raise RuntimeError(f"CUDA error: invalid device ordinal {index}: there are {device_count()} stand-in devices")
    _State.device = index


def device_index(device: Any) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    device = torch.device(device)
    if device_kind(device) != "device":
        raise ValueError(f"Expected a cuda device, but got: {device}")
    return current_device() if device.type == "cpu" or device.index is None else device.index


class device_context:
    """torch.cuda.device(...): the current device inside a `with`; a negative index changes nothing."""

    def __init__(self, device: Any) -> None:
        self.idx = device_index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = current_device()
        if self.idx >= 0:
            set_device(self.idx)

    def __exit__(self, *exc: object) -> None:
        set_device(self.prev_idx)


class device_of_context(device_context):
    """torch.cuda.device_of(tensor)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.get_device() if isinstance(tensor, torch.Tensor) else -1)


def host_memory() -> tuple[int, int]:
    """(available, total) bytes of this machine."""
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def device_properties(device: Any = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name=device_name(),
        major=8,
        minor=0,
        total_memory=host_memory()[1],
        multi_processor_count=os.cpu_count() or 1,
        is_integrated=1,
        warp_size=32,
    )


def device_name(device: Any = None) -> str:
    return "CPU standing in for a GPU"


def memory_stats(device: Any = None) -> dict[str, int]:
    """No GPU memory is in use, which is what the figures say. Only figures that Megatron logs are listed."""
    keys = [f"{kind}_bytes.all" for kind in ("allocated", "reserved", "active", "inactive_split", "requested")]
    keys += ["allocation.all", "segment.all", "active.all"]
    stats = {f"{key}.{part}": 0 for key in keys for part in ("current", "peak", "allocated", "freed")}
    return {**stats, "num_alloc_retries": 0, "num_ooms": 0, "num_device_alloc": 0, "num_device_free": 0}
