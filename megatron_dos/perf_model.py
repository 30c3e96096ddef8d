"""Where the subgroups of a step should be updated, from the rates of the machine: the performance model.

Of a rank's N parameters a share c is updated on the CPU, f is streamed through the GPU and r stays there:
c + f + r = 1. Each lane is busy for its part of the work; bytes per parameter, b_g of a grad that is sent to the host, b_p
of a model param:

    cpu     c N / U_c
    h2d     (12 f + b_p c) N / B_h2d
    d2h     (12 f + b_g c) N / B_d2h          b_g is 0 when grads are sent during the backward pass
    gpu     (f + r) N / U_g + casts
    dram    (24 f + (24 + 2 b_g + 2 b_p) c) N R / D     shared by the R ranks of the node

and the step takes as long as the busiest of them, plus what it takes to fill and drain the pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from megatron_dos.machine import Machine
from megatron_dos.partition import automatic_subgroup_size
from megatron_dos.schedule import Placement, every_kth_on_device

__all__ = [
    "Choice",
    "Estimate",
    "Memory",
    "MemoryFitError",
    "Workload",
    "choose",
    "closed_form",
    "memory_fit",
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
        seconds: what the step takes.
        lanes: seconds for which each of cpu, h2d, d2h, gpu and dram is busy.
    """

    host_share: Fraction
    streamed_share: Fraction
    resident_share: Fraction
    seconds: float
    lanes: Mapping[str, float]

    @property
    def limiting(self) -> str:
        """The busiest lane."""
        return max(self.lanes, key=self.lanes.__getitem__)


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
        step_seconds: what the step takes.
        lanes: seconds for which each lane is busy.
        limiting: the busiest lane.
        helps: what the step would take with twice the cores, link, host memory rate, or with the states that fit into a
            quarter of the GPU's memory resident there: name -> seconds, the best first.
        memory: what it takes.
        reason: one line of text.
    """

    host_share: Fraction
    streamed_share: Fraction
    resident_share: Fraction
    step_seconds: float
    lanes: Mapping[str, float]
    limiting: str
    helps: Mapping[str, float]
    memory: Memory
    reason: str


def memory_fit(
    machine: Machine,
    work: Workload,
    resident_share: Fraction | float = 0,
    streamed: bool = True,
    free_gpu_memory: float | None = None,
    free_host_memory: float | None = None,
) -> Memory:
    """The memory that the update takes.

    Args:
        machine: the node.
        work: the update of a rank.
        resident_share: part of the parameters whose states stay on the GPU.
        streamed: whether any subgroups are streamed, which takes device slots.
        free_gpu_memory: bytes that the rest of the training leaves free on each GPU at the step; None for all of it.
        free_host_memory: bytes that are free on the node before the states are made; None for all of it.

    Raises:
        MemoryFitError: it does not fit; the message says what is needed and what is there.
    """
    memory = _memory(work, Fraction(resident_share), streamed)
    for where, needed, free, parts, way_out in (
        (
            "GPU",
            memory.gpu,
            machine.gpu_memory if free_gpu_memory is None else free_gpu_memory,
            f"{_gb(memory.gpu_slots)} of slots during the step, {_gb(memory.gpu_resident)} of resident states",
            "lower --dos-resident-share or --dos-subgroup-size",
        ),
        (
            f"node for {work.ranks} ranks",
            memory.host,
            machine.host_memory if free_host_memory is None else free_host_memory,
            f"{_gb(memory.host_states)} of states, {_gb(memory.host_slots)} of slots",
            "use more nodes, or keep a part of the states on the GPU (--dos-resident-share)",
        ),
    ):
        if needed > free:
            raise MemoryFitError(
                f"the update needs {_gb(needed)} on the {where} ({parts}), and {_gb(free)} are free: {way_out}"
            )
    return memory


def _memory(work: Workload, resident: Fraction, streamed: bool) -> Memory:
    largest = max(work.subgroups)
    slots = work.device_slots * STATE_BYTES * largest if streamed and resident < 1 else 0
    if work.casts and resident < 1:
        slots += work.host_slots * 4 * largest
    kept = round(work.parameters * resident)
    return Memory(
        gpu_slots=slots,
        gpu_resident=STATE_BYTES * kept,
        host_states=work.ranks * STATE_BYTES * (work.parameters - kept),
        host_slots=work.ranks * work.host_slots * 8 * largest,
    )


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


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
        raise ValueError(
            f"shares on CPU and GPU: at least 0 and at most 1 together, got {host_share}, {resident_share}"
        )
    n = work.parameters
    grad = 0 if work.early_grads else work.grad_bytes
    pass_bytes = 2 * STATE_BYTES + work.grad_bytes + work.param_bytes
    cpu_rate = (
        machine.cpu_update(work.threads or max(machine.cores // work.ranks, 1), work.ranks) * FUSED_PASS / pass_bytes
    )
    h2d, d2h = _link(machine, float(STATE_BYTES * f + work.param_bytes * c) * n, float(STATE_BYTES * f + grad * c) * n)
    lanes = {
        "cpu": float(c) * n / cpu_rate,
        "h2d": h2d,
        "d2h": d2h,
        "gpu": float(f + r) * n / machine.gpu_update,
        "dram": float(2 * STATE_BYTES * f + (pass_bytes + grad + work.param_bytes) * c) * n * work.ranks / machine.dram,
    }
    size = max(work.subgroups)
    fill_and_drain = STATE_BYTES * size / machine.d2h_alone if f else work.param_bytes * size / machine.h2d_alone
    return Estimate(c, f, r, max(lanes.values()) + fill_and_drain, lanes)


def _link(machine: Machine, down: float, up: float) -> tuple[float, float]:
    """When the copies to and from the GPU end that start together: each direction is faster once the other is done."""
    first = min(down / machine.h2d_together, up / machine.d2h_together)
    return (
        first + (down - first * machine.h2d_together) / machine.h2d_alone,
        first + (up - first * machine.d2h_together) / machine.d2h_alone,
    )


def choose(
    machine: Machine,
    work: Workload,
    *,
    free_gpu_memory: float | None = 0,
    free_host_memory: float | None = None,
    gpu_share: Fraction | float | None = None,
    resident_share: Fraction | float | None = None,
    stride: int = 0,
) -> Choice:
    """The shares with which the step is shortest, within the memory there is.

    Args:
        machine: the node.
        work: the update of a rank.
        free_gpu_memory: bytes of each GPU that states may take for good; None: all that the slots leave. States are
            made resident as far as it reaches, unless `resident_share` says how many.
        free_host_memory: bytes that are free on the node; None for all of it.
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
    if resident_share is not None:
        resident = _share("resident_share", resident_share)
    else:
        room = machine.gpu_memory if free_gpu_memory is None else free_gpu_memory
        left = room - _memory(work, Fraction(0), streamed=True).gpu_slots
        resident = Fraction(max(min(int(left / STATE_BYTES / max(work.subgroups)), count), 0), count)
    if stride:
        placed = every_kth_on_device(count, stride)
        shares = [(1 - resident) * Fraction(placed.count(Placement.HOST), count)]
    elif gpu_share is not None:
        shares = [(1 - resident) * (1 - _share("gpu_share", gpu_share))]
    else:
        shares = [(1 - resident) * Fraction(step, min(count, 200)) for step in range(min(count, 200) + 1)]
    best = min((closed_form(machine, work, share, resident) for share in shares), key=lambda e: e.seconds)
    memory = memory_fit(
        machine, work, best.resident_share, best.streamed_share > 0, machine.gpu_memory, free_host_memory
    )
    helps = {}
    reason = (
        f"{_percent(best.host_share)} on the CPU, {_percent(best.streamed_share)} streamed, "
        f"{_percent(best.resident_share)} resident: {best.seconds:.3f} s a step, limited by {best.limiting}"
    )
    return Choice(
        best.host_share,
        best.streamed_share,
        best.resident_share,
        best.seconds,
        best.lanes,
        best.limiting,
        helps,
        memory,
        reason,
    )


def _percent(share: Fraction) -> str:
    return f"{float(share):.0%}"


def _share(name: str, given: Fraction | float) -> Fraction:
    share = Fraction(given)
    if not 0 <= share <= 1:
        raise ValueError(f"{name}: {given} is not between 0 and 1")
    return share
