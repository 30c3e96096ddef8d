# SPDX-License-Identifier: Apache-2.0
"""The modules that take the place of torch.cuda and of torch.accelerator."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from megatron_dos.cpu_emulation.base import REAL_CUDA, NotCoveredError
from megatron_dos.cpu_emulation.devices import (
    current_device,
    device_context,
    device_count,
    device_index,
    device_name,
    device_of_context,
    device_properties,
    host_memory,
    memory_stats,
    set_device,
)
from megatron_dos.cpu_emulation.random import (
    DefaultGenerators,
    get_device_rng_state,
    manual_seed_device,
    seed_device,
    set_device_rng_state,
)
from megatron_dos.cpu_emulation.streams import Event, Stream, StreamContext, current_stream, default_stream, set_stream
from megatron_dos.cpu_emulation.tensors import DTYPES, TensorType


def _nothing(*args: Any, **kwargs: Any) -> None:
    """For calls whose effect a CPU has anyway: synchronize, empty_cache, nvtx marks."""


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


class _StandInModule(types.ModuleType):
    """A module that knows what it covers, and says so when asked for anything else."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system and introspection probe these
            raise AttributeError(name)
        raise NotCoveredError(f"{self.__name__}.{name}")


def _refused(name: str) -> type:
    """A class that may be named, in an annotation or isinstance(), but not made."""

    def refuse(self: object, *args: Any, **kwargs: Any) -> None:
        raise NotCoveredError(f"torch.cuda.{name}")

    return type(name, (), {"__init__": refuse})


def _module(name: str, contents: dict[str, Any]) -> types.ModuleType:
    module = _StandInModule(name, "CPU stand-in, see megatron_dos.cpu_emulation")
    module.__dict__.update(contents)
    # Lets `import torch.cuda.x` of rarely used parts reach torch's own files.
    module.__path__ = getattr(sys.modules.get(name), "__path__", [])
    return module


def build_cuda() -> types.ModuleType:
    """The module that takes the place of torch.cuda, with its submodules."""
    random = {
        "get_rng_state": get_device_rng_state,
        "get_rng_state_all": lambda: [get_device_rng_state() for _ in range(device_count())],
        "set_rng_state": set_device_rng_state,
        "set_rng_state_all": lambda states: set_device_rng_state(states[current_device()]),
        "manual_seed": manual_seed_device,
        "manual_seed_all": manual_seed_device,
        "seed": seed_device,
        "seed_all": seed_device,
        "initial_seed": lambda: torch.default_generator.initial_seed(),
    }
    memory = {
        name: _constant(0)
        for name in (
            "memory_allocated",
            "max_memory_allocated",
            "memory_reserved",
            "max_memory_reserved",
            "device_memory_used",
        )
    }
    memory |= {
        "memory_stats": memory_stats,
        "mem_get_info": lambda device=None: host_memory(),
        "empty_cache": _nothing,
        "reset_peak_memory_stats": _nothing,
        "reset_max_memory_allocated": _nothing,
        "set_per_process_memory_fraction": _nothing,
        "MemPool": _refused("MemPool"),
        "CUDAPluggableAllocator": _refused("CUDAPluggableAllocator"),
    }
    nvtx = {
        "range_push": _constant(0),
        "range_pop": _constant(0),
        "range_start": _constant(0),
        "range_end": _nothing,
        "mark": _nothing,
        "range": _constant(contextlib.nullcontext()),
    }
    devices = {
        "is_available": _constant(True),
        "is_initialized": _constant(True),
        "is_bf16_supported": _constant(True),
        "is_current_stream_capturing": _constant(False),
        "device_count": device_count,
        "current_device": current_device,
        "set_device": set_device,
        "device": device_context,
        "device_of": device_of_context,
        "get_device_properties": device_properties,
        "get_device_capability": _constant((8, 0)),
        "get_device_name": device_name,
        "synchronize": _nothing,
        "ipc_collect": _nothing,
        "init": _nothing,
        # torch itself and Megatron's random state tracker call these.
        "_lazy_init": _nothing,
        "_lazy_call": lambda call, **kwargs: call(),
        "_is_in_bad_fork": _constant(False),
        "_is_compiled": _constant(True),
        "_get_device_index": lambda device, optional=False, allow_cpu=False: device_index(device),
        "default_generators": DefaultGenerators(),
    }
    streams = {
        "Stream": Stream,
        "Event": Event,
        "stream": StreamContext,
        "StreamContext": StreamContext,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": set_stream,
        "ExternalStream": _refused("ExternalStream"),
        "CUDAGraph": _refused("CUDAGraph"),
        "graph": _refused("graph"),
    }
    submodules = {
        "random": _module("torch.cuda.random", random),
        "memory": _module("torch.cuda.memory", memory),
        "nvtx": _module("torch.cuda.nvtx", nvtx),
        "amp": REAL_CUDA.amp,  # plain Python around torch.amp, which works on a CPU
    }
    if importlib.util.find_spec("torch.cuda._pin_memory_utils"):
        # torch.distributed.checkpoint imports it; its functions ask for torch.cuda.cudart, which is refused.
        submodules["_pin_memory_utils"] = importlib.import_module("torch.cuda._pin_memory_utils")
    sys.modules.update({f"torch.cuda.{name}": module for name, module in submodules.items()})
    tensor_types = {name: TensorType(name, (), {"__module__": "torch.cuda"}) for name in DTYPES}
    errors = {"OutOfMemoryError": REAL_CUDA.OutOfMemoryError}
    return _module("torch.cuda", {**random, **memory, **devices, **streams, **submodules, **tensor_types, **errors})


def replace_accelerator() -> None:
    """torch.accelerator is torch's newer name for the same device."""
    replacements = {
        "is_available": _constant(True),
        "device_count": device_count,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": current_device,
        "current_device_idx": current_device,
        "set_device_index": set_device,
        "set_device_idx": set_device,
        "current_stream": current_stream,
        "set_stream": set_stream,
        "synchronize": _nothing,
        "empty_cache": _nothing,
    }
    module = getattr(torch, "accelerator", None)  # from torch 2.6 on
    for name, replacement in replacements.items():
        if hasattr(module, name):
            setattr(module, name, replacement)
