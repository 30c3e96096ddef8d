# SPDX-License-Identifier: Apache-2.0
"""How long a step takes at a billion parameters and more: ours and other ways to update, interleaved in one run.

All rows update the same tensors: bf16 params with the shapes of a stack of GPT layers and their FP32 main grads, as
Megatron keeps them. They run through the same operations, kernels and device, so that what differs is the program; only
Megatron's own optimizer brings its own.
"""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

import torch

from megatron_dos.device import CudaDevice
from megatron_dos.gpu_check.context import Context, median
from megatron_dos.gpu_check.lanes import Lanes
from megatron_dos.gpu_check.rivals import HybridOptimizer, Resident, ResidentOperations, UnusableError
from megatron_dos.kernels import AdamScalars, cpu, device_kernel
from megatron_dos.node.memory import available_host_memory
from megatron_dos.planning.clock import Rate, durations, simulate
from megatron_dos.planning.rival_programs import every_kth_with_serial_copies, static_split
from megatron_dos.program.partition import BYTES_PER_PARAMETER, OwnedRange, automatic_subgroup_size, partition
from megatron_dos.program.schedule import OpKind, Placement, Program, SubgroupShape
from megatron_dos.update.engine import EngineOptions, UpdateEngine
from megatron_dos.update.operations import StepInputs
from megatron_dos.words import gib

__all__ = ["Bench", "gpt_layer", "run"]

HYPER_PARAMETERS: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
HALF = Fraction(1, 2)
SWEEP = tuple(Fraction(percent, 100) for percent in (70, 60, 80, 90, 40, 30))
"""GPU's shares that are tried besides 0, 0.5 and 1, the likelier ones first."""
SWEEP_SECONDS = 50  # left at least for each share of the sweep
CPU_ONLY, GPU_ONLY = "CPU only", "GPU streaming only"
HOST_PART, DEVICE_PART = 0.7, 0.7  # of the free memory that may be used
HYBRID_BYTES = 24  # host memory that HybridDeviceOptimizer takes for a parameter: 3 states, a grad, and rounding up
HYBRID_SECONDS = 30  # left at least before its set-up begins


def gpt_layer(hidden: int, ffn: int, kv_channels: int) -> list[int]:
    """Elements of each param of one GPT layer: QKV, projection, gated MLP in and out, two norms."""
    return [(hidden + 2 * kv_channels) * hidden, hidden * hidden, 2 * ffn * hidden, ffn * hidden, hidden, hidden]


@dataclass
class Row:
    """One way to update, and how long its steps took."""

    name: str
    what: str
    step: Callable[[], None]
    program: Program | None = None
    seconds: list[float] = field(default_factory=list)


