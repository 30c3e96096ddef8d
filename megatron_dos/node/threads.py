# SPDX-License-Identifier: Apache-2.0
"""How many worker threads the CPU update gets, on which CPUs they run, and from which NUMA node memory is taken.

The default is this rank's share of the CPUs the process may use, whatever OMP_NUM_THREADS says: torchrun sets that
to 1, and ranks that each take every CPU slow one another down. `node` finds the ranks that share the machine, and
`placement` divides it. Where it has NUMA nodes, a rank's CPUs and memory are those near its GPU, as far as they go: a
preference, never a reason to fail, but what cannot be had is said.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_dos.node import ranks as node
from megatron_dos.node.placement import Placement, RankFacts, place
from megatron_dos.node.ranks import Node
from megatron_dos.words import plural

__all__ = [
    "complaints",
    "cpus_for",
    "cpus_of_rank",
    "default_threads",
    "is_first_on_node",
    "memory_node",
    "nearness",
    "on_node",
    "ranks_on_machine",
    "ranks_on_node",
    "source_of_threads",
]

_SYSTEM = Path("/sys/devices/system")

_placed: tuple[Node, list[Placement]] | None = None


def default_threads() -> int:
    """This rank's share of the CPUs, at least 1: see `placement`."""
    return _placement().threads


def source_of_threads() -> str:
    """Where that number is from, in words: 'own mask of 12 CPUs'."""
    of = node.current()
    return _placement().source + (f"; {of.doubt}" if of.doubt else "")


def ranks_on_node() -> int:
    """How many ranks share the host memory and /dev/shm that this one sees."""
    return len(node.current().in_container)


def ranks_on_machine() -> int:
    """How many ranks share the CPUs and the memory bandwidth, in whatever containers they are."""
    return len(node.current().ranks)


def is_first_on_node() -> bool:
    """Whether this rank is the one that speaks for the ranks of `ranks_on_node`."""
    of = node.current()
    return of.in_container[0] == of.own


def cpus_for(threads: int) -> list[int]:
    """CPUs for a pool of `threads` workers; empty when they are not to be pinned.

    A single worker is free to move. More workers than this rank's share of the CPUs get all allowed ones.
    """
    return [] if threads == 1 else list(_runs_on(threads, node.current().own, _placement()))


def cpus_of_rank() -> list[int]:
    """This rank's share of the allowed CPUs, sorted; all of them where there are fewer than ranks."""
    return list(_placement().cpus)


def memory_node() -> int | None:
    """The NUMA node that this rank's slabs prefer: its GPU's, else its CPUs' when they are all of one; else None."""
    nodes = _nodes_of_cpus()
    if len(set(nodes.values())) < 2:
        return None
    near_gpu = node.current().own.gpu_node
    if near_gpu is not None:
        return near_gpu
    of_cpus = {nodes.get(cpu) for cpu in cpus_of_rank()}
    return of_cpus.pop() if len(of_cpus) == 1 else None


@contextlib.contextmanager
def on_node(wanted: int | None) -> Iterator[None]:
    """Run the calling thread on the CPUs of a NUMA node, so that pages which it touches first are taken from there.

    Only CPUs that this rank may use count. Where there are none, or no node is wanted, the thread stays where it is.
    """
    nodes = {} if wanted is None else _nodes_of_cpus()
    near = [cpu for cpu in node.current().own.cpus if nodes.get(cpu) == wanted] if nodes else []
    if not near:
        yield
        return
    before = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):  # the mask of the process has shrunk since: a preference, no reason to fail
        os.sched_setaffinity(0, near)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)


def nearness(threads: int) -> str:
    """How near the CPUs of a pool of `threads` workers are to this rank's GPU, in words; empty without a GPU, or with
    one NUMA node."""
    own = node.current().own
    where = _nearness(own, _runs_on(threads, own, _placement()), _nodes_of_cpus())
    return where.words if where else ""


