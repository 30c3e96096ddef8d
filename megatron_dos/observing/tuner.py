# SPDX-License-Identifier: Apache-2.0
"""Which share of the parameters the GPU updates, found while the training runs: measured steps in, shares out.

The tuner knows what each kind of operation takes for a parameter, as measured in the last steps, and asks the virtual
clock how long the step would take with other shares. It moves to the best one and measures again, since copies and
updates on the CPU slow one another down in host memory (see [Note: contention]). It stops when no share promises a gain
that is worth it; from then on it only watches, and starts again when steps take clearly more or less time than before.

Each rank tunes for itself, from its own steps: its links and its CPUs may differ from its neighbours', and no bit of
the result depends on the share. What ranks must agree on, such as threads and host memory, does not depend on it
either, so nothing is communicated. Equal measurements give equal choices.

[Note: contention] Where host memory is the limit, operations that use it are slower than they would be alone, and what
they take describes that one share only: lanes look busy, whatever the share. That it is the limit shows in operations
that take longer than they did with another share. Then what counts is bytes: host memory is a further lane, with the
highest rate that a step has reached, and the least that each operation has taken is its own cost. Even that may have
been slowed down, so once, for one trial, copies are taken to be faster alone than they were ever seen.

[Note: warming up] When operations run for the first time, kernels are compiled and memory is touched, which may take
seconds. Steps in which a kind of operation is new are not learned from, nor is the first with another share if it takes
much longer than those before the move, which promised less: another kernel may have been compiled for what this share
is the first to stream.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from megatron_dos.observing.figures import StepFigures, SubgroupTraffic
from megatron_dos.planning.choice import choose
from megatron_dos.planning.clock import HostMemory, Rate, Sharing, durations, simulate
from megatron_dos.planning.machine import Machine
from megatron_dos.planning.workload import MemoryFitError, Workload
from megatron_dos.program.partition import BYTES_PER_PARAMETER
from megatron_dos.program.schedule import OpKind, Placement, Program
from megatron_dos.program.timeline import FULL_DUPLEX

__all__ = ["START_SHARE", "Decision", "FirstChoice", "ShareTuner", "first_choice"]

START_SHARE = Fraction(1, 2)
"""The CPU's share of the first steps on an unknown machine: all lanes work, so all are measured."""

SURPRISING = 1.5  # times as long as the steps before, see [Note: warming up]
WORTH_IT = 0.02  # a predicted gain below this part of the step is none
CONTENDED = 1.08  # operations that take longer than with another share by more than this factor hinder one another
DRIFTED = 0.10  # steps that take this part more or less than before are another situation
RECENT = 5  # steps from which a drift is seen
ENOUGH = 2  # steps with one share before it is settled on
HOPE = 1.5  # how much faster than it was ever seen a copy may be alone
MOST_MOVES = 6
MOST_SHARES = 200  # that are compared
MOST_SIMULATED = 12
MOST_SUBGROUPS = 256  # beyond, filling and draining the pipeline takes so little that the busiest lane says enough

# For what has not been measured yet, the best that hardware does: so what might be better is tried, and thereby
# measured, and what is worse even so is not. Bytes and parameters a second.
_BEST_LINK = 60e9
_BEST_UPDATE = {OpKind.UPDATE_ON_HOST: 8e9, OpKind.UPDATE_ON_DEVICE: 200e9, OpKind.CAST_GRAD: 500e9}

_SAME_LINK = (
    (OpKind.STATES_TO_DEVICE, OpKind.PARAM_TO_DEVICE),
    (OpKind.PARAM_TO_DEVICE, OpKind.STATES_TO_DEVICE),
    (OpKind.STATES_TO_HOST, OpKind.GRAD_TO_HOST),
    (OpKind.GRAD_TO_HOST, OpKind.STATES_TO_HOST),
)
_COPIES = {known for known, _ in _SAME_LINK}
_LANES = sorted(set(FULL_DUPLEX.values()))


@dataclass(frozen=True)
class FirstChoice:
    """What a training begins with, before it has measured anything.

    Attributes:
        host_share: the CPU's share of the parameters that are not resident on the GPU.
        costs: kind of operation -> seconds a parameter, as far as they are known.
        reason: where the share is from, to be read after it; empty if the user gave it.
    """

    host_share: Fraction
    costs: Mapping[OpKind, float] = field(default_factory=dict)
    reason: str = ""


