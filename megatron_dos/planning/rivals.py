# SPDX-License-Identifier: Apache-2.0
"""How other systems go through a step, on the virtual clock: what this package is compared with.

Each function takes the machine, the work of a rank and the part of the states that stays on the GPU, and returns the
timeline of one step by that system's rules. What its CPU passes move, in bytes per parameter:

    ZeRO-Offload, TwinFlow, published interleaving   44: Adam 28 (states and FP32 grad read, states written),
                                                     unscaling 8, 16-bit params 8 (4 read, 2 written, 2 to write them)
    HybridDeviceOptimizer                            28: Adam alone; FP32 grads come, FP32 params go
    SuperOffload                                     28: the same

`memory_of` returns the memory of their states, grads and slots; it knows them by their names in RIVALS.
`iteration` puts forward and backward passes before the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

from megatron_dos.planning.machine import Machine
from megatron_dos.planning.model import HostPath, clock_optimum, on_the_clock, placed, program_for
from megatron_dos.planning.rival_programs import with_blocking_params, with_serial_copies
from megatron_dos.planning.workload import Memory, Workload, memory_needed, room_to_stream
from megatron_dos.program.schedule import Placement, Program, every_kth_on_device
from megatron_dos.program.timeline import Timeline

__all__ = [
    "RIVALS",
    "Iteration",
    "Overheads",
    "device_streaming",
    "full_offload",
    "hybrid_device_optimizer",
    "iteration",
    "memory_of",
    "ours",
    "published",
    "superoffload",
]

PASSES = 44
"""Bytes of host memory that the CPU passes of DeepSpeed's ZeRO-Offload move for a parameter; see above."""
TENSOR_OVERHEAD = 38e-6
"""Seconds that one call of torch's fused AdamW for one tensor costs the host: 34 to 41 us measured on a Zen 4 core."""
TENSOR_NUMEL = 4_000_000
"""Parameters of a rank's part of an average tensor: an estimate, for HybridDeviceOptimizer's calls."""


@lru_cache(maxsize=1024)
def _changed(change: Callable[[Program], Program], *of_program: Any) -> Program:
    return change(placed(*of_program))


def _program(
    work: Workload,
    resident: Fraction | float,
    rest: Callable[[int], Sequence[Placement]],
    host_slots: int | None = None,
    casts: bool = False,
    change: Callable[[Program], Program] = lambda program: program,
) -> Program:
    """The first subgroups resident, the others as `rest` says for their number; `change` makes it wait for more."""
    count = len(work.subgroups)
    kept = round(count * resident)
    placements = (*[Placement.RESIDENT] * kept, *rest(count - kept))
    return _changed(change, placements, casts, host_slots or work.host_slots, work.device_slots)


def _on_host(count: int) -> list[Placement]:
    return [Placement.HOST] * count


def full_offload(machine: Machine, work: Workload, resident: Fraction | float = 0, pinned: bool = False) -> Timeline:
    """ZeRO-Offload, and TwinFlow where a part is resident: update a subgroup, send its params, then the next.

    The grads are on the host when the step begins. Nothing overlaps; `pinned` says that params are sent from
    page-locked memory.
    """
    path = HostPath(touched=PASSES, grad=0, param=work.param_bytes, pageable=not pinned)
    return on_the_clock(machine, work, _program(work, resident, _on_host, change=with_blocking_params), path)


def published(
    machine: Machine, work: Workload, resident: Fraction | float = 0, stride: int = 2, passes: float = PASSES
) -> Timeline:
    """The published interleaving: of the subgroups that are not resident one in `stride` on the GPU, copies by turns.

    The grads of the CPU's subgroups are on the host when the step begins. `passes` is what the CPU's passes move of
    host memory for a parameter.
    """
    program = _program(work, resident, lambda count: every_kth_on_device(count, stride), change=with_serial_copies)
    path = HostPath(touched=passes, grad=0, param=work.param_bytes)
    return on_the_clock(machine, work, program, path)


def device_streaming(machine: Machine, work: Workload, resident: Fraction | float = 0) -> Timeline:
    """All that is not resident streamed through the GPU, both directions at once."""
    return on_the_clock(machine, work, _program(work, resident, lambda count: [Placement.STREAMED] * count))


def superoffload(machine: Machine, work: Workload, resident: Fraction | float = 0) -> Timeline:
    """SuperOffload without speculation: casts on the GPU, so grads and params travel in FP32; the rest on the CPU.

    The resident part is updated meanwhile. Its updates during the backward pass, before the norm of the grads is known,
    are left out: they have to be taken back when it is too large.
    """
    path = HostPath(touched=28, grad=0 if work.early_grads else 4, param=4)
    return on_the_clock(machine, work, _program(work, resident, _on_host, casts=True), path)


