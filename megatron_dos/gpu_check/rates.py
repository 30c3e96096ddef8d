# SPDX-License-Identifier: Apache-2.0
"""How fast each lane is, alone and beside the others: links, the update on the GPU, the update on the CPU.

What measures is `megatron_dos.calibration.lane_rates`, with which `megatron-dos calibrate` measures, too.
"""

from __future__ import annotations

import time

import torch

from megatron_dos.calibration.lane_rates import HostUpdate, Links, device_update_rate, link_rates, rates_beside_copies
from megatron_dos.gpu_check.context import Context, median
from megatron_dos.kernels import cpu, device_kernel, elementwise_adam
from megatron_dos.node import slab
from megatron_dos.planning.workload import FUSED_PASS

__all__ = ["run"]

SAMPLES = 5
TURNS, EVEN = 0.65, 0.85  # first end over second end of two equal copies: 0.5 when they take turns, 1 when they share


def run(context: Context) -> None:
    context.value("page_locking", _page_locking(context))
    links = Links(context.sizes.copy_bytes, context.device, context.sleep_on_stream)
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
    rates = link_rates(links, SAMPLES)
    part = rates.pop("enqueueing")
    context.value("links_bytes_per_second", rates)
    if not context.dry:
        detail = f"enqueueing took {part:.1%} of the time of the copies"
        context.check("copies of slabs do not hold up the host", part < 0.5, detail)


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
    device = torch.empty(0, device=context.device).device  # the host's in a dry run
    kernels = {"chosen": device_kernel.select("auto", device)}
    if not context.dry:
        kernels["elementwise"] = elementwise_adam.adamw
    rates = {}
    for name, kernel in kernels.items():
        rate = device_update_rate(kernel, context.sizes.update_elements, context.device, SAMPLES)
        rates[name] = {"parameters_per_second": rate, "bytes_per_second": rate * FUSED_PASS}
    context.value("device_update", rates)


def _host_update(context: Context, links: Links) -> None:
    """Parameters a second of the update on the CPU, alone and while both links are in use."""
    numel = context.sizes.update_elements
    update = HostUpdate(numel, context.device)
    update()
    alone = numel / median([update() for _ in range(SAMPLES)])
    # Copies for about as long as five updates take.
    beside = rates_beside_copies(links, update, parts=8, seconds=0.0 if context.dry else 5 * numel / alone)
    context.value(
        "host_update",
        {
            "threads": cpu.pool().threads,
            "parameters_per_second_alone": alone,
            "parameters_per_second_beside_copies": beside.update,
            "h2d_bytes_per_second_beside_it": beside.h2d,
            "d2h_bytes_per_second_beside_it": beside.d2h,
            "host_memory_bytes_per_second_alone": alone * FUSED_PASS,
            "host_memory_bytes_per_second_of_all": beside.host_memory,
        },
    )