def first_choice(machine: Machine | None, work: Workload, resident_share: Fraction = Fraction(0)) -> FirstChoice:
    """The share to begin with: the best of the performance model if the machine has been measured, else half.

    Args:
        machine: what `megatron-dos calibrate` has measured on this node, if it has.
        work: the update of this rank.
        resident_share: part of the parameters whose states stay on the GPU.
    """
    if machine is None:
        return FirstChoice(START_SHARE, reason=" to begin with (nothing measured yet)")
    costs = {
        OpKind.STATES_TO_DEVICE: BYTES_PER_PARAMETER / machine.h2d_together,
        OpKind.PARAM_TO_DEVICE: work.param_bytes / machine.h2d_together,
        OpKind.STATES_TO_HOST: BYTES_PER_PARAMETER / machine.d2h_together,
        OpKind.GRAD_TO_HOST: work.grad_bytes / machine.d2h_together,
        OpKind.UPDATE_ON_HOST: 1 / machine.cpu_update(work.threads, work.ranks),
        OpKind.UPDATE_ON_DEVICE: 1 / machine.gpu_update,
    }
    try:
        chosen = choose(machine, work, resident_share=resident_share)
    except MemoryFitError:  # whoever allocates knows better, and says more
        return FirstChoice(START_SHARE, costs, " to begin with")
    if chosen.resident_share == 1:  # of whole subgroups, which may be more than was asked for
        return FirstChoice(START_SHARE, costs)
    share = min(chosen.host_share / (1 - chosen.resident_share), Fraction(1))
    return FirstChoice(share, costs, f" to begin with (calibrated machine; limited by {chosen.limiting})")


@dataclass(frozen=True)
class Decision:
    """What the tuner made of a step.

    Attributes:
        step: the measured step.
        host_share: the CPU's share from now on.
        reason: a line for the log, without the share.
    """

    step: int
    host_share: Fraction
    reason: str


@dataclass(frozen=True)
class _Model:
    """What a step is expected to take: seconds a parameter by kind of operation, bytes a second of host memory."""

    costs: Mapping[OpKind, float]
    memory_rate: float = math.inf


@dataclass
class _Seen:
    """What steps with one share took, and their operations on average."""

    seconds: list[float] = field(default_factory=list)
    costs: dict[OpKind, float] = field(default_factory=dict)

    def add(self, figures: StepFigures) -> None:
        self.seconds.append(figures.seconds)
        for kind, cost in figures.costs.items():
            known = self.costs.get(kind, cost)
            self.costs[kind] = known + (cost - known) / len(self.seconds)


