# SPDX-License-Identifier: Apache-2.0
"""Other ways to update the same tensors, to compare with: programs of other systems, and Megatron's own optimizer."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron_dos.program.schedule import Op, Placement, Program
from megatron_dos.update.engine import UpdateEngine
from megatron_dos.update.operations import StepInputs, StepOperations

__all__ = ["HybridOptimizer", "Resident", "ResidentOperations", "UnusableError"]


class Resident:
    """States of some subgroups on the device, where they stay: 12 bytes a parameter of device memory."""

    def __init__(self, engine: UpdateEngine, program: Program, device: torch.device) -> None:
        self.states: dict[int, torch.Tensor] = {}
        for index, placement in enumerate(program.placements):
            if placement is Placement.RESIDENT:
                subgroup = engine.partition.subgroups[index]
                span = slice(subgroup.start, subgroup.stop)
                states = torch.empty((3, subgroup.numel), dtype=torch.float32, device=device)
                for row, host in zip(states, ("master", "exp_avg", "exp_avg_sq"), strict=True):
                    row.copy_(getattr(engine.memory.states, host)[span])
                self.states[index] = states


class ResidentOperations(StepOperations):
    """The operations of a program some of whose states are on the device."""

    def __init__(self, engine: UpdateEngine, inputs: StepInputs, program: Program, resident: Resident) -> None:
        placements = tuple(
            Placement.HOST if placement is Placement.RESIDENT else placement for placement in program.placements
        )
        super().__init__(
            engine.memory,
            inputs,
            replace(program, placements=placements),
            engine.runs(inputs),
            threads=engine.options.threads,
            device_kernel=engine.device_kernel,
        )
        first = len(self._states_slots)  # resident states are further slots, which nothing fetches and nothing frees
        self._slot_of = {subgroup: first + number for number, subgroup in enumerate(resident.states)}
        self._states_slots = [*self._states_slots, *resident.states.values()]

    def update_on_device(self, op: Op) -> None:
        super().update_on_device(replace(op, slot=self._slot_of.get(op.subgroup, op.slot)))


class UnusableError(RuntimeError):
    """Megatron is not there, or has no such optimizer, or another one; the message says which."""


class HybridOptimizer:
    """Megatron's HybridDeviceOptimizer on flat bf16 params and their FP32 grads, built as Megatron builds it.

    Args:
        params: flat bf16 tensors on the device.
        grads: flat FP32 tensors on the device.
        fraction: part of the params whose states are on the CPU.
        hyper_parameters: lr, weight_decay, betas, eps.

    Raises:
        UnusableError: it cannot be had here.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        fraction: float,
        hyper_parameters: dict[str, Any],
    ) -> None:
        try:
            core = importlib.import_module("megatron.core.optimizer")
        except Exception as error:  # whatever a package half installed may raise
            raise UnusableError(f"megatron-core not importable: {type(error).__name__}: {error}") from error
        try:
            optimizer, cpu_adam, gpu_adam = core.HybridDeviceOptimizer, core.CPUAdam, core.Adam
        except AttributeError as error:
            raise UnusableError(f"this Megatron is without it: {error}") from error
        self.gpu_optimizer = f"{gpu_adam.__module__}.{gpu_adam.__qualname__}"
        self._params = [torch.nn.Parameter(param) for param in params]
        for param, grad in zip(self._params, grads, strict=True):
            param.decoupled_grad = grad  # type: ignore[attr-defined]  # where the distributed optimizer puts it for this optimizer
        # Megatron's arguments with --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d, the rest at its defaults.
        try:
            self._optimizer = optimizer(
                [{"params": self._params, **hyper_parameters}],
                offload_fraction=fraction,
                cpu_optimizer_cls=cpu_adam,
                gpu_optimizer_cls=gpu_adam,
                overlap_cpu_optimizer_d2h_h2d=True,
                pin_cpu_grads=True,
                pin_cpu_params=True,
                param_update_in_fp32=True,
                bias_correction=True,
                fused=True,
                **hyper_parameters,
            )
        except RuntimeError:  # CUDA's errors and want of memory, after which the stage cannot go on
            raise
        except Exception as error:
            raise UnusableError(f"its constructor has changed: {type(error).__name__}: {error}") from error

    def step(self) -> None:
        self._optimizer.step()