def complaints(chosen: int = 0) -> list[str]:
    """What the ranks of this node lack, a sentence each: threads, or CPUs near their GPUs.

    Args:
        chosen: the user's number of threads; 0 where it is that of `default_threads`.
    """
    of = node.current()
    lacking: dict[str, list[int]] = defaultdict(list)
    for rank, placement in zip(of.ranks, _placements(of), strict=True):
        if rank.container == of.own.container:
            for what in _lacks(rank, placement, len(of.ranks), chosen):
                lacking[what].append(rank.rank)
    return [
        f"states of rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} are {what}"
        for what, ranks in lacking.items()
    ]


def _lacks(rank: RankFacts, placement: Placement, ranks: int, chosen: int) -> Iterator[str]:
    cpus = os.cpu_count() or 1
    if not chosen and placement.threads == 1 < cpus // ranks:
        yield (
            f"updated with 1 CPU thread ({placement.source}), and the machine has {cpus} CPUs for "
            f"{plural(ranks, 'rank')}. Have the launcher give each rank more CPUs, or raise the CPU quota of the "
            "container"
        )
    where = _nearness(rank, _runs_on(chosen or placement.threads, rank, placement), _nodes_of_cpus())
    if where and not where.all_near:
        yield f"updated by CPU threads {where.words}"


def _runs_on(threads: int, rank: RankFacts, placement: Placement) -> tuple[int, ...]:
    """CPUs of the workers of a pool: see `cpus_for`."""
    return placement.cpus if 1 < threads <= len(placement.cpus) else rank.cpus


@dataclass(frozen=True)
class _Nearness:
    """How near CPUs are to a GPU, in words, and whether all are known to be on its NUMA node."""

    words: str
    all_near: bool = False


def _nearness(rank: RankFacts, cpus: tuple[int, ...], nodes: dict[int, int]) -> _Nearness | None:
    """None without a GPU, or with one NUMA node."""
    if len(set(nodes.values())) == 1:
        return None
    if rank.gpu_unknown:
        return _Nearness(f"not known to be near the GPU: {rank.gpu_unknown}")
    if rank.gpu_node is None:
        return None
    if not nodes:
        return _Nearness("not known to be near the GPU: the kernel lists no NUMA nodes")
    near = sum(nodes.get(cpu) == rank.gpu_node for cpu in cpus)
    if near == len(cpus):
        return _Nearness(f"on NUMA node {rank.gpu_node} of the GPU", all_near=True)
    return _Nearness(f"of which {near} of {len(cpus)} CPUs are on NUMA node {rank.gpu_node} of the GPU")


def _placement() -> Placement:
    of = node.current()
    return _placements(of)[of.index]


def _placements(of: Node) -> list[Placement]:
    """Of all ranks of the machine; the last answer is kept."""
    global _placed
    if _placed is None or _placed[0] is not of:
        nodes = _nodes_of_cpus()
        cpus = {cpu for rank in of.ranks for cpu in rank.cpus}
        order = sorted(cpus, key=lambda cpu: (nodes.get(cpu, 0), _first_sibling(cpu), cpu))
        _placed = of, place(of.ranks, order, nodes)
    return _placed[1]


def _nodes_of_cpus() -> dict[int, int]:
    """CPU -> NUMA node; empty where the kernel does not say."""
    nodes: dict[int, int] = {}
    for path in sorted(_SYSTEM.glob("node/node[0-9]*/cpulist")):
        nodes.update(dict.fromkeys(_numbers(path), int(path.parent.name.removeprefix("node"))))
    return nodes


def _first_sibling(cpu: int) -> int:
    """The lowest CPU of the same core."""
    return min(_numbers(_SYSTEM / f"cpu/cpu{cpu}/topology/thread_siblings_list"), default=cpu)


def _numbers(path: Path) -> list[int]:
    """The numbers of a kernel list like 0-3,8; empty where the file cannot be read."""
    try:
        text = path.read_text().strip()
    except OSError:
        return []
    numbers: list[int] = []
    for run in filter(None, text.split(",")):
        low, _, high = run.partition("-")
        numbers += range(int(low), int(high or low) + 1)
    return numbers
