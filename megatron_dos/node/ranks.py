# SPDX-License-Identifier: Apache-2.0
"""Who the ranks of this machine are: what they exchanged, or else what the launcher's environment says.

[Note: ranks meet at the store] Launchers differ in what they say: some bind each rank to CPUs of its own, some set no
LOCAL_WORLD_SIZE. So each rank puts what the others have to know into the key-value store through which
`torch.distributed` was set up, and reads what the ranks of its own machine have put there. It is not a collective: its
order among those of all ranks does not matter, it needs no GPU, and a rank that never builds an optimizer delays the
others by `LIMIT_S` seconds, once, instead of for ever. What a rank learns decides where its threads run and how much
memory it expects others to take, never a bit of a result, so ranks may differ in it.
"""

from __future__ import annotations

import json
import os
import socket
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_dos.node import gpu
from megatron_dos.node.control_groups import cpu_quotas
from megatron_dos.node.placement import RankFacts

__all__ = ["LIMIT_S", "Node", "current", "local_rank", "meet"]

LIMIT_S = 120.0
"""Seconds to wait for ranks that have not got as far."""

_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")
_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class Node:
    """The ranks of this machine.

    Attributes:
        ranks: in the order of their numbers.
        index: which of them this process is.
        doubt: why it is not known that these are the ranks, '' where they have said so themselves.
    """

    ranks: tuple[RankFacts, ...]
    index: int
    doubt: str = ""

    @property
    def own(self) -> RankFacts:
        return self.ranks[self.index]

    @property
    def in_container(self) -> list[RankFacts]:
        """The ranks that share memory limits and /dev/shm with this one, which is among them."""
        return [rank for rank in self.ranks if rank.container == self.own.container]


_met: tuple[weakref.ref[Any], Node] | None = None  # and of which process group
_meetings = 0


def current() -> Node:
    """The ranks of this machine as they have met, else according to the environment.

    Raises:
        ValueError: a launcher's environment variable makes no sense.
    """
    if _met is not None and dist.is_initialized() and _met[0]() is dist.group.WORLD:
        return _met[1]
    return _from_environment("the ranks have not met")


def meet(limit_s: float | None = None) -> None:
    """Let the ranks of the job find out which of them share this machine, where `torch.distributed` is initialised.

    Every rank of the job calls it; all but the first call for a world do nothing. See [Note: ranks meet at the store].

    Args:
        limit_s: seconds to wait for the others; `LIMIT_S` by default. Afterwards the environment is believed.
    """
    global _met, _meetings
    if not dist.is_initialized():
        return
    if _met is None or _met[0]() is not dist.group.WORLD:
        _meetings += 1
        try:
            found = _at_store(f"megatron_dos/{_meetings}", LIMIT_S if limit_s is None else limit_s)
        except RuntimeError as error:  # a timeout, or a backend that has no store
            found = _from_environment(f"the ranks did not meet: {str(error).splitlines()[0]}")
        _met = weakref.ref(dist.group.WORLD), found


def local_rank() -> int:
    """Which of the node's ranks this is, as torchrun, MPI or Slurm says; 0 where nobody does."""
    return _integer(_RANKS, 0, 0)


def _at_store(prefix: str, limit_s: float) -> Node:
    """The ranks of this machine, from the store."""
    store = dist.distributed_c10d._get_default_store()
    if store is None:
        raise RuntimeError(f"{dist.get_backend()} has no store")
    own = _facts(dist.get_rank())
    of_machine = f"{prefix}/machine {own.machine}"
    store.set(f"{of_machine}/{store.add(of_machine, 1)}", json.dumps(asdict(own)))
    # The last to arrive knows that all have written before it.
    if store.add(f"{prefix}/arrived", 1) == dist.get_world_size():
        store.set(f"{prefix}/complete", "1")
    store.wait([f"{prefix}/complete"], timedelta(seconds=limit_s))
    count = store.add(of_machine, 0)
    written = (json.loads(store.get(f"{of_machine}/{number}")) for number in range(1, count + 1))
    ranks = sorted((RankFacts(**{**of, "cpus": tuple(of["cpus"])}) for of in written), key=lambda rank: rank.rank)
    if own not in ranks:
        raise RuntimeError("the store did not keep what was written")  # one that only pretends, as in simulations
    return Node(tuple(ranks), ranks.index(own))


def _from_environment(doubt: str) -> Node:
    """As many ranks as the launcher says, or as this one's number shows, and all with this one's mask."""
    index = local_rank()
    count = max(_integer(_SIZES, 1, 1), index + 1)
    own, near = _facts(index), gpu.numa_nodes(count)
    ranks = tuple(replace(own, rank=rank, gpu_node=near[rank]) for rank in range(count))
    return Node(ranks, index, doubt)


def _facts(rank: int) -> RankFacts:
    """What this process says of itself."""
    machine = machine_id()
    gpu_node, gpu_unknown = gpu.numa_node()
    return RankFacts(
        rank=rank,
        machine=machine,
        container=f"{machine} {socket.gethostname()} {_device(_SHARED_MEMORY)}",
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        quotas=cpu_quotas(),
        gpu_node=gpu_node,
        gpu_unknown=gpu_unknown,
    )


def machine_id() -> str:
    """Names the running kernel, as host names do not: containers of one machine have several, and machines may share
    one. The host name is used where the kernel says nothing."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


def _device(folder: str) -> int:
    """The number of the mounted file system."""
    try:
        return os.stat(folder).st_dev
    except OSError:
        return 0


def _integer(names: Sequence[str], default: int, least: int) -> int:
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


def _forget() -> None:
    """A forked child may be another rank."""
    global _met, _meetings
    _met, _meetings = None, 0


os.register_at_fork(after_in_child=_forget)
