# SPDX-License-Identifier: Apache-2.0
"""Where the subgroups of a step should be updated, from the rates of the machine: the performance model.

Of a rank's N parameters a share c is updated on the CPU, f is streamed through the GPU and r stays there:
c + f + r = 1. Bytes per parameter: b_g of a grad as the CPU reads it, s_g of a grad sent to the host during the step
(b_g, or 0 when grads are sent during the backward pass), b_p of a model param. Each lane is busy for its part of it:

    cpu     c N / U_c
    h2d     (12 f + b_p c) N / B_h2d
    d2h     (12 f + s_g c) N / B_d2h
    gpu     (f + r) N / U_g
    dram    (24 f + (24 + b_g + s_g + 2 b_p) c) N R / D     shared by the R ranks of the node

The closed form lets these lanes share host memory as operations do on the virtual clock, and adds what it takes to fill
and drain the pipeline. The virtual clock runs the program itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from megatron_dos.planning.clock import HostMemory, Rate, Sharing, durations, fair_parts, simulate
from megatron_dos.planning.machine import Machine
from megatron_dos.program.partition import automatic_subgroup_size
from megatron_dos.program.schedule import (
    OpKind,
    Placement,
    Program,
    SubgroupShape,
    build_program,
    every_kth_on_device,
    mix,
)
from megatron_dos.program.timeline import Timeline
from megatron_dos.words import gib, plural

__all__ = [
    "Choice",
    "Estimate",
    "HostPath",
    "Memory",
    "MemoryFitError",
    "Workload",
    "choose",
    "clock_optimum",
    "clocked",
    "closed_form",
    "closed_form_optimum",
    "fused",
    "memory_fit",
    "memory_needed",
    "on_the_clock",
    "optimum",
    "placed",
    "program_for",
    "room_to_stream",
]

STATE_BYTES = 12
"""Bytes of a parameter's states: master param, exp_avg and exp_avg_sq in FP32."""
FUSED_PASS = 30
"""Bytes of host memory that a machine's CPU rates stand for: states read and written, FP32 grad, 16-bit param."""
CAST_BYTES = 6
"""Bytes of GPU memory that casting a 16-bit grad to FP32 moves."""


