# SPDX-License-Identifier: Apache-2.0
"""Which kernel updates subgroups on the device: the choice behind --dos-gpu-kernel."""

from __future__ import annotations

import functools
import logging
from typing import Any, Protocol

import torch

from megatron_dos.kernels import AdamScalars, cpu, elementwise_adam, library_adam

__all__ = ["NAMES", "DeviceKernel", "select"]

NAMES = ("auto", "triton", *library_adam.LIBRARIES)
"""What --dos-gpu-kernel may be."""

_logger = logging.getLogger(__name__)


class DeviceKernel(Protocol):
    """One AdamW step in place, enqueued on the current stream, called with `Operands` in their order or by name.

    Moments are float32; params are rounded to nearest even where they are written to out.
    """

    def __call__(self, *operands: Any, **by_name: Any) -> None: ...


def select(name: str, device: torch.device, threads: int = 0) -> DeviceKernel:
    """The kernel for a device.

    Args:
        name: one of NAMES. `auto` is Triton's kernel where Triton works, else torch operations; both give the same
            bits. The libraries give their own.
        device: where the tensors will be. On host memory, as under emulation, the C++ kernel stands in for `auto` and
            `triton`, with the same bits.
        threads: of the C++ kernel; 0 means this rank's share of the allowed CPUs.

    Raises:
        ValueError: unknown name, or a library that has no kernel for host memory.
        RuntimeError: the library is not installed. Both name --dos-gpu-kernel and a remedy.
    """
    if name not in NAMES:
        raise ValueError(f"--dos-gpu-kernel {name}: must be one of {', '.join(NAMES)}")
    on_host = device.type == "cpu"
    if on_host and name in ("te", "apex"):
        raise ValueError(
            f"--dos-gpu-kernel {name}: {library_adam.LIBRARIES[name]} needs a CUDA GPU, but the parameters are in host "
            "memory. Leave --dos-gpu-kernel at auto."
        )
    if name in library_adam.LIBRARIES:
        return library_adam.load(name)
    if on_host:
        return functools.partial(cpu.adamw, threads=threads)
    return _triton() if name == "triton" else _triton_or_elementwise(device)


def _triton() -> DeviceKernel:
    try:
        from megatron_dos.kernels import triton_adam
    except ImportError as error:
        raise RuntimeError(
            f"--dos-gpu-kernel triton: Triton cannot be loaded here ({error}). Install triton, or leave "
            "--dos-gpu-kernel at auto, which does without."
        ) from error
    return triton_adam.adamw


def _triton_or_elementwise(device: torch.device) -> DeviceKernel:
    """Triton's kernel if one small update works: Triton needs a C compiler and a driver it knows, at run time."""
    try:
        kernel = _triton()
        if torch.cuda.is_available():
            _try(kernel, device)
    except Exception as error:
        _logger.warning(
            "Triton does not work here, so the update on the GPU is made of torch operations, slower with the same "
            "result: %s",
            error,
        )
        return elementwise_adam.adamw
    return kernel


def _try(kernel: DeviceKernel, device: torch.device) -> None:
    # Aligned to 16 bytes like nearly all pieces of a step, for which Triton compiles a kernel of its own.
    states = torch.zeros((3, 64), dtype=torch.float32, device=device)
    half = torch.zeros((2, 64), dtype=torch.bfloat16, device=device)
    scalars = AdamScalars.at_step(1, lr=0.0, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, decoupled=True)
    kernel(*states, half[0], scalars, out=half[1])
