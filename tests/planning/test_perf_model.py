# SPDX-License-Identifier: Apache-2.0
"""The performance model: what lanes are busy for, what fits, what is chosen; and that nothing else is faster."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import pairwise

import pytest

from megatron_dos.planning import rivals
from megatron_dos.planning.choice import More, choose
from megatron_dos.planning.clock import Queues
from megatron_dos.planning.machine import Machine, preset, preset_names
from megatron_dos.planning.model import (
    HostPath,
    clock_optimum,
    clocked,
    closed_form,
    closed_form_optimum,
    on_the_clock,
    optimum,
    program_for,
)
from megatron_dos.planning.systems import RIVALS
from megatron_dos.planning.workload import MemoryFitError, Workload, memory_fit
from megatron_dos.program.schedule import OpKind, Placement, SubgroupShape, build_program

GB = 10**9
# The 20B model of the published testbed: 15.327e9 parameters on 4 GPUs.
PUBLISHED = Workload(parameters=round(15.327e9 / 4), ranks=4, subgroup=100_000_000)
PUBLISHED_K2_RATE = 15.327e9 / 1.296
"""Parameters a second of the node, measured by the authors."""


def plain(**values: float) -> Machine:
    """A machine with round rates, full duplex, without latencies, and with as much host memory rate as one likes."""
    rates = {
        **{"cpu_update_per_core": 0.5e9, "cpu_update_max": 1e12, "gpu_update": 100e9, "dram": 1e15},
        **{f"{direction}_{how}": 50e9 for direction in ("h2d", "d2h") for how in ("alone", "together")},
        **{"copy_latency": 0.0, "cpu_latency": 0.0, "cores": 16, "gpus": 1},
    }
    return replace(preset("h100-pcie5"), **{**rates, **values})


# --- what a lane is busy for


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("grad_bytes", [2, 4])
def test_lanes_are_busy_for_the_bytes_that_the_design_counts(early, grad_bytes):
    work = Workload(parameters=10**9, ranks=2, threads=4, grad_bytes=grad_bytes, early_grads=early)
    found = closed_form(plain(dram=400e9), work, Fraction(3, 10), Fraction(1, 10))
    c, f, sent = 0.3, 0.6, 0 if early else grad_bytes
    assert found.streamed_share == Fraction(6, 10)
    # One core updates 0.5e9 parameters a second where a pass touches 30 bytes of each.
    assert found.lanes["cpu"] == pytest.approx(c * 10**9 / (4 * 0.5e9 * 30 / (24 + grad_bytes + 2)))
    assert found.lanes["h2d"] == pytest.approx((12 * f + 2 * c) * 10**9 / 50e9)
    assert found.lanes["d2h"] == pytest.approx((12 * f + sent * c) * 10**9 / 50e9)
    assert found.lanes["gpu"] == pytest.approx(0.7 * 10**9 / 100e9)
    assert found.lanes["dram"] == pytest.approx(2 * 10**9 * (24 * f + (24 + grad_bytes + 2 + sent + 2) * c) / 400e9)
    assert found.seconds >= max(found.lanes.values())


def test_a_link_that_is_not_quite_full_duplex_is_faster_once_one_direction_is_done():
    machine = plain(h2d_together=20e9, d2h_together=40e9)
    work = Workload(parameters=10**9, grad_bytes=4)
    all_streamed = closed_form(machine, work, 0)
    # Together for 12 GB / 40 GB/s = 0.3 s, in which 6 GB arrive; the other 6 GB come at 50 GB/s.
    assert all_streamed.lanes["d2h"] == pytest.approx(0.3)
    assert all_streamed.lanes["h2d"] == pytest.approx(0.3 + 6 / 50)


@pytest.mark.parametrize(
    ("slow", "host_share"),
    [("h2d", 0), ("d2h", 0), ("h2d", Fraction(1, 2)), ("d2h", Fraction(1, 2)), ("cpu", Fraction(1, 2)), ("cpu", 1)],
)
def test_filling_and_draining_the_pipeline_is_counted_also_with_few_subgroups(slow, host_share):
    if slow == "cpu":
        machine = plain(cpu_update_per_core=0.05e9)
    else:
        machine = plain(**{f"{slow}_alone": 20e9, f"{slow}_together": 20e9})
    work = Workload(parameters=800_000_000, subgroup=100_000_000, early_grads=True)
    quick, exact = (estimate(machine, work, host_share) for estimate in (closed_form, clocked))
    assert quick.lanes[slow] == max(quick.lanes.values())
    waited = exact.seconds - quick.lanes[slow]
    assert waited > 0, "nothing to fill or drain: the test shows nothing"
    assert quick.seconds == pytest.approx(exact.seconds, rel=0.03)
    assert quick.seconds - quick.lanes[slow] > 0.5 * waited


@pytest.mark.parametrize("shares", [(1.2, 0), (-0.1, 0), (0.6, 0.6), (0, -0.5)])
def test_shares_that_are_none_are_refused(shares):
    with pytest.raises(ValueError, match="0 to 1 together"):
        closed_form(plain(), Workload(parameters=10**9), *shares)


@pytest.mark.parametrize(
    "wrong", [{"parameters": 0}, {"ranks": 0}, {"grad_bytes": 0}, {"threads": -1}, {"subgroup": -1}, {"host_slots": 0}]
)
def test_work_that_is_none_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Workload(**{"parameters": 10, **wrong})


def test_a_rank_has_its_even_share_of_the_cores_unless_threads_are_named():
    work = Workload(parameters=10**9, ranks=4, early_grads=True)
    for threads, expected in ((0, 4), (3, 3)):
        found = closed_form(plain(cores=16), replace(work, threads=threads), 1)
        assert found.threads == expected
        assert found.lanes["cpu"] == pytest.approx(1 / (expected * 0.5))
    assert closed_form(plain(cores=2), work, 1).threads == 1


def test_subgroups_hold_all_parameters():
    assert Workload(parameters=250, subgroup=100).subgroups == [100, 100, 50]
    assert Workload(parameters=50, subgroup=100).subgroups == [50]
    assert sum(Workload(parameters=3_831_750_001).subgroups) == 3_831_750_001


# --- on the virtual clock


def test_on_the_clock_an_update_takes_what_its_bytes_and_rates_say():
    machine, work = plain(), Workload(parameters=10**9, subgroup=10**9, threads=2, grad_bytes=4)
    streamed = on_the_clock(machine, work, program_for(work, 0))
    assert streamed.makespan == pytest.approx(12 / 50 + 1 / 100 + 12 / 50)
    on_host = on_the_clock(machine, work, program_for(work, 1))
    assert on_host.makespan == pytest.approx(4 / 50 + 1 / 1.0 + 2 / 50)
    early = replace(work, early_grads=True)
    assert on_the_clock(machine, early, program_for(early, 1)).makespan == pytest.approx(1 / 1.0 + 2 / 50)
    resident = on_the_clock(machine, work, program_for(work, 0, 1))
    assert resident.makespan == pytest.approx(1 / 100)


def test_on_the_clock_the_ranks_of_a_node_share_its_host_memory():
    work = Workload(parameters=10**9, subgroup=10**9, ranks=4, threads=100)
    # 30 bytes of a parameter at a quarter of 80 GB/s; grads and params move at their own pace before and after.
    seconds = on_the_clock(plain(dram=80e9), work, program_for(work, 1)).makespan
    assert seconds == pytest.approx(30 / 20 + (4 + 2) / 20)
    assert on_the_clock(plain(dram=160e9), work, program_for(work, 1)).makespan == pytest.approx(36 / 40)


def test_early_grads_cost_the_step_nothing_also_where_the_program_names_them():
    work = Workload(parameters=10**8, subgroup=5 * 10**7, early_grads=True)
    shapes = [SubgroupShape((0, 0), numel, False) for numel in work.subgroups]
    program = build_program(shapes, [Placement.HOST] * 2, early={0: 0, 1: 1})
    assert any(op.kind is OpKind.EARLY_GRAD_TO_HOST for op in program.ops)
    named = on_the_clock(plain(), work, program).makespan
    assert named == pytest.approx(on_the_clock(plain(), work, program_for(work, 1)).makespan)


def test_params_from_pageable_memory_are_slow_and_read_and_written_once_more():
    machine = plain(h2d_pageable=5e9, dram=30e9)
    work = Workload(parameters=10**9, subgroup=10**9, threads=100)
    program = build_program([SubgroupShape((0, 0), 10**9, False)], [Placement.HOST])
    path = HostPath(touched=30, grad=0, param=2, pageable=True)
    # The link at 5 GB/s would take 0.4 s; 6 bytes of host memory at 30 GB/s take 0.2 s.
    assert on_the_clock(machine, work, program, path).makespan == pytest.approx(1.0 + 0.4)
    assert on_the_clock(replace(machine, h2d_pageable=20e9), work, program, path).makespan == pytest.approx(1.0 + 0.2)


# --- memory


def test_memory_is_counted_by_slots_and_states():
    work = Workload(parameters=10**9, ranks=2, subgroup=10**8, casts=True, host_slots=2, device_slots=3)
    found = memory_fit(plain(), work, Fraction(1, 4))
    assert found.gpu_slots == 3 * 12 * 10**8 + 2 * 4 * 10**8
    assert found.gpu_resident == 12 * 10**9 / 4
    assert found.host_states == 2 * 12 * 10**9 * 3 / 4
    assert found.host_slots == 2 * 2 * 8 * 10**8
    early = memory_fit(plain(), replace(work, early_grads=True), Fraction(1, 4), host_share=Fraction(1, 2))
    assert early.host_slots == found.host_slots + 2 * 4 * 10**9 / 2, "early grads have a slot of their own each"
    assert memory_fit(plain(), work, 0, streamed=False, host_share=0).gpu == 0


@pytest.mark.parametrize(
    ("free", "message"),
    [
        (
            {"free_gpu_memory": 5 * GB},
            r"needs 6\.9 GiB on the GPU \(4\.1 GiB of slots .* 2\.8 GiB of resident .* 4\.7 GiB are",
        ),
        (
            {"free_host_memory": 20 * GB},
            r"needs 19\.7 GiB on the node for 2 ranks \(16\.8 GiB of states, 3\.0 GiB of slots\)",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_numbers_and_a_way_out(free, message):
    work = Workload(parameters=10**9, ranks=2, subgroup=10**8, casts=True)
    with pytest.raises(MemoryFitError, match=message) as caught:
        memory_fit(plain(), work, Fraction(1, 4), **free)
    assert "--dos-resident-share" in str(caught.value)


# --- the choice


def test_a_weak_cpu_leaves_all_to_the_gpu_and_a_weak_link_to_the_cpu():
    work = Workload(parameters=10**9, threads=8)
    assert choose(plain(cpu_update_per_core=1e6), work).host_share == 0
    slow = {f"{direction}_{how}": 1e9 for direction in ("h2d", "d2h") for how in ("alone", "together")}
    assert choose(plain(**slow), replace(work, early_grads=True)).host_share > 0.9


def test_the_balance_point_is_that_of_cpu_and_link():
    work = Workload(parameters=6_400_000_000, subgroup=10**7, threads=4, early_grads=True, grad_bytes=4)
    # 2e9 parameters a second on the CPU against 50e9 / 12 over the link, which also brings 2 bytes from the CPU:
    # c / 2 = (12 (1 - c) + 2 c) / 50
    assert float(choose(plain(), work).host_share) == pytest.approx(24 / 70, abs=0.01)


def test_shares_add_up_and_the_choice_explains_itself():
    machine, work = preset("a100-pcie4"), Workload(parameters=2 * 10**9, ranks=4)
    found = choose(machine, work, free_gpu_memory=6 * GB)
    assert found.host_share + found.streamed_share + found.resident_share == 1
    assert 0 < found.resident_share < 1
    assert found.memory.gpu <= 6 * GB
    assert found.memory.gpu + 12 * max(work.subgroups) > 6 * GB, "as many subgroups as fit are resident"
    assert 1 <= found.threads <= 8
    for part in ("% streamed", f"on {found.threads} CPU", "% resident", "host memory is busy", "would give"):
        assert part in found.reason, found.reason
    seconds = list(found.helps.values())
    assert seconds == sorted(seconds)
    assert all(each <= 1.001 * found.step_seconds for each in seconds), "more of something never hurts"
    assert found.limiting == "dram"
    assert seconds[0] < 0.8 * found.step_seconds


def test_resident_states_are_advised_where_memory_is_free_for_them():
    work = Workload(parameters=2 * 10**9)
    quarter, rest = More.QUARTER_RESIDENT, More.REST_RESIDENT
    for free, activations, more in ((60, 0, quarter), (60, 41, rest), (19, 0, rest)):
        found = choose(
            preset("h100-pcie5"), work, free_gpu_memory=free * GB, activations=activations * GB, resident_share=0
        )
        assert more in found.helps
        assert len(found.helps) == 4
    for taken in ({"activations": 59 * GB, "resident_share": 0}, {"resident_share": 1}):
        found = choose(preset("h100-pcie5"), work, free_gpu_memory=60 * GB, **taken)
        assert not any(more.is_resident for more in found.helps), "nothing is left, or to be gained"


def test_nothing_is_resident_unless_memory_is_said_to_be_free():
    work = Workload(parameters=2 * 10**9)
    assert choose(plain(), work).resident_share == 0
    assert choose(plain(), work, free_gpu_memory=30 * GB).resident_share == 1
    assert choose(plain(), work, free_gpu_memory=30 * GB, resident_share=0).resident_share == 0


def test_without_room_for_slots_all_is_updated_on_the_cpu():
    work = Workload(parameters=2 * 10**9)
    found = choose(plain(cpu_update_per_core=1e6), work, free_gpu_memory=1 * GB)
    assert found.host_share == 1
    assert found.memory.gpu == 0
    with pytest.raises(MemoryFitError, match="of slots during the step"):
        choose(plain(), work, free_gpu_memory=1 * GB, gpu_share=0.5)


def test_what_the_user_names_is_taken():
    work = Workload(parameters=2 * 10**9, subgroup=10**8)
    assert choose(plain(), work, gpu_share=0.75).host_share == Fraction(1, 4)
    assert choose(plain(), work, resident_share=0.5, gpu_share=0.5).host_share == Fraction(1, 4)
    assert choose(plain(), work, resident_share=0.5).resident_share == Fraction(1, 2)
    assert choose(plain(), work, stride=2).host_share == Fraction(1, 2)
    assert choose(plain(), work, stride=5).host_share == Fraction(4, 5)
    assert choose(plain(), work, stride=1).host_share == 0
    assert choose(plain(), work, resident_share=0.5, stride=2).host_share == Fraction(1, 4)
    for wrong in ({"gpu_share": 1.5}, {"resident_share": -1}):
        with pytest.raises(ValueError, match="is not between 0 and 1"):
            choose(plain(), work, **wrong)
    with pytest.raises(ValueError, match="stride and gpu_share"):
        choose(plain(), work, stride=2, gpu_share=0.5)


def test_the_choice_is_no_slower_than_any_named_one():
    machine, work = preset("a100-pcie4"), Workload(parameters=10**9, ranks=4)
    best = choose(machine, work).step_seconds
    named = [choose(machine, work, stride=k) for k in (1, 2, 3, 10)]
    named += [choose(machine, work, gpu_share=share / 8) for share in range(9)]
    assert all(best <= 1.0001 * each.step_seconds for each in named)


@pytest.mark.parametrize("resident", [0.05, 0.1, 1 / 3, 0.7, 0.999, 1])
def test_a_share_may_be_any_number_between_0_and_1(resident):
    work = Workload(parameters=10**9, subgroup=5 * 10**7)
    for find in (closed_form_optimum, optimum, clock_optimum):
        found = find(plain(), work, resident)
        assert found.host_share + found.streamed_share + found.resident_share == 1
        assert found.resident_share == pytest.approx(resident, abs=0.5 / 20)
    assert choose(plain(), work, resident_share=resident).resident_share == found.resident_share


def test_states_too_large_for_the_node_are_refused():
    with pytest.raises(MemoryFitError, match=r"on the node for 4 ranks .* 476\.8 GiB are free"):
        choose(preset("h100-pcie5"), Workload(parameters=20 * 10**9, ranks=4))


def test_fewer_threads_are_better_where_the_cpu_would_take_memory_from_the_copies():
    narrow = {f"{direction}_together": 50e9 for direction in ("h2d", "d2h")}
    machine = replace(preset("h100-pcie5"), **narrow)
    best = clock_optimum(machine, PUBLISHED)
    assert 0 < best.threads < 24
    assert best.host_share > 0
    everything = clocked(machine, replace(PUBLISHED, threads=24), best.host_share)
    assert best.seconds < 0.995 * everything.seconds


# --- against the virtual clock and against the others

RANKS = (1, 2, 4, 8, 16)
CORES = (4, 16, 48, 128)
SWEPT = (
    (Workload(parameters=400_000_000, casts=True), Fraction(0)),
    (Workload(parameters=3_800_000_000, subgroup=100_000_000, early_grads=True), Fraction(0)),
    (Workload(parameters=2_000_000_000, subgroup=100_000_000, grad_bytes=2), Fraction(1, 5)),
)


@cache
def swept(name: str) -> list[tuple[str, Machine, Workload, Fraction]]:
    """Machines like the preset with 1 to 16 ranks and 4 to 128 cores, as far as the difference shows."""
    found, seen = [], set()
    for ranks in RANKS:
        for cores in CORES:
            machine = replace(preset(name), gpus=ranks, cores=cores)
            for number, (work, resident) in enumerate(SWEPT):
                key = ranks, number, machine.cpu_update(max(cores // ranks, 1), ranks)
                if key not in seen:
                    seen.add(key)
                    found.append((f"{ranks} ranks, {cores} cores", machine, replace(work, ranks=ranks), resident))
    return found


@pytest.mark.parametrize("name", preset_names())
def test_closed_form_and_clock_agree_and_no_rival_is_faster(name):
    cases = swept(name)
    assert len(cases) >= 15
    for case, machine, work, resident in cases:
        quick, exact = closed_form_optimum(machine, work, resident), clock_optimum(machine, work, resident)
        assert quick.seconds == pytest.approx(exact.seconds, rel=0.05), (case, work, quick, exact)
        # What is chosen is as good, on the clock, as what a search on the clock finds.
        choice = optimum(machine, work, resident)
        chosen = clocked(machine, replace(work, threads=choice.threads), choice.host_share, resident)
        assert chosen.seconds <= 1.05 * exact.seconds, (case, work, choice, exact)
        for rival in RIVALS.values():
            seconds = rivals.step_of(rival, machine, work, resident).makespan
            assert exact.seconds <= (1 + 1e-9) * seconds, (case, work, rival, exact, seconds)


def test_ours_updates_half_as_fast_again_as_the_published_interleaving_on_its_testbed():
    machine = preset("h100-pcie5")
    work = Workload(parameters=PUBLISHED.parameters, ranks=4, grad_bytes=2)
    # As much GPU memory as the published program takes for its three slots of 100M parameters.
    resident = choose(machine, work, free_gpu_memory=3 * 12 * PUBLISHED.subgroup).resident_share
    assert resident < 0.05
    seconds = clock_optimum(machine, work, resident).seconds
    rate = 4 * work.parameters / seconds
    assert rate >= 1.5 * PUBLISHED_K2_RATE
    assert rate >= 1.5 * 4 * PUBLISHED.parameters / rivals.published(machine, PUBLISHED).makespan
    # With nothing resident it moves 24 bytes of host memory a parameter, the published program 35.
    bare = clock_optimum(machine, work).seconds
    assert 4 * work.parameters / bare == pytest.approx(machine.dram / 24, rel=0.02)


def test_resident_states_shorten_the_step_in_proportion():
    machine = preset("h200")
    work = Workload(parameters=2_000_000_000, ranks=8, subgroup=50_000_000)
    seconds = [clock_optimum(machine, work, Fraction(part, 4)).seconds for part in range(5)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[2] == pytest.approx(seconds[0] / 2, rel=0.05)
    assert seconds[4] < 0.05 * seconds[0]


# --- the rivals


def test_full_offload_overlaps_nothing():
    machine = plain(dram=4 * 100e9, h2d_pageable=10e9, cores=400)
    work = replace(PUBLISHED, parameters=10**9)
    timeline = rivals.full_offload(machine, work)
    # 44 bytes in the passes and 2 over the link, of which host memory moves 6, all one after the other.
    assert timeline.makespan == pytest.approx(44 / 100 + 2 / 10, rel=1e-6)
    spans = sorted(zip(timeline.starts, timeline.ends, strict=True))
    running = [span for span in spans if span[0] < span[1]]
    assert all(later[0] >= earlier[1] for earlier, later in pairwise(running))
    half = rivals.full_offload(machine, work, 0.5)
    assert half.makespan == pytest.approx(timeline.makespan / 2 + 0.5 / 100, rel=1e-6)


def test_the_published_program_copies_by_turns():
    timeline = rivals.published(plain(), replace(PUBLISHED, ranks=1))
    ops = [op for op in timeline.program.ops if op.kind in (OpKind.STATES_TO_DEVICE, OpKind.STATES_TO_HOST)]
    spans = sorted((timeline.starts[op.index], timeline.ends[op.index]) for op in ops)
    assert all(later[0] >= earlier[1] for earlier, later in pairwise(spans))
    places = timeline.program.placements
    assert [place is Placement.STREAMED for place in places] == [index % 2 == 1 for index in range(len(places))]
    static = rivals.published(plain(), PUBLISHED, 0.5, stride=4).program.placements
    assert static.count(Placement.RESIDENT) == round(len(static) / 2)
    assert static.count(Placement.STREAMED) == (len(static) - round(len(static) / 2)) // 4


def test_rivals_that_send_fp32_both_ways_pay_for_it():
    slow = {f"{direction}_{how}": 2e9 for direction in ("h2d", "d2h") for how in ("alone", "together")}
    work = Workload(parameters=10**9, subgroup=10**8, grad_bytes=2)
    for rival in (rivals.superoffload, rivals.hybrid_device_optimizer):
        assert rival(plain(**slow), work).makespan >= 4 / 2
        assert on_the_clock(plain(**slow), work, program_for(work, 1)).makespan < 3 / 2


def test_an_iteration_sends_the_grads_of_cpu_subgroups_in_its_backward_pass():
    machine, work = plain(matmul=1e12), Workload(parameters=10**9, subgroup=10**8, grad_bytes=4)
    step = rivals.full_offload(machine, work, 0.5)
    overheads = rivals.Overheads(fixed=0.25, blocking_grads=1e9, flush=1e-10)
    quiet = rivals.iteration(machine, work, step, 1e12, overheads)
    assert (quiet.forward, quiet.step) == (1.25, step.makespan)
    assert quiet.backward == pytest.approx(3 + 4 * 0.5 / 50)
    assert quiet.seconds == pytest.approx(quiet.forward + quiet.backward + quiet.step)
    blocking = rivals.iteration(machine, work, step, 1e12, overheads, blocking=True)
    assert blocking.backward == pytest.approx(3 + 4 * 0.5 / 1)
    interleaved = rivals.iteration(machine, work, step, 1e12, overheads, interleaved=True)
    assert interleaved.forward == pytest.approx(1.25 + 0.1)
    assert math.isclose(interleaved.backward, quiet.backward)


# --- one hardware queue

ONE_RANK = Workload(parameters=2_000_000_000, grad_bytes=2)


def test_with_one_queue_enqueueing_ahead_costs_the_overlap_of_cpu_and_gpu_and_when_needed_hardly_anything():
    machine = preset("h100-pcie5")
    each, ahead, when_needed = (
        clocked(machine, replace(ONE_RANK, queues=queues), Fraction(2, 5)).seconds for queues in Queues
    )
    assert ahead > 1.5 * each
    assert each <= when_needed < 1.05 * each


@pytest.mark.parametrize("name", preset_names())
def test_one_queue_is_not_faster(name):
    machine = preset(name)
    for work in (ONE_RANK, replace(ONE_RANK, ranks=machine.gpus, grad_bytes=4, casts=True)):
        for rival in RIVALS.values():
            each, ahead, when_needed = (
                rivals.step_of(rival, machine, replace(work, queues=queues)).makespan for queues in Queues
            )
            # What comes later may leave bandwidth to something that matters more.
            assert min(ahead, when_needed) >= 0.98 * each, rival.name
        for share in (Fraction(0), Fraction(2, 5), Fraction(4, 5), Fraction(1)):
            each, ahead, when_needed = (
                clocked(machine, replace(work, queues=queues), share).seconds for queues in Queues
            )
            assert min(ahead, when_needed) >= 0.98 * each, share


def test_with_one_queue_the_choice_is_that_of_the_clock():
    machine, work = preset("h100-pcie5"), replace(ONE_RANK, ranks=4, queues=Queues.ONE_AHEAD)
    chosen, best = choose(machine, work), clock_optimum(machine, work)
    assert (chosen.host_share, chosen.threads, chosen.step_seconds) == (best.host_share, best.threads, best.seconds)
    assert best.host_share > choose(machine, replace(work, queues=Queues.EACH)).host_share
    named = choose(machine, work, gpu_share=Fraction(1, 2))
    assert named.step_seconds == clocked(machine, work, Fraction(1, 2)).seconds
