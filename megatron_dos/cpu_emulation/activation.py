# SPDX-License-Identifier: Apache-2.0
"""Put the stand-in in the place of torch.cuda, for the whole process and for good."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from megatron_dos.cpu_emulation.base import REAL_CUDA, is_active, set_active
from megatron_dos.cpu_emulation.collectives import replace_coalesced_gather
from megatron_dos.cpu_emulation.cuda import build_cuda, replace_accelerator
from megatron_dos.cpu_emulation.loading import replace_data_loading
from megatron_dos.cpu_emulation.random import Generator, replace_host_random
from megatron_dos.cpu_emulation.tensors import replace_parameter_methods, replace_tensor_methods

FORCE_VARIABLE = "MEGATRON_DOS_FORCE_CPU_EMULATION"


def _real_gpu_present() -> bool:
    return REAL_CUDA.is_available()


def activate(force: bool = False) -> None:
    """Put the CPU stand-in in the place of torch.cuda in this process, for good. A second call does nothing.

    force: go on although a GPU is present (also: MEGATRON_DOS_FORCE_CPU_EMULATION=1). Raises RuntimeError otherwise.
    Call it before anything of Megatron is imported.
    """
    if is_active():
        return
    if not (force or os.environ.get(FORCE_VARIABLE) == "1") and _real_gpu_present():
        raise RuntimeError(
            "a GPU is present: megatron_dos.cpu_emulation is for machines without one. Run the script directly, or "
            f"emulate anyway with --force or {FORCE_VARIABLE}=1."
        )
    if any(name == "megatron.core" or name.startswith("megatron.core.") for name in sys.modules):
        raise RuntimeError("megatron.core was imported before megatron_dos.cpu_emulation.activate(): call it earlier")
    set_active()

    # Megatron insists on it with tensor parallelism on GPUs of this capability; it has no effect on a CPU.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    _disable_compile()
    sys.modules["torch.cuda"] = torch.cuda = build_cuda()
    torch.Generator = Generator
    replace_host_random()
    replace_accelerator()
    replace_tensor_methods()
    replace_parameter_methods()
    replace_data_loading()
    replace_coalesced_gather()


def _disable_compile() -> None:
    """Megatron compiles functions as it is imported, which would initialise CUDA; eager code gives the same results."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    # torch.optim imports it sooner or later, and it looks into the real torch.cuda as it is imported.
    dynamo = importlib.import_module("torch._dynamo")
    dynamo.config.disable = True  # where it was imported before, it has not seen the variable

    def not_compiled(model: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
        return model if model is not None else lambda function: function

    torch.compile = not_compiled
