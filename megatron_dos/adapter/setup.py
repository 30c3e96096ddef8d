# SPDX-License-Identifier: Apache-2.0
"""What is decided when the optimizer is built."""

from __future__ import annotations

import os
import warnings
from fractions import Fraction
from typing import Any

import torch

from megatron_dos.device import CudaDevice, Device, HostDevice
from megatron_dos.kernels import cpu as cpu_kernel
from megatron_dos.node import threads
from megatron_dos.options.options import DosOptions, UnsupportedOptionError
from megatron_dos.options.refusals import can_send_grads_early
from megatron_dos.program.partition import Partition
from megatron_dos.update.engine import EngineOptions
from megatron_dos.update.memory import host_bytes, resident_parameters, staging_bytes
from megatron_dos.words import gib, plural

__all__ = ["make_device"]


# Every subgroup costs some bookkeeping in each step; beyond this many it would be felt.
MOST_SUBGROUPS = 1 << 16
# Package and name of the classes that Megatron uses for Adam.
ADAMS = {("transformer_engine", "FusedAdam"), ("apex", "FusedAdam"), ("torch", "Adam"), ("torch", "AdamW")}


def make_device(device: torch.device) -> Device:
    """What runs the programs of parameters on `device`."""
    return CudaDevice(device) if device.type == "cuda" else HostDevice()


def _tunes(options: DosOptions, device: torch.device) -> bool:
    """Whether the share of the GPU is to be found: the user names none, and there is a GPU."""
    return device.type == "cuda" and options.dos_gpu_share < 0 and not options.dos_update_stride


def _engine_options(options: DosOptions) -> EngineOptions:
    return EngineOptions(
        threads=options.dos_cpu_threads or threads.default_threads(),
        host_share=1 - Fraction(max(options.dos_gpu_share, 0.0)),
        stride=options.dos_update_stride,
        resident_share=Fraction(options.dos_resident_share),
        grads_as_fp32=options.dos_grad_transfer == "fp32",
    )


def _sends_early(options: DosOptions, device: torch.device, config: Any, model_chunks: list[Any]) -> bool:
    if options.dos_overlap_grad_d2h != "auto":
        return options.dos_overlap_grad_d2h == "on"
    # The copies' wait for a reduction might hold up the backward pass: behind it in the one hardware queue, or in the
    # host. Counting zeros would need stand-ins of 4 bytes for each zero of FP32 grads.
    waits = [os.environ.get(name) for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "TORCH_NCCL_BLOCKING_WAIT")]
    if "1" in waits or config.log_num_zeros_in_grad:
        return False
    first = model_chunks[0]
    return device.type == "cuda" and can_send_grads_early(config, first.ddp_config, first.config)


def _announce(subgroups: Partition, options: EngineOptions, reason: str, given: DosOptions) -> None:
    """Say on the first rank of the job what the states will take, before anything is allocated."""
    asked_slots = given.dos_early_grad_slots
    if torch.distributed.get_rank() == 0:
        on_gpu = f"one subgroup in {options.stride}" if options.stride else f"{float(1 - options.host_share):.0%}"
        resident = resident_parameters(subgroups, options)
        on_device = f", GPU memory {gib(12 * resident, 3)} for {resident:,} of them" if resident else ""
        early = (
            f"; grads of {plural(options.early_slots, 'subgroup')} sent in the backward pass"
            if options.early_slots
            else ""
        )
        if asked_slots and not options.early_slots:
            early = f"; --dos-early-grad-slots {asked_slots} has no effect: no grads can be sent in the backward pass"
        print(
            f"deep optimizer states: rank 0 owns {subgroups.numel:,} parameters in "
            f"{plural(len(subgroups.subgroups), 'subgroup')} of at most {subgroups.largest:,}; host memory "
            f"{gib(host_bytes(subgroups, options), 3)}, of which staging {gib(staging_bytes(subgroups, options), 3)}"
            f"{on_device}; {on_gpu} updated on the GPU{reason}, the rest on the CPU with "
            f"{plural(options.threads, 'thread')} ({_source_of_threads(given)}){early}",
            flush=True,
        )
        near = threads.nearness(options.threads)
        print(f"{cpu_kernel.describe(options.threads)}{', ' if near else ''}{near}", flush=True)


def _source_of_threads(options: DosOptions) -> str:
    return "--dos-cpu-threads" if options.dos_cpu_threads else threads.source_of_threads()


def _complain(options: DosOptions) -> None:
    """Say on the first rank of each node what its ranks lack."""
    if threads.is_first_on_node():
        for complaint in threads.complaints(options.dos_cpu_threads):
            warnings.warn(f"deep optimizer states: {complaint}", RuntimeWarning, stacklevel=2)


def _require_adam(optimizer: torch.optim.Optimizer | None) -> None:
    """Refuse an inner optimizer whose update is not the one of these states.

    Megatron takes its Adam from Transformer Engine, Apex or torch. A class put there by somebody else, derived from
    these or not, may do anything.

    Raises:
        UnsupportedOptionError: names the class.
    """
    kind = type(optimizer)
    if optimizer is None or (kind.__module__.partition(".")[0], kind.__name__) in ADAMS:
        return
    raise UnsupportedOptionError(
        f"--use-deep-optimizer-states replaces Megatron's Adam, and the inner optimizer is a {kind.__module__}."
        f"{kind.__qualname__}, whose update may be another one. Leave megatron.core.optimizer.Adam as Megatron imports "
        "it (FusedAdam of transformer_engine or apex, or torch's AdamW), or drop --use-deep-optimizer-states"
    )
