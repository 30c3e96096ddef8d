"""How many worker threads the CPU update gets, on which CPUs they run, and from which NUMA node memory is taken.

The default is this rank's share of the CPUs the process may use, whatever OMP_NUM_THREADS says: torchrun sets that
to 1, and ranks that each take every CPU slow one another down. Where the machine has NUMA nodes, a rank's CPUs and
memory are those near its GPU, as far as they go: a preference, never a reason to fail.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_dos.kernels import gpu

__all__ = ["cpus_for", "cpus_of_rank", "default_threads", "divide_cpus", "local_rank", "memory_node", "ranks_on_node"]

_SYSTEM = Path("/sys/devices/system")


def default_threads() -> int:
    """This rank's share of the allowed CPUs: their number over the ranks of the node, at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // ranks_on_node())


def ranks_on_node() -> int:
    """How many ranks share this node: what torchrun says, or MPI, or Slurm; 1 where none of them does."""
    return _local(("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE"), 1, 1)


def local_rank() -> int:
    """Which of the node's ranks this is, likewise; 0 where nobody says."""
    return _local(("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"), 0, 0)


def cpus_for(threads: int) -> list[int]:
    """CPUs for a pool of `threads` workers; empty when they are not to be pinned.

    A single worker is free to move. More workers than this rank's share of the CPUs get all allowed ones.
    """
    if threads == 1:
        return []
    share = cpus_of_rank()
    return share if threads <= len(share) else sorted(os.sched_getaffinity(0))


def cpus_of_rank() -> list[int]:
    """This rank's share of the allowed CPUs, sorted; all of them where there are fewer than ranks."""
    ranks = ranks_on_node()
    rank = local_rank()
    allowed = sorted(os.sched_getaffinity(0))
    if rank >= ranks:
        return allowed
    nodes = _nodes_of_cpus()
    cores = {cpu: (nodes.get(cpu, 0), _first_sibling(cpu), cpu) for cpu in allowed}
    in_order = sorted(allowed, key=cores.__getitem__)
    return divide_cpus(in_order, nodes, gpu.numa_nodes(ranks))[rank]


def divide_cpus(cpus: Sequence[int], nodes: Mapping[int, int], wanted: Sequence[int | None]) -> list[list[int]]:
    """Equal shares of `cpus`, one for each rank of `wanted`, disjoint where there are enough CPUs.

    Args:
        cpus: allowed CPUs, those that share caches side by side.
        nodes: CPU -> NUMA node.
        wanted: the node that each rank prefers, or None.

    Returns:
        A sorted list of CPUs for each rank. A rank without a preference, or whose node is used up, gets what is left.
    """
    size = len(cpus) // len(wanted)
    if size == 0:
        return [sorted(cpus)] * len(wanted)
    free = list(cpus)
    shares: list[list[int]] = []
    for node in wanted:
        near = [cpu for cpu in free if node is not None and nodes.get(cpu) == node][:size]
        shares.append(near)
        free = [cpu for cpu in free if cpu not in near]
    for share in shares:
        missing = size - len(share)
        share += free[:missing]
        del free[:missing]
    return [sorted(share) for share in shares]


def memory_node() -> int | None:
    """The NUMA node that this rank's slabs prefer: its GPU's, else its CPUs' when they are all of one; else None."""
    nodes = _nodes_of_cpus()
    if len(set(nodes.values())) < 2:
        return None
    rank, ranks = local_rank(), ranks_on_node()
    near_gpu = gpu.numa_nodes(ranks)[rank] if rank < ranks else None
    if near_gpu is not None:
        return near_gpu
    of_cpus = {nodes.get(cpu) for cpu in cpus_of_rank()}
    return of_cpus.pop() if len(of_cpus) == 1 else None


def _local(names: Sequence[str], default: int, least: int) -> int:
    """The first integer environment variable of a launcher that is set."""
    name = next((name for name in names if os.environ.get(name)), None)
    if name is None:
        return default
    text = os.environ[name]
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise ValueError(f"environment variable {name}: expected an integer of at least {least}, got {text!r}")
    return value


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
