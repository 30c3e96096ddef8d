# SPDX-License-Identifier: Apache-2.0
"""Which CPUs each rank of a machine gets for its update, from what the ranks say of themselves. Nothing here looks at
the machine.

A CPU that one rank alone may use is that rank's; one that n ranks may use counts 1/n for each of them. So masks that a
launcher has made disjoint are left as they are, and a mask that all ranks have is divided. Quotas of control groups are
divided equally by the ranks in the group, and cap the threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

__all__ = ["Placement", "RankFacts", "divide_cpus", "place"]


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """What the other ranks have to know of one.

    Attributes:
        rank: its number in the job.
        machine: names the running kernel, whose CPUs it uses.
        container: names the container on that machine, whose memory and /dev/shm it uses.
        cpus: its affinity mask.
        quotas: control group -> CPUs of its quota; see `control_groups.cpu_quotas`.
        gpu_node: NUMA node of its GPU, None where that is not known or there is no GPU.
        gpu_unknown: why it is not known, '' where it is or no GPU is in use.
    """

    rank: int
    machine: str
    container: str
    cpus: tuple[int, ...]
    quotas: Mapping[str, float] = field(default_factory=dict)
    gpu_node: int | None = None
    gpu_unknown: str = ""


@dataclass(frozen=True)
class Placement:
    """What one rank gets.

    Attributes:
        threads: of its update, at least 1.
        cpus: on which several threads run, sorted: its share; its whole mask where the share is less than one CPU.
        source: where the number of threads is from, in words.
    """

    threads: int
    cpus: tuple[int, ...]
    source: str


def place(ranks: Sequence[RankFacts], order: Sequence[int], nodes: Mapping[int, int]) -> list[Placement]:
    """The placement of each rank of one machine.

    Args:
        ranks: all that run on it. Every rank gets the same answer if it gives them in the same order.
        order: all CPUs of the masks, those that share caches side by side.
        nodes: CPU -> NUMA node.
    """
    shares = divide_cpus([rank.cpus for rank in ranks], order, nodes, [rank.gpu_node for rank in ranks])
    users = Counter(cpu for rank in ranks for cpu in rank.cpus)
    members = Counter(group for rank in ranks for group in rank.quotas)
    return [_placement(rank, share, users, members) for rank, share in zip(ranks, shares, strict=True)]


def _placement(rank: RankFacts, share: list[int], users: Counter[int], members: Counter[str]) -> Placement:
    threads, source = max(1, len(share)), _source(rank.cpus, users)
    for group, quota in rank.quotas.items():
        allowed = max(1, int(quota / members[group]))  # not one more: a group that exceeds its quota is stopped
        if allowed < threads:
            among = f" shared by {members[group]} ranks" if members[group] > 1 else ""
            threads, source = allowed, f"container quota of {quota:g} CPU{'' if quota == 1 else 's'}{among}"
    return Placement(threads, tuple(share or rank.cpus), source)


def _source(cpus: Sequence[int], users: Counter[int]) -> str:
    """Where the size of a share is from."""
    sharing = {users[cpu] for cpu in cpus}
    count = f"{len(cpus)} CPU{'' if len(cpus) == 1 else 's'}"
    if sharing == {1}:
        return f"own mask of {count}"
    if len(sharing) == 1:
        return f"{count} shared by {sharing.pop()} ranks"
    return f"mask of {count}, some of them shared by up to {max(sharing)} ranks"


def divide_cpus(
    masks: Sequence[Sequence[int]],
    order: Sequence[int],
    nodes: Mapping[int, int],
    wanted: Sequence[int | None],
) -> list[list[int]]:
    """Disjoint shares of the CPUs, one for each rank.

    Args:
        masks: the CPUs that each rank may use.
        order: all CPUs of the masks, those that share caches side by side.
        nodes: CPU -> NUMA node.
        wanted: the node that each rank prefers, or None.

    Returns:
        A sorted list of CPUs for each rank, of its mask: as many as the sum of 1/n over the CPUs of the mask, rounded
        down, where n ranks may use a CPU. Those of the preferred node come first, as far as they go.
    """
    users = Counter(cpu for mask in masks for cpu in mask)
    sizes = [int(sum(Fraction(1, users[cpu]) for cpu in mask)) for mask in masks]
    # Those that fewer others may use come first: what is left suits the others.
    in_order = sorted(order, key=lambda cpu: users[cpu])
    allowed = [[cpu for cpu in in_order if cpu in mask] for mask in map(frozenset, masks)]
    rank_of: dict[int, int] = {}
    held = [0] * len(masks)

    def take(rank: int, asked: set[int]) -> bool:
        """Give the rank one more CPU, if need be one of a rank not asked before, which then takes another."""
        asked.add(rank)
        for cpu in allowed[rank]:
            if cpu not in rank_of:
                rank_of[cpu] = rank
                return True
        for cpu in allowed[rank]:
            if rank_of[cpu] not in asked and take(rank_of[cpu], asked):
                rank_of[cpu] = rank
                return True
        return False

    for rank, node in enumerate(wanted):
        near = [cpu for cpu in allowed[rank] if node is not None and nodes.get(cpu) == node and cpu not in rank_of]
        rank_of.update(dict.fromkeys(near[: sizes[rank]], rank))
        held[rank] = len(near[: sizes[rank]])
    for rank, size in enumerate(sizes):
        # Sizes are rounded down from shares that exist side by side, so there is always one more to take.
        for _ in range(size - held[rank]):
            assert take(rank, set()), "shares are larger than the masks"
    shares: list[list[int]] = [[] for _ in masks]
    for cpu in sorted(rank_of):
        shares[rank_of[cpu]].append(cpu)
    return shares
