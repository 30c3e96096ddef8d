# SPDX-License-Identifier: Apache-2.0
"""Checks that the update has no race: random orders change no bit, and no dependency can be left out.

`make race-check` runs it. Two parts, both with the real engine on tiny subgroups and the adversarial device:

orders      Varied programs in tens of thousands of random orders, half of them with one operation held back as long
            as possible. Every step has to give the bits of the sequential run.
mutations   Of varied programs, every declared dependency is removed alone, and each removal has to be caught twice:
            by the declared reads and writes, in a run that holds back the operation that is no longer waited for; and
            with that check off, by other bits in the result. One that is not caught is a dependency that nothing
            needs.

Exit status 0 when both hold, 1 otherwise.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch
from tqdm import tqdm

from megatron_dos.device.host import HostDevice
from megatron_dos.device.sim import RaceError, SimDevice, describe
from megatron_dos.gpu_check.exchange import ExchangedDevice, set_back
from megatron_dos.kernels import AdamScalars, device_kernel
from megatron_dos.program.partition import STATES, OwnedRange, Partition, partition
from megatron_dos.program.schedule import Op, Program
from megatron_dos.update.engine import EngineOptions, UpdateEngine
from megatron_dos.update.operations import StepInputs

__all__ = ["Case", "Mutant", "Mutations", "Run", "check_mutations", "check_orders", "make_case"]

STEPS = 3  # one after the other: the second and third find slots and states as the one before left them
MAX_SUBGROUPS = 17
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TRIES = 20  # for a removed dependency to show in the result


@dataclass(frozen=True)
class Step:
    """What changes from step to step.

    Grads of the buckets in `early` are sent before the step where the CPU has a use for them; in a `skipped` step that
    is all that happens, as when a grad is not finite.
    """

    share: Fraction
    grads: list[torch.Tensor]
    scalars: list[AdamScalars]
    grad_scales: dict[int, tuple[float, float]]
    early: list[tuple[int, int]]
    skipped: bool


@dataclass(frozen=True)
class Case:
    """A partition, its first params and some steps; `options` holds all but the share.

    The grads of the owners in `changing` change after the early ones were sent.
    """

    partition: Partition
    buckets: dict[tuple[int, int], list[int]]
    params: list[torch.Tensor]
    options: EngineOptions
    steps: list[Step]
    changing: frozenset[int]


@dataclass
class Run(ExchangedDevice):
    """An engine on a case, and what its steps gave. The engine's device is this object."""

    case: Case
    device: Any
    params: list[torch.Tensor] = field(init=False)
    engine: UpdateEngine = field(init=False)

    def __post_init__(self) -> None:
        self.params = [param.clone() for param in self.case.params]
        kernel = device_kernel.select("auto", torch.device("cpu"), threads=1)
        self.engine = UpdateEngine(
            self.case.partition, self.params, self.case.options, self, kernel, self.case.changing
        )
        self.restart()

    def restart(self) -> None:
        """Back to the first step's start."""
        set_back(self.engine, self.params, self.case.params)

    def program(self, step: Step) -> Program:
        """What the step will run."""
        device, self.device = self.device, HostDevice()
        self._send_early(step)
        program = self.engine.program(step.grads)
        self.engine.forget_early()
        self.device = device
        return program

    def _send_early(self, step: Step) -> None:
        self.engine.set_host_share(step.share)
        final = {owner: step.grads[owner].clone() for owner in self.case.changing}
        for owner in final:
            step.grads[owner].fill_(float("nan"))
        for bucket in step.early:
            self.engine.send_early([bucket], step.grads.__getitem__)
        for owner, grad in final.items():
            step.grads[owner].copy_(grad)

    def step(self, step: Step) -> list[torch.Tensor]:
        """Run one step; its result: states, params, and each bucket's params as they were when it was released."""
        released: dict[tuple[int, int], torch.Tensor] = {}

        def release(bucket: tuple[int, int]) -> None:
            assert bucket not in released, f"bucket {bucket} was released twice"
            released[bucket] = as_bytes([self.params[owner] for owner in self.case.buckets[bucket]])

        self._send_early(step)
        if step.skipped:
            self.engine.forget_early()
        else:
            self.engine.update(StepInputs(step.grads, step.scalars, step.grad_scales, release))
        states = [self.engine.owner_states(owner) for owner in range(len(self.params))]
        flat = as_bytes([of_owner[name] for name in STATES for of_owner in states] + self.params)
        return [flat, *(released[bucket] for bucket in sorted(released))]


