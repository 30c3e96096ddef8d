# SPDX-License-Identifier: Apache-2.0
"""A GPU in software: stock torch for CUDA, on a machine without a GPU. See docs/software-gpu.md."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from software_gpu.build import build, is_possible

__all__ = ["activate", "build", "is_possible"]

_active: ctypes.CDLL | None = None


def activate(folder: Path) -> ctypes.CDLL:
    """Make torch, which must not have been imported yet, find the software GPU; the library, to set and count.

    Args:
        folder: what `build` gave.
    """
    global _active
    if "torch" in sys.modules:
        raise RuntimeError("software_gpu.activate comes before the first import of torch")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    libraries = [ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL) for path in sorted(folder.glob("libcuda*.so.*"))]
    _active = next(one for one in libraries if "cudart" in one._name)

    from software_gpu import operations

    operations.start(_active)
    operations.OnStreams().__enter__()
    _replace_sleep()
    return _active


def _replace_sleep() -> None:
    """`torch.cuda._sleep`, which is a kernel outside torch's dispatcher: cycles of 1 GHz pass on the current stream."""
    import time

    import torch

    from software_gpu.operations import enqueue

    torch.cuda._sleep = lambda cycles: enqueue(lambda: time.sleep(cycles / 1e9))
