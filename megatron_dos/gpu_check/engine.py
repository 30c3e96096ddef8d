# SPDX-License-Identifier: Apache-2.0
"""The engine on real streams gives the bits of the sequential update, whatever is late; and lateness does show.

The expected bits come from an engine on host tensors that updates one subgroup after the other with the CPU kernel.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch

from megatron_dos.device import CudaDevice, HostDevice
from megatron_dos.device.sim import SimDevice, describe
from megatron_dos.gpu_check.context import Context
from megatron_dos.gpu_check.exchange import ExchangedDevice, set_back
from megatron_dos.gpu_check.late import Delays, Without
from megatron_dos.kernels import AdamScalars, device_kernel
from megatron_dos.program.partition import STATES, OwnedRange, Partition, partition
from megatron_dos.program.schedule import OpKind, Program
from megatron_dos.update.engine import EngineOptions, UpdateEngine
from megatron_dos.update.operations import StepInputs

__all__ = ["Case", "Run", "run"]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STEPS = 4
SCHEDULES: dict[str, tuple[Fraction | float, ...]] = {
    "share 0": (0,) * STEPS,
    "share 0.3": (Fraction(3, 10),) * STEPS,
    "share 0.5": (Fraction(1, 2),) * STEPS,
    "share 1": (1,) * STEPS,
    "share changed between steps": (1, 0, Fraction(1, 2), Fraction(3, 10)),
}
"""CPU's share of each step."""
DTYPES: dict[str, tuple[Sequence[torch.dtype], Sequence[torch.dtype]]] = {
    "bf16 params, FP32 grads": ([BF16], [FP32]),
    "bf16 params and grads": ([BF16], [BF16]),
    "fp16 params and grads": ([FP16], [FP16]),
    "FP32 params and grads": ([FP32], [FP32]),
    "mixed": ([BF16, FP32, FP16], [FP32, BF16, BF16, FP16]),
}
"""Dtypes of params and of grads, by turns over the owners."""
BUCKETS = ((0, 0), (0, 1), (1, 0))
TRIES = 3  # for the removal of a dependency to show, with each delay
LATENESS = (30.0, 100.0, 300.0)
"""Milliseconds by which what was waited for is late: longer ones where the shorter do not show."""


@dataclass(frozen=True)
class Case:
    """A partition, first params and the inputs of some steps, on the host.

    The grads of the owners in `changing` change after those that are sent early were sent.
    """

    partition: Partition
    owners_of: dict[tuple[int, int], list[int]]
    params: list[torch.Tensor]
    grads: list[list[torch.Tensor]]
    scalars: list[list[AdamScalars]]
    grad_scales: dict[int, tuple[float, float]]
    changing: frozenset[int]


