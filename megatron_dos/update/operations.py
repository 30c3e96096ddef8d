# SPDX-License-Identifier: Apache-2.0
"""What each operation of a step does: which memory it copies, which kernel it runs.

Operations are told apart by kind only; when and where they run is the device's part. Each may rely on nothing but
the resources that the schedule says it reads, and touches nothing but those that it says it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatron_dos.device.protocol import Handlers
from megatron_dos.kernels import AdamScalars
from megatron_dos.kernels import cpu as cpu_kernel
from megatron_dos.kernels.device_kernel import DeviceKernel
from megatron_dos.kernels.operands import Operands
from megatron_dos.program.partition import STATES, Piece, Subgroup
from megatron_dos.program.schedule import Op, OpKind, Placement, Program, Resource
from megatron_dos.update.joining import Runs
from megatron_dos.update.memory import UpdateMemory

__all__ = ["StepInputs", "StepOperations", "send_grads"]


@dataclass(frozen=True)
class StepInputs:
    """What one step hands to the engine, everything indexed by parameter shard.

    Attributes:
        grads: flat device tensors, one element per owned parameter, FP32, bf16 or fp16.
        scalars: the Adam scalars of each shard's param group.
        grad_scales: shard index -> two factors that the update applies to its FP32 grad, one after the other, each time
            rounded: the inverse loss scale and the clip factor. (1.0, 1.0) where absent.
        release_bucket: called with a bucket once all its params are written.
        edited: shards whose grads are no longer those that were sent early, beyond those that may change in each step.
    """

    grads: Sequence[torch.Tensor]
    scalars: Sequence[AdamScalars]
    grad_scales: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    release_bucket: Callable[[tuple[int, int]], None] = lambda bucket: None
    edited: Collection[int] = ()

    def kinds(self) -> list[int]:
        """A number for each shard, the same for shards with the same scalars and the same factors on the grad."""
        keys: list[Hashable] = list(map(id, self.scalars))
        if self.grad_scales:
            keys = [(key, *self.factors(owner)) for owner, key in enumerate(keys)]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        return [numbers[key] for key in keys]

    def factors(self, owner: int) -> tuple[float, float]:
        """The factors on the FP32 grad, in order."""
        return self.grad_scales.get(owner, (1.0, 1.0))


class StepOperations:
    """The operations of one step, bound to its inputs and to the memory of the update.

    Device staging is taken from the caching allocator here and given back when this object goes, after the step.

    Args:
        memory: the states, the staging slots and the params.
        inputs: of this step.
        program: what the operations are of.
        runs: how pieces are joined, with these inputs.
        threads: worker threads of the CPU update.
        device_kernel: the update on the device; may be missing where nothing is updated there.
        changing: shards whose grads may change after they were sent early.
    """

    def __init__(
        self,
        memory: UpdateMemory,
        inputs: StepInputs,
        program: Program,
        runs: Runs,
        *,
        threads: int,
        device_kernel: DeviceKernel | None = None,
        changing: frozenset[int] = frozenset(),
    ) -> None:
        self._memory = memory
        self._inputs = inputs
        self._runs = runs
        self._threads = threads
        self._device_kernel = device_kernel
        subgroups = memory.partition.subgroups
        device = inputs.grads[0].device if inputs.grads else torch.device("cpu")
        streamed = [s.numel for s, p in zip(subgroups, program.placements, strict=True) if p is Placement.STREAMED]
        self._states_slots = [
            torch.empty((len(STATES), _aligned(max(streamed))), dtype=torch.float32, device=device)
            for _ in range(min(program.device_slots, len(streamed)))
        ]
        self._placements = program.placements
        self._early = program.early
        self._changed = changing.union(inputs.edited)
        self._cast = {op.subgroup for op in program.ops if op.kind is OpKind.CAST_GRAD}
        largest_cast = max((subgroups[index].numel for index in self._cast), default=0)
        # CPU subgroups that need no cast pass over their slot, so the first to need one may have any.
        last_slot = max((op.slot for op in program.ops if op.kind is OpKind.CAST_GRAD), default=-1)
        self._grad_slots = [torch.empty(largest_cast, dtype=torch.float32, device=device) for _ in range(last_slot + 1)]

    def handlers(self) -> Handlers:
        """What to call for each kind of operation."""
        return {
            OpKind.EARLY_GRAD_TO_HOST: self.early_grad_to_host,
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
            "host_grad_slot": self._memory.host_grads,
            "early_grad_slot": self._memory.early_grads,
            "host_param_slot": self._memory.host_params,
        }
        return [slots[name][index]] if name in slots else []

    # --- subgroups on the CPU

    def early_grad_to_host(self, op: Op) -> None:
        """Grads -> early slot."""
        send_grads(self._subgroup(op), self._runs, self._memory.early_grads[op.slot], self._inputs.grads.__getitem__)

    def cast_grad(self, op: Op) -> None:
        """Grads in their own dtype -> FP32 in the device slot."""
        for at, piece in self._placed(op, self._runs.of_grads(op.subgroup)):
            self._grad_slots[op.slot][at : at + piece.numel].copy_(self._grad(piece), non_blocking=True)

    def grad_to_host(self, op: Op) -> None:
        """Grads -> host slot: in one copy when they were cast into a slot, else straight from the grad buffer.

        Of a subgroup whose grads were sent early: those that may have changed since -> early slot.
        """
        if op.subgroup in self._early:
            subgroup, slot = self._subgroup(op), self._memory.early_grads[op.slot]
            changed = [piece for piece in subgroup.pieces if piece.owner in self._changed]
            some = changed if len(changed) < len(subgroup.pieces) else None
            send_grads(subgroup, self._runs, slot, self._inputs.grads.__getitem__, some)
            return
        if op.subgroup in self._cast:
            numel = self._subgroup(op).numel
            source = self._grad_slots[op.slot][:numel]
            _typed(self._memory.host_grads[op.slot], 0, numel, source.dtype).copy_(source, non_blocking=True)
            return
        send_grads(self._subgroup(op), self._runs, self._memory.host_grads[op.slot], self._inputs.grads.__getitem__)

    def update_on_host(self, op: Op) -> cpu_kernel.Ticket:
        """Fused update of the host states. The new params, in their model dtype, go to the host slot; without slots
        grads are read and params written where they are."""
        states = self._memory.states
        in_place = not self._memory.host_grads
        if in_place:
            runs = self._runs.of_updates_in_place(op.subgroup)
        else:
            runs = self._runs.of_staged_updates(op.subgroup, op.subgroup in self._cast)
        pieces = []
        for at, piece in self._placed(op, runs):
            span = slice(piece.slab, piece.slab + piece.numel)
            pieces.append(
                Operands(
                    states.master[span],
                    states.exp_avg[span],
                    states.exp_avg_sq[span],
                    self._grad(piece) if in_place else self._staged_grad(op, at, piece),
                    self._inputs.scalars[piece.owner],
                    *self._inputs.factors(piece.owner),
                    self._param(piece) if in_place else self._staged_param(op, at, piece),
                )
            )
        return cpu_kernel.submit(pieces, self._threads)

    def param_to_device(self, op: Op) -> None:
        """Host slot -> the parameter buffer, in place."""
        for at, piece in self._placed(op, self._runs.of_params(op.subgroup)):
            self._param(piece).copy_(self._staged_param(op, at, piece), non_blocking=True)

    # --- subgroups on the device

    def states_to_device(self, op: Op) -> None:
        """Host states -> device slot."""
        self._copy_states(op, to_device=True)

    def update_on_device(self, op: Op) -> None:
        """Fused update in the slot, or of resident states, which reads the grad and writes the param in place."""
        if self._placements[op.subgroup] is Placement.RESIDENT:
            subgroup = self._subgroup(op)
            states = [self._memory.resident_part(name, subgroup.start, subgroup.stop) for name in STATES]
        else:
            states = list(self._states_slots[op.slot])
        assert self._device_kernel is not None, "needed where anything is updated on the device"
        for at, piece in self._placed(op, self._runs.of_updates_in_place(op.subgroup)):
            master, exp_avg, exp_avg_sq = (state[at : at + piece.numel] for state in states)
            self._device_kernel(
                master,
                exp_avg,
                exp_avg_sq,
                self._grad(piece),
                self._inputs.scalars[piece.owner],
                *self._inputs.factors(piece.owner),
                self._param(piece),
            )

    def states_to_host(self, op: Op) -> None:
        """Device slot -> host states."""
        self._copy_states(op, to_device=False)

    def _copy_states(self, op: Op, to_device: bool) -> None:
        subgroup = self._subgroup(op)
        for name, staged in zip(STATES, self._states_slots[op.slot], strict=True):
            host = getattr(self._memory.states, name)[subgroup.start : subgroup.stop]
            staged = staged[: subgroup.numel]
            source, target = (host, staged) if to_device else (staged, host)
            target.copy_(source, non_blocking=True)

    def release_bucket(self, op: Op) -> None:
        """Hand the bucket on: all its params are written."""
        self._inputs.release_bucket(self._memory.buckets[op.subgroup])

    # --- what the operations work on

    def _subgroup(self, op: Op) -> Subgroup:
        return self._memory.partition.subgroups[op.subgroup]

    def _placed(self, op: Op, pieces: Sequence[Piece]) -> Iterator[tuple[int, Piece]]:
        """Pieces of the operation's subgroup, each with the number of its first element in the subgroup."""
        start = self._subgroup(op).start
        for piece in pieces:
            yield piece.slab - start, piece

    def _grad(self, piece: Piece) -> torch.Tensor:
        return _stretch(self._inputs.grads[piece.owner], piece)

    def _param(self, piece: Piece) -> torch.Tensor:
        return _stretch(self._memory.shards[piece.owner], piece)

    def _staged_grad(self, op: Op, at: int, piece: Piece) -> torch.Tensor:
        early = self._early.get(op.subgroup)
        slot = self._memory.host_grads[op.slot] if early is None else self._memory.early_grads[early]
        if op.subgroup in self._cast:
            return _typed(slot, 4 * at, piece.numel, torch.float32)
        dtype = self._inputs.grads[piece.owner].dtype
        return _typed(slot, self._runs.grad_width(op.subgroup) * at, piece.numel, dtype)

    def _staged_param(self, op: Op, at: int, piece: Piece) -> torch.Tensor:
        slot = self._memory.host_params[op.slot]
        dtype = self._memory.shards[piece.owner].dtype
        return _typed(slot, self._runs.param_width(op.subgroup) * at, piece.numel, dtype)


