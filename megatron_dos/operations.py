"""What each operation of a step does: which memory it copies, which kernel it runs.

Operations are told apart by kind only; when and where they run is the device's part. Each may rely on nothing but
the resources that the schedule says it reads, and touches nothing but those that it says it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from megatron_dos.kernels import AdamScalars
from megatron_dos.kernels import cpu as cpu_kernel
from megatron_dos.partition import Piece, Subgroup
from megatron_dos.schedule import Op, OpKind, Placement, Program, Resource
from megatron_dos.states import STATES

if TYPE_CHECKING:
    from megatron_dos.engine import UpdateEngine

__all__ = ["StepInputs", "StepOperations"]


@dataclass(frozen=True)
class StepInputs:
    """What one step hands to the engine, everything indexed by parameter shard.

    Attributes:
        grads: flat device tensors, one element per owned parameter, FP32, bf16 or fp16.
        scalars: the Adam scalars of each shard's param group.
        unscale: factor on grads that are not FP32, applied to their FP32 values before the grad scale.
        grad_scales: shard index -> factor applied to its FP32 grad inside the update; 1.0 where absent.
        release_bucket: called with a bucket once all its params are written.
    """

    grads: Sequence[torch.Tensor]
    scalars: Sequence[AdamScalars]
    unscale: float = 1.0
    grad_scales: Mapping[int, float] = field(default_factory=dict)
    release_bucket: Callable[[tuple[int, int]], None] = lambda bucket: None


class StepOperations:
    """The operations of one step, bound to its inputs and to the engine's memory.

    Device staging is taken from the caching allocator here and given back when this object goes, after the step.
    """

    def __init__(self, engine: UpdateEngine, inputs: StepInputs, program: Program) -> None:
        if Placement.RESIDENT in program.placements:
            raise NotImplementedError("states that stay on the device: such a program is for the virtual clock only")
        self._engine = engine
        self._inputs = inputs
        subgroups = engine.partition.subgroups
        device = inputs.grads[0].device if inputs.grads else torch.device("cpu")
        streamed = [s.numel for s, p in zip(subgroups, program.placements, strict=True) if p is Placement.STREAMED]
        self._states_slots = [
            torch.empty((len(STATES), _aligned(max(streamed))), dtype=torch.float32, device=device)
            for _ in range(min(program.device_slots, len(streamed)))
        ]
        self._cast = {op.subgroup for op in program.ops if op.kind is OpKind.CAST_GRAD}
        largest_cast = max((subgroups[index].numel for index in self._cast), default=0)
        # CPU subgroups that need no cast pass over their slot, so the first to need one may have any.
        last_slot = max((op.slot for op in program.ops if op.kind is OpKind.CAST_GRAD), default=-1)
        self._grad_slots = [torch.empty(largest_cast, dtype=torch.float32, device=device) for _ in range(last_slot + 1)]

    def handlers(self) -> Mapping[OpKind, Callable[[Op], Any]]:
        """What to call for each kind of operation."""
        return {
            OpKind.CAST_GRAD: self.cast_grad,
            OpKind.GRAD_TO_HOST: self.grad_to_host,
            OpKind.UPDATE_ON_HOST: self.update_on_host,
            OpKind.PARAM_TO_DEVICE: self.param_to_device,
            OpKind.STATES_TO_DEVICE: self.states_to_device,
            OpKind.UPDATE_ON_DEVICE: self.update_on_device,
            OpKind.STATES_TO_HOST: self.states_to_host,
            OpKind.RELEASE_BUCKET: self.release_bucket,
        }

    def memory(self, resource: Resource) -> list[torch.Tensor]:
        """The staging memory behind a resource; empty for what is not staging. For devices that check its use."""
        name, index = resource
        slots: dict[str, Sequence[torch.Tensor]] = {
            "device_grad_slot": self._grad_slots,
            "states_slot": self._states_slots,
            "host_grad_slot": self._engine.host_grads,
            "host_param_slot": self._engine.host_params,
        }
        return [slots[name][index]] if name in slots else []

    # --- subgroups on the CPU

    def cast_grad(self, op: Op) -> None:
        """Grads in their own dtype -> FP32 in the device slot."""
        for at, piece in self._pieces(op):
            self._grad_slots[op.slot][at : at + piece.numel].copy_(self._grad(piece), non_blocking=True)

    def grad_to_host(self, op: Op) -> None:
        """Grads -> host slot: in one copy when they were cast into a slot, else straight from the grad buffer."""
        if op.subgroup in self._cast:
            numel = self._subgroup(op).numel
            source = self._grad_slots[op.slot][:numel]
            _typed(self._engine.host_grads[op.slot], 0, numel, source.dtype).copy_(source, non_blocking=True)
            return
        for at, piece in self._pieces(op):
            grad = self._grad(piece)
            _typed(self._engine.host_grads[op.slot], at, piece.numel, grad.dtype).copy_(grad, non_blocking=True)

    def update_on_host(self, op: Op) -> cpu_kernel.Ticket:
        """Fused update of the host states; the new params, in their model dtype, go to the host slot."""
        states = self._engine.states
        pieces = []
        for at, piece in self._pieces(op):
            span = slice(piece.slab, piece.slab + piece.numel)
            grad_dtype = torch.float32 if op.subgroup in self._cast else self._inputs.grads[piece.owner].dtype
            pieces.append(
                (
                    states.master[span],
                    states.exp_avg[span],
                    states.exp_avg_sq[span],
                    _typed(self._engine.host_grads[op.slot], at, piece.numel, grad_dtype),
                    self._inputs.scalars[piece.owner],
                    *self._scales(piece),
                    self._staged_param(op, at, piece),
                )
            )
        return cpu_kernel.submit(pieces, self._engine.options.threads)

    def param_to_device(self, op: Op) -> None:
        """Host slot -> the parameter buffer, in place."""
        for at, piece in self._pieces(op):
            self._param(piece).copy_(self._staged_param(op, at, piece), non_blocking=True)

    # --- subgroups streamed through the device

    def states_to_device(self, op: Op) -> None:
        """Host states -> device slot."""
        self._copy_states(op, to_device=True)

    def update_on_device(self, op: Op) -> None:
        """Fused update in the slot, which reads the grad and writes the param in place."""
        slot = self._states_slots[op.slot]
        for at, piece in self._pieces(op):
            master, exp_avg, exp_avg_sq = (state[at : at + piece.numel] for state in slot)
            self._engine.device_kernel(
                master,
                exp_avg,
                exp_avg_sq,
                self._grad(piece),
                self._inputs.scalars[piece.owner],
                *self._scales(piece),
                self._param(piece),
            )

    def states_to_host(self, op: Op) -> None:
        """Device slot -> host states."""
        self._copy_states(op, to_device=False)

    def _copy_states(self, op: Op, to_device: bool) -> None:
        subgroup = self._subgroup(op)
        for name, staged in zip(STATES, self._states_slots[op.slot], strict=True):
            host = getattr(self._engine.states, name)[subgroup.start : subgroup.stop]
            staged = staged[: subgroup.numel]
            source, target = (host, staged) if to_device else (staged, host)
            target.copy_(source, non_blocking=True)

    def release_bucket(self, op: Op) -> None:
        """Hand the bucket on: all its params are written."""
        self._inputs.release_bucket(self._engine.buckets[op.subgroup])

    # --- what the operations work on

    def _subgroup(self, op: Op) -> Subgroup:
        return self._engine.partition.subgroups[op.subgroup]

    def _pieces(self, op: Op) -> Iterator[tuple[int, Piece]]:
        """The pieces of the operation's subgroup, each with its first element in the slot."""
        subgroup = self._subgroup(op)
        for piece in subgroup.pieces:
            yield piece.slab - subgroup.start, piece

    def _grad(self, piece: Piece) -> torch.Tensor:
        return self._inputs.grads[piece.owner][piece.offset : piece.offset + piece.numel]

    def _param(self, piece: Piece) -> torch.Tensor:
        return self._engine.shards[piece.owner][piece.offset : piece.offset + piece.numel]

    def _staged_param(self, op: Op, at: int, piece: Piece) -> torch.Tensor:
        return _typed(self._engine.host_params[op.slot], at, piece.numel, self._engine.shards[piece.owner].dtype)

    def _scales(self, piece: Piece) -> tuple[float, float]:
        """The factors on the FP32 grad, in order: FP32 grads have been unscaled in place by Megatron."""
        is_fp32 = self._inputs.grads[piece.owner].dtype == torch.float32
        return (1.0 if is_fp32 else self._inputs.unscale), self._inputs.grad_scales.get(piece.owner, 1.0)


def _aligned(numel: int) -> int:
    """Elements of a row whose successor starts on a boundary that kernels can load several elements from at once."""
    return -(-numel // 64) * 64


def _typed(slot: torch.Tensor, at: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """`numel` elements of `dtype` at element `at` of a slot of bytes. An element has 4 bytes of the slot."""
    return slot[4 * at : 4 * (at + numel)].view(dtype)[:numel]
