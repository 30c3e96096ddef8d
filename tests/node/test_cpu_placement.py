# SPDX-License-Identifier: Apache-2.0
"""Which CPUs ranks get under the launchers, from their masks, quotas and GPUs; nothing of this machine counts."""

import itertools
import random
from fractions import Fraction

import pytest

from megatron_dos.node.placement import RankFacts, divide_cpus, place

CPUS = range(96)
NODES = {cpu: cpu // 48 for cpu in CPUS}
TWO_SOCKETS = {cpu: cpu // 4 for cpu in range(8)}


def ranks_with(masks, quotas=None, gpu_nodes=None):
    return [
        RankFacts(
            rank=rank,
            machine="m",
            container="c",
            cpus=tuple(mask),
            quotas=(quotas or [{}] * len(masks))[rank],
            gpu_node=gpu_nodes[rank] if gpu_nodes else None,
        )
        for rank, mask in enumerate(masks)
    ]


def disjoint(placements):
    taken = [cpu for placement in placements for cpu in placement.cpus]
    return len(taken) == len(set(taken))


EXCLUSIVE = [range(12 * rank, 12 * rank + 12) for rank in range(8)]
UNBOUND = [CPUS] * 8
BY_NODE = [range(48)] * 4 + [range(48, 96)] * 4
LAUNCHERS = {
    "torchrun": (UNBOUND, "96 CPUs shared by 8 ranks"),
    "torchrun --numa-binding exclusive": (EXCLUSIVE, "own mask of 12 CPUs"),
    "srun --cpus-per-task=12": (EXCLUSIVE, "own mask of 12 CPUs"),
    "mpirun --map-by slot:PE=12": (EXCLUSIVE[::-1], "own mask of 12 CPUs"),
    "torchrun --numa-binding node": (BY_NODE, "48 CPUs shared by 4 ranks"),
    "Ray or Monarch actors": (UNBOUND, "96 CPUs shared by 8 ranks"),
    "srun -N2 -n16": (UNBOUND, "96 CPUs shared by 8 ranks"),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_eight_ranks_on_96_cpus_have_12_threads_each_under_every_launcher(launcher):
    masks, source = LAUNCHERS[launcher]
    placements = place(ranks_with(masks, gpu_nodes=[0] * 4 + [1] * 4), CPUS, NODES)
    assert [placement.threads for placement in placements] == [12] * 8
    assert {placement.source for placement in placements} == {source}
    assert disjoint(placements)
    assert all(set(placement.cpus) <= set(mask) for placement, mask in zip(placements, masks, strict=True))


def test_unbound_ranks_get_cpus_of_the_node_of_their_gpu():
    placements = place(ranks_with(UNBOUND, gpu_nodes=[1, 0] * 4), CPUS, NODES)
    assert [{NODES[cpu] for cpu in placement.cpus} for placement in placements] == [{1}, {0}] * 4


@pytest.mark.parametrize(
    ("quota", "members", "threads", "source"),
    [
        (1.0, 1, 1, "container quota of 1 CPU"),
        (1.5, 1, 1, "container quota of 1.5 CPUs"),
        (7.9, 1, 7, "container quota of 7.9 CPUs"),
        (16.0, 8, 2, "container quota of 16 CPUs shared by 8 ranks"),
        (1.0, 8, 1, "container quota of 1 CPU shared by 8 ranks"),
        (200.0, 8, 12, "96 CPUs shared by 8 ranks"),
        (96.0, 8, 12, "96 CPUs shared by 8 ranks"),
    ],
)
def test_a_quota_caps_the_threads_and_is_divided_by_the_ranks_in_its_group(quota, members, threads, source):
    quotas = [{"job" if rank < members else f"own {rank}": quota} for rank in range(8)]
    placement = place(ranks_with(UNBOUND, quotas), CPUS, NODES)[0]
    assert (placement.threads, placement.source) == (threads, source)
    assert len(placement.cpus) == 12


def test_the_tightest_of_nested_quotas_counts():
    quotas = [{f"task {rank}": 6.0, "job": 32.0} for rank in range(8)]
    assert [placement.threads for placement in place(ranks_with(UNBOUND, quotas), CPUS, NODES)] == [4] * 8
    assert place(ranks_with(UNBOUND[:1], quotas[:1]), CPUS, NODES)[0].threads == 6


def test_more_ranks_than_cpus_leaves_one_thread_each_on_any_cpu():
    placements = place(ranks_with([(0, 1)] * 8), (0, 1), {})
    assert {(placement.threads, placement.cpus, placement.source) for placement in placements} == {
        (1, (0, 1), "2 CPUs shared by 8 ranks")
    }


def test_masks_that_overlap_in_part():
    placements = place(ranks_with([range(8), range(4, 8)]), range(8), {})
    assert [placement.cpus for placement in placements] == [(0, 1, 2, 3, 4, 5), (6, 7)]
    assert placements[0].source == "mask of 8 CPUs, some of them shared by up to 2 ranks"


def divide(wanted):
    return divide_cpus([range(8)] * len(wanted), range(8), TWO_SOCKETS, wanted)


def test_shares_are_near_the_gpu_as_far_as_that_goes():
    assert divide([1, 0]) == [[4, 5, 6, 7], [0, 1, 2, 3]]
    assert divide([1, 0, 1, 0]) == [[4, 5], [0, 1], [6, 7], [2, 3]]
    assert divide([1, 1]) == [[4, 5, 6, 7], [0, 1, 2, 3]]
    assert divide([None, 0, 7, None]) == [[2, 3], [0, 1], [4, 5], [6, 7]]


def test_a_rank_gives_way_to_one_that_has_no_other_cpus():
    """The first would take the second's only CPUs, which are nearer to its GPU."""
    assert divide_cpus([range(8), range(4, 8)], range(8), TWO_SOCKETS, [1, 1]) == [[0, 1, 2, 3, 6, 7], [4, 5]]
    # Each CPU may be used by two of three ranks; taken in order, the last would find none.
    assert divide_cpus([(1, 0), (0, 2), (1, 2)], (1, 2, 0), {}, [None] * 3) == [[0], [2], [1]]


def test_shares_of_any_masks_are_disjoint_and_as_large_as_promised():
    for seed in range(1000):
        rng = random.Random(seed)
        cpus, ranks = rng.randint(1, 24), rng.randint(1, 9)
        masks = [sorted(rng.sample(range(cpus), rng.randint(1, cpus))) for _ in range(ranks)]
        nodes = {cpu: rng.randint(0, 2) for cpu in range(cpus)}
        shares = divide_cpus(masks, range(cpus), nodes, [rng.choice([None, 0, 1, 2]) for _ in masks])
        taken = list(itertools.chain(*shares))
        assert len(taken) == len(set(taken)), seed
        for mask, share in zip(masks, shares, strict=True):
            assert set(share) <= set(mask), seed
            promised = sum(Fraction(1, sum(cpu in other for other in masks)) for cpu in mask)
            assert len(share) == int(promised), seed