class ShareTuner:
    """Finds the CPU's share.

    Args:
        traffic: what each subgroup costs.
        program_at: the program of a step with a CPU's share.
        host_share: to begin with.
        costs: kind of operation -> seconds a parameter, as far as they are known of this machine.

    Attributes:
        host_share: the CPU's share of the next step, of what is not resident on the GPU.
        settled: whether it stays unless steps begin to take another time.
    """

    def __init__(
        self,
        traffic: Sequence[SubgroupTraffic],
        program_at: Callable[[Fraction], Program],
        host_share: Fraction = START_SHARE,
        costs: Mapping[OpKind, float] | None = None,
    ) -> None:
        self.host_share = host_share
        self._numels = [each.numel for each in traffic]
        self._program_at = program_at
        self._on_host, self._streamed = (_amounts(program_at(Fraction(share)), self._numels) for share in (1, 0))
        self._link_bytes = _link_bytes(traffic)
        self._memory_bytes = _memory_bytes(self._link_bytes)
        self._known = _least_costs(self._link_bytes) | dict(costs or {})
        self._costs = dict(self._known)
        self._measured: set[OpKind] = set()
        self._have_run: set[OpKind] = set()
        self._usual_before: float | None = None  # seconds of a step before the move to a share that was never tried
        self._placements = program_at(host_share).placements
        self._begin_tuning()

    def _begin_tuning(self) -> None:
        self.settled = False
        self._moves = 0
        self._hoped = self._on_trial = False
        self._seen: dict[Fraction, _Seen] = {}
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._usual: float | None = None  # seconds of a step since it has settled

    def observe(self, figures: StepFigures) -> Decision | None:
        """Learn from a measured step; a decision, if this step leads to one."""
        if self._on_host == self._streamed:  # nothing is in host memory, so no share differs from another
            return None
        if not self._is_of_present_share(figures):
            return None
        fresh = figures.costs.keys() - self._have_run
        self._have_run |= fresh
        usual_before, self._usual_before = self._usual_before, None
        if fresh or (usual_before is not None and figures.seconds > SURPRISING * usual_before):
            return None  # see [Note: warming up]
        if not self.settled:
            self._learn(figures)
            return self._tune(figures)
        self._recent.append(figures.seconds)
        if len(self._recent) < RECENT:
            return None
        now = statistics.median(self._recent)
        if self._usual is None:
            self._usual = now
        elif abs(now / self._usual - 1) > DRIFTED:
            before = self._usual
            self._begin_tuning()
            self._learn(figures)
            return self._tune(figures, f"a step takes {now:.3f} s and no longer {before:.3f} s; ")
        return None

    def _is_of_present_share(self, figures: StepFigures) -> bool:
        """Not so if the step had begun when the last decision was made."""
        on_host = sum(
            numel for numel, place in zip(self._numels, self._placements, strict=True) if place is Placement.HOST
        )
        return abs(figures.device_share - (1 - on_host / sum(self._numels))) < 1e-9

    def _learn(self, figures: StepFigures) -> None:
        seen = self._seen.setdefault(self.host_share, _Seen())
        seen.add(figures)
        self._costs.update(seen.costs)
        self._measured |= seen.costs.keys()
        # Copies in one direction go at one rate: what is known of one kind holds for the other.
        for known, unknown in _SAME_LINK:
            if known in self._measured and unknown not in self._measured:
                self._costs[unknown] = self._costs[known] * self._link_bytes[unknown] / self._link_bytes[known]

    def _tune(self, figures: StepFigures, prefix: str = "") -> Decision | None:
        why = f"{prefix}{_utilisation(figures)}"
        if self._on_trial:
            self._on_trial = False
            if self._mean_seconds(self.host_share) > min(map(self._mean_seconds, self._seen)):
                return self._settle(figures, why)
        contended = self._contended()
        best, gain = self._best(contended or _Model(self._costs))
        hopes = False
        if gain < WORTH_IT:
            if len(self._seen[self.host_share].seconds) < ENOUGH:
                return None
            hopes, self._hoped = not self._hoped, True
            if hopes:
                best, gain = self._best(self._hope())
        if gain < WORTH_IT or self._moves == MOST_MOVES or best in self._seen:
            return self._settle(figures, why)
        self._moves += 1
        self._on_trial = hopes
        self._move_to(best)
        if hopes:
            why += "; on trial, should host memory be the limit"
        elif contended is not None:
            why += "; host memory is the limit"
        return Decision(figures.step, best, f"{why}; a gain of {gain:.0%} is expected")

    def _settle(self, figures: StepFigures, why: str) -> Decision:
        self.settled = True
        fastest = min(self._seen, key=self._mean_seconds)
        least, now = self._mean_seconds(fastest), self._mean_seconds(self.host_share)
        if least < (1 - WORTH_IT) * now:
            why += f"; this share took {least:.3f} s, the last {now:.3f} s"
            self._move_to(fastest)
        else:
            why += f"; no other share promises {WORTH_IT:.0%} less"
        return Decision(figures.step, self.host_share, why)

    def _mean_seconds(self, share: Fraction) -> float:
        return statistics.fmean(self._seen[share].seconds)

    def _move_to(self, share: Fraction) -> None:
        self._usual_before = None if share in self._seen else self._mean_seconds(self.host_share)
        self.host_share = share
        self._placements = self._program_at(share).placements

    # --- what is expected of a share

    def _best(self, model: _Model) -> tuple[Fraction, float]:
        """The share with the shortest step, and the part of the present step's time that it saves."""
        count = min(len(self._numels), MOST_SHARES)
        shares = sorted((Fraction(k, count) for k in range(count + 1)), key=lambda share: self._bound(share, model))
        expected = {share: self._expected(share, model) for share in shares[:MOST_SIMULATED]}
        best = min(expected, key=expected.__getitem__)
        now = self._expected(self.host_share, model)
        return best, 1 - expected[best] / now if now > 0 else 0.0

    def _expected(self, share: Fraction, model: _Model) -> float:
        """Seconds of a step."""
        bound = self._bound(share, model)
        if len(self._numels) > MOST_SUBGROUPS:
            return bound
        rates = {kind: Rate(1 / max(cost, 1e-18)) for kind, cost in model.costs.items()}
        memory = None
        if model.memory_rate < math.inf:
            moved = {kind: nbytes for kind, nbytes in self._memory_bytes.items() if model.costs[kind] > 0}
            memory = HostMemory(model.memory_rate, lambda op: moved.get(op.kind, 0.0) * self._numels[op.subgroup])
        ran = simulate(self._program_at(share), durations(self._numels, rates), sharing=Sharing.EVEN, memory=memory)
        return ran.makespan

    def _bound(self, share: Fraction, model: _Model) -> float:
        """Seconds for which the busiest lane works, host memory among them."""
        lanes = (self._work(share, model.costs, lane) for lane in _LANES)
        return max(self._work(share, self._memory_bytes) / model.memory_rate, *lanes)

    def _work(self, share: Fraction, each: Mapping[OpKind, float], lane: str | None = None) -> float:
        """The sum of `each` times parameters over the operations of a lane, or of all. It is linear in the share."""
        c = float(share)
        return sum(
            part * each.get(kind, 0.0) * numel
            for part, amounts in ((c, self._on_host), (1 - c, self._streamed))
            for (of_lane, kind), numel in amounts.items()
            if lane in (None, of_lane)
        )

    def _contended(self) -> _Model | None:
        """The model of [Note: contention]; None if operations take about as long with every share."""
        least = self._least()
        slowest = max(
            statistics.fmean(seen.costs[kind] / cost for kind, cost in least.items() if kind in seen.costs and cost > 0)
            for seen in self._seen.values()
        )
        return _Model(self._costs | least, self._memory_rate()) if slowest > CONTENDED else None

    def _hope(self) -> _Model:
        """The same, with copies that are as fast as can be hoped for."""
        costs = self._costs | self._least()
        faster = {kind: min(costs[kind], max(self._known[kind], costs[kind] / HOPE)) for kind in _COPIES}
        return _Model(costs | faster, self._memory_rate())

    def _least(self) -> dict[OpKind, float]:
        """What operations that use host memory have taken with the share with which they took least."""
        kinds = self._memory_bytes.keys() & set().union(*(seen.costs for seen in self._seen.values()))
        return {kind: min(seen.costs.get(kind, math.inf) for seen in self._seen.values()) for kind in kinds}

    def _memory_rate(self) -> float:
        return max(self._work(share, self._memory_bytes) / self._mean_seconds(share) for share in self._seen)


