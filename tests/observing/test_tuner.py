# SPDX-License-Identifier: Apache-2.0
"""The share that the tuner finds is near the best there is, soon, for good, and in spite of noise.

Machines are the virtual clock's: rates of each lane, and host memory that all operations share.
"""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from test_engine import NUMELS, Expected, assert_same_bits, make_engine, random_params, scalars_at

from megatron_dos.device.sim import SimDevice
from megatron_dos.observing.figures import SubgroupTraffic, figures
from megatron_dos.observing.tuner import MOST_MOVES, RECENT, START_SHARE, ShareTuner, first_choice
from megatron_dos.planning.choice import choose
from megatron_dos.planning.clock import HostMemory, Rate, Sharing, durations, simulate
from megatron_dos.planning.machine import preset
from megatron_dos.planning.workload import Workload
from megatron_dos.program.schedule import OpKind, Placement, Program, SubgroupShape, build_program, mix
from megatron_dos.program.timeline import Timeline
from megatron_dos.update.operations import StepInputs

NUMEL = 100_000_000
SOON = 8  # steps
LIMITED_BY_MEMORY = (81, 101, 135)  # with any share that rates alone would suggest


class Node:
    """A machine and a model drawn at random."""

    def __init__(self, seed: int, memory: bool = True, noise: float = 0.0) -> None:
        draw = random.Random(seed)
        self.count = draw.choice([1, 3, 8, 16, 30])
        self.link = 10 ** draw.uniform(10, 11)
        self.back = self.link * draw.uniform(0.7, 1.2)
        self.cpu = 10 ** draw.uniform(8.3, 9.8)
        self.gpu = 10 ** draw.uniform(9.8, 11)
        self.memory = 10 ** draw.uniform(10.8, 11.8) if memory else 1e15
        self.casts = draw.random() < 0.5
        self.noise = noise
        self._draw = draw
        self.traffic = [SubgroupTraffic(NUMEL, 4 * NUMEL, 2 * NUMEL)] * self.count

    def program_at(self, host_share: Fraction) -> Program:
        shapes = [SubgroupShape((0, i // 4), NUMEL, self.casts) for i in range(self.count)]
        return build_program(shapes, mix([NUMEL] * self.count, host_share))

    def run(self, host_share: Fraction, noise: float = 0.0) -> Timeline:
        def about(rate: float) -> float:
            return rate * self._draw.lognormvariate(0, noise) if noise else rate

        rates = {
            OpKind.CAST_GRAD: Rate(about(500e9)),
            OpKind.GRAD_TO_HOST: Rate(about(self.back), 4),
            OpKind.UPDATE_ON_HOST: Rate(about(self.cpu)),
            OpKind.PARAM_TO_DEVICE: Rate(about(self.link), 2),
            OpKind.STATES_TO_DEVICE: Rate(about(self.link), 12),
            OpKind.UPDATE_ON_DEVICE: Rate(about(self.gpu)),
            OpKind.STATES_TO_HOST: Rate(about(self.back), 12),
        }
        moved = {
            OpKind.GRAD_TO_HOST: 4,
            OpKind.UPDATE_ON_HOST: 30,
            OpKind.PARAM_TO_DEVICE: 2,
            OpKind.STATES_TO_DEVICE: 12,
            OpKind.STATES_TO_HOST: 12,
        }
        return simulate(
            self.program_at(host_share),
            durations([NUMEL] * self.count, rates),
            sharing=Sharing.EVEN,
            memory=HostMemory(self.memory, lambda op: moved.get(op.kind, 0) * NUMEL),
        )

    def step(self, tuner: ShareTuner, number: int):
        return tuner.observe(figures(number, self.run(tuner.host_share, self.noise), self.traffic))

    def seconds(self, host_share: Fraction) -> float:
        return self.run(host_share).makespan

    def best(self) -> float:
        return min(self.seconds(Fraction(k, self.count)) for k in range(self.count + 1))


def tuned(node: Node, steps: int = SOON, **settings) -> ShareTuner:
    tuner = ShareTuner(node.traffic, node.program_at, **settings)
    for number in range(1, steps + 1):
        node.step(tuner, number)
    return tuner


@pytest.mark.parametrize("memory", [False, True], ids=["lanes", "shared memory"])
@pytest.mark.parametrize("seed", [*range(20), *LIMITED_BY_MEMORY])
def test_the_best_share_is_found_soon_and_kept(seed, memory):
    node = Node(seed, memory)
    tuner = tuned(node)
    assert node.seconds(tuner.host_share) <= 1.03 * node.best()
    assert tuner.settled
    found = tuner.host_share
    for number in range(SOON + 1, 40):
        assert node.step(tuner, number) is None
    assert tuner.host_share == found


@pytest.mark.parametrize("seed", range(20))
def test_noise_neither_misleads_nor_unsettles_it(seed):
    node = Node(seed, noise=0.03)
    tuner = ShareTuner(node.traffic, node.program_at)
    decisions = [number for number in range(1, 60) if node.step(tuner, number)]
    assert node.seconds(tuner.host_share) <= 1.06 * node.best()
    assert max(decisions) <= 2 * SOON
    assert len(decisions) <= MOST_MOVES + 1


def test_equal_measurements_give_equal_choices():
    decided = []
    for _ in range(2):
        node = Node(4, noise=0.05)
        tuner = ShareTuner(node.traffic, node.program_at)
        decided.append([node.step(tuner, number) for number in range(1, 12)])
    assert decided[0] == decided[1]
    assert any(decided[0])


def node_of(count: int, seed: int = 3, **attributes) -> Node:
    node = Node(seed)
    node.count, node.casts = count, False
    node.traffic = [SubgroupTraffic(NUMEL, 4 * NUMEL, 2 * NUMEL)] * count
    for name, value in {"link": 50e9, "back": 50e9, "cpu": 2e9, "gpu": 40e9, "memory": 1e15, **attributes}.items():
        setattr(node, name, value)
    return node


def test_it_starts_again_when_the_machine_changes_and_only_then():
    node = node_of(20)
    tuner = tuned(node, 30)
    before = tuner.host_share
    node.cpu, node.link, node.back = 0.95 * node.cpu, 0.95 * node.link, 0.95 * node.back
    assert not any(node.step(tuner, number) for number in range(31, 50))
    node.cpu = 0.5e9
    decisions = [node.step(tuner, number) for number in range(51, 51 + RECENT + SOON)]
    first = next(decision for decision in decisions if decision)
    assert "no longer" in first.reason
    assert tuner.host_share < before
    assert node.seconds(tuner.host_share) <= 1.03 * node.best()
    assert tuner.settled


def test_the_first_step_is_not_learned_from():
    node = node_of(20)
    tuner = ShareTuner(node.traffic, node.program_at)
    slow = replace(
        figures(1, node.run(START_SHARE), node.traffic), seconds=100.0, costs={OpKind.UPDATE_ON_DEVICE: 1e-6}
    )
    assert tuner.observe(slow) is None
    assert tuner.host_share == START_SHARE
    for number in range(2, 2 + SOON):
        node.step(tuner, number)
    assert node.seconds(tuner.host_share) <= 1.01 * node.best()


def test_a_step_that_had_begun_before_a_decision_is_not_taken_for_one_after_it():
    node = node_of(20)
    tuner = ShareTuner(node.traffic, node.program_at)
    old = figures(1, node.run(START_SHARE), node.traffic)
    number = 0
    while tuner.host_share == START_SHARE:
        number += 1
        node.step(tuner, number)
    share, known = tuner.host_share, dict(tuner._costs)
    assert tuner.observe(replace(old, seconds=99.0, costs={OpKind.UPDATE_ON_HOST: 1.0})) is None
    assert (tuner.host_share, tuner._costs) == (share, known)


def late_step_of_another_share(tuner: ShareTuner, node: Node) -> None:
    """A usual step at the first share, which the tuner has left: not so slow as to be taken for one that compiles."""
    late = figures(1, node.run(START_SHARE), node.traffic)
    costs = {kind: cost * (8 if kind is OpKind.UPDATE_ON_HOST else 1) for kind, cost in late.costs.items()}
    tuner.observe(replace(late, costs=costs))


@pytest.mark.parametrize("checked", [True, False], ids=["as it is", "without the check"])
def test_a_late_step_of_another_share_teaches_nothing(monkeypatch, checked):
    if not checked:
        monkeypatch.setattr(ShareTuner, "_is_of_present_share", lambda self, figures: True)
    node = node_of(20)
    tuner = ShareTuner(node.traffic, node.program_at)
    number = 0
    while tuner.host_share == START_SHARE:
        number += 1
        node.step(tuner, number)
    before = tuner.host_share, dict(tuner._costs), tuner._usual_before, list(tuner._seen)
    late_step_of_another_share(tuner, node)
    after = tuner.host_share, dict(tuner._costs), tuner._usual_before, list(tuner._seen)
    assert (after == before) == checked


@pytest.mark.parametrize("host_share", [START_SHARE, Fraction(1), Fraction(1, 10)], ids=str)
@pytest.mark.parametrize("compiling", [0.5, 5.0])
def test_kernels_compiled_in_the_first_steps_of_a_share_do_not_spoil_it(host_share, compiling):
    node = node_of(20)
    node.link = node.back = 12e9  # so that some of both is best
    tuner = ShareTuner(node.traffic, node.program_at, host_share)
    known = set()
    for number in range(1, 20):
        share, step = tuner.host_share, figures(number, node.run(tuner.host_share), node.traffic)
        if share not in known and OpKind.UPDATE_ON_DEVICE in step.costs:
            on_device = step.costs[OpKind.UPDATE_ON_DEVICE] + compiling / (step.numel * step.device_share)
            costs = {**step.costs, OpKind.UPDATE_ON_DEVICE: on_device}
            step = replace(step, seconds=step.seconds + compiling, costs=costs)
        known.add(share)
        tuner.observe(step)
    assert node.seconds(tuner.host_share) <= 1.03 * node.best()
    assert tuner.settled


def test_every_decision_says_why():
    node = node_of(20)
    tuner = ShareTuner(node.traffic, node.program_at)
    decisions = [decision for number in range(1, 40) if (decision := node.step(tuner, number))]
    assert decisions[0].step == 2
    assert decisions[0].host_share != START_SHARE
    assert all("s with cpu " in decision.reason for decision in decisions)
    assert all("a gain of" in decision.reason for decision in decisions[:-1])
    assert "no other share promises" in decisions[-1].reason or "this share took" in decisions[-1].reason
    assert decisions[-1].host_share == tuner.host_share


def test_a_lane_that_nothing_is_known_of_is_tried():
    node = node_of(20, cpu=4e9)
    for share in (Fraction(0), Fraction(1)):
        tuner = tuned(node, host_share=share)
        assert node.seconds(tuner.host_share) <= 1.03 * node.best()


def test_what_a_slow_link_takes_for_states_is_known_from_its_other_copies():
    node = node_of(20, cpu=4e9, link=5e9, back=5e9)
    tuner = ShareTuner(node.traffic, node.program_at, Fraction(1))
    for number in range(1, 20):
        node.step(tuner, number)
        assert tuner.host_share > 0.7  # one trial, no leap
    assert tuner.host_share == 1


def test_what_is_known_to_be_slow_is_not_tried():
    node = node_of(20, cpu=0.02e9)
    tuner = ShareTuner(node.traffic, node.program_at, Fraction(0), {OpKind.UPDATE_ON_HOST: 1 / 0.02e9})
    for number in range(1, 20):
        node.step(tuner, number)
        assert tuner.host_share == 0


def test_thousands_of_subgroups_take_no_simulation(monkeypatch):
    from megatron_dos.observing import tuner as module

    node = node_of(1000)
    ran = node.run(START_SHARE)
    monkeypatch.setattr(module, "simulate", lambda *args, **settings: pytest.fail("simulated"))
    tuner = ShareTuner(node.traffic, node.program_at)
    for number in range(1, 3):
        tuner.observe(figures(number, ran, node.traffic))
    # c / cpu = (12 (1 - c) + 4 c) / link: the CPU and the way back are busy for as long.
    assert float(tuner.host_share) == pytest.approx(12 / 50 / (1 / 2 + 8 / 50), abs=0.01)


def test_a_rank_that_owns_nothing_tunes_nothing():
    tuner = ShareTuner([], lambda share: build_program([], []))
    assert tuner.observe(figures(1, simulate(build_program([], []), lambda op: 0.0), [])) is None


@pytest.mark.parametrize("count", [1, 3])
def test_where_all_states_are_resident_there_is_nothing_to_tune(count):
    shapes, traffic = [SubgroupShape((0, 0), NUMEL, False)] * count, [SubgroupTraffic(NUMEL, 4, 2)] * count
    program = build_program(shapes, [Placement.RESIDENT] * count)
    tuner = ShareTuner(traffic, lambda share: program)
    ran = simulate(program, durations([NUMEL] * count, {OpKind.UPDATE_ON_DEVICE: Rate(50e9)}))
    assert [tuner.observe(figures(step, ran, traffic)) for step in range(1, 6)] == [None] * 5


class TestFirstChoice:
    WORK = Workload(parameters=3_800_000_000, ranks=4, threads=24, subgroup=NUMEL)

    def test_a_half_where_nothing_is_known(self):
        choice = first_choice(None, self.WORK)
        assert (choice.host_share, choice.costs) == (START_SHARE, {})
        assert "nothing measured" in choice.reason

    @pytest.mark.parametrize("name", ["h100-pcie5", "a100-pcie4", "gh200"])
    def test_the_models_where_the_machine_is_known(self, name):
        machine = preset(name)
        choice = first_choice(machine, self.WORK)
        assert choice.host_share == choose(machine, self.WORK, resident_share=0).host_share
        assert choice.costs[OpKind.STATES_TO_DEVICE] == 12 / machine.h2d_together
        assert "calibrated" in choice.reason

    def test_of_the_parameters_that_are_not_resident(self):
        machine = preset("h100-pcie5")
        chosen = choose(machine, self.WORK, resident_share=Fraction(1, 2))
        choice = first_choice(machine, self.WORK, Fraction(1, 2))
        assert choice.host_share == chosen.host_share / (1 - chosen.resident_share)
        assert first_choice(machine, self.WORK, Fraction(1)).host_share == START_SHARE

    def test_where_the_resident_subgroups_are_all_of_them(self):
        """Whole subgroups are resident, so a share below 1 may come to all."""
        choice = first_choice(preset("h100-pcie5"), self.WORK, Fraction(999, 1000))
        assert choice.host_share == START_SHARE

    def test_what_does_not_fit_is_left_to_whoever_allocates(self):
        machine = replace(preset("h100-pcie5"), host_memory=1e9)
        assert first_choice(machine, self.WORK).host_share == START_SHARE


@pytest.mark.parametrize("cpu", [0.5e9, 8e9], ids=["to the GPU", "to the CPU"])
def test_shares_that_are_tuned_between_steps_change_no_bit(cpu):
    params = random_params()
    engine = make_engine(params, 1000, host_share=START_SHARE, grads_as_fp32=False)
    engine._device = SimDevice(seed=1)
    expected = [
        Expected(param.float().numpy().copy(), np.zeros(param.numel(), np.float32), np.zeros(param.numel(), np.float32))
        for param in params
    ]
    subgroups = engine.partition.subgroups
    node = node_of(len(subgroups), cpu=cpu)
    node.traffic = [SubgroupTraffic(s.numel, 4 * s.numel, 2 * s.numel) for s in subgroups]
    tuner = None
    shares = set()
    generator = torch.Generator().manual_seed(1)
    for step in range(1, SOON + 1):
        grads = [torch.randn(n, generator=generator) for n in NUMELS]
        scalars = [scalars_at(step, 0.1)] * len(NUMELS)
        engine.update(StepInputs(grads, scalars))
        for owner, grad in enumerate(grads):
            expected[owner].step(grad, scalars[owner], 1.0, 1.0)
        assert_same_bits(engine, params, expected)
        tuner = tuner or ShareTuner(node.traffic, engine.program_at)
        rates = {kind: Rate(1 / cost) for kind, cost in figures(1, node.run(START_SHARE), node.traffic).costs.items()}
        program = engine.program(grads)
        assert engine.program_at(tuner.host_share) == program
        ran = simulate(program, durations([s.numel for s in subgroups], rates))
        tuner.observe(figures(step, ran, node.traffic))
        shares.add(tuner.host_share)
        engine.set_host_share(tuner.host_share)
    assert len(shares) > 1
    on_host = [place is Placement.HOST for place in engine.program(grads).placements]
    assert (sum(on_host) > len(on_host) / 2) == (cpu > 2e9)
