# SPDX-License-Identifier: Apache-2.0
"""The memory of an update: the optimizer states, FP32 master params, exp_avg and exp_avg_sq, and the staging slots.

Each state is one flat slab in host memory, and each owned parameter's states are slices of the slabs. They exist
nowhere else, neither on the device nor as a second host copy. The user may have a share of them reside on the device
instead: then they are there only.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch

from megatron_dos.node import slab
from megatron_dos.node.memory import host_memory_taken, require_host_memory
from megatron_dos.program.partition import BYTES_PER_PARAMETER, STATES, Partition
from megatron_dos.refusal import Refusal
from megatron_dos.update.engine_options import EngineOptions

__all__ = [
    "DeviceMemoryError",
    "HostStates",
    "ResidentStates",
    "UpdateMemory",
    "host_bytes",
    "resident_parameters",
    "staging_bytes",
]


class DeviceMemoryError(MemoryError, Refusal):
    """The optimizer states that are to reside on the device do not fit into its free memory."""


class HostStates:
    """Flat FP32 host arrays of `numel` elements each: `master`, `exp_avg`, `exp_avg_sq`.

    All start as zeros. Without a GPU their pages take memory when they are first written; with one they are
    page-locked at once.
    """

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.master = slab.zeros(numel)
        self.exp_avg = slab.zeros(numel)
        self.exp_avg_sq = slab.zeros(numel)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self.numel * BYTES_PER_PARAMETER


class ResidentStates:
    """Flat FP32 arrays of `numel` zeros each on a device: `master`, `exp_avg`, `exp_avg_sq`.

    Raises:
        DeviceMemoryError: they do not fit; nothing has been allocated then.
    """

    def __init__(self, numel: int, device: torch.device) -> None:
        needed = numel * BYTES_PER_PARAMETER
        if device.type == "cuda" and numel:
            torch.cuda.empty_cache()  # what the caching allocator holds unused is free, but does not look so
            free = torch.cuda.mem_get_info(device)[0]
            if needed > free:
                raise DeviceMemoryError(
                    f"--dos-resident-share keeps {needed / 2**30:.2f} GiB of optimizer states on the GPU, but only "
                    f"{free / 2**30:.2f} GiB of its memory are free, before activations. Lower the share."
                )
        self.master = torch.zeros(numel, device=device)
        self.exp_avg = torch.zeros(numel, device=device)
        self.exp_avg_sq = torch.zeros(numel, device=device)

    def move_to(self, device: torch.device) -> None:
        """Move all states, one array after the other."""
        for name in STATES:
            setattr(self, name, getattr(self, name).to(device))


class UpdateMemory:
    """The states and staging slots of one engine, and the parameters that it updates.

    Args:
        partition: subgroups of this rank.
        shards: flat views into Megatron's parameter buffers, one per owner of the partition; bf16, fp16 or FP32.
        options: how large the slots are and how many, and what resides on the device.

    Attributes:
        buckets: those of the partition, in its order.
        first_resident: the first of the subgroups that reside on the device; their number if none does.
        resident_from: slab positions below this are in host memory, the others on the device.
        states, resident: the states in host memory and on the device.
        host_grads, host_params: staging slots of CPU subgroups, of bytes: 4 for each element, whatever the dtypes.
        early_grads: the same for grads that are sent before the step.

    Raises:
        HostMemoryError: states and staging do not fit into host memory; nothing has been allocated then.
        DeviceMemoryError: likewise, of resident states and device memory.
        ValueError: no host slots, and parameters that are not in host memory.
    """

    def __init__(self, partition: Partition, shards: Sequence[torch.Tensor], options: EngineOptions) -> None:
        if options.host_slots == 0 and any(shard.device.type != "cpu" for shard in shards):
            raise ValueError("host_slots: 0 is for parameters in host memory; give at least 1 slot")
        self.partition = partition
        self.shards = shards
        self.buckets = list(dict.fromkeys(subgroup.bucket for subgroup in partition.subgroups))
        require_host_memory(host_bytes(partition, options))
        self.first_resident = first_resident(partition, options.resident_share)
        self.resident_from = partition.numel - resident_parameters(partition, options)
        place = shards[0].device if shards else torch.device("cpu")
        self.resident = ResidentStates(partition.numel - self.resident_from, place)
        self.states = HostStates(self.resident_from)
        self.host_grads = self._slots(_host_slots(partition, options))
        self.host_params = self._slots(_host_slots(partition, options))
        self.early_grads = self._slots(_early_slots(partition, options))
        host_memory_taken()

    def _slots(self, count: int) -> list[torch.Tensor]:
        return [slab.zeros(STAGED_BYTES * self.partition.largest, torch.uint8) for _ in range(count)]

    def resident_part(self, name: str, start: int, stop: int) -> torch.Tensor:
        """View of a state on the device, by slab positions."""
        return getattr(self.resident, name)[max(start - self.resident_from, 0) : max(stop - self.resident_from, 0)]

    def parts(self, owner: int) -> dict[str, list[torch.Tensor]]:
        """For each state of a parameter shard, views of its parts: in host memory, on the device, or one of each."""
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


# --- Sizes -----------------------------------------------------------------------------------------------------------

STAGED_BYTES = 4
"""Of a staging slot for each element of a grad or a param: at most FP32."""


def _host_slots(partition: Partition, options: EngineOptions) -> int:
    return min(options.host_slots, len(partition.subgroups))


def _early_slots(partition: Partition, options: EngineOptions) -> int:
    return min(options.early_slots, len(partition.subgroups))


def staging_bytes(partition: Partition, options: EngineOptions) -> int:
    """Host memory of the staging slots."""
    slots = 2 * _host_slots(partition, options) + _early_slots(partition, options)
    return slots * partition.largest * STAGED_BYTES


def first_resident(partition: Partition, share: Fraction | float) -> int:
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
    return sum(subgroup.numel for subgroup in partition.subgroups[first_resident(partition, options.resident_share) :])


def host_bytes(partition: Partition, options: EngineOptions) -> int:
    """All host memory that an engine for `partition` takes: states and staging."""
    on_host = partition.numel - resident_parameters(partition, options)
    return on_host * BYTES_PER_PARAMETER + staging_bytes(partition, options)