def as_bytes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All bytes of flat tensors in one new tensor."""
    return torch.cat([tensor.view(torch.uint8) for tensor in tensors])


def same_bits(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def make_case(seed: int) -> Case:
    """A random case: 1 to 17 subgroups in 1 to 4 buckets, all dtypes and shares, 1 to 4 slots of each kind."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    parts, buckets, numels = _random_partition(rng)
    # Of one dtype each in half of the cases, as most models have it, else mixed.
    param_dtypes, grad_dtypes = (
        [fixed or rng.choice(DTYPES) for _ in numels]
        for fixed in (rng.choice((rng.choice(DTYPES), None)) for _ in "pg")
    )
    options = EngineOptions(
        threads=1,
        grads_as_fp32=rng.random() < 0.5,
        host_slots=rng.randint(1, 4),
        device_slots=rng.randint(1, 4),
        early_slots=rng.choice((0, 0, 1, 2, 3, 4)),
        resident_share=rng.choice((0, 0, 0, Fraction(1, 3), Fraction(7, 10))),
    )
    changing = frozenset(owner for owner in range(len(numels)) if rng.random() < 0.3)
    shares = (Fraction(0), Fraction(1), Fraction(rng.randint(1, 99), 100), Fraction(rng.randint(1, 99), 100))
    steps = [
        Step(
            share=rng.choice(shares),
            grads=[torch.randn(n, generator=generator).to(d) for n, d in zip(numels, grad_dtypes, strict=True)],
            scalars=[
                AdamScalars.at_step(number, 1e-2, (0.9, 0.95), 1e-8, 0.1 * (owner % 2), decoupled=True)
                for owner in range(len(numels))
            ],
            grad_scales={
                owner: (rng.choice((1.0, 0.125, 0.3)), rng.uniform(0.1, 1))
                for owner in range(len(numels))
                if rng.random() < 0.5
            },
            early=[bucket for bucket in sorted(buckets) if rng.random() < 0.8],
            skipped=number > 1 and rng.random() < 0.2,
        )
        for number in range(1, STEPS + 1)
    ]
    params = [torch.randn(n, generator=generator).to(d) for n, d in zip(numels, param_dtypes, strict=True)]
    return Case(parts, buckets, params, options, steps, changing)