class MemoryFitError(MemoryError):
    """What the step needs does not fit into the memory of the GPU or of the node."""


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
    """

    parameters: int
    ranks: int = 1
    threads: int = 0
    subgroup: int = 0
    grad_bytes: int = 4
    param_bytes: int = 2
    casts: bool = False
    early_grads: bool = False
    host_slots: int = 2
    device_slots: int = 3

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
class Estimate:
    """What a step takes at given shares.

    Attributes:
        host_share: part of the parameters that is updated on the CPU.
        streamed_share: part that is streamed through the GPU.
        resident_share: part whose states stay on the GPU.
        threads: CPU threads of the rank.
        seconds: what the step takes.
        lanes: seconds for which each of cpu, h2d, d2h, gpu and dram is busy.
    """

    host_share: Fraction
    streamed_share: Fraction
    resident_share: Fraction
    threads: int
    seconds: float
    lanes: Mapping[str, float]


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


@dataclass(frozen=True)
class Choice:
    """The shares that the model takes, and why.

    Attributes:
        host_share, streamed_share, resident_share: parts of the parameters; they add up to 1.
        threads: CPU threads of the rank with which that holds; fewer than it has where host memory is short.
        step_seconds: what the step takes.
        lanes: seconds for which each of cpu, h2d, d2h, gpu and dram is busy.
        limiting: the busiest lane, that of the CPU only where it has all its threads.
        helps: what a step would take with more of something: name -> seconds, the best first.
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
    helps: Mapping[str, float]
    memory: Memory
    reason: str
    most_resident: Fraction


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
        MemoryFitError: it does not fit; the message says what is needed and what is there.
    """
    memory = memory_needed(work, Fraction(resident_share), streamed, Fraction(host_share))
    for where, needed, free, parts, way_out in (
        (
            "GPU",
            memory.gpu,
            machine.gpu_memory if free_gpu_memory is None else free_gpu_memory,
            f"{gib(memory.gpu_slots)} of slots during the step, {gib(memory.gpu_resident)} of resident states",
            "lower --dos-resident-share or --dos-subgroup-size",
        ),
        (
            f"node for {plural(work.ranks, 'rank')}",
            memory.host,
            machine.host_memory if free_host_memory is None else free_host_memory,
            f"{gib(memory.host_states)} of states, {gib(memory.host_slots)} of slots",
            "use more nodes, or keep a part of the states on the GPU (--dos-resident-share)",
        ),
    ):
        if needed > free:
            raise MemoryFitError(
                f"the update needs {gib(needed)} on the {where} ({parts}), and {gib(free)} are free: {way_out}"
            )
    return memory


def memory_needed(work: Workload, resident: Fraction, streamed: bool, host_share: Fraction) -> Memory:
    """What `memory_fit` compares with what is free; its arguments are told there."""
    largest = max(work.subgroups)
    on_gpu = work.device_slots * STATE_BYTES * largest if streamed and resident < 1 else 0
    if work.casts and host_share and not work.early_grads:
        on_gpu += work.host_slots * 4 * largest
    early = work.grad_bytes * round(work.parameters * host_share) if work.early_grads else 0
    kept = round(work.parameters * resident)
    return Memory(
        gpu_slots=on_gpu,
        gpu_resident=STATE_BYTES * kept,
        host_states=work.ranks * STATE_BYTES * (work.parameters - kept),
        host_slots=work.ranks * (work.host_slots * 8 * largest + early),
    )


def room_to_stream(work: Workload, resident_share: Fraction | float, free_gpu_memory: float) -> bool:
    """Whether `free_gpu_memory` bytes of a GPU hold the slots of streamed subgroups beside the resident states."""
    resident = _whole_subgroups(work, resident_share)
    return memory_needed(work, resident, streamed=True, host_share=Fraction(0)).gpu <= free_gpu_memory


@dataclass(frozen=True, kw_only=True)
class HostPath:
    """What the update of a parameter on the CPU moves, in bytes.

    Attributes:
        touched: of host memory, in all passes that the CPU makes over its states, grad and params.
        grad: sent to the host during the step.
        param: sent back to the GPU.
        pageable: whether the params are sent from pageable memory: slower, and through a staging buffer.
        overhead: seconds of the CPU for each subgroup besides.
    """

    touched: float
    grad: float
    param: float
    pageable: bool = False
    overhead: float = 0.0


def fused(work: Workload) -> HostPath:
    """The path of this package: one pass over states and grad, which also makes the model param."""
    return HostPath(
        touched=2 * STATE_BYTES + work.grad_bytes + work.param_bytes,
        grad=0 if work.early_grads else work.grad_bytes,
        param=work.param_bytes,
    )


def _host_rate(machine: Machine, work: Workload, path: HostPath) -> float:
    """Parameters a second that the CPU threads of one rank update, host memory permitting."""
    return machine.cpu_update(_threads(machine, work), work.ranks) * FUSED_PASS / path.touched


def _threads(machine: Machine, work: Workload) -> int:
    return work.threads or max(machine.cores // work.ranks, 1)


def on_the_clock(machine: Machine, work: Workload, program: Program, path: HostPath | None = None) -> Timeline:
    """When the operations of a program would run on the machine, all ranks of the node doing the same at once.

    Each rank has its part of the host memory's rate. Copies of one direction share the link evenly: the states of a
    subgroup are three copies of about the size of its grads, and the copies of two streams take turns, so that a small
    one waits for one of the three, not for all. `path` says what an update on the CPU costs; None is this package's.
    """
    path = path or fused(work)
    numels, states = work.subgroups, float(STATE_BYTES)
    copy, gpu = machine.copy_latency, machine.gpu_update
    to_device = machine.h2d_pageable if path.pageable else machine.h2d_alone
    host = Rate(_host_rate(machine, work, path), latency=machine.cpu_latency + path.overhead)
    rates = {
        OpKind.EARLY_GRAD_TO_HOST: Rate(machine.d2h_alone, 0.0),  # done when the step begins
        OpKind.CAST_GRAD: Rate(gpu * FUSED_PASS / CAST_BYTES, latency=copy),
        OpKind.GRAD_TO_HOST: Rate(machine.d2h_alone, path.grad, copy if path.grad else 0.0),
        OpKind.UPDATE_ON_HOST: host,
        OpKind.PARAM_TO_DEVICE: Rate(to_device, path.param, copy),
        OpKind.STATES_TO_DEVICE: Rate(machine.h2d_alone, states, copy),
        OpKind.UPDATE_ON_DEVICE: Rate(gpu, latency=copy),
        OpKind.STATES_TO_HOST: Rate(machine.d2h_alone, states, copy),
    }
    moved = {
        OpKind.GRAD_TO_HOST: path.grad,
        OpKind.UPDATE_ON_HOST: path.touched,
        # Through a staging buffer it is read, written and read again.
        OpKind.PARAM_TO_DEVICE: (3 if path.pageable else 1) * path.param,
        OpKind.STATES_TO_DEVICE: states,
        OpKind.STATES_TO_HOST: states,
    }
    memory = HostMemory(
        machine.dram / work.ranks, lambda op: moved.get(op.kind, 0.0) * (numels[op.subgroup] if op.kind in moved else 0)
    )
    return simulate(program, durations(numels, rates), sharing=Sharing.EVEN, memory=memory, together=_together(machine))


def program_for(work: Workload, host_share: Fraction | float, resident_share: Fraction | float = 0) -> Program:
    """This package's program at these shares: the others evenly mixed after the resident ones.

    The GPU has nothing else to do while the first states are fetched.
    """
    numels = work.subgroups
    kept = round(len(numels) * Fraction(resident_share))
    of_rest = min(Fraction(host_share) / (1 - Fraction(resident_share)), Fraction(1)) if kept < len(numels) else 0
    placements = [*[Placement.RESIDENT] * kept, *mix(numels[kept:], of_rest)]
    return placed(tuple(placements), work.casts, work.host_slots, work.device_slots)


@lru_cache(maxsize=1024)
def placed(placements: tuple[Placement, ...], casts: bool, host_slots: int, device_slots: int) -> Program:
    """The program of subgroups of one bucket at these places. Their sizes do not matter to it."""
    shapes = [SubgroupShape((0, 0), 1, casts)] * len(placements)
    return build_program(shapes, placements, host_slots, device_slots)


def closed_form(
    machine: Machine, work: Workload, host_share: Fraction | float, resident_share: Fraction | float = 0
) -> Estimate:
    """What a step takes when `host_share` of the parameters is updated on the CPU and `resident_share` on the GPU.

    The rest is streamed.

    Raises:
        ValueError: a share is negative, or they exceed 1 together.
    """
    c, r = Fraction(host_share), Fraction(resident_share)
    f = 1 - c - r
    if min(c, f, r) < 0:
        raise ValueError(f"shares on CPU and GPU: 0 to 1 together, got {host_share}, {resident_share}")
    n, path = work.parameters, fused(work)
    down, up = float(STATE_BYTES * f + path.param * c) * n, float(STATE_BYTES * f + path.grad * c) * n
    rate, memory = _host_rate(machine, work, path), machine.dram / work.ranks
    cpu = float(c) * n / rate
    ends = _drained(
        {"cpu": cpu, "h2d": down / machine.h2d_alone, "d2h": up / machine.d2h_alone},
        {"cpu": rate * path.touched, "h2d": machine.h2d_alone, "d2h": machine.d2h_alone},
        memory,
        _together(machine),
    )
    size = max(work.subgroups)
    fetch, write = (STATE_BYTES * size / link for link in (machine.h2d_alone, machine.d2h_alone))
    params, grads = path.param / machine.h2d_alone, path.grad / machine.d2h_alone
    edge = size / machine.gpu_update + 2 * machine.copy_latency
    candidates = [ends["cpu"] + (params + grads) * size if c else 0.0]
    if f:
        candidates.append(_with_edge(ends["h2d"], write + edge, params * float(c) * n))
        candidates.append(_with_edge(ends["d2h"], fetch + edge, grads * float(c) * n))
    lanes = {
        "cpu": cpu,
        **_drained({"h2d": down / machine.h2d_alone, "d2h": up / machine.d2h_alone}, {}, math.inf, _together(machine)),
        "gpu": float(f + r) * n / machine.gpu_update,
        "dram": float(2 * STATE_BYTES * f + (path.touched + path.grad + path.param) * c) * n / memory,
    }
    return Estimate(c, f, r, _threads(machine, work), max(*candidates, *lanes.values()), lanes)


def _drained(
    work: Mapping[str, float], demand: Mapping[str, float], memory: float, together: Mapping[str, float]
) -> dict[str, float]:
    """When each lane ends if all start at once and share the memory as on the virtual clock.

    Args:
        work: lane -> seconds that it needs when it has everything to itself.
        demand: lane -> bytes of memory a second that it moves then.
        memory: bytes a second that the memory moves.
        together: lane -> the part of its rate that it keeps while all lanes named here are in use.
    """
    left = {lane: seconds for lane, seconds in work.items() if seconds}
    ends, now = dict.fromkeys(work, 0.0), 0.0
    while left:
        slowed = all(lane in left for lane in together)
        speeds = {lane: together.get(lane, 1.0) if slowed else 1.0 for lane in left}
        wanted = {lane: demand.get(lane, 0.0) * speed for lane, speed in speeds.items()}
        for lane, granted in fair_parts(wanted, memory).items():
            if granted < wanted[lane]:
                speeds[lane] *= granted / wanted[lane]
        first = min(left, key=lambda lane: left[lane] / speeds[lane])
        passed = left[first] / speeds[first]
        now += passed
        left = {lane: left[lane] - passed * speeds[lane] for lane in left if lane != first}
        left = {lane: seconds for lane, seconds in left.items() if seconds > 1e-12 * work[lane]}
        ends.update({lane: now for lane in work if lane not in left and not ends[lane] and work[lane]})
    return ends


def _with_edge(end: float, edge: float, small: float) -> float:
    """When the states' copies are through whose lane is busy until `end` and which have `edge` seconds to wait besides.

    `small` seconds of the lane's work are copies for CPU subgroups, spread evenly over the step. Those of them that
    fall into the waiting time cost nothing: of a step of T seconds, T = end + edge - small * edge / T.
    """
    total = end + edge
    return (total + math.sqrt(max(total * total - 4 * edge * small, 0.0))) / 2


def _together(machine: Machine) -> dict[str, float]:
    return {
        "h2d": machine.h2d_together / machine.h2d_alone,
        "d2h": machine.d2h_together / machine.d2h_alone,
    }


def closed_form_optimum(machine: Machine, work: Workload, resident_share: Fraction | float = 0) -> Estimate:
    """The shares and threads with which the step is shortest by the closed form."""
    resident = _whole_subgroups(work, resident_share)
    return _optimum(machine, work, resident, lambda share, threads: closed_form(machine, threads, share, resident))


def _whole_subgroups(work: Workload, share: Fraction | float) -> Fraction:
    """The nearest share that whole subgroups make."""
    count = len(work.subgroups)
    return Fraction(round(count * share), count)


def optimum(machine: Machine, work: Workload, resident_share: Fraction | float = 0) -> Estimate:
    """The closed form's optimum, unless the virtual clock says that one place for all is better.

    A single subgroup elsewhere hinders the others more than the closed form, which knows no subgroups, can tell.
    """
    resident = _whole_subgroups(work, resident_share)
    found = closed_form_optimum(machine, work, resident)
    candidates = [
        (found.host_share, found.threads),
        *((share, _threads(machine, work)) for share in (Fraction(0), 1 - resident)),
    ]

    def seconds(candidate: tuple[Fraction, int]) -> float:
        share, threads = candidate
        return clocked(machine, replace(work, threads=threads), share, resident).seconds

    share, threads = min(dict.fromkeys(candidates), key=seconds)
    return closed_form(machine, replace(work, threads=threads), share, resident)


def clock_optimum(machine: Machine, work: Workload, resident_share: Fraction | float = 0) -> Estimate:
    """The shares and threads with which the virtual clock of the program stops first."""
    resident = _whole_subgroups(work, resident_share)
    start = closed_form_optimum(machine, work, resident)
    return _optimum(machine, work, resident, lambda share, threads: clocked(machine, threads, share, resident), start)


def clocked(
    machine: Machine, work: Workload, host_share: Fraction | float, resident_share: Fraction | float = 0
) -> Estimate:
    """What `closed_form` estimates, on the virtual clock: slower to find, and exact for the program."""
    timeline = on_the_clock(machine, work, program_for(work, host_share, resident_share))
    shares = [Fraction(timeline.program.placements.count(place), len(work.subgroups)) for place in Placement]
    of = closed_form(machine, work, shares[0], shares[2])
    lanes = {lane: timeline.busy(lane) for lane in ("cpu", "h2d", "d2h", "gpu")}
    return replace(of, seconds=timeline.makespan, lanes={**lanes, "dram": of.lanes["dram"]})


def _optimum(
    machine: Machine,
    work: Workload,
    resident: Fraction,
    evaluate: Callable[[Fraction, Workload], Estimate],
    start: Estimate | None = None,
) -> Estimate:
    """The best number of CPU subgroups and threads: downhill from `start` in steps that become smaller, and both ends.

    Fewer threads than there are can be better where host memory is short: the CPU then leaves more of it to the copies,
    see [Note: host memory] in device/clock.py.
    """
    count = len(work.subgroups)
    most = count - round(count * resident)
    threads = _thread_counts(machine, work)
    known: dict[tuple[int, int], Estimate] = {}

    def at(on_host: int, threads_at: int) -> Estimate:
        if not on_host:
            threads_at = len(threads) - 1  # none is used
        if (on_host, threads_at) not in known:
            with_threads = replace(work, threads=threads[threads_at])
            known[on_host, threads_at] = evaluate(Fraction(on_host, count), with_threads)
        return known[on_host, threads_at]

    def descend(on_host: int, threads_at: int, step: int) -> None:
        while step:
            places = [place for place in (on_host - step, on_host, on_host + step) if 0 <= place <= most]
            better = min(places, key=lambda place: at(place, threads_at).seconds)
            step = step if better != on_host else step // 2
            on_host = better

    if start is None:
        for threads_at in range(len(threads)):
            descend(most // 2, threads_at, max(most // 4, 1))
    else:
        nearest = min(range(len(threads)), key=lambda place: abs(threads[place] - start.threads))
        for threads_at in {nearest, len(threads) - 1}:
            descend(round(count * start.host_share), threads_at, max(most // 8, 1))
    at(0, 0), at(most, len(threads) - 1)
    return min(known.values(), key=lambda estimate: estimate.seconds)


def _thread_counts(machine: Machine, work: Workload) -> list[int]:
    """Numbers of threads that differ in what they reach: powers of two and what the rank has, at most."""
    most = _threads(machine, work)
    enough = math.ceil(machine.cpu_update_max / work.ranks / machine.cpu_update_per_core)
    return sorted({most} | {1 << power for power in range(most.bit_length()) if 1 << power < min(most, enough)})


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
        if given is None:
            return of_all(machine, work, resident)
        return closed_form(machine, work, min(Fraction(given, count), 1 - resident), resident)

    found = best(machine, work, resident)
    # With fewer threads than there are, the CPU is as slow as it should be.
    lanes = [lane for lane in found.lanes if lane != "cpu" or found.threads == _threads(machine, work)]
    limiting = max(lanes, key=found.lanes.__getitem__)
    streamed = found.streamed_share > 0
    memory = memory_fit(machine, work, resident, streamed, found.host_share, room, free_host_memory)
    quarter, left = machine.gpu_memory / 4, room - activations
    most_resident = max(Fraction(_room_for(work, min(quarter, left)), count), resident)
    for_states = "a quarter of the GPU's memory" if quarter <= left else "what is free of the GPU's memory"
    more = {
        "twice the CPU cores": best(*_more_cores(machine, work), resident, closed_form_optimum),
        "twice the link": best(_faster_link(machine), work, resident, closed_form_optimum),
        "twice the host memory rate": best(
            replace(machine, dram=2 * machine.dram), work, resident, closed_form_optimum
        ),
    }
    if most_resident > resident:
        kept_there = best(machine, work, most_resident, closed_form_optimum)
        more[f"{for_states} for resident states"] = kept_there
    helps = {name: more[name].seconds for name in sorted(more, key=lambda name: more[name].seconds)}
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
    if STATE_BYTES * work.parameters <= free:
        return count
    left = free - memory_needed(work, Fraction(0), streamed=True, host_share=Fraction(1)).gpu_slots
    return max(min(int(left // (STATE_BYTES * largest)), count), 0)


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
    work: Workload, found: Estimate, limiting: str, helps: Mapping[str, float], missing_to_stream: float
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
        text += f"; {helper} would give {_duration(seconds)}"
    if missing_to_stream:
        text += f"; nothing can be streamed: {gib(missing_to_stream)} of GPU memory are missing for its slots"
    return text


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _percent(share: Fraction | float) -> str:
    return f"{float(share):.0%}"


def _share(name: str, given: Fraction | float) -> Fraction:
    share = Fraction(given)
    if not 0 <= share <= 1:
        raise ValueError(f"{name}: {given} is not between 0 and 1")
    return share
