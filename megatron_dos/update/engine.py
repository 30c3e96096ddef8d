# SPDX-License-Identifier: Apache-2.0
"""The update of one step: what each operation of a program does, on which memory.

The engine owns the states and the staging slots. It is handed flat parameter shards and their grads; it knows
Adam and tensors, but neither Megatron nor in which order or where the operations run: that is the program's and
the device's part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice
from typing import Any

import torch

from megatron_dos.device import Device, HostDevice
from megatron_dos.device.protocol import Handlers
from megatron_dos.kernels.device_kernel import DeviceKernel
from megatron_dos.node import slab
from megatron_dos.node.memory import host_memory_taken, require_host_memory
from megatron_dos.program.partition import BYTES_PER_PARAMETER, STATES, Partition
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
from megatron_dos.update.handed_out import HandedOut, copy_into
from megatron_dos.update.joining import Places, Runs
from megatron_dos.update.memory import HostStates, ResidentStates
from megatron_dos.update.operations import StepInputs, StepOperations, send_grads

__all__ = ["EngineOptions", "UpdateEngine", "host_bytes", "resident_parameters", "staging_bytes"]

# Two staging slots for CPU subgroups: one is filled while the other is used. Three for streamed ones: one is
# fetched, one updated and one written back.
HOST_SLOTS = 2
DEVICE_SLOTS = 3


@dataclass(frozen=True)
class EngineOptions:
    """How an engine updates.

    Attributes:
        threads: worker threads of the CPU update.
        host_share: part of the elements in host memory that is updated on the CPU, 0 to 1; the rest of them is streamed
            through the device.
        stride: stream one subgroup in `stride` through the device instead; 0 for the share.
        resident_share: part of all elements whose states stay on the device, 0 to 1. Fixed when the engine is made.
        grads_as_fp32: send grads to the CPU as FP32, cast on the device; otherwise in their own dtype, cast by the
            CPU update. The bits of the result are the same.
        last_bucket_first: update the buckets in the order in which the next forward pass needs them.
        host_slots: staging slots of CPU subgroups; fewer where there are fewer subgroups. 0: the CPU reads grads and
            writes params where they are, in host memory.
        device_slots: staging slots of streamed subgroups, taken during the step.
        early_slots: host slots for grads that are sent before the step; fewer where there are fewer subgroups.
    """

    threads: int
    host_share: Fraction | float = 1
    stride: int = 0
    resident_share: Fraction | float = 0
    grads_as_fp32: bool = True
    last_bucket_first: bool = False
    host_slots: int = HOST_SLOTS
    device_slots: int = DEVICE_SLOTS
    early_slots: int = 0


def _host_slots(partition: Partition, options: EngineOptions) -> int:
    return min(options.host_slots, len(partition.subgroups))


def _early_slots(partition: Partition, options: EngineOptions) -> int:
    return min(options.early_slots, len(partition.subgroups))


def staging_bytes(partition: Partition, options: EngineOptions) -> int:
    """Host memory of the staging slots: at most 4 bytes for each element of a grad or a param."""
    halves = 2 * _host_slots(partition, options) + _early_slots(partition, options)
    return halves * partition.largest * 4


def _first_resident(partition: Partition, share: Fraction | float) -> int:
    """The first of the subgroups that reside on the device: the last ones, as near to the share as subgroups allow.

    They are those of the last buckets, whose grads come last and whose params the next forward pass needs first.
    """
    wanted, index, placed = Fraction(share) * partition.numel, len(partition.subgroups), 0
    while index > 0 and wanted > 0 and 2 * (wanted - placed) >= partition.subgroups[index - 1].numel:
        index -= 1
        placed += partition.subgroups[index].numel
    return index


def resident_parameters(partition: Partition, options: EngineOptions) -> int:
    """Parameters whose states reside on the device."""
    return sum(subgroup.numel for subgroup in partition.subgroups[_first_resident(partition, options.resident_share) :])


def host_bytes(partition: Partition, options: EngineOptions) -> int:
    """All host memory that an engine for `partition` takes: states and staging."""
    on_host = partition.numel - resident_parameters(partition, options)
    return on_host * BYTES_PER_PARAMETER + staging_bytes(partition, options)


def _unobserved(program: Program, handlers: Handlers, grads: Any) -> AbstractContextManager[Handlers]:
    return nullcontext(handlers)


class UpdateEngine:
    """Host states of the owned parameters and the machinery that updates them subgroup by subgroup.

    Args:
        partition: subgroups of this rank.
        shards: flat views into Megatron's parameter buffers, one per owner of the partition; bf16, fp16 or FP32.
        options: how to update.
        device: runs the programs.
        device_kernel: the update on the device; may be missing where nothing is updated there.
        changing: shards whose grads may change after they were sent early.

    Attributes:
        torn: a step has failed in its middle: some subgroups are updated, others are not.
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
        self.partition = partition
        self.options = options
        self.shards = shards
        self.buckets = list(dict.fromkeys(subgroup.bucket for subgroup in partition.subgroups))
        self.device_kernel = device_kernel
        self.changing = frozenset(changing)
        self._device = device or HostDevice()
        self.observed: Callable[..., AbstractContextManager[Handlers]] = _unobserved
        self._in_flight = False
        self.torn = False
        self.handed_out = HandedOut(self._parts)
        if options.host_slots == 0 and any(shard.device.type != "cpu" for shard in shards):
            raise ValueError("host_slots: 0 is for parameters in host memory; give at least 1 slot")
        self._program: Program | None = None
        self._program_of: tuple[Any, ...] | None = None
        self._placed: tuple[EngineOptions, Sequence[Placement]] | None = None
        self._places = Places.of(shards)
        self._runs: Runs | None = None
        self._early_runs: Runs | None = None
        self._sent_early: dict[int, int] = {}  # subgroup -> early slot, in the order of sending
        require_host_memory(host_bytes(partition, options))
        # Slab positions below this are in host memory, the others on the device.
        self._first_resident = _first_resident(partition, options.resident_share)
        self.resident_from = partition.numel - resident_parameters(partition, options)
        place = shards[0].device if shards else torch.device("cpu")
        self.resident = ResidentStates(partition.numel - self.resident_from, place)
        self.states = HostStates(self.resident_from)
        # 4 bytes an element, whatever the dtypes.
        slots = range(_host_slots(partition, options))
        self.host_grads = [slab.zeros(4 * partition.largest, torch.uint8) for _ in slots]
        self.host_params = [slab.zeros(4 * partition.largest, torch.uint8) for _ in slots]
        early = range(_early_slots(partition, options))
        self.early_grads = [slab.zeros(4 * partition.largest, torch.uint8) for _ in early]
        host_memory_taken()

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
        start, stop = self.partition.slab_ranges[owner]
        border = min(max(self.resident_from, start), stop)
        result = {}
        for name in STATES:
            # A storage of its own over the slab's memory: Megatron copies a tensor that is part of a larger storage
            # before it saves it, which would double the states.
            on_host = torch.from_numpy(getattr(self.states, name).numpy()[start:border])
            on_device = self.resident_part(name, border, stop)
            result[name] = [part for part in (on_host, on_device) if len(part)] or [on_host]
        return result

    def move_resident(self, device: torch.device) -> None:
        """Move the states that reside on the device elsewhere, or back; no step may come before they are back."""
        self._device.synchronize()
        with self.handed_out.through_a_change():
            self.resident.move_to(device)

    def resident_part(self, name: str, start: int, stop: int) -> torch.Tensor:
        """View of a state on the device, by slab positions."""
        return getattr(self.resident, name)[max(start - self.resident_from, 0) : max(stop - self.resident_from, 0)]

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
            send_grads(self.partition.subgroups[op.subgroup], self._early_runs, self.early_grads[op.slot], grad_of)

        if self._early_runs is None:
            places = Places.of([grad_of(owner) for owner in range(len(self.shards))])
            self._early_runs = Runs(self.partition, self._places, places, kinds=[0] * len(self.shards))
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
        return {subgroup: slot for slot, subgroup in enumerate(islice(on_host, len(self.early_grads)))}

    @torch.no_grad()
    def update(self, inputs: StepInputs) -> None:
        """Update states and parameters of every subgroup by one step."""
        with self.handed_out.through_a_change():
            self._update(inputs)

    def _update(self, inputs: StepInputs) -> None:
        program = self.program(inputs.grads, inputs.edited)
        operations = StepOperations(self, inputs, program)
        self._in_flight = self.torn = True
        self._sent_early = {}
        with self.observed(program, operations.handlers(), inputs.grads) as handlers:
            self._device.run(program, handlers, operations.memory)
        self.torn = False

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
        casts = self._program_of[1] if self._program_of else (False,) * len(self.shards)
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
            host_slots=len(self.host_grads),
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
        subgroups = self.partition.subgroups
        if options.stride:
            placements = every_kth_on_device(self._first_resident, options.stride)
        else:
            placements = mix([subgroup.numel for subgroup in subgroups[: self._first_resident]], options.host_share)
        resident = len(subgroups) - self._first_resident
        return (*placements, *[Placement.RESIDENT] * resident)