def _amounts(program: Program, numels: Sequence[int]) -> dict[tuple[str, OpKind], int]:
    """Lane and kind of operation -> parameters that it is done for."""
    amounts: dict[tuple[str, OpKind], int] = {}
    for op in program.ops:
        if op.kind is not OpKind.RELEASE_BUCKET:
            what = (FULL_DUPLEX[op.stream], op.kind)
            amounts[what] = amounts.get(what, 0) + numels[op.subgroup]
    return amounts


def _link_bytes(traffic: Sequence[SubgroupTraffic]) -> dict[OpKind, float]:
    """What each kind of copy moves for a parameter."""
    numel = max(sum(each.numel for each in traffic), 1)
    return {
        OpKind.STATES_TO_DEVICE: BYTES_PER_PARAMETER,
        OpKind.STATES_TO_HOST: BYTES_PER_PARAMETER,
        OpKind.GRAD_TO_HOST: sum(each.grad_bytes for each in traffic) / numel,
        OpKind.PARAM_TO_DEVICE: sum(each.param_bytes for each in traffic) / numel,
    }


def _memory_bytes(link_bytes: Mapping[OpKind, float]) -> dict[OpKind, float]:
    """What each kind of operation reads from host memory and writes to it, for a parameter."""
    staged = link_bytes[OpKind.GRAD_TO_HOST] + link_bytes[OpKind.PARAM_TO_DEVICE]
    return {**link_bytes, OpKind.UPDATE_ON_HOST: 2 * BYTES_PER_PARAMETER + staged}


def _least_costs(link_bytes: Mapping[OpKind, float]) -> dict[OpKind, float]:
    copies = {kind: nbytes / _BEST_LINK for kind, nbytes in link_bytes.items()}
    return dict.fromkeys(OpKind, 0.0) | copies | {kind: 1 / rate for kind, rate in _BEST_UPDATE.items()}


def _utilisation(figures: StepFigures) -> str:
    """How busy the lanes were: "0.612 s with cpu 93%, h2d 88% busy"."""
    busy = (f"{lane} {use.busy / figures.seconds:.0%}" for lane, use in figures.lanes.items() if figures.seconds > 0)
    return f"{figures.seconds:.3f} s with {', '.join(busy)} busy"