def make_case(dtypes: str, elements: int, subgroups: int, seed: int, odd: bool = False) -> Case:
    """A case of about `elements` elements in three buckets and about `subgroups` subgroups.

    `odd`: params begin and end at any element; else at multiples of 64, as Megatron lays them out.
    """
    rng, generator = random.Random(seed), torch.Generator(device="cpu").manual_seed(seed)
    weights = [rng.uniform(0.02, 1) for _ in range(9)]
    unit = 1 if odd else 64
    numels = [max(round(elements * weight / sum(weights)) // unit * unit, 1) for weight in weights]
    owners_of: dict[tuple[int, int], list[int]] = {}
    ranges, start = [], 0
    for owner, numel in enumerate(numels):
        bucket = BUCKETS[owner * len(BUCKETS) // len(numels)]
        owners_of.setdefault(bucket, []).append(owner)
        ranges.append(OwnedRange(owner, bucket, start, numel))
        start += numel
    param_dtypes, grad_dtypes = DTYPES[dtypes]

    def random_tensors(dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
        each = itertools.cycle(dtypes)
        return [torch.randn(numel, generator=generator, device="cpu").to(next(each)) for numel in numels]

    return Case(
        partition(ranges, max(start // subgroups, 1)),
        owners_of,
        random_tensors(param_dtypes),
        [random_tensors(grad_dtypes) for _ in range(STEPS)],
        [
            [
                AdamScalars.at_step(step, 1e-2, (0.9, 0.95), 1e-8, 0.1 * (owner % 2), True)
                for owner in range(len(numels))
            ]
            for step in range(1, STEPS + 1)
        ],
        grad_scales={
            owner: (rng.choice((1.0, 0.125, 0.3)), rng.uniform(0.1, 1))
            for owner in range(len(numels))
            if rng.random() < 0.5
        },
        changing=frozenset(rng.sample(range(len(numels)), 3)),
    )


@dataclass
class Run(ExchangedDevice):
    """An engine on a case. The engine's device is this object, so that `device` can be exchanged."""

    case: Case
    place: torch.device
    device: Any
    options: EngineOptions
    params: list[torch.Tensor] = field(init=False)
    engine: UpdateEngine = field(init=False)

    def __post_init__(self) -> None:
        self.params = [param.to(self.place, copy=True) for param in self.case.params]
        self.grads = [[grad.to(self.place) for grad in grads] for grads in self.case.grads]
        kernel = device_kernel.select("auto", self.params[0].device, self.options.threads)
        self.engine = UpdateEngine(self.case.partition, self.params, self.options, self, kernel, self.case.changing)
        self.restart()

    def restart(self) -> None:
        """Back to before the first step. Nothing may be in flight."""
        set_back(self.engine, self.params, self.case.params)

    def program(self, number: int, share: Fraction | float) -> Program:
        self.engine.set_host_share(share)
        return self.engine.program(self.grads[number])

    def step(self, number: int, share: Fraction | float) -> dict[tuple[int, int], torch.Tensor]:
        """Enqueue a step; the params of each bucket as they are when it is released."""
        self.engine.set_host_share(share)
        released: dict[tuple[int, int], torch.Tensor] = {}

        def release(bucket: tuple[int, int]) -> None:
            assert bucket not in released, f"bucket {bucket} was released twice"
            released[bucket] = _bytes([self.params[owner] for owner in self.case.owners_of[bucket]])

        case = self.case
        if self.engine.memory.early_grads:
            self._send_early(self.grads[number])
        self.engine.update(StepInputs(self.grads[number], case.scalars[number], case.grad_scales, release))
        return released

    def _send_early(self, grads: list[torch.Tensor]) -> None:
        """As a backward pass does: bucket by bucket, and some grads are final only afterwards."""
        final = {owner: grads[owner].clone() for owner in self.case.changing}
        for owner in final:
            grads[owner].fill_(float("nan"))
        for bucket in self.engine.memory.buckets:
            self.engine.send_early([bucket], grads.__getitem__)
        for owner, grad in final.items():
            grads[owner].copy_(grad)

    def result(self, released: dict[tuple[int, int], torch.Tensor]) -> list[torch.Tensor]:
        """All bits of states, params and released buckets, on the host."""
        params = _bytes(self.params).cpu()  # on the caller's stream: after the step
        if self.place.type == "cuda":
            torch.cuda.synchronize()
        states = [self.engine.owner_states(owner) for owner in range(len(self.params))]
        flat = [_bytes([of_owner[name].cpu() for of_owner in states]) for name in STATES]
        return [*flat, params, *(released[bucket].cpu() for bucket in sorted(released))]


def _bytes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.view(torch.uint8) for tensor in tensors])


NAMES = (*STATES, "params", *(f"params released with bucket {bucket}" for bucket in BUCKETS))


def _differences(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> list[str]:
    """What differs, in words; nothing when all bits are the same."""
    if len(got) != len(wanted):
        return [f"{len(got) - len(NAMES) + len(BUCKETS)} buckets were released instead of {len(BUCKETS)}"]
    return [
        f"{name}: {int((one != other).sum())} of {one.numel()} bytes differ"
        for name, one, other in zip(NAMES, got, wanted, strict=True)
        if not torch.equal(one, other)
    ]


def expected_results(case: Case) -> list[list[torch.Tensor]]:
    """After each step: the sequential update on host tensors."""
    sequential = Run(case, torch.device("cpu"), HostDevice(), EngineOptions(threads=0))
    return [sequential.result(sequential.step(number, 1)) for number in range(STEPS)]


# --- the stage


def run(context: Context) -> None:
    faults: list[str] = []
    counts = {"runs": 0, "steps": 0}
    elements = context.sizes.engine_elements
    began = time.monotonic()
    # On the device, its bits, and for which case and options they are.
    engine: Any = None
    expected: list[list[torch.Tensor]] = []
    of: tuple[Any, ...] = ()
    for required in context.required(list(_all_required()), "required runs of the engine"):
        number, dtypes, odd, options, schedule, grads_as_fp32, synchronized = required
        if of[:1] != (number,):
            case = make_case(dtypes, elements, context.sizes.engine_subgroups, seed=number, odd=odd)
            expected = expected_results(case)
            context.value("counts", dict(counts))
        if of != (number, options):
            engine, of = Run(case, context.device, None, options), (number, options)
        way = "in part in the backward pass" if options.early_slots else "as FP32" if grads_as_fp32 else "as is"
        what = f"{dtypes}, {schedule}, grads sent {way}"
        engine.engine.use(replace(options, grads_as_fp32=grads_as_fp32))
        faults += _compare(context, engine, expected, SCHEDULES[schedule], synchronized, number, what, counts)
    partly = bool(context.result["not_made"])
    context.value("required_seconds", round(time.monotonic() - began, 2))
    _sensitivity(context)
    faults += _campaign(context, counts)
    context.value("counts", dict(counts))
    if not counts["runs"]:
        return
    which = (
        "a part of the required ones"
        if partly
        else "all dtypes, shares 0, 0.3, 0.5, 1 and changing, both grad transfers, "
        "with and without waiting between steps"
    )
    context.check(
        "the engine with random delays on every stream has the bits of the sequential update",
        not faults,
        f"{counts['steps']} steps in {counts['runs']} runs: {which}"
        if not faults
        else "; ".join(faults[:5]),
    )


def _all_required() -> Iterator[tuple[int, str, bool, EngineOptions, str, bool, bool]]:
    """(number of the case, dtypes, whether it is odd, options) and what `_required` gives."""
    for number, (dtypes, odd) in enumerate([*((name, False) for name in DTYPES), ("mixed", True)]):
        for options in (EngineOptions(threads=0), EngineOptions(threads=0, early_slots=4, resident_share=0.2)):
            for each in _required(odd or options.early_slots > 0):
                yield (number, dtypes, odd, options, *each)


def _required(few: bool) -> Iterator[tuple[str, bool, bool]]:
    """(schedule, grads_as_fp32, whether each step is waited for and compared).

    Few where each alignment of the arrays is another compilation, or only the way of the grads differs.
    """
    if few:
        yield "share 0.5", True, True
        yield "share changed between steps", True, False
        return
    for schedule, grads_as_fp32 in itertools.product(SCHEDULES, (True, False)):
        yield schedule, grads_as_fp32, True
    yield "share changed between steps", True, False


def _compare(
    context: Context,
    engine: Run,
    expected: list[list[torch.Tensor]],
    shares: Sequence[Fraction | float],
    synchronized: bool,
    seed: int,
    what: str,
    counts: dict[str, int],
) -> list[str]:
    """One run of all steps; the faults found. Without synchronization only the last step's result is looked at."""
    if context.dry and counts["runs"] % 2:
        name, engine.device = "random order", SimDevice(seed)
    else:
        longest = 0.05 if context.dry else 1.0
        name, engine.device = "CUDA streams", Delays(context, _cuda(context), seed, longest, poisons=synchronized)
    engine.restart()
    counts["runs"] += 1
    for number, share in enumerate(shares):
        released = engine.step(number, share)
        counts["steps"] += 1
        if not synchronized and number + 1 < len(shares):
            continue
        differences = _differences(engine.result(released), expected[number])
        if differences:
            return [f"{what}, {name}, step {number + 1}: {', '.join(differences)}"]
    return []


_made: list[CudaDevice] = []


def _cuda(context: Context) -> CudaDevice:
    """The one device of this process, as in training."""
    if not _made:
        _made.append(CudaDevice(context.device))
    return _made[0]


def _campaign(context: Context, counts: dict[str, int]) -> list[str]:
    """Random runs while there is time: slots, strides, shares, order of buckets, early grads, resident states."""
    faults: list[str] = []
    for number in range(context.sizes.engine_campaign):
        if context.left() < 3 or faults:
            break
        rng = random.Random(1000 + number)
        dtypes = rng.choice(list(DTYPES))
        elements, subgroups = rng.randint(1, context.sizes.engine_elements), rng.randint(1, 17)
        case = make_case(dtypes, elements, subgroups, seed=1000 + number)
        options = EngineOptions(
            threads=rng.choice((0, 1, 2)),
            stride=rng.choice((0, 0, 1, 2, 3)),
            grads_as_fp32=rng.random() < 0.5,
            last_bucket_first=rng.random() < 0.5,
            host_slots=rng.randint(1, 4),
            device_slots=rng.randint(1, 4),
            early_slots=rng.choice((0, 0, 2, 5)),
            resident_share=rng.choice((0, 0, Fraction(1, 3))),
        )
        shares = [Fraction(rng.randint(0, 100), 100) for _ in range(STEPS)]
        synchronized = rng.random() < 0.5
        what = f"random run {number}: {dtypes}, {options}, shares {[str(share) for share in shares]}"
        engine = Run(case, context.device, None, options)
        faults += _compare(context, engine, expected_results(case), shares, synchronized, number, what, counts)
    return faults


# --- the check can fail


def _sensitivity(context: Context) -> None:
    """Remove dependencies, one of each kind, and let what was waited for be late: the bits must change."""
    case = make_case("bf16 params and grads", context.sizes.engine_elements, 13, seed=77)
    run = Run(case, context.device, None, EngineOptions(threads=0, host_share=Fraction(1, 2)))
    expected = expected_results(case)[0]
    program = run.program(0, Fraction(1, 2))
    survivors, total, kinds = [], 0, _edges(program)
    longest = LATENESS[0]
    for edges in context.required(kinds, "kinds of dependency, one removed of each"):
        total += 1
        # On a busy machine what waits may be later still. A dry run's order of operations knows no delay.
        tries = itertools.product(LATENESS[:1] if context.dry else LATENESS, edges[:TRIES])
        shown = next((late for late, edge in tries if _shows(context, run, expected, edge[0], edge[1], late)), None)
        longest = max(longest, shown or 0)
        if shown is None:
            op, dependency = edges[0]
            survivors.append(f"{describe(program.ops[op])} without waiting for {describe(program.ops[dependency])}")
    seen = {"kinds": total, "seen": total - len(survivors), "not_seen": survivors, "longest_delay_ms": longest}
    context.value("removed_dependencies", seen)
    if kinds and not total:
        return
    context.check(
        "a removed dependency shows in the bits when the operation before is late",
        total > 0 and not survivors,
        f"{total} kinds of dependency, one removed of each" if not survivors else "not seen: " + "; ".join(survivors),
    )


def _edges(program: Program) -> list[list[tuple[int, int]]]:
    """For each two kinds of operation of which one waits for the other: (operation, dependency), in a mixed order."""
    found: dict[tuple[OpKind, OpKind], list[tuple[int, int]]] = {}
    for op in program.ops:
        for dependency in op.depends_on:
            found.setdefault((program.ops[dependency].kind, op.kind), []).append((op.index, dependency))
    rng = random.Random(5)
    return [rng.sample(edges, len(edges)) for edges in found.values()]


def _shows(
    context: Context, run: Run, expected: list[torch.Tensor], op: int, dependency: int, lateness: float
) -> bool:
    """Whether one step without this dependency gives other bits where it is late by that many milliseconds."""
    if context.dry:
        late: Any = SimDevice(seed=op, hold_back=dependency, check=False)
    else:
        late = Delays(context, _cuda(context), seed=0, late=dependency, lateness=lateness)
    run.device = Without(op, dependency, late)
    run.restart()
    return bool(_differences(run.result(run.step(0, Fraction(1, 2))), expected))
