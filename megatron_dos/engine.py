"""The update of one step: what each operation of a program does, on which memory.

The engine owns the states and the staging slots. It is handed flat parameter shards and their grads; it knows
Adam and tensors, but neither Megatron nor in which order or where the operations run: that is the program's and
the device's part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from megatron_dos.device import Device, HostDevice
from megatron_dos.kernels import slab
from megatron_dos.kernels.device_kernel import DeviceKernel
from megatron_dos.operations import StepInputs, StepOperations
from megatron_dos.partition import Partition
from megatron_dos.runs import Places, Runs
from megatron_dos.schedule import Placement, Program, SubgroupShape, build_program, every_kth_on_device, mix
from megatron_dos.states import BYTES_PER_PARAMETER, STATES, HostStates, require_host_memory

__all__ = ["EngineOptions", "UpdateEngine", "host_bytes", "staging_bytes"]

# Two staging slots for CPU subgroups: one is filled while the other is used. Three for streamed ones: one is
# fetched, one updated and one written back.
HOST_SLOTS = 2
DEVICE_SLOTS = 3


@dataclass(frozen=True)
class EngineOptions:
    """How an engine updates.

    Attributes:
        threads: worker threads of the CPU update.
        host_share: part of the elements that is updated on the CPU, 0 to 1; the rest is streamed through the device.
        stride: stream one subgroup in `stride` through the device instead; 0 for the share.
        grads_as_fp32: send grads to the CPU as FP32, cast on the device; otherwise in their own dtype, cast by the
            CPU update. The bits of the result are the same.
        last_bucket_first: update the buckets in the order in which the next forward pass needs them.
        host_slots: staging slots of CPU subgroups; fewer where there are fewer subgroups. 0: the CPU reads grads and
            writes params where they are, in host memory.
        device_slots: staging slots of streamed subgroups, taken during the step.
    """

    threads: int
    host_share: Fraction | float = 1
    stride: int = 0
    grads_as_fp32: bool = True
    last_bucket_first: bool = False
    host_slots: int = HOST_SLOTS
    device_slots: int = DEVICE_SLOTS


def _host_slots(partition: Partition, slots: int) -> int:
    return min(slots, len(partition.subgroups))


def staging_bytes(partition: Partition, host_slots: int = HOST_SLOTS) -> int:
    """Host memory of the staging slots: a grad and a param of at most 4 bytes each for each element of a slot."""
    return _host_slots(partition, host_slots) * partition.largest * 8


def host_bytes(partition: Partition, host_slots: int = HOST_SLOTS) -> int:
    """All host memory that an engine for `partition` takes: states and staging."""
    return partition.numel * BYTES_PER_PARAMETER + staging_bytes(partition, host_slots)


class UpdateEngine:
    """Host states of the owned parameters and the machinery that updates them subgroup by subgroup.

    Args:
        partition: subgroups of this rank.
        shards: flat views into Megatron's parameter buffers, one per owner of the partition; bf16, fp16 or FP32.
        options: how to update.
        device: runs the programs.
        device_kernel: the update on the device; may be missing where nothing is streamed.

    Raises:
        HostMemoryError: states and staging do not fit into host memory; nothing has been allocated then.
        ValueError: no host slots, and parameters that are not in host memory.
    """

    def __init__(
        self,
        partition: Partition,
        shards: Sequence[torch.Tensor],
        options: EngineOptions,
        device: Device | None = None,
        device_kernel: DeviceKernel | None = None,
    ) -> None:
        self.partition = partition
        self.options = options
        self.shards = shards
        self.buckets = list(dict.fromkeys(subgroup.bucket for subgroup in partition.subgroups))
        self.device_kernel = device_kernel
        self._device = device or HostDevice()
        self._in_flight = False
        if options.host_slots == 0 and any(shard.device.type != "cpu" for shard in shards):
            raise ValueError("host_slots: 0 is for parameters in host memory; give at least 1 slot")
        self._program: Program | None = None
        self._program_of: tuple[EngineOptions, tuple[bool, ...]] | None = None
        self._places = Places.of(shards)
        self._runs: Runs | None = None
        require_host_memory(host_bytes(partition, options.host_slots))
        self.states = HostStates(partition.numel)
        # 4 bytes an element, whatever the dtypes.
        slots = range(_host_slots(partition, options.host_slots))
        self.host_grads = [slab.zeros(4 * partition.largest, torch.uint8) for _ in slots]
        self.host_params = [slab.zeros(4 * partition.largest, torch.uint8) for _ in slots]

    def owner_states(self, owner: int) -> dict[str, torch.Tensor]:
        """The states of one parameter shard: flat FP32 host views `master`, `exp_avg`, `exp_avg_sq`.

        Waits for a step whose last states are still on their way to the host.
        """
        if self._in_flight:
            self._device.synchronize()
            self._in_flight = False
        start, stop = self.partition.slab_ranges[owner]
        return {
            # A storage of its own over the slab's memory: Megatron copies a tensor that is part of a larger storage
            # before it saves it, which would double the states.
            name: torch.from_numpy(getattr(self.states, name).numpy()[start:stop])
            for name in STATES
        }

    @torch.no_grad()
    def update(self, inputs: StepInputs) -> None:
        """Update states and parameters of every subgroup by one step."""
        program = self.program(inputs.grads)
        operations = StepOperations(self, inputs, program)
        self._in_flight = True
        self._device.run(program, operations.handlers(), operations.memory)

    def program(self, grads: Sequence[torch.Tensor]) -> Program:
        """The program of a step with these grads and the present options; the last step's if they are the same."""
        casts = tuple(self.options.grads_as_fp32 and grad.dtype != torch.float32 for grad in grads)
        if self._program is None or self._program_of != (self.options, casts):
            shapes = [
                SubgroupShape(subgroup.bucket, subgroup.numel, any(casts[piece.owner] for piece in subgroup.pieces))
                for subgroup in self.partition.subgroups
            ]
            self._program = build_program(
                shapes,
                self._placements(),
                host_slots=len(self.host_grads),
                device_slots=self.options.device_slots,
                last_bucket_first=self.options.last_bucket_first,
            )
            self._program_of = (self.options, casts)
        return self._program

    def runs(self, inputs: StepInputs) -> Runs:
        """How pieces are joined in a step with these inputs; the last step's if nothing has moved."""
        grads, kinds = Places.of(inputs.grads), inputs.kinds()
        if self._runs is None or (self._runs.grads, self._runs.kinds) != (grads, kinds):
            self._runs = Runs(self.partition, self._places, grads, kinds)
        return self._runs

    def _placements(self) -> Sequence[Placement]:
        subgroups, options = self.partition.subgroups, self.options
        if options.stride:
            return every_kth_on_device(len(subgroups), options.stride)
        return mix([subgroup.numel for subgroup in subgroups], options.host_share)
