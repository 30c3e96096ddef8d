# SPDX-License-Identifier: Apache-2.0
"""What is decided when the optimizer is built."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_dos.adapter.buffers import owned_ranges
from megatron_dos.adapter.param_gather import is_possible
from megatron_dos.calibration.cache import cached_machine
from megatron_dos.device import CudaDevice, Device, HostDevice
from megatron_dos.kernels import cpu as cpu_kernel
from megatron_dos.kernels import device_kernel
from megatron_dos.kernels.device_kernel import DeviceKernel
from megatron_dos.node import threads
from megatron_dos.observing.tuner import FirstChoice, first_choice
from megatron_dos.options.options import AUTOMATIC_EARLY_SLOTS, DosOptions, UnsupportedOptionError
from megatron_dos.options.refusals import can_send_grads_early
from megatron_dos.planning.machine import Machine
from megatron_dos.planning.workload import Workload
from megatron_dos.program.partition import (
    BYTES_PER_PARAMETER,
    OwnedRange,
    Partition,
    automatic_subgroup_size,
    partition,
)
from megatron_dos.update.engine_options import EngineOptions
from megatron_dos.update.memory import host_bytes, resident_parameters, staging_bytes
from megatron_dos.words import gib, plural

__all__ = ["Facts", "Setup", "announce", "choose", "complain", "facts_of", "inject", "require_adam"]

# Every subgroup costs some bookkeeping in each step; beyond this many it would be felt.
MOST_SUBGROUPS = 1 << 16
# Package and name of the classes that Megatron uses for Adam.
ADAMS = {("transformer_engine", "FusedAdam"), ("apex", "FusedAdam"), ("torch", "Adam"), ("torch", "AdamW")}


@dataclass(frozen=True)
class Facts:
    """What is known when an optimizer is built, beside its options.

    Attributes:
        device: where params and grads are.
        ranges: what this rank owns of the buffers.
        grad_bytes, param_bytes: of an element of the grads and of the params in Megatron's buffers.
        make_device: what runs the programs.
        has_gpu: there is a GPU that can share the update.
        gathers_early: the all-gathers of the params can be started within the step.
        can_send_early: grads can be sent in the backward pass without harm, as far as is known.
        threads: worker threads of the CPU update, if the user names no other number.
        ranks: those of this machine, which update at the same time.
        machine: reads what `megatron-dos calibrate` has measured on this machine; None if it has not.
    """

    device: torch.device
    ranges: Sequence[OwnedRange]
    grad_bytes: int
    param_bytes: int
    make_device: Callable[[torch.device], Device]
    has_gpu: bool
    gathers_early: bool
    can_send_early: bool
    threads: int
    ranks: int
    machine: Callable[[], Machine | None]


@dataclass(frozen=True)
class Setup:
    """What is decided when an optimizer is built.

    Attributes:
        subgroups: of this rank.
        engine: how the engine updates.
        place: where params and grads are.
        device: runs the programs.
        kernel: the update on the device; None on a rank that owns nothing.
        gathers_early: the all-gathers of the params are started within the step.
        sends_early: grads are sent in the backward pass.
        finds_share: the share of the GPU is to be found by measuring.
        first: the share to begin with, and why.
    """

    subgroups: Partition
    engine: EngineOptions
    place: torch.device
    device: Device
    kernel: DeviceKernel | None
    gathers_early: bool
    sends_early: bool
    finds_share: bool
    first: FirstChoice


_injected: dict[str, Any] = {}


def inject(**facts: Any) -> None:
    """Have optimizers that are built from now on take these facts for those that would be found: a test's device, say.

    Args:
        facts: attributes of `Facts`.

    Raises:
        TypeError: there is no such fact.
    """
    if unknown := facts.keys() - {field.name for field in fields(Facts)}:
        raise TypeError(f"no facts of an optimizer: {', '.join(sorted(unknown))}")
    _injected.update(facts)


def facts_of(
    optimizer: DistributedOptimizer,
    shards: Sequence[torch.Tensor],
    owners: Mapping[torch.nn.Parameter, int],
    model_chunks: Sequence[Any],
) -> Facts:
    """What is known of Megatron's optimizer once its buffers are divided, and of this machine.

    Args:
        shards: flat views of what this rank owns.
        owners: param -> index of its shard.
        model_chunks: Megatron's DDP-wrapped chunks.
    """
    buffers = optimizer.buffers
    # A rank can have param groups and yet no buffer: a pipeline stage without experts, say.
    device = buffers[0].grad_data.device if buffers else torch.device("cpu")
    found = Facts(
        device=device,
        ranges=owned_ranges(optimizer.gbuf_ranges, owners),
        grad_bytes=buffers[0].grad_data.element_size() if buffers else 4,
        param_bytes=shards[0].element_size() if shards else 4,
        make_device=CudaDevice if device.type == "cuda" else lambda device: HostDevice(),
        has_gpu=device.type == "cuda",
        gathers_early=is_possible(optimizer.config, optimizer.ddp_config, model_chunks[0].config),
        can_send_early=device.type == "cuda" and _can_send_early(optimizer.config, model_chunks[0]),
        threads=threads.default_threads(),
        ranks=threads.ranks_on_machine(),
        machine=cached_machine,
    )
    return replace(found, **_injected)


def _can_send_early(config: Any, first: Any) -> bool:
    # The copies' wait for a reduction might hold up the backward pass: behind it in the one hardware queue, or in the
    # host. Counting zeros would need stand-ins of 4 bytes for each zero of FP32 grads.
    waits = [os.environ.get(name) for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "TORCH_NCCL_BLOCKING_WAIT")]
    if "1" in waits or config.log_num_zeros_in_grad:
        return False
    return can_send_grads_early(config, first.ddp_config, first.config)


def choose(options: DosOptions, facts: Facts) -> Setup:
    """Decide all that is decided when an optimizer is built.

    Raises:
        UnsupportedOptionError: --dos-subgroup-size cuts the parameters into too many subgroups.
        ValueError, RuntimeError: see `device_kernel.select`.
    """
    subgroups = _subgroups(options, facts)
    device = facts.make_device(facts.device)
    sends_early = not device.shares_memory and _sends_early(options, facts)
    engine = EngineOptions(
        threads=options.dos_cpu_threads or facts.threads,
        host_share=1 - Fraction(max(options.dos_gpu_share, 0.0)),
        stride=options.dos_update_stride,
        resident_share=Fraction(options.dos_resident_share),
        grads_as_fp32=options.dos_grad_transfer == "fp32",
        last_bucket_first=facts.gathers_early,
        early_slots=(options.dos_early_grad_slots or AUTOMATIC_EARLY_SLOTS) if sends_early else 0,
    )
    finds_share = facts.has_gpu and options.dos_gpu_share < 0 and not options.dos_update_stride
    first = FirstChoice(Fraction(engine.host_share))
    if finds_share and subgroups.numel:
        first = first_choice(facts.machine(), _workload(subgroups, engine, facts), Fraction(engine.resident_share))
        engine = replace(engine, host_share=first.host_share)
    if device.shares_memory:
        engine = replace(engine, host_slots=0)
    kernel = device_kernel.select(options.dos_gpu_kernel, facts.device, engine.threads) if subgroups.numel else None
    return Setup(
        subgroups=subgroups,
        engine=engine,
        place=facts.device,
        device=device,
        kernel=kernel,
        gathers_early=facts.gathers_early,
        sends_early=sends_early,
        finds_share=finds_share,
        first=first,
    )


def _subgroups(options: DosOptions, facts: Facts) -> Partition:
    owned = sum(part.numel for part in facts.ranges)
    size = options.dos_subgroup_size or automatic_subgroup_size(owned)
    if owned > size * MOST_SUBGROUPS:
        raise UnsupportedOptionError(
            f"--dos-subgroup-size {size} cuts the {owned:,} parameters that this rank owns into more than "
            f"{MOST_SUBGROUPS:,} subgroups. Give at least {-(-owned // MOST_SUBGROUPS):,}, or 0 (automatic)."
        )
    return partition(facts.ranges, size)


def _sends_early(options: DosOptions, facts: Facts) -> bool:
    if options.dos_overlap_grad_d2h == "auto":
        return facts.can_send_early
    return options.dos_overlap_grad_d2h == "on"


def _workload(subgroups: Partition, options: EngineOptions, facts: Facts) -> Workload:
    """This rank's update as the performance model sees it, which knows all grads as sent early or none: none."""
    casts = options.grads_as_fp32 and facts.grad_bytes < 4
    return Workload(
        parameters=subgroups.numel,
        ranks=facts.ranks,
        threads=options.threads,
        subgroup=subgroups.largest,
        grad_bytes=4 if casts else facts.grad_bytes,
        param_bytes=facts.param_bytes,
        casts=casts,
        host_slots=options.host_slots,
        device_slots=options.device_slots,
    )


def announce(setup: Setup, given: DosOptions) -> None:
    """Say on the first rank of the job what the states will take, before anything is allocated."""
    subgroups, options, reason = setup.subgroups, setup.engine, setup.first.reason
    asked_slots = given.dos_early_grad_slots
    if torch.distributed.get_rank() == 0:
        on_gpu = f"one subgroup in {options.stride}" if options.stride else f"{float(1 - options.host_share):.0%}"
        resident = resident_parameters(subgroups, options)
        on_gpu_memory = gib(BYTES_PER_PARAMETER * resident, 3)
        on_device = f", GPU memory {on_gpu_memory} for {resident:,} of them" if resident else ""
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


def complain(options: DosOptions) -> None:
    """Say on the first rank of each node what its ranks lack."""
    if threads.is_first_on_node():
        for complaint in threads.complaints(options.dos_cpu_threads):
            warnings.warn(f"deep optimizer states: {complaint}", RuntimeWarning, stacklevel=2)


def require_adam(optimizer: torch.optim.Optimizer | None) -> None:
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
