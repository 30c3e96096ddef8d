"""How fast each lane is, alone and beside the others: links, the update on the GPU, the update on the CPU.

The host memory is slabs as the engine makes them. Copies are timed with events on their streams, from a common start.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpu_check_stages.context import Context, median
from megatron_dos.kernels import AdamScalars, cpu, device_kernel, elementwise_adam, slab

__all__ = ["run"]

SAMPLES = 5
CHUNKS = 8  # copies that a slab is copied in, as subgroups are
TURNS, EVEN = 0.65, 0.85  # first end over second end of two equal copies: 0.5 when they take turns, 1 when they share
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
    """Two slabs, two device buffers and two streams in each direction."""

    def __init__(self, context: Context) -> None:
        self._context = context
        numel = context.sizes.copy_bytes // 4
        self.device = [torch.empty(numel, device=context.device).uniform_(-1, 1) for _ in range(2)]
        self.host = [_host_copy(device) for device in self.device]
        self.streams = {name: [torch.cuda.Stream() for _ in range(2)] for name in ("h2d", "d2h")}
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
        context = self._context
        go = torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._gate):  # closed until all copies are enqueued
            context.sleep_on_stream(2.0)
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
        context.synchronize()
        for job, end in zip(jobs, ends, strict=True):
            job.seconds = max(go.elapsed_time(end) / 1e3, 1e-9)
        return max(job.seconds for job in jobs)


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A slab with the tensor's values: random numbers are made on the device, where that takes no time."""
    memory = slab.zeros(tensor.numel(), tensor.dtype)
    memory.copy_(tensor)
    return memory


def run(context: Context) -> None:
    context.value("page_locking", _page_locking(context))
    links = Links(context)
    _links(context, links)
    _same_direction(context, links)
    _device_update(context)
    _host_update(context, links)
    if context.dry:
        context.note("Nothing is page-locked and no copy crosses a link without a GPU.")


def _page_locking(context: Context) -> dict[str, float]:
    """Seconds for each GiB of a new slab: mapped, zeroed and page-locked; and to give it back."""
    numel = 2 * context.sizes.copy_bytes // 4
    gib = 4 * numel / 2**30
    began = time.perf_counter()
    memory = slab.zeros(numel)
    made = time.perf_counter()
    del memory
    released = time.perf_counter()
    return {"seconds_per_gib": (made - began) / gib, "release_seconds_per_gib": (released - made) / gib, "gib": gib}


def _links(context: Context, links: Links) -> None:
    """Bytes a second of each direction."""
    links.time(links.job("h2d"), links.job("d2h"))  # warms up
    alone: dict[str, list[float]] = {"h2d": [], "d2h": []}
    together: dict[str, list[float]] = {"h2d": [], "d2h": [], "sum": []}
    for _ in range(SAMPLES):
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
    context.value("links_bytes_per_second", {"alone": _medians(alone), "together": _medians(together)})
    if not context.dry:
        detail = f"enqueueing took {part:.1%} of the time of the copies"
        context.check("copies of slabs do not hold up the host", part < 0.5, detail)


def _medians(samples: dict[str, list[float]]) -> dict[str, float]:
    return {name: median(values) for name, values in samples.items()}


def _same_direction(context: Context, links: Links) -> None:
    """What two streams of one direction do: two equal copies at once, and a small copy behind a large one."""
    found = {}
    for direction in ("h2d", "d2h"):
        ratios, waits = [], []
        for _ in range(SAMPLES):
            first, second = (
                links.job(direction, 0, times=1, part=0.5, chunks=1),
                links.job(direction, 1, times=1, chunks=1),
            )
            links.time(first, second)
            ends = sorted((first.seconds, second.seconds))
            ratios.append(ends[0] / ends[1])
            large, small = (
                links.job(direction, 0, times=1, part=0.5, chunks=1),
                links.job(direction, 1, times=1, part=1 / 16, chunks=1),
            )
            links.time(large, small)
            waits.append(small.seconds / large.seconds)
        ratio = median(ratios)
        found[direction] = {
            "first_end_over_second_end": ratio,
            "small_copy_end_over_large_copy_end": median(waits),
            "streams": "take turns" if ratio < TURNS else "share evenly" if ratio > EVEN else "neither",
        }
    context.value("two_streams_of_one_direction", found)


