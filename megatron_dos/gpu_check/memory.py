# SPDX-License-Identifier: Apache-2.0
"""A step gives back the device memory that it took, takes no more than its slots, and makes no stream and no event."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from megatron_dos.device import CudaDevice
from megatron_dos.gpu_check.context import Context
from megatron_dos.kernels import AdamScalars, device_kernel
from megatron_dos.program.partition import BYTES_PER_PARAMETER, OwnedRange, partition
from megatron_dos.update.engine import EngineOptions, UpdateEngine
from megatron_dos.update.memory import host_bytes
from megatron_dos.update.operations import StepInputs

__all__ = ["run"]

STEPS = 10
ROUNDING = 2 << 20  # the caching allocator takes memory in pieces of this size
RSS_SLACK = 32 << 20  # the rest of the process: Python's own memory, compiled kernels
SHARES = (Fraction(1, 2), Fraction(0), Fraction(1), Fraction(3, 10))
"""CPU's shares that are tried."""


def run(context: Context) -> None:
    numel = context.sizes.memory_parameters
    parts = partition([OwnedRange(0, (0, 0), 0, numel)], context.sizes.memory_subgroup)
    param = torch.randn(numel, device=context.device).bfloat16()
    grad = torch.randn(numel, device=context.device).bfloat16()
    options = EngineOptions(threads=0)
    kernel = device_kernel.select("auto", param.device)
    rss_before = _resident_bytes()
    engine = UpdateEngine(parts, [param], options, CudaDevice(context.device), kernel)
    engine.memory.states.master.copy_(param)
    context.value(
        "states",
        {
            "parameters": numel,
            "subgroups": len(parts.subgroups),
            "host_bytes_promised": host_bytes(parts, options),
            "host_bytes_taken": _resident_bytes() - rss_before,
        },
    )
    if context.dry:
        context.note("Without a GPU, device memory cannot be measured, and the figures for it are 0.")
    else:
        slots = (*engine.memory.host_grads, *engine.memory.host_params)
        pinned = [tensor.is_pinned() for tensor in (engine.memory.states.master, engine.memory.states.exp_avg, *slots)]
        context.check("states and host slots are page-locked", all(pinned), f"{sum(pinned)} of {len(pinned)} slabs")
    for share in context.required((Fraction(1, 2),), "steps in which nothing may wait"):
        _waits(context, engine, grad, share)
    rows = []
    for share in context.required(SHARES, "CPU's shares"):
        engine.use(replace(options, host_share=share))
        rows.append(_measure(context, engine, grad, share))
        context.value("steps", rows)
    if not rows:
        return
    made = [str(row["cpu_share"]) for row in rows]
    for name in ("device memory before is that after a step", "no stream and no event is made after the first step"):
        faults = [f"CPU's share {row['cpu_share']}" for row in rows if not row[name]]
        context.check(name, not faults, ", ".join(faults) or f"CPU's shares {', '.join(made)}")
    for name in (
        "the peak is the slots",
        "the same after step 10 as after step 1",
        "allocations are those of the slots",
        "host memory is flat",
    ):
        faults = [f"CPU's share {row['cpu_share']}: {row}" for row in rows if not row[name]]
        context.check(name, not faults, "; ".join(faults))


def _waits(context: Context, engine: UpdateEngine, grad: torch.Tensor, share: Fraction) -> None:
    """A step in which torch refuses to wait for the GPU; it comes after one that compiles the kernels."""
    engine.set_host_share(share)
    error = ""
    for forbidden in (contextlib.nullcontext(), context.waits_forbidden()):
        scalars = AdamScalars.at_step(1, 1e-3, (0.9, 0.95), 1e-8, 0.1, decoupled=True)
        try:
            with forbidden:
                engine.update(StepInputs([grad], [scalars]))
        except RuntimeError as raised:
            error = str(raised)
        context.synchronize()
    context.check("no operation of a step waits for the GPU", not error, error)


def _measure(context: Context, engine: UpdateEngine, grad: torch.Tensor, share: Fraction) -> dict[str, object]:
    """Ten steps with one share; the figures of each and whether they are as they should be."""

    def step(number: int) -> dict[str, int]:
        context.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, allocations = torch.cuda.memory_allocated(), _allocations()
        scalars = AdamScalars.at_step(number, 1e-3, (0.9, 0.95), 1e-8, 0.1, decoupled=True)
        with _counted() as made:
            engine.update(StepInputs([grad], [scalars]))
        context.synchronize()
        return {
            "before_bytes": before,
            "after_bytes": torch.cuda.memory_allocated(),
            "peak_bytes": torch.cuda.max_memory_allocated() - before,
            "reserved_bytes": torch.cuda.memory_reserved(),
            "allocations": _allocations() - allocations,
            "streams_made": made["streams"],
            "events_made": made["events"],
            "resident_bytes": _resident_bytes(),
        }

    gc.collect()  # once: a step must not leave memory for the collector
    steps = [step(number) for number in range(1, STEPS + 1)]
    first, later, last = steps[0], steps[1:], steps[-1]
    largest, options = engine.partition.largest, engine.options
    slots = (options.device_slots if share < 1 else 0, len(engine.memory.host_grads) if share > 0 else 0)
    expected = slots[0] * BYTES_PER_PARAMETER * largest + slots[1] * 4 * largest
    return {
        "cpu_share": str(share),
        "slot_bytes": expected,
        "first_step": first,
        "last_step": last,
        "device memory before is that after a step": all(each["before_bytes"] == each["after_bytes"] for each in steps),
        "the same after step 10 as after step 1": all(
            each[name] == first[name] for each in later for name in ("after_bytes", "peak_bytes", "reserved_bytes")
        ),
        "the peak is the slots": all(each["peak_bytes"] <= expected + ROUNDING * sum(slots) for each in steps),
        "allocations are those of the slots": all(each["allocations"] <= sum(slots) for each in steps),
        "no stream and no event is made after the first step": not any(
            each["streams_made"] or each["events_made"] for each in later
        ),
        "host memory is flat": last["resident_bytes"] - later[0]["resident_bytes"] <= RSS_SLACK,
    }


def _allocations() -> int:
    """How many times the caching allocator has been asked for memory."""
    return torch.cuda.memory_stats().get("allocation.all.allocated", 0)


def _resident_bytes() -> int:
    """Host memory of this process, page-locked memory included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


@contextlib.contextmanager
def _counted() -> Iterator[dict[str, int]]:
    """Counts the CUDA streams and events that are made inside the block, by whomever."""
    made = {"streams": 0, "events": 0}
    with _counted_class(torch.cuda.Stream, made, "streams"), _counted_class(torch.cuda.Event, made, "events"):
        yield made


@contextlib.contextmanager
def _counted_class(counted: Any, made: dict[str, int], name: str) -> Iterator[None]:
    original, own = counted.__init__, "__init__" in vars(counted)

    def init(self: object, *args: object, **kwargs: object) -> None:
        made[name] += "stream_id" not in kwargs  # with it, an object for a stream that is there
        if original is not object.__init__:
            original(self, *args, **kwargs)

    counted.__init__ = init
    try:
        yield
    finally:
        if own:
            counted.__init__ = original
        else:
            del counted.__init__
