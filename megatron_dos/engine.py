"""The update of one step: what each operation of a program does, on which memory.

The engine owns the states and the staging slots. It is handed flat parameter shards and their grads; it knows
Adam and tensors, but neither Megatron nor in which order or where the operations run: that is the program's and
the device's part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_dos.device import HostDevice
from megatron_dos.kernels import AdamScalars, slab
from megatron_dos.kernels import cpu as cpu_kernel
from megatron_dos.partition import Partition, Subgroup
from megatron_dos.schedule import Op, OpKind, Program, cpu_update_program
from megatron_dos.states import BYTES_PER_PARAMETER, HostStates, require_host_memory

__all__ = ["StepInputs", "UpdateEngine", "host_bytes", "staging_bytes"]

# Two staging slots of each kind: one is filled while the other is used.
SLOTS = 2


def _slot_count(partition: Partition) -> int:
    return max(min(SLOTS, len(partition.subgroups)), 1)


def staging_bytes(partition: Partition) -> int:
    """Host memory of the staging slots: an FP32 grad and a param of at most 4 bytes for each element of a slot."""
    return _slot_count(partition) * partition.largest * 8


def host_bytes(partition: Partition) -> int:
    """All host memory that an engine for `partition` takes: states and staging."""
    return partition.numel * BYTES_PER_PARAMETER + staging_bytes(partition)


@dataclass(frozen=True)
class StepInputs:
    """What one step hands to the engine, everything indexed by parameter shard.

    Attributes:
        grads: flat device tensors, one element per owned parameter, FP32, bf16 or fp16.
        scalars: the Adam scalars of each shard's param group.
        unscale: FP32 device tensor of one element by which grads that are not FP32 are multiplied when they are
            cast, or None.
        grad_scales: shard index -> factor applied to its FP32 grad inside the update; 1.0 where absent.
    """

    grads: Sequence[torch.Tensor]
    scalars: Sequence[AdamScalars]
    unscale: torch.Tensor | None = None
    grad_scales: Mapping[int, float] = field(default_factory=dict)


class UpdateEngine:
    """Host states of the owned parameters and the machinery that updates them subgroup by subgroup.

    Args:
        partition: subgroups of this rank.
        shards: flat views into Megatron's parameter buffers, one per owner of the partition; bf16, fp16 or FP32.
        threads: worker threads of the CPU update.
        device: runs the programs.

    Raises:
        HostMemoryError: states and staging do not fit into host memory; nothing has been allocated then.
    """

    def __init__(
        self, partition: Partition, shards: Sequence[torch.Tensor], threads: int, device: Any | None = None
    ) -> None:
        self.partition = partition
        self._shards = shards
        self._threads = threads
        self._device = device or HostDevice()
        self._slot_count = _slot_count(partition)
        require_host_memory(host_bytes(partition))
        self.states = HostStates(partition.numel)
        self._host_grads = [slab.zeros(partition.largest) for _ in range(self._slot_count)]
        # Params of every dtype share one slot: the bytes are viewed as the dtype of the shard at hand.
        self._host_params = [slab.zeros(4 * partition.largest, torch.uint8) for _ in range(self._slot_count)]

    def owner_states(self, owner: int) -> dict[str, torch.Tensor]:
        """The states of one parameter shard: flat FP32 host views `master`, `exp_avg`, `exp_avg_sq`."""
        start, stop = self.partition.slab_ranges[owner]
        return {name: getattr(self.states, name)[start:stop] for name in ("master", "exp_avg", "exp_avg_sq")}

    @torch.no_grad()
    def update(self, inputs: StepInputs) -> None:
        """Update states and parameters of every subgroup by one step."""
        program = self._program(inputs.grads)
        device_slots = self._device_slots(program, inputs.grads)
        step = _Step(self, inputs, device_slots)
        self._device.run(
            program,
            {
                OpKind.CAST_GRAD: step.cast_grad,
                OpKind.GRAD_TO_HOST: step.grad_to_host,
                OpKind.UPDATE_ON_HOST: step.update_on_host,
                OpKind.PARAM_TO_DEVICE: step.param_to_device,
            },
        )

    def _program(self, grads: Sequence[torch.Tensor]) -> Program:
        casts = (
            any(grads[piece.owner].dtype != torch.float32 for piece in subgroup.pieces)
            for subgroup in self.partition.subgroups
        )
        return cpu_update_program(casts, self._slot_count)

    def _device_slots(self, program: Program, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """FP32 staging on the device, taken from the caching allocator for the step and given back after it."""
        if not program.casts:
            return []
        device = next(grad.device for grad in grads if grad.dtype != torch.float32)
        return [
            torch.empty(self.partition.largest, dtype=torch.float32, device=device) for _ in range(self._slot_count)
        ]


class _Step:
    """The handlers of one step's operations."""

    def __init__(self, engine: UpdateEngine, inputs: StepInputs, device_slots: list[torch.Tensor]) -> None:
        self._engine = engine
        self._inputs = inputs
        self._device_slots = device_slots

    def _subgroup(self, op: Op) -> Subgroup:
        return self._engine.partition.subgroups[op.subgroup]

    def _piece_grads(self, subgroup: Subgroup) -> list[torch.Tensor]:
        return [self._inputs.grads[p.owner][p.offset : p.offset + p.numel] for p in subgroup.pieces]

    def cast_grad(self, op: Op) -> None:
        """Grads in their own dtype -> FP32 on the device, unscaled where they are not FP32 already."""
        subgroup = self._subgroup(op)
        slot = self._device_slots[op.slot]
        for piece, grad in zip(subgroup.pieces, self._piece_grads(subgroup), strict=True):
            staged = slot[piece.slab - subgroup.start :][: piece.numel]
            staged.copy_(grad)
            if self._inputs.unscale is not None and grad.dtype != torch.float32:
                staged.mul_(self._inputs.unscale)

    def grad_to_host(self, op: Op) -> None:
        """FP32 grads -> host slot: in one copy when they were staged, else straight from the grad buffer."""
        subgroup = self._subgroup(op)
        target = self._engine._host_grads[op.slot]
        if ("device_grad_slot", op.slot) in op.reads:
            target[: subgroup.numel].copy_(self._device_slots[op.slot][: subgroup.numel])
            return
        for piece, grad in zip(subgroup.pieces, self._piece_grads(subgroup), strict=True):
            target[piece.slab - subgroup.start :][: piece.numel].copy_(grad)

    def update_on_host(self, op: Op) -> None:
        """Fused update of the states; the new params, in their model dtype, go to the host slot."""
        subgroup = self._subgroup(op)
        states = self._engine.states
        host_grad = self._engine._host_grads[op.slot]
        pieces = []
        for piece in subgroup.pieces:
            at = piece.slab - subgroup.start
            span = slice(piece.slab, piece.slab + piece.numel)
            pieces.append(
                (
                    states.master[span],
                    states.exp_avg[span],
                    states.exp_avg_sq[span],
                    host_grad[at : at + piece.numel],
                    self._inputs.scalars[piece.owner],
                    self._inputs.grad_scales.get(piece.owner, 1.0),
                    self._staged_param(op.slot, piece.owner, at, piece.numel),
                )
            )
        cpu_kernel.adamw_pieces(pieces, self._engine._threads)

    def param_to_device(self, op: Op) -> None:
        """Host slot -> the parameter buffer, in place."""
        subgroup = self._subgroup(op)
        for piece in subgroup.pieces:
            at = piece.slab - subgroup.start
            shard = self._engine._shards[piece.owner]
            shard[piece.offset : piece.offset + piece.numel].copy_(
                self._staged_param(op.slot, piece.owner, at, piece.numel)
            )

    def _staged_param(self, slot: int, owner: int, at: int, numel: int) -> torch.Tensor:
        """`numel` elements at element `at` of a param slot, as the shard's dtype.

        Every element has 4 bytes of the slot, so that pieces of different dtypes cannot overlap.
        """
        dtype = self._engine._shards[owner].dtype
        return self._engine._host_params[slot][4 * at : 4 * (at + numel)].view(dtype)[:numel]