def send_grads(
    subgroup: Subgroup,
    runs: Runs,
    slot: torch.Tensor,
    grad_of: Callable[[int], torch.Tensor],
    pieces: Iterable[Piece] | None = None,
) -> None:
    """Grads of a subgroup, in their own dtype -> a slot on the host.

    Args:
        runs: how pieces are joined, and how far apart elements are in the slot.
        grad_of: parameter shard -> its grad.
        pieces: only these.
    """
    width = runs.grad_width(subgroup.index)
    for piece in runs.of_grads(subgroup.index) if pieces is None else pieces:
        grad = _stretch(grad_of(piece.owner), piece)
        _typed(slot, width * (piece.slab - subgroup.start), piece.numel, grad.dtype).copy_(grad, non_blocking=True)


def _aligned(numel: int) -> int:
    """Elements of a row whose successor starts on a boundary that kernels can load several elements from at once."""
    return -(-numel // 64) * 64


def _typed(slot: torch.Tensor, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """`numel` elements of `dtype` from byte `start` of a slot of bytes."""
    return slot[start : start + dtype.itemsize * numel].view(dtype)


def _stretch(flat: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The piece's elements; those of a joined piece go on past the end of its owner's tensor."""
    return flat.as_strided((piece.numel,), (1,), flat.storage_offset() + piece.offset)
