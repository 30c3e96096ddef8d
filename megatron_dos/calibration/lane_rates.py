# SPDX-License-Identifier: Apache-2.0
"""Measures how fast each lane of this process is: the links, the update on the GPU, the update on the CPU.

`megatron-dos calibrate` and `megatron-dos check` both measure with this. Host memory is slabs as the engine makes them,
page-locked where a GPU is in use; copies are timed with events on their streams, from a common start. Everything runs
on the GPU that is current.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_dos.kernels import AdamScalars, cpu
from megatron_dos.node import slab
from megatron_dos.planning.workload import FUSED_PASS

__all__ = [
    "AllLanes",
    "Copy",
    "HostUpdate",
    "Job",
    "Links",
    "device_update_rate",
    "host_copy",
    "link_rates",
    "rates_beside_copies",
    "sleep_on_stream",
]

CHUNKS = 8  # copies that a slab is copied in, as subgroups are
SCALARS = AdamScalars.at_step(10, 1e-4, (0.9, 0.95), 1e-8, 0.1, decoupled=True)

Copy = tuple[torch.Tensor, torch.Tensor]  # target, source


@dataclass
class Job:
    """Copies on one stream, and how long they took from the common start to their end."""

    stream: Any
    copies: Sequence[Copy]
    seconds: float = 0.0

    @property
    def nbytes(self) -> int:
        return sum(target.nbytes for target, _ in self.copies)


class Links:
    """Two slabs, two device buffers and two streams in each direction.

    Args:
        nbytes: of a slab; a multiple of 64 KiB.
        device: the GPU.
        sleep: keeps the current stream busy for that many milliseconds.
    """

    def __init__(self, nbytes: int, device: torch.device, sleep: Callable[[float], None]) -> None:
        numel = nbytes // 4
        self.device = [torch.empty(numel, device=device).uniform_(-1, 1) for _ in range(2)]
        self.host = [host_copy(tensor) for tensor in self.device]
        self.streams = {name: [torch.cuda.Stream() for _ in range(2)] for name in ("h2d", "d2h")}
        self._sleep = sleep
        self._gate = torch.cuda.Stream()
        self.seconds_to_enqueue = 0.0  # of the last jobs

    def job(self, direction: str, index: int = 0, times: int = 2, part: float = 1.0, chunks: int = CHUNKS) -> Job:
        """Copies of a slab, or of its first part, on stream `index` of a direction; each direction has its slab."""
        which = 0 if direction == "h2d" else 1
        host, device = self.host[which], self.device[which]
        if index:  # the second stream of a direction copies the other half
            half = host.numel() // 2
            host, device = host[half:], device[half:]
        numel = int(host.numel() * part)
        pairs = zip(device[:numel].chunk(chunks), host[:numel].chunk(chunks), strict=True)
        copies = [(to, come) if direction == "h2d" else (come, to) for to, come in pairs]
        return Job(self.streams[direction][index], copies * times)

    def time(self, *jobs: Job, meanwhile: Callable[[], None] | None = None) -> float:
        """Run jobs at once; seconds until the last has ended. Each learns its own."""
        go = torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._gate):  # closed until all copies are enqueued
            self._sleep(2.0)
            go.record()
        ends = []
        began = time.perf_counter()
        for job in jobs:
            job.stream.wait_event(go)
            with torch.cuda.stream(job.stream):
                for target, source in job.copies:
                    target.copy_(source, non_blocking=True)
                end = torch.cuda.Event(enable_timing=True)
                end.record()
                ends.append(end)
        self.seconds_to_enqueue = time.perf_counter() - began
        if meanwhile is not None:
            meanwhile()
        torch.cuda.synchronize()
        for job, end in zip(jobs, ends, strict=True):
            job.seconds = max(go.elapsed_time(end) / 1e3, 1e-9)
        return max(job.seconds for job in jobs)


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A slab with the tensor's values: random numbers are made on the device, where that takes no time."""
    memory = slab.zeros(tensor.numel(), tensor.dtype)
    memory.copy_(tensor)
    return memory


def link_rates(links: Links, samples: int) -> dict[str, Any]:
    """Bytes a second of each direction, medians.

    Returns:
        "alone" and "together", each with "h2d" and "d2h", the latter with "sum", too; and "enqueueing", the part of the
        time of the copies that it took to enqueue them.
    """
    links.time(links.job("h2d"), links.job("d2h"))  # warms up
    alone: dict[str, list[float]] = {"h2d": [], "d2h": []}
    together: dict[str, list[float]] = {"h2d": [], "d2h": [], "sum": []}
    part = 0.0
    for _ in range(samples):
        for direction, rates in alone.items():
            job = links.job(direction)
            links.time(job)
            rates.append(job.nbytes / job.seconds)
        jobs = {direction: links.job(direction) for direction in alone}
        seconds = links.time(*jobs.values())
        for direction, job in jobs.items():
            together[direction].append(job.nbytes / job.seconds)
        together["sum"].append(sum(job.nbytes for job in jobs.values()) / seconds)
        part = links.seconds_to_enqueue / seconds
    return {"alone": _medians(alone), "together": _medians(together), "enqueueing": part}


