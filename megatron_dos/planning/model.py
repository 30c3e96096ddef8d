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
from megatron_dos.planning.workload import (
    CAST_BYTES,
    FUSED_PASS,
    Workload,
    _threads,
    _whole_subgroups,
)
from megatron_dos.program.partition import BYTES_PER_PARAMETER
from megatron_dos.program.schedule import (
    OpKind,
    Placement,
    Program,
    SubgroupShape,
    build_program,
    mix,
)
from megatron_dos.program.timeline import Timeline

__all__ = [
    "Estimate",
    "HostPath",
    "clock_optimum",
    "clocked",
    "closed_form",
    "closed_form_optimum",
    "fused",
    "on_the_clock",
    "optimum",
    "placed",
    "program_for",
]


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
        touched=2 * BYTES_PER_PARAMETER + work.grad_bytes + work.param_bytes,
        grad=0 if work.early_grads else work.grad_bytes,
        param=work.param_bytes,
    )


def _host_rate(machine: Machine, work: Workload, path: HostPath) -> float:
    """Parameters a second that the CPU threads of one rank update, host memory permitting."""
    return machine.cpu_update(_threads(machine, work), work.ranks) * FUSED_PASS / path.touched


def on_the_clock(machine: Machine, work: Workload, program: Program, path: HostPath | None = None) -> Timeline:
    """When the operations of a program would run on the machine, all ranks of the node doing the same at once.

    Each rank has its part of the host memory's rate. Copies of one direction share the link evenly: the states of a
    subgroup are three copies of about the size of its grads, and the copies of two streams take turns, so that a small
    one waits for one of the three, not for all. `path` says what an update on the CPU costs; None is this package's.
    """
    path = path or fused(work)
    numels, states = work.subgroups, float(BYTES_PER_PARAMETER)
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
    return simulate(
        program,
        durations(numels, rates),
        sharing=Sharing.EVEN,
        memory=memory,
        together=_together(machine),
        queues=work.queues,
    )


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
    down, up = float(BYTES_PER_PARAMETER * f + path.param * c) * n, float(BYTES_PER_PARAMETER * f + path.grad * c) * n
    rate, memory = _host_rate(machine, work, path), machine.dram / work.ranks
    cpu = float(c) * n / rate
    ends = _drained(
        {"cpu": cpu, "h2d": down / machine.h2d_alone, "d2h": up / machine.d2h_alone},
        {"cpu": rate * path.touched, "h2d": machine.h2d_alone, "d2h": machine.d2h_alone},
        memory,
        _together(machine),
    )
    size = max(work.subgroups)
    fetch, write = (BYTES_PER_PARAMETER * size / link for link in (machine.h2d_alone, machine.d2h_alone))
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
        "dram": float(2 * BYTES_PER_PARAMETER * f + (path.touched + path.grad + path.param) * c) * n / memory,
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


