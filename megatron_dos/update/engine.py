# SPDX-License-Identifier: Apache-2.0
"""The engine: which program a step runs, with which operations, on the memory that the engine owns.

It is handed flat parameter shards and their grads. It knows Adam and tensors, but neither Megatron nor in which order
or where the operations run: that is the program's and the device's part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from fractions import Fraction
from itertools import islice
from typing import Any

import torch

from megatron_dos.device import Device, HostDevice
from megatron_dos.device.protocol import Handlers
from megatron_dos.kernels.device_kernel import DeviceKernel
from megatron_dos.program.partition import Partition
from megatron_dos.program.schedule import (
    Op,
    OpKind,
    Placement,
    Program,
    Stream,
    SubgroupShape,
    build_program,
    every_kth_on_device,
    mix,
)
from megatron_dos.update.engine_options import EngineOptions
from megatron_dos.update.handed_out import HandedOut, copy_into
from megatron_dos.update.joining import Places, Runs
from megatron_dos.update.memory import UpdateMemory
from megatron_dos.update.operations import StepInputs, StepOperations, send_grads

__all__ = ["EngineOptions", "UpdateEngine"]

def _unobserved(program: Program, handlers: Handlers, grads: Any) -> AbstractContextManager[Handlers]:
    return nullcontext(handlers)


class UpdateEngine:
    """Host states of the owned parameters and the machinery that updates them subgroup by subgroup.

    Args:
        partition: subgroups of this rank.
        shards: flat views into Megatron's parameter buffers, one per owner of the partition; bf16, fp16 or FP32.
        options: how to update; `use` and `set_host_share` change them between steps.
        device: runs the programs.
        device_kernel: the update on the device; may be missing where nothing is updated there.
        changing: shards whose grads may change after they were sent early.

    Attributes:
        memory: the states and staging slots, with the partition and the shards that they are of.
        changes: entered around the run of a step's program, and not left well where the step has failed in its middle:
            some subgroups are updated then, others are not.
        handed_out: the tensors of states that callers outside were given.
        observed: called with a step's program, the handlers of its operations and its grads, around the run; the
            handlers that it gives are run in their place.

    Raises:
        HostMemoryError: states and staging do not fit into host memory; nothing has been allocated then.
        DeviceMemoryError: likewise, of resident states and device memory.
        ValueError: no host slots, and parameters that are not in host memory.
    """

    def __init__(
        self,
        partition: Partition,
        shards: Sequence[torch.Tensor],
        options: EngineOptions,
        device: Device | None = None,
        device_kernel: DeviceKernel | None = None,
        changing: Collection[int] = (),
    ) -> None:
        self.memory = UpdateMemory(partition, shards, options)
        self._options = options
        self.device_kernel = device_kernel
        self.changing = frozenset(changing)
        self._device = device or HostDevice()
        self.observed: Callable[..., AbstractContextManager[Handlers]] = _unobserved
        self._in_flight = False
        self.changes: Callable[[], AbstractContextManager[None]] = nullcontext
        self.handed_out = HandedOut(self._parts)
        self._program: Program | None = None
        self._program_of: tuple[Any, ...] | None = None
        self._placed: tuple[EngineOptions, Sequence[Placement]] | None = None
        self._places = Places.of(shards)
        self._runs: Runs | None = None
        self._early_runs: Runs | None = None
        self._sent_early: dict[int, int] = {}  # subgroup -> early slot, in the order of sending

    @property
    def partition(self) -> Partition:
        """The subgroups of this rank."""
        return self.memory.partition

    @property
    def options(self) -> EngineOptions:
        """How the next step is updated."""
        return self._options

    def use(self, options: EngineOptions) -> None:
        """Update by other options from the next step on.

        Raises:
            ValueError: memory was taken at construction for another `resident_share`, or another number of slots.
        """
        for name in ("resident_share", "host_slots", "early_slots"):
            if getattr(options, name) != getattr(self._options, name):
                raise ValueError(f"{name} is fixed when the engine is made, at {getattr(self._options, name)}")
        self._options = options

    def set_host_share(self, share: Fraction | float) -> None:
        """Update another part of the elements on the CPU from the next step on, 0 to 1."""
        self.use(replace(self._options, host_share=share))

    def owner_states(self, owner: int) -> dict[str, torch.Tensor]:
        """The states of one parameter shard: flat FP32 views `master`, `exp_avg`, `exp_avg_sq`.

        Views of host memory, or of device memory where they are resident. Where they lie in both, host copies: use
        `write_owner_states` to change states. Waits for a step whose last states are still on their way to the host.
        """
        return {
            name: parts[0] if len(parts) == 1 else torch.cat([part.cpu() for part in parts])
            for name, parts in self.owner_parts(owner).items()
        }

    @torch.no_grad()
    def write_owner_states(self, owner: int, states: Mapping[str, torch.Tensor]) -> None:
        """Copy `states`, flat tensors by name, into those of one parameter shard."""
        parts_of = self.owner_parts(owner)
        for name, new in states.items():
            copy_into(parts_of[name], new)
        self.handed_out.refresh(owner)

    def owner_parts(self, owner: int) -> dict[str, list[torch.Tensor]]:
        """For each state of a parameter shard, views of its parts: in host memory, on the device, or one of each.

        Waits for a step whose last states are still on their way to the host. Whoever writes to the parts calls
        `handed_out.refresh` afterwards.
        """
        self.handed_out.settle(owner)
        return self._parts(owner)

    def _parts(self, owner: int) -> dict[str, list[torch.Tensor]]:
        if self._in_flight:
            self._device.synchronize()
            self._in_flight = False
        return self.memory.parts(owner)

    def move_resident(self, device: torch.device) -> None:
        """Move the states that reside on the device elsewhere, or back; no step may come before they are back."""
        self._device.synchronize()
        with self.handed_out.through_a_change():
            self.memory.resident.move_to(device)

    @torch.no_grad()
    def send_early(
        self,
        buckets: Collection[tuple[int, int]],
        grad_of: Callable[[int], torch.Tensor],
        ready: Callable[[], Any] = lambda: None,
    ) -> None:
        """Start sending the reduced grads of `buckets` that the CPU will need in the next step, as far as slots go.

        Args:
            buckets: those whose grads are final, but for the shards named as `changing`.
            grad_of: parameter shard -> its grad, a flat device tensor that the next step will have with the same dtype
                and values: unscaling and clipping are then left to the update.
            ready: called on the stream that sends the grads, to make it wait for them.
        """

        def send(op: Op) -> None:
            ready()
            subgroup, slot = self.partition.subgroups[op.subgroup], self.memory.early_grads[op.slot]
            send_grads(subgroup, runs, slot, grad_of)

        if self._early_runs is None:
            places = Places.of([grad_of(owner) for owner in range(len(self.memory.shards))])
            self._early_runs = Runs(self.partition, self._places, places, kinds=[0] * len(self.memory.shards))
        runs = self._early_runs
        for subgroup, slot in self._early_plan(self._placements()).items():
            if subgroup in self._sent_early or slot in self._sent_early.values():
                continue
            if self.partition.subgroups[subgroup].bucket in buckets:
                # In front of a program come its early operations, in the order in which they were sent.
                index = len(self._sent_early)
                reads, writes = frozenset({("grad", subgroup)}), frozenset({("early_grad_slot", slot)})
                op = Op(index, OpKind.EARLY_GRAD_TO_HOST, Stream.GRAD_D2H, subgroup, slot, reads, writes, ())
                self._device.begin(op, send)
                self._sent_early[subgroup] = slot

    def forget_early(self) -> None:
        """Grads that were sent early are no longer those of the next step, and their memory may be written again."""
        self._device.join()
        self._sent_early = {}

    def _early_plan(self, placements: Sequence[Placement]) -> dict[int, int]:
        """CPU subgroup -> its early slot: those whose buckets are reduced first get one."""
        on_host = (index for index, placement in enumerate(placements) if placement is Placement.HOST)
        return {subgroup: slot for slot, subgroup in enumerate(islice(on_host, len(self.memory.early_grads)))}

    @torch.no_grad()
    def update(self, inputs: StepInputs) -> None:
        """Update states and parameters of every subgroup by one step."""
        with self.handed_out.through_a_change():
            self._update(inputs)

    def _update(self, inputs: StepInputs) -> None:
        program = self.program(inputs.grads, inputs.edited)
        operations = self.operations(inputs, program)
        self._in_flight = True
        self._sent_early = {}
        with self.changes(), self.observed(program, operations.handlers(), inputs.grads) as handlers:
            self._device.run(program, handlers, operations.memory)

    def operations(self, inputs: StepInputs, program: Program) -> StepOperations:
        """The operations of a step with these inputs, and of this program or another one of this engine's partition."""
        return StepOperations(
            self.memory,
            inputs,
            program,
            self.runs(inputs),
            threads=self.options.threads,
            device_kernel=self.device_kernel,
            changing=self.changing,
        )

    def program(self, grads: Sequence[torch.Tensor], edited: Collection[int] = ()) -> Program:
        """The program of a step with these grads and the present options; the last step's if they are the same.

        Args:
            grads: by parameter shard.
            edited: see `StepInputs`.
        """
        casts = tuple(self.options.grads_as_fp32 and grad.dtype != torch.float32 for grad in grads)
        placements = self._placements()
        early = {index: slot for index, slot in self._sent_early.items() if placements[index] is Placement.HOST}
        again = self._holding(early, self.changing.union(edited))
        built_of = (self.options, casts, tuple(early.items()), again)
        if self._program is None or self._program_of != built_of:
            self._program = self._build(casts, placements, early, again)
            self._program_of = built_of
        return self._program

    def program_at(self, host_share: Fraction | float) -> Program:
        """The program of a step like the last one, but for the CPU's share. To compare with, not to be run."""
        casts = self._program_of[1] if self._program_of else (False,) * len(self.memory.shards)
        placements = self._placements_of(replace(self.options, host_share=host_share, stride=0))
        early = self._early_plan(placements) if self._program and self._program.early else {}
        return self._build(casts, placements, early, self._holding(early, self.changing))

    def _holding(self, subgroups: Iterable[int], owners: Collection[int]) -> frozenset[int]:
        """Those of the subgroups that hold a part of one of the parameter shards."""
        pieces = {index: self.partition.subgroups[index].pieces for index in subgroups}
        return frozenset(index for index, of_one in pieces.items() if any(piece.owner in owners for piece in of_one))

    def _build(
        self,
        casts: Sequence[bool],
        placements: Sequence[Placement],
        early: Mapping[int, int],
        again: Collection[int],
    ) -> Program:
        shapes = [
            SubgroupShape(
                subgroup.bucket,
                subgroup.numel,
                casts=any(casts[piece.owner] for piece in subgroup.pieces),
                changes=subgroup.index in again,
            )
            for subgroup in self.partition.subgroups
        ]
        return build_program(
            shapes,
            placements,
            host_slots=len(self.memory.host_grads),
            device_slots=self.options.device_slots,
            last_bucket_first=self.options.last_bucket_first,
            early=early,
        )

    def runs(self, inputs: StepInputs) -> Runs:
        """How pieces are joined in a step with these inputs; the last step's if nothing has moved."""
        grads, kinds = Places.of(inputs.grads), inputs.kinds()
        if self._runs is None or (self._runs.grads, self._runs.kinds) != (grads, kinds):
            self._runs = Runs(self.partition, self._places, grads, kinds)
        return self._runs

    def _placements(self) -> Sequence[Placement]:
        if self._placed is None or self._placed[0] != self.options:
            self._placed = self.options, self._placements_of(self.options)
        return self._placed[1]

    def _placements_of(self, options: EngineOptions) -> Sequence[Placement]:
        subgroups, first_resident = self.partition.subgroups, self.memory.first_resident
        if options.stride:
            placements = every_kth_on_device(first_resident, options.stride)
        else:
            placements = mix([subgroup.numel for subgroup in subgroups[:first_resident]], options.host_share)
        return (*placements, *[Placement.RESIDENT] * (len(subgroups) - first_resident))