def _medians(samples: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in samples.items()}


def device_update_rate(kernel: Callable[..., None], numel: int, device: torch.device, samples: int) -> float:
    """Parameters a second of a kernel on the GPU: FP32 grads in, bf16 params out, states in its memory."""
    states = torch.zeros((3, numel), device=device)
    states[0].uniform_(-1, 1)
    grad = torch.empty(numel, device=device).uniform_(-1e-3, 1e-3)
    out = torch.empty(numel, dtype=torch.bfloat16, device=device)
    seconds = []
    for _ in range(samples + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        kernel(*states, grad, SCALARS, 1.0, 0.5, out)
        end.record()
        torch.cuda.synchronize()
        seconds.append(max(start.elapsed_time(end) / 1e3, 1e-9))
    return numel / statistics.median(seconds[1:])  # the first may compile


class HostUpdate:
    """States, FP32 grads and bf16 params of `numel` parameters on the host, to update with the fused kernel.

    Args:
        numel: parameters.
        device: where random numbers are made: the GPU, or the CPU where there is none.
        threads: of the update; None for this rank's share.
    """

    def __init__(self, numel: int, device: torch.device, threads: int | None = None) -> None:
        self.numel = numel
        self.states = [
            host_copy(torch.empty(numel, device=device).uniform_(-1, 1)),
            slab.zeros(numel),
            slab.zeros(numel),
        ]
        self.grad = host_copy(torch.empty(numel, device=device).uniform_(-1e-3, 1e-3))
        self.out = slab.zeros(numel, torch.bfloat16)
        self.threads = threads

    def __call__(self, start: int = 0, stop: int | None = None) -> float:
        """Update parameters `start` to `stop`; seconds."""
        part = slice(start, stop)
        began = time.perf_counter()
        cpu.adamw(
            *(state[part] for state in self.states),
            self.grad[part],
            SCALARS,
            1.0,
            0.5,
            self.out[part],
            threads=self.threads,
        )
        return time.perf_counter() - began


@dataclass(frozen=True)
class AllLanes:
    """Rates of the lanes that use host memory, all at once: parameters a second, and bytes a second."""

    update: float
    h2d: float
    d2h: float

    @property
    def host_memory(self) -> float:
        """Bytes a second of host memory; each copied byte passes once."""
        return self.update * FUSED_PASS + self.h2d + self.d2h


def rates_beside_copies(links: Links, update: HostUpdate, parts: int, seconds: float) -> AllLanes:
    """Copies both ways for about `seconds`, at least once, and updates of one part after another meanwhile."""
    one_pass = links.time(links.job("h2d", times=1), links.job("d2h", times=1))
    times = max(round(seconds / one_pass), 1)
    jobs = [links.job("h2d", times=times), links.job("d2h", times=times)]
    updated, taken = 0, 0.0

    def updates_until_copied() -> None:
        nonlocal updated, taken
        ends = [torch.cuda.Event() for _ in jobs]
        for job, end in zip(jobs, ends, strict=True):
            end.record(job.stream)
        began = time.perf_counter()
        size = -(-update.numel // parts)
        while updated == 0 or not all(end.query() for end in ends):
            start = updated % update.numel
            stop = min(start + size, update.numel)
            update(start, stop)
            updated += stop - start
        taken = time.perf_counter() - began

    links.time(*jobs, meanwhile=updates_until_copied)
    h2d, d2h = (job.nbytes / job.seconds for job in jobs)
    return AllLanes(updated / taken, h2d, d2h)


_cycles: list[float] = []


def sleep_on_stream(milliseconds: float) -> None:
    """Keep the current stream busy for about that time. The first call waits for the GPU."""
    if not _cycles:  # cycles a millisecond, measured once
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cycles = 20_000_000
        for _ in range(2):  # the first time the clock may still be low
            start.record()
            torch.cuda._sleep(cycles)
            end.record()
            torch.cuda.synchronize()
        _cycles.append(cycles / max(start.elapsed_time(end), 1e-3))
    torch.cuda._sleep(int(milliseconds * _cycles[0]))
