# SPDX-License-Identifier: Apache-2.0
"""The choice of shares and threads, and the reason for it in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction

from megatron_dos.planning.clock import Queues
from megatron_dos.planning.machine import Machine
from megatron_dos.planning.model import (
    Estimate,
    clock_optimum,
    clocked,
    closed_form,
    closed_form_optimum,
    optimum,
)
from megatron_dos.planning.workload import (
    FUSED_PASS,
    Memory,
    Workload,
    _share,
    _threads,
    _whole_subgroups,
    memory_fit,
    memory_needed,
    room_to_stream,
)
from megatron_dos.program.partition import BYTES_PER_PARAMETER
from megatron_dos.program.schedule import (
    Placement,
    every_kth_on_device,
)
from megatron_dos.words import gib

__all__ = ["Choice", "More", "choose"]


class More(Enum):
    """What a step may be shorter with; the values are for people."""

    CORES = "twice the CPU cores"
    LINK = "twice the link"
    HOST_MEMORY = "twice the host memory rate"
    QUARTER_RESIDENT = "a quarter of the GPU's memory for resident states"
    REST_RESIDENT = "the free part of the GPU's memory for resident states"

    @property
    def is_resident(self) -> bool:
        """Whether it is more states that stay on the GPU."""
        return self in (More.QUARTER_RESIDENT, More.REST_RESIDENT)


@dataclass(frozen=True)
class Choice:
    """The shares that the model takes, and why.

    Attributes:
        host_share, streamed_share, resident_share: parts of the parameters; they add up to 1.
        threads: CPU threads of the rank with which that holds; fewer than it has where host memory is short.
        step_seconds: what the step takes.
        lanes: seconds for which each of cpu, h2d, d2h, gpu and dram is busy.
        limiting: the busiest lane, that of the CPU only where it has all its threads.
        helps: the seconds that a step would take with more of something, the best first.
        memory: what it takes.
        reason: one line for the log.
        most_resident: the resident share that there is room for beside activations, in a quarter of the GPU's memory.
    """

    host_share: Fraction
    streamed_share: Fraction
    resident_share: Fraction
    threads: int
    step_seconds: float
    lanes: Mapping[str, float]
    limiting: str
    helps: Mapping[More, float]
    memory: Memory
    reason: str
    most_resident: Fraction


def choose(
    machine: Machine,
    work: Workload,
    *,
    free_gpu_memory: float | None = None,
    free_host_memory: float | None = None,
    activations: float = 0,
    gpu_share: Fraction | float | None = None,
    resident_share: Fraction | float | None = None,
    stride: int = 0,
) -> Choice:
    """The shares with which the step is shortest, within the memory there is.

    By the closed form, or by the virtual clock where all streams share a hardware queue.

    Args:
        machine: the node.
        work: the update of a rank.
        free_gpu_memory: bytes of each GPU that the update may take, slots and resident states together. States are made
            resident as far as it reaches, unless `resident_share` says how many. None: not known; none are resident.
        free_host_memory: bytes that are free on the node; None for all of it.
        activations: bytes of `free_gpu_memory` that activations take between steps; more states are not advised there.
        gpu_share: update this part of the parameters that are not resident on the GPU, instead of the best.
        resident_share: keep this part of the states on the GPU.
        stride: stream one subgroup in `stride`, as in the published system, instead of the best.

    Raises:
        MemoryFitError: it does not fit, whatever the shares.
        ValueError: a share lies outside 0 to 1, or `gpu_share` and `stride` are both given.
    """
    if stride and gpu_share is not None:
        raise ValueError("stride and gpu_share both say what the GPU updates: give one")
    count = len(work.subgroups)
    room = machine.gpu_memory if free_gpu_memory is None else free_gpu_memory
    if resident_share is not None:
        kept = round(count * _whole_subgroups(work, _share("resident_share", resident_share)))
    else:
        kept = 0 if free_gpu_memory is None else _room_for(work, room)
    resident = Fraction(kept, count)
    given, missing = None, 0.0
    if stride:
        given = every_kth_on_device(count - kept, stride).count(Placement.HOST) if kept < count else 0
    elif gpu_share is not None:
        given = round((count - kept) * (1 - _share("gpu_share", gpu_share)))
    elif not room_to_stream(work, resident, room):
        given = count - kept
        missing = memory_needed(work, resident, streamed=True, host_share=Fraction(0)).gpu - room

    def best(
        machine: Machine, work: Workload, resident: Fraction, of_all: Callable[..., Estimate] = optimum
    ) -> Estimate:
        on_the_clock = work.queues is not Queues.EACH  # the closed form does not know who waits for whom
        if given is None:
            return (clock_optimum if on_the_clock else of_all)(machine, work, resident)
        estimate = clocked if on_the_clock else closed_form
        return estimate(machine, work, min(Fraction(given, count), 1 - resident), resident)

    found = best(machine, work, resident)
    # With fewer threads than there are, the CPU is as slow as it should be.
    lanes = [lane for lane in found.lanes if lane != "cpu" or found.threads == _threads(machine, work)]
    limiting = max(lanes, key=found.lanes.__getitem__)
    streamed = found.streamed_share > 0
    memory = memory_fit(machine, work, resident, streamed, found.host_share, room, free_host_memory)
    quarter, left = machine.gpu_memory / 4, room - activations
    most_resident = max(Fraction(_room_for(work, min(quarter, left)), count), resident)
    more = {
        More.CORES: best(*_more_cores(machine, work), resident, closed_form_optimum),
        More.LINK: best(_faster_link(machine), work, resident, closed_form_optimum),
        More.HOST_MEMORY: best(replace(machine, dram=2 * machine.dram), work, resident, closed_form_optimum),
    }
    if most_resident > resident:
        kept_there = best(machine, work, most_resident, closed_form_optimum)
        more[More.QUARTER_RESIDENT if quarter <= left else More.REST_RESIDENT] = kept_there
    helps = {each: more[each].seconds for each in sorted(more, key=lambda each: more[each].seconds)}
    return Choice(
        found.host_share,
        found.streamed_share,
        found.resident_share,
        found.threads,
        found.seconds,
        found.lanes,
        limiting,
        helps,
        memory,
        _reason(work, found, limiting, helps, missing),
        most_resident,
    )


def _room_for(work: Workload, free: float) -> int:
    """Subgroups whose states fit into that much of the GPU's memory beside the slots of the others."""
    count, largest = len(work.subgroups), max(work.subgroups)
    if BYTES_PER_PARAMETER * work.parameters <= free:
        return count
    left = free - memory_needed(work, Fraction(0), streamed=True, host_share=Fraction(1)).gpu_slots
    return max(min(int(left // (BYTES_PER_PARAMETER * largest)), count), 0)


def _more_cores(machine: Machine, work: Workload) -> tuple[Machine, Workload]:
    """Twice the cores: they reach together what host memory allows."""
    most = max(machine.cpu_update_max, min(2 * machine.cpu_update_max, machine.dram / FUSED_PASS))
    return replace(machine, cpu_update_max=most), replace(work, threads=2 * _threads(machine, work))


def _faster_link(machine: Machine) -> Machine:
    names = ("h2d_alone", "d2h_alone", "h2d_together", "d2h_together")
    return replace(machine, **{name: 2 * getattr(machine, name) for name in names})


_LANE_NAMES = {
    "cpu": "the CPU",
    "h2d": "the link to the GPU",
    "d2h": "the link to the host",
    "gpu": "the GPU",
    "dram": "host memory",
}


def _reason(
    work: Workload, found: Estimate, limiting: str, helps: Mapping[More, float], missing_to_stream: float
) -> str:
    threads = f"{found.threads} CPU thread{'s' if found.threads > 1 else ''}"
    parts = {
        "streamed through the GPU": found.streamed_share,
        f"on {threads}": found.host_share,
        "resident on the GPU": found.resident_share,
    }
    text = (
        f"{', '.join(f'{_percent(share)} {where}' for where, share in parts.items() if share)}: "
        f"{_duration(found.seconds)} a step, {work.parameters / found.seconds / 1e9:.2f} G parameters/s a rank; "
        f"{_LANE_NAMES[limiting]} is busy {_percent(found.lanes[limiting] / found.seconds)} of it"
    )
    helper, seconds = next(iter(helps.items()))
    if seconds < 0.98 * found.seconds:
        text += f"; {helper.value} would give {_duration(seconds)}"
    if missing_to_stream:
        text += f"; nothing can be streamed: {gib(missing_to_stream)} of GPU memory are missing for its slots"
    return text


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _percent(share: Fraction | float) -> str:
    return f"{float(share):.0%}"