def hybrid_device_optimizer(machine: Machine, work: Workload, resident: Fraction | float = 0) -> Timeline:
    """Megatron's HybridDeviceOptimizer with its copies overlapped: one fused AdamW call a tensor, FP32 both ways."""
    calls = max(work.subgroups) / TENSOR_NUMEL
    path = HostPath(touched=28, grad=4, param=4, overhead=calls * TENSOR_OVERHEAD)
    # Every parameter has buffers of its own on the host, so no copy waits for a slot.
    return on_the_clock(machine, work, _program(work, resident, _on_host, host_slots=len(work.subgroups)), path)


def ours(
    machine: Machine, work: Workload, resident: Fraction | float = 0, free_gpu_memory: float = math.inf
) -> Timeline:
    """This package at the best share of the virtual clock; nothing is streamed where its slots find no GPU memory."""
    if not room_to_stream(work, resident, free_gpu_memory):
        return on_the_clock(machine, work, program_for(work, 1 - Fraction(resident), resident))
    best = clock_optimum(machine, work, resident)
    return on_the_clock(machine, replace(work, threads=best.threads), program_for(work, best.host_share, resident))


RIVALS: Mapping[str, Callable[[Machine, Workload, Fraction], Timeline]] = {
    "full offload": full_offload,
    "full offload, page-locked params": lambda machine, work, resident: full_offload(machine, work, resident, True),
    "published, k=2": published,
    "published, k=3": lambda machine, work, resident: published(machine, work, resident, 3),
    "published, k=1": lambda machine, work, resident: published(machine, work, resident, 1),
    "GPU streaming": device_streaming,
    "SuperOffload, no speculation": superoffload,
    "HybridDeviceOptimizer": hybrid_device_optimizer,
}
"""Name -> the step of that system. With a resident part, full offload is TwinFlow's static split."""


def memory_of(name: str, work: Workload, step: Timeline) -> Memory:
    """The memory that the step of a system takes, on its GPU and on the node: a name of RIVALS, or ours.

    Streamed subgroups take slots on the GPU, casts there too. Full offload, the published interleaving and
    HybridDeviceOptimizer keep FP32 grads of all their CPU subgroups on the host, where the others have slots.
    """
    if name.startswith(("full offload", "published", "HybridDeviceOptimizer")):
        work = replace(work, early_grads=True, grad_bytes=4, casts=False)
    elif name.startswith("SuperOffload"):
        work = replace(work, grad_bytes=4, casts=True)
    places = step.program.placements
    shares = {place: Fraction(places.count(place), len(places)) for place in Placement}
    return memory_needed(
        work, shares[Placement.RESIDENT], Placement.STREAMED in places, host_share=shares[Placement.HOST]
    )


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """What an iteration of the published code takes besides the work that the machine's rates explain.

    Attributes:
        fixed: seconds of every iteration.
        blocking_grads: bytes a second of grads that are sent to the host one by one, each waited for.
        flush: seconds for each parameter of a rank by which interleaving makes the next forward pass longer.
    """

    fixed: float = 0.0
    blocking_grads: float = 4.1e9
    flush: float = 0.0


@dataclass(frozen=True)
class Iteration:
    """Seconds of the parts of an iteration."""

    forward: float
    backward: float
    step: float

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.step


def iteration(
    machine: Machine,
    work: Workload,
    step: Timeline,
    forward_flops: float,
    overheads: Overheads,
    blocking: bool = False,
    interleaved: bool = False,
) -> Iteration:
    """An iteration: forward pass, backward pass with everything recomputed, grads sent to the host, step.

    Grads of the step's CPU subgroups are sent in the backward pass. The published logs show them not hidden: the
    backward pass is longer by just what the copies take.

    Args:
        machine: the node.
        work: the update of a rank.
        step: the timeline of its step.
        forward_flops: floating-point operations of a rank's forward pass.
        overheads: what the code takes besides.
        blocking: whether each grad's copy is waited for.
        interleaved: whether the step's last copies run on into the forward pass.
    """
    placed = zip(work.subgroups, step.program.placements, strict=True)
    sent = work.grad_bytes * sum(numel for numel, place in placed if place is Placement.HOST)
    forward = forward_flops / machine.matmul + overheads.fixed
    if interleaved:
        forward += overheads.flush * work.parameters
    backward = 3 * forward_flops / machine.matmul + sent / (overheads.blocking_grads if blocking else machine.d2h_alone)
    return Iteration(forward, backward, step.makespan)