def _random_partition(rng: random.Random) -> tuple[Partition, dict[tuple[int, int], list[int]], list[int]]:
    """A partition of at most 17 subgroups, the owners of each bucket, and the elements of each owner."""
    wanted = rng.randint(1, MAX_SUBGROUPS)
    while True:
        owners = [(rng.randint(1, 40), bucket) for bucket in range(rng.randint(1, 4)) for _ in range(rng.randint(1, 5))]
        buckets: dict[tuple[int, int], list[int]] = {}
        ranges, start = [], 0
        for owner, (numel, bucket) in enumerate(owners):
            key = (bucket // 2, bucket)
            buckets.setdefault(key, []).append(owner)
            ranges.append(OwnedRange(owner, key, start, numel))
            start += numel
        parts = partition(ranges, max(start // wanted, 1))
        if len(parts.subgroups) <= MAX_SUBGROUPS:
            return parts, buckets, [numel for numel, _ in owners]


def check_orders(seed: int, orders: int) -> list[str]:
    """Run one case in `orders` random orders, a step each. The faults found, in words; none when all is well."""
    case = make_case(seed)
    sequential = Run(case, HostDevice())
    expected = [sequential.step(replace(step, share=Fraction(1), early=[])) for step in case.steps]
    device = SimDevice(seed)
    run = Run(case, device)
    rng = random.Random(seed)
    for order in range(orders):
        number = order % STEPS
        if number == 0:
            run.restart()
        step = case.steps[number]
        device.hold_back = rng.randrange(len(run.program(step).ops)) if rng.random() < 0.5 else None
        where = f"case {seed}, order {order} (step {number + 1}, holding back operation {device.hold_back})"
        try:
            result = run.step(step)
        except RaceError as error:
            return [f"{where}: {error}"]
        if not same_bits(result, expected[number]):
            return [f"{where}: the result differs from the sequential run's"]
    return []


@dataclass
class Mutations:
    """How many dependencies were removed, and how many of the removals were caught, by either means."""

    total: int = 0
    by_check: int = 0
    by_bits: int = 0
    survivors: list[str] = field(default_factory=list)

    def add(self, other: Mutations) -> None:
        self.total += other.total
        self.by_check += other.by_check
        self.by_bits += other.by_bits
        self.survivors += other.survivors


@dataclass
class Mutant:
    """A device that runs programs with operation `op` not waiting for `dependency`, on `device`."""

    op: int
    dependency: int
    device: SimDevice

    def begin(self, op: Op, handler: Any) -> None:
        self.device.begin(op, handler)

    def join(self) -> None:
        self.device.join()

    def synchronize(self) -> None:
        self.device.synchronize()

    def run(self, program: Program, handlers: Any, memory: Any) -> None:
        op = program.ops[self.op]
        kept = tuple(dependency for dependency in op.depends_on if dependency != self.dependency)
        ops = [*program.ops[: self.op], replace(op, depends_on=kept), *program.ops[self.op + 1 :]]
        self.device.run(replace(program, ops=tuple(ops)), handlers, memory)


def check_mutations(seed: int) -> Mutations:
    """Remove each dependency of the first step of one case alone, and see whether that is caught."""
    case = make_case(seed)
    step = case.steps[0]
    run = Run(case, HostDevice())
    expected = run.step(step)
    program = run.program(step)
    found = Mutations()
    for op in program.ops:
        for dependency in op.depends_on:
            found.total += 1
            by_check = _caught_by_check(run, step, op.index, dependency, seed)
            by_bits = _caught_by_bits(run, step, op.index, dependency, seed, expected)
            found.by_check += by_check
            found.by_bits += by_bits
            for caught, means in ((by_check, "the declared reads and writes"), (by_bits, "the bits of the result")):
                if not caught:
                    what = f"{describe(op)} need not wait for {describe(program.ops[dependency])}"
                    found.survivors.append(f"case {seed}: by {means}, {what}")
    return found


def _caught_by_check(run: Run, step: Step, op: int, dependency: int, seed: int) -> bool:
    """Whether the one order that holds back what is no longer waited for shows it."""
    run.restart()
    run.device = Mutant(op, dependency, SimDevice(seed, hold_back=dependency))
    try:
        run.step(step)
    except RaceError:
        return True
    return False


def _caught_by_bits(
    run: Run, step: Step, op: int, dependency: int, seed: int, expected: Sequence[torch.Tensor]
) -> bool:
    """Whether one of several such orders gives another result."""
    for number in range(TRIES):
        run.restart()
        run.device = Mutant(op, dependency, SimDevice(seed + number, hold_back=dependency, check=False))
        if not same_bits(run.step(step), expected):
            return True
    return False


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--orders", type=int, default=30000, help="random orders in all (default %(default)s)")
    parser.add_argument("--orders-per-case", type=int, default=30, help="of each program (default %(default)s)")
    parser.add_argument("--mutated", type=int, default=150, help="cases of the mutation run (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first case (default %(default)s)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: one a CPU)")
    args = parser.parse_args(argv)
    began = time.monotonic()
    cases = -(-args.orders // args.orders_per_case)
    faults: list[str] = []
    seeds = range(args.seed, args.seed + cases)
    with tqdm(total=cases * args.orders_per_case, desc="orders", unit="order") as bar:
        for found in _each(args.jobs, check_orders, seeds, [args.orders_per_case] * cases):
            faults += found
            bar.update(args.orders_per_case)
    mutations = Mutations()
    mutated = range(args.seed, args.seed + args.mutated)
    for of_case in tqdm(_each(args.jobs, check_mutations, mutated), total=args.mutated, desc="mutations", unit="case"):
        mutations.add(of_case)
    for line in [*faults, *mutations.survivors]:
        print(line)
    print(
        f"orders: {cases * args.orders_per_case} in {cases} cases, {len(faults)} cases with a fault\n"
        f"mutations: {mutations.total} dependencies of {args.mutated} cases removed one by one: "
        f"{_percent(mutations.by_check, mutations.total)} caught by the declared reads and writes, "
        f"{_percent(mutations.by_bits, mutations.total)} by the bits of the result alone\n"
        f"time: {time.monotonic() - began:.0f} s in {args.jobs} process{'es' if args.jobs > 1 else ''}"
    )
    return 1 if faults or mutations.survivors or not mutations.total else 0


def _each(jobs: int, function: Callable[..., Any], *arguments: Iterable[Any]) -> Iterator[Any]:
    """`map`, in `jobs` processes when that is more than one."""
    if jobs == 1:
        yield from map(function, *arguments)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_one_thread) as pool:
        yield from pool.map(function, *arguments)


def _percent(part: int, total: int) -> str:
    return f"{part} ({100 * part / max(total, 1):.1f} %)"


def _one_thread() -> None:
    """The tensors are tiny, and each CPU has a process."""
    torch.set_num_threads(1)


if __name__ == "__main__":
    sys.exit(main())