class Bench:
    """Params, grads and an engine on a stack of GPT layers; steps of any program on them."""

    def __init__(self, context: Context, layers: int) -> None:
        self.context = context
        sizes = context.sizes
        numels = gpt_layer(sizes.hidden, sizes.ffn, sizes.kv_channels) * layers
        ranges, start = [], 0
        for owner, numel in enumerate(numels):
            ranges.append(OwnedRange(owner, (0, 0), start, numel))
            start += numel
        self.numel = start
        self.partition = partition(ranges, sizes.subgroup or automatic_subgroup_size(start))
        place = context.device
        # One buffer of each, of which the params are views, as in Megatron.
        self.flat_params = torch.empty(start, dtype=torch.bfloat16, device=place).normal_(std=0.02)
        self.first_params = self.flat_params.clone()
        self.flat_grads = torch.empty(start, device=place).normal_(std=1e-3)
        self.params, self.grads = list(self.flat_params.split(numels)), list(self.flat_grads.split(numels))
        self.low_grads: list[torch.Tensor] = []
        self.device = CudaDevice(place)
        kernel = device_kernel.select("auto", self.flat_params.device)
        began = time.perf_counter()
        self.engine = UpdateEngine(self.partition, self.params, EngineOptions(threads=0), self.device, kernel)
        self.seconds_to_construct = time.perf_counter() - began
        self._step = 0
        self.restart()

    def restart(self) -> None:
        """Back to before the first step."""
        self.context.synchronize()
        self._step = 0
        self.flat_params.copy_(self.first_params)
        states = self.engine.memory.states
        states.exp_avg.zero_()
        states.exp_avg_sq.zero_()
        for start in range(0, self.numel, 1 << 26):  # in parts: the temporary FP32 copy is on the device
            part = slice(start, start + (1 << 26))
            states.master[part].copy_(self.first_params[part].float())

    def add_low_precision_grads(self) -> None:
        """bf16 grads beside the FP32 ones."""
        low = self.flat_grads.bfloat16()
        self.low_grads = list(low.split([param.numel() for param in self.params]))

    def inputs(self, low: bool = False) -> StepInputs:
        self._step += 1
        scalars = AdamScalars.at_step(self._step, decoupled=True, **HYPER_PARAMETERS)
        grads = self.low_grads if low else self.grads
        return StepInputs(grads, [scalars] * len(grads), grad_scales={})

    def update(self, gpu_share: Fraction | float, low: bool = False, grads_as_fp32: bool = True) -> None:
        """A step of the engine."""
        options = EngineOptions(threads=0, host_share=1 - Fraction(gpu_share), grads_as_fp32=grads_as_fp32)
        self.engine.use(options)
        self.engine.update(self.inputs(low))

    @torch.no_grad()
    def run(self, program: Program, resident: Resident | None = None, device: Any = None) -> None:
        """A step of another program."""
        if resident is None:
            operations = self.engine.operations(self.inputs(), program)
        else:
            operations = ResidentOperations(self.engine, self.inputs(), program, resident)
        (device or self.device).run(program, operations.handlers(), operations.memory)

    def program(self, gpu_share: Fraction | float) -> Program:
        """The engine's program for FP32 grads."""
        self.engine.use(EngineOptions(threads=0, host_share=1 - Fraction(gpu_share)))
        return self.engine.program(self.grads)

    def shapes(self) -> list[SubgroupShape]:
        return [SubgroupShape(subgroup.bucket, subgroup.numel, casts=False) for subgroup in self.partition.subgroups]

    def seconds(self, step: Callable[[], None]) -> float:
        """Seconds of one step, until all of it has ended."""
        self.context.synchronize()
        began = time.perf_counter()
        step()
        self.context.synchronize()
        return time.perf_counter() - began

    def fingerprint(self) -> list[int]:
        """A checksum of every subgroup's states."""
        self.context.synchronize()
        states = self.engine.memory.states
        arrays = [state.numpy().view("uint8") for state in (states.master, states.exp_avg, states.exp_avg_sq)]
        spans = [
            array[4 * subgroup.start : 4 * subgroup.stop] for array in arrays for subgroup in self.partition.subgroups
        ]
        with ThreadPoolExecutor(cpu.pool().threads) as pool:
            return list(pool.map(zlib.crc32, spans))


def run(context: Context) -> None:
    layers = _layers(context)
    bench = Bench(context, layers)
    context.value(
        "setting",
        {
            "parameters": bench.numel,
            "layers": layers,
            "layer": {"hidden": context.sizes.hidden, "ffn": context.sizes.ffn, "kv": context.sizes.kv_channels},
            "subgroups": len(bench.partition.subgroups),
            "subgroup_parameters": bench.partition.largest,
            "cpu_threads": cpu.pool().threads,
            "params": "bf16",
            "grads": "FP32",
            "seconds_to_construct": bench.seconds_to_construct,
        },
    )
    _same_bits(context, bench)
    _enqueueing(context, bench)
    rows = _rows(context, bench)
    best = _sweep(context, bench, rows)
    _hybrid(context, bench, rows)
    _low_precision(context, bench, rows, best)
    _rounds(context, bench, rows, _name_of(best))
    _lanes(context, bench, best)