def _device_update(context: Context) -> None:
    """Parameters a second of the update on the GPU: FP32 grads in, bf16 params out."""
    numel = context.sizes.update_elements
    states = torch.zeros((3, numel), device=context.device)
    states[0].uniform_(-1, 1)
    grad = torch.empty(numel, device=context.device).uniform_(-1e-3, 1e-3)
    out = torch.empty(numel, dtype=torch.bfloat16, device=context.device)
    kernels = {"chosen": device_kernel.select("auto", states.device)}
    if not context.dry:
        kernels["elementwise"] = elementwise_adam.adamw
    rates = {}
    for name, kernel in kernels.items():
        seconds = []
        for _ in range(SAMPLES + 1):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            kernel(*states, grad, SCALARS, 1.0, 0.5, out)
            end.record()
            context.synchronize()
            seconds.append(max(start.elapsed_time(end) / 1e3, 1e-9))
        rate = numel / median(seconds[1:])
        rates[name] = {"parameters_per_second": rate, "bytes_per_second": rate * 30}
    context.value("device_update", rates)


def _host_update(context: Context, links: Links) -> None:
    """Parameters a second of the update on the CPU, alone and while both links are in use."""
    numel = context.sizes.update_elements
    states = [
        _host_copy(torch.empty(numel, device=context.device).uniform_(-1, 1)),
        slab.zeros(numel),
        slab.zeros(numel),
    ]
    grad = _host_copy(torch.empty(numel, device=context.device).uniform_(-1e-3, 1e-3))
    out = slab.zeros(numel, torch.bfloat16)
    parts = 8

    def update(part: slice) -> None:
        cpu.adamw(*(state[part] for state in states), grad[part], SCALARS, 1.0, 0.5, out[part])

    def timed() -> float:
        began = time.perf_counter()
        update(slice(0, numel))
        return time.perf_counter() - began

    timed()
    alone = numel / median([timed() for _ in range(SAMPLES)])
    # Copies for about as long as five updates take, and updates until they have ended.
    wanted = 5 * numel / alone
    one_pass = links.time(links.job("h2d", times=1), links.job("d2h", times=1))
    times = max(round(wanted / one_pass), 1) if not context.dry else 1
    jobs = [links.job("h2d", times=times), links.job("d2h", times=times)]
    updated, seconds = [0], [0.0]

    def updates_until_copied() -> None:
        ends = [torch.cuda.Event() for _ in jobs]
        for job, end in zip(jobs, ends, strict=True):
            end.record(job.stream)
        began = time.perf_counter()
        size = -(-numel // parts)
        while updated[0] == 0 or not all(end.query() for end in ends):
            start = updated[0] % numel
            update(slice(start, min(start + size, numel)))
            updated[0] += min(size, numel - start)
        seconds[0] = time.perf_counter() - began

    links.time(*jobs, meanwhile=updates_until_copied)
    beside = updated[0] / seconds[0]
    h2d, d2h = (job.nbytes / job.seconds for job in jobs)
    context.value(
        "host_update",
        {
            "threads": cpu.pool().threads,
            "parameters_per_second_alone": alone,
            "parameters_per_second_beside_copies": beside,
            "h2d_bytes_per_second_beside_it": h2d,
            "d2h_bytes_per_second_beside_it": d2h,
            # 3 states read and written, an FP32 grad read, a bf16 param written; each copied byte passes once.
            "host_memory_bytes_per_second_alone": alone * 30,
            "host_memory_bytes_per_second_of_all": beside * 30 + h2d + d2h,
        },
    )
