# SPDX-License-Identifier: Apache-2.0
"""What a rank has to update, and the memory that this takes."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from megatron_dos.planning.clock import Queues
from megatron_dos.planning.machine import Machine
from megatron_dos.program.partition import BYTES_PER_PARAMETER, automatic_subgroup_size
from megatron_dos.program.schedule import DEVICE_SLOTS, HOST_SLOTS
from megatron_dos.words import gib, plural

__all__ = ["Memory", "MemoryFitError", "Shortage", "Workload", "memory_fit", "memory_needed", "room_to_stream"]


FUSED_PASS = 30
"""Bytes of host memory that a machine's CPU rates stand for: states read and written, FP32 grad, 16-bit param."""
CAST_BYTES = 6
"""Bytes of GPU memory that casting a 16-bit grad to FP32 moves."""


@dataclass(frozen=True)
class Shortage:
    """Memory that the step needs and that is not there.

    Attributes:
        where: the memory, for people.
        needed, free: bytes.
        parts: what is needed for what.
        way_out: what to do, with `{dos}` for how flags begin.
    """

    where: str
    needed: float
    free: float
    parts: str
    way_out: str

    def text(self, flags_begin: str = "--dos-") -> str:
        """The shortage and the way out; the flags of training begin with `--dos-`, those of `plan` do not."""
        return (
            f"the update needs {gib(self.needed)} on the {self.where} ({self.parts}), and {gib(self.free)} are free: "
            f"{self.way_out.format(dos=flags_begin)}"
        )


class MemoryFitError(MemoryError):
    """What the step needs does not fit into the memory of the GPU or of the node: `shortage` says what."""

    def __init__(self, shortage: Shortage) -> None:
        super().__init__(shortage.text())
        self.shortage = shortage


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The update of one rank, and of the other ranks of its node, which do the same.

    Attributes:
        parameters: parameters whose states this rank owns.
        ranks: ranks of the node that update at the same time.
        threads: CPU threads of this rank; 0 for its even share of the node's cores.
        subgroup: parameters of a subgroup; 0 for the automatic size.
        grad_bytes: bytes of a grad as it is sent to the host: 4, or 2 where it is sent in bf16 or fp16.
        param_bytes: bytes of a model param.
        casts: whether grads are cast on the GPU before they are sent.
        early_grads: whether the grads of CPU subgroups are sent during the backward pass.
        host_slots: staging slots of CPU subgroups.
        device_slots: staging slots of streamed subgroups.
        queues: the hardware queues of each GPU; the closed form knows a queue for each stream alone.
    """

    parameters: int
    ranks: int = 1
    threads: int = 0
    subgroup: int = 0
    grad_bytes: int = 4
    param_bytes: int = 2
    casts: bool = False
    early_grads: bool = False
    host_slots: int = HOST_SLOTS
    device_slots: int = DEVICE_SLOTS
    queues: Queues = Queues.EACH

    def __post_init__(self) -> None:
        for name in ("parameters", "ranks", "grad_bytes", "param_bytes", "host_slots", "device_slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: at least 1, got {getattr(self, name)}")
        for name in ("threads", "subgroup"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: at least 0, which is automatic, got {getattr(self, name)}")

    @property
    def subgroups(self) -> list[int]:
        """Parameters of each subgroup: all of one size, but for the last."""
        size = min(self.subgroup or automatic_subgroup_size(self.parameters), self.parameters)
        whole, rest = divmod(self.parameters, size)
        return [size] * whole + [rest] * bool(rest)


@dataclass(frozen=True)
class Memory:
    """Bytes that the update takes: on each GPU during the step and throughout, and on the node for all ranks."""

    gpu_slots: int
    gpu_resident: int
    host_states: int
    host_slots: int

    @property
    def gpu(self) -> int:
        return self.gpu_slots + self.gpu_resident

    @property
    def host(self) -> int:
        return self.host_states + self.host_slots


def memory_fit(
    machine: Machine,
    work: Workload,
    resident_share: Fraction | float = 0,
    streamed: bool = True,
    host_share: Fraction | float = 1,
    free_gpu_memory: float | None = None,
    free_host_memory: float | None = None,
) -> Memory:
    """The memory that the update takes.

    Args:
        machine: the node.
        work: the update of a rank.
        resident_share: part of the parameters whose states stay on the GPU.
        streamed: whether any subgroups are streamed, which takes device slots.
        host_share: part of the parameters that is updated on the CPU, which takes slots, and room for early grads.
        free_gpu_memory: bytes that the rest of the training leaves free on each GPU at the step; None for all of it.
        free_host_memory: bytes that are free on the node before the states are made; None for all of it.

    Raises:
        MemoryFitError: it does not fit; the message gives the needed and the available memory.
    """
    memory = memory_needed(work, Fraction(resident_share), streamed, Fraction(host_share))
    for shortage in (
        Shortage(
            "GPU",
            memory.gpu,
            machine.gpu_memory if free_gpu_memory is None else free_gpu_memory,
            f"{gib(memory.gpu_slots)} of slots during the step, {gib(memory.gpu_resident)} of resident states",
            "lower {dos}resident-share or {dos}subgroup-size",
        ),
        Shortage(
            f"node for {plural(work.ranks, 'rank')}",
            memory.host,
            machine.host_memory if free_host_memory is None else free_host_memory,
            f"{gib(memory.host_states)} of states, {gib(memory.host_slots)} of slots",
            "use more nodes, or keep a part of the states on the GPU ({dos}resident-share)",
        ),
    ):
        if shortage.needed > shortage.free:
            raise MemoryFitError(shortage)
    return memory


def memory_needed(work: Workload, resident: Fraction, streamed: bool, host_share: Fraction) -> Memory:
    """Memory that the update needs. `memory_fit` documents the arguments."""
    largest = max(work.subgroups)
    on_gpu = work.device_slots * BYTES_PER_PARAMETER * largest if streamed and resident < 1 else 0
    if work.casts and host_share and not work.early_grads:
        on_gpu += work.host_slots * 4 * largest
    early = work.grad_bytes * round(work.parameters * host_share) if work.early_grads else 0
    kept = round(work.parameters * resident)
    return Memory(
        gpu_slots=on_gpu,
        gpu_resident=BYTES_PER_PARAMETER * kept,
        host_states=work.ranks * BYTES_PER_PARAMETER * (work.parameters - kept),
        host_slots=work.ranks * (work.host_slots * 8 * largest + early),
    )


def room_to_stream(work: Workload, resident_share: Fraction | float, free_gpu_memory: float) -> bool:
    """Whether `free_gpu_memory` bytes of a GPU hold the slots of streamed subgroups beside the resident states."""
    resident = _whole_subgroups(work, resident_share)
    return memory_needed(work, resident, streamed=True, host_share=Fraction(0)).gpu <= free_gpu_memory


def _threads(machine: Machine, work: Workload) -> int:
    return work.threads or max(machine.cores // work.ranks, 1)


def _whole_subgroups(work: Workload, share: Fraction | float) -> Fraction:
    """The nearest share that whole subgroups make."""
    count = len(work.subgroups)
    return Fraction(round(count * share), count)


def _share(name: str, given: Fraction | float) -> Fraction:
    share = Fraction(given)
    if not 0 <= share <= 1:
        raise ValueError(f"{name}: {given} is not between 0 and 1")
    return share