def _layers(context: Context) -> int:
    """How many layers: what the sizes ask for, or what fits."""
    sizes = context.sizes
    per_layer = sum(gpt_layer(sizes.hidden, sizes.ffn, sizes.kv_channels))
    wanted = -(-sizes.parameters // per_layer)
    host = HOST_PART * available_host_memory() / (BYTES_PER_PARAMETER + 1)  # a byte for the slots
    # On the device: params twice, both kinds of grads, half of the states, and slots.
    device = DEVICE_PART * context.free_device_memory() / (2 + 2 + 4 + 2 + BYTES_PER_PARAMETER / 2 + 2)
    fits = min(host, device) // per_layer
    page_locking = context.earlier.get("rates", {}).get("page_locking", {}).get("seconds_per_gib")
    if page_locking:
        in_time = 0.25 * context.left() / (page_locking * BYTES_PER_PARAMETER / 2**30)
        fits = min(fits, in_time // per_layer)
    layers = max(int(min(wanted, fits)), 1)
    if layers < wanted:
        context.note(
            f"Smaller than asked for: {layers * per_layer / 1e9:.2f}e9 parameters instead of "
            f"{wanted * per_layer / 1e9:.2f}e9 is what fits into memory and time here."
        )
    return layers


def _same_bits(context: Context, bench: Bench) -> None:
    """One step at full size, placed in three ways."""
    results: dict[str, Any] = {}
    for share in (Fraction(0), HALF, Fraction(1)):
        if results and context.left() < 60 and not context.dry:
            context.note("The bits at full size were compared for fewer shares, for lack of time.")
            break
        bench.restart()
        bench.update(share)
        fingerprint = bench.fingerprint()
        results[str(share)] = (fingerprint, bench.flat_params.clone())
    (first, params), *others = results.values()
    same = all(
        other == first and torch.equal(these.view(torch.int16), params.view(torch.int16)) for other, these in others
    )
    context.check(
        "a step at full size has the same bits wherever it is updated",
        same,
        f"{bench.numel} parameters, GPU shares {', '.join(results)}: checksums of each subgroup's states, all params",
    )


def _enqueueing(context: Context, bench: Bench) -> None:
    """How long the host is busy with a step that is wholly the GPU's."""
    began = time.perf_counter()
    bench.update(1)
    enqueued = time.perf_counter() - began
    context.synchronize()
    seconds = time.perf_counter() - began
    context.value("gpu_only_step", {"host_seconds": enqueued, "seconds": seconds})
    if not context.dry:  # a stand-in does the work where it is enqueued
        detail = f"{enqueued * 1e3:.1f} ms of {seconds * 1e3:.1f} ms"
        context.check("the host only enqueues a step on the GPU", enqueued < 0.5 * seconds, detail)


# --- the rows


def _rows(context: Context, bench: Bench) -> list[Row]:
    shapes = bench.shapes()
    split = static_split(shapes, HALF)
    resident = Resident(bench.engine, split, context.device)
    context.value("device_bytes_of_resident_states", sum(states.nbytes for states in resident.states.values()))
    serial = every_kth_with_serial_copies(shapes, 2)
    static = Fraction(
        sum(s.numel for s, p in zip(shapes, split.placements, strict=True) if p is Placement.RESIDENT), bench.numel
    )
    return [
        Row(
            CPU_ONLY,
            "every subgroup on the CPU; grads and params copied meanwhile, as in full offload with asynchronous copies",
            lambda: bench.update(0),
            bench.program(0),
        ),
        Row(GPU_ONLY, "every subgroup streamed through the GPU", lambda: bench.update(1), bench.program(1)),
        Row(
            "static split",
            f"states of {float(static):.0%} of the params on the GPU for good, the CPU's part after the GPU's",
            lambda: bench.run(split, resident),
            split,
        ),
        Row(
            "k=2, serial copies",
            "the published interleaving: one subgroup in two on the GPU, states fetched and written back by turns",
            lambda: bench.run(serial),
            serial,
        ),
        Row(_name_of(HALF), "mixed evenly, both directions at once", lambda: bench.update(HALF), bench.program(HALF)),
    ]


def _name_of(gpu_share: Fraction) -> str:
    """The row of the engine with this share."""
    return {Fraction(0): CPU_ONLY, Fraction(1): GPU_ONLY}.get(gpu_share, f"ours, GPU share {float(gpu_share):.2f}")


def _sweep(context: Context, bench: Bench, rows: list[Row]) -> Fraction:
    """The fastest of some GPU shares, which becomes a row where it is not one already."""
    seconds: dict[Fraction, float] = {}
    for row in rows:  # the first steps compile kernels and touch pages
        bench.seconds(row.step)
    for share in (HALF, Fraction(1), *SWEEP, Fraction(0)):
        if context.left() < SWEEP_SECONDS and not context.dry:
            context.note(f"The sweep of shares ended before GPU share {float(share):.2f}, for lack of time.")
            break
        bench.seconds(partial(bench.update, share))
        seconds[share] = min(bench.seconds(partial(bench.update, share)) for _ in range(2))
        context.value(
            "sweep_seconds_of_gpu_share", {f"{float(share):.2f}": seconds[share] for share in sorted(seconds)}
        )
    best = min(seconds, key=seconds.__getitem__)
    context.value("best_gpu_share", float(best))
    if best in SWEEP:
        rows.append(
            Row(_name_of(best), "the best of a sweep of shares", lambda: bench.update(best), bench.program(best))
        )
    return best


def _hybrid(context: Context, bench: Bench, rows: list[Row]) -> None:
    """Megatron's optimizer, where it can be had."""
    needed = HYBRID_BYTES * bench.numel
    if needed > HOST_PART * available_host_memory():
        context.note(f"HybridDeviceOptimizer not measured: it would take {gib(needed, 0)} of host memory.")
        return
    if context.left() < HYBRID_SECONDS and not context.dry:
        context.note("HybridDeviceOptimizer not measured: too little time was left.")
        return
    torch.set_num_threads(cpu.pool().threads)
    began = time.perf_counter()
    try:
        optimizer = HybridOptimizer(bench.params, bench.grads, 1.0, HYPER_PARAMETERS)
        first = bench.seconds(optimizer.step)
    except UnusableError as error:
        context.note(f"HybridDeviceOptimizer not measured: {error}")
        return
    context.value(
        "hybrid",
        {
            "seconds_to_construct_and_first_step": time.perf_counter() - began,
            "seconds_of_first_step": first,
            "gpu_optimizer": optimizer.gpu_optimizer,
            "torch_threads": torch.get_num_threads(),
            "offload_fraction": 1.0,
        },
    )
    rows.append(
        Row(
            "HybridDeviceOptimizer",
            "Megatron's --optimizer-cpu-offload, everything offloaded, copies overlapped",
            optimizer.step,
        )
    )


def _low_precision(context: Context, bench: Bench, rows: list[Row], best: Fraction) -> None:
    """bf16 grads, sent to the CPU in two ways."""
    bench.add_low_precision_grads()
    for what, as_fp32 in (("cast on the GPU, sent as FP32", True), ("sent as they are, cast on the CPU", False)):
        rows.append(
            Row(
                f"{_name_of(best)}, bf16 grads {'as FP32' if as_fp32 else 'as they are'}",
                f"bf16 main grads, {what}",
                partial(bench.update, best, low=True, grads_as_fp32=as_fp32),
            )
        )


def _rounds(context: Context, bench: Bench, rows: list[Row], best: str) -> None:
    """Every row once a round, in a random order, for as long as there is time; medians and ratios."""
    rng = random.Random(0)
    predicted = _predictions(context, bench, rows)
    longest = 0.0
    for number in range(context.sizes.rounds):
        began = time.perf_counter()
        if number > 0 and context.left() < 1.2 * longest + 5:
            if number < 3 and not context.dry:
                context.note(f"Only {number} rounds were measured, for lack of time.")
            break
        for row in rng.sample(rows, len(rows)):
            row.seconds.append(bench.seconds(row.step))
        longest = max(longest, time.perf_counter() - began)
        context.value("rows", _table(bench, rows, predicted, best))


def _table(bench: Bench, rows: list[Row], predicted: Mapping[str, float], best: str) -> list[dict[str, Any]]:
    """The rows; ratios are medians of each round's ratio to the engine at its best share."""
    reference = next(row for row in rows if row.name == best)
    return [
        {
            "name": row.name,
            "what": row.what,
            "seconds": row.seconds,
            "median_seconds": median(row.seconds),
            "parameters_per_second": bench.numel / median(row.seconds),
            "times_ours": median([mine / best for mine, best in zip(row.seconds, reference.seconds, strict=True)]),
            "predicted_seconds": predicted.get(row.name),
        }
        for row in rows
    ]


# --- the model


def _predictions(context: Context, bench: Bench, rows: list[Row]) -> dict[str, float]:
    """Seconds of each program on the virtual clock, with the rates that were measured while the lanes ran together."""
    rates = _rates(context)
    if rates is None:
        context.note("No predictions: the rates were not measured.")
        return {}
    duration = durations([subgroup.numel for subgroup in bench.partition.subgroups], rates)
    return {row.name: simulate(row.program, duration).makespan for row in rows if row.program is not None}


def _rates(context: Context) -> dict[OpKind, Rate] | None:
    measured = context.earlier.get("rates", {})
    if not {"links_bytes_per_second", "device_update", "host_update"} <= measured.keys():
        return None
    links = measured["links_bytes_per_second"]["together"]
    return {
        OpKind.GRAD_TO_HOST: Rate(links["d2h"], 4),
        OpKind.UPDATE_ON_HOST: Rate(measured["host_update"]["parameters_per_second_beside_copies"]),
        OpKind.PARAM_TO_DEVICE: Rate(links["h2d"], 2),
        OpKind.STATES_TO_DEVICE: Rate(links["h2d"], BYTES_PER_PARAMETER),
        OpKind.UPDATE_ON_DEVICE: Rate(measured["device_update"]["chosen"]["parameters_per_second"]),
        OpKind.STATES_TO_HOST: Rate(links["d2h"], BYTES_PER_PARAMETER),
    }


# --- the lanes


def _lanes(context: Context, bench: Bench, best: Fraction) -> None:
    """How busy each lane is in one step more, with events around every operation."""
    serial = every_kth_with_serial_copies(bench.shapes(), 2)
    programs: dict[str, Program] = {
        _name_of(best): bench.program(best),
        _name_of(HALF): bench.program(HALF),
        "k=2, serial copies": serial,
    }
    found, timelines = {}, {}
    for name, program in programs.items():
        lanes = Lanes(context, bench.device)
        bench.run(program, device=lanes)
        found[name], timelines[name] = lanes.busy(), lanes.timeline()
        context.value("timelines", timelines)
        context.value("busy_fraction_of_lanes", found)
