# SPDX-License-Identifier: Apache-2.0
"""A stand-in for NCCL on the software GPU: collectives that gloo does, on streams of their own.

As with NCCL, each process group has a stream. A collective waits there for what the caller's stream holds by now, and
whoever waits for its handle makes a stream wait, not the host. Groups are gloo's, and are called "nccl" as asked for.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.utils._pytree import tree_leaves, tree_map_only

from software_gpu.operations import alias_of, enqueue, raise_failure

__all__ = ["install"]

_COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "_all_gather_base",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "_reduce_scatter_base",
    "broadcast",
    "reduce",
    "all_to_all_single",
    "all_to_all",
    "gather",
    "scatter",
)
_POINT_TO_POINT = ("isend", "irecv", "send", "recv")

Work = Callable[[], Any]


class Handle:
    """What an asynchronous collective gives. Its tensors live until it is waited for, as with NCCL."""

    def __init__(self, event: torch.cuda.Event, tensors: list[torch.Tensor]) -> None:
        self._event = event
        self._tensors = tensors

    def wait(self, timeout: Any = None) -> bool:
        torch.cuda.current_stream().wait_event(self._event)
        self._tensors = []
        return True

    def is_completed(self) -> bool:
        return self._event.query()

    def synchronize(self) -> None:
        self.wait()


class _Streams:
    """One stream for each group, made when it is first used."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Any, torch.cuda.Stream]] = {}

    def of(self, group: Any) -> torch.cuda.Stream:
        group = group or c10d._get_default_group()
        return self._of.setdefault(id(group), (group, torch.cuda.Stream()))[1]


_streams = _Streams()
_collected = threading.local()
_names: dict[int, tuple[Any, str]] = {}  # of groups: the backend that was asked for


def _is_cuda(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def _start(works: list[Work], group: Any, tensors: list[torch.Tensor]) -> Handle:
    """Put collectives on the stream of a group."""
    stream = _streams.of(group)
    stream.wait_stream(torch.cuda.current_stream())

    def run() -> None:
        for started in [work() for work in works]:
            if started is not None:
                started.wait()

    enqueue(run, stream)
    event = torch.cuda.Event()
    event.record(stream)
    return Handle(event, tensors)


def _collective(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        group, is_async = given.get("group"), given.pop("async_op", original.__name__ in ("isend", "irecv"))
        tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
        if not _uses_streams(group):
            return original(*args, **kwargs)
        on_device = any(map(_is_cuda, tensors))
        aliases = tree_map_only(torch.Tensor, lambda one: alias_of(one.detach()) if _is_cuda(one) else one, given)
        work = _averaged(original, aliases, group)
        collected = getattr(_collected, "works", None)
        if collected is not None:
            collected.append((work, tensors))
            return None
        handle = _start([work], group, tensors)
        if not on_device:  # objects, in memory of the host
            handle._event.synchronize()
            raise_failure()
        if is_async:
            return handle
        handle.wait()
        return None

    return call


def _averaged(original: Callable[..., Any], given: dict[str, Any], group: Any) -> Work:
    """The collective, with averages as sums that are divided."""
    if given.get("op") != dist.ReduceOp.AVG:
        return lambda: original(**given)
    output = next(given[name] for name in ("tensor", "output") if name in given)

    def work() -> None:
        original(**{**given, "op": dist.ReduceOp.SUM})
        output.div_(dist.get_world_size(group))

    return work


def _uses_streams(group: Any) -> bool:
    group = group or c10d._get_default_group()
    return _names.get(id(group), (None, ""))[1] == "nccl"


class _Coalesced:
    def __init__(self) -> None:
        self.handle: Handle | None = None

    def wait(self) -> None:
        if self.handle is not None:
            self.handle.wait()


@contextmanager
def _coalescing_manager(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[_Coalesced]:
    _collected.works, result = [], _Coalesced()
    try:
        yield result
        works = _collected.works
    finally:
        _collected.works = None
    if works:
        tensors = [tensor for _, of_one in works for tensor in of_one]
        result.handle = _start([work for work, _ in works], group, tensors)
        if not async_ops:
            result.wait()


def _batch_isend_irecv(operations: list[Any]) -> list[Handle]:
    with _coalescing_manager(operations[0].group) as result:
        for one in operations:
            peer = {"group_dst" if one.op is dist.isend else "group_src": one.group_peer}
            one.op(one.tensor, group=one.group, tag=one.tag, **peer)
    return [result.handle]


def _barrier(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        if not _uses_streams(group):
            return original(group, async_op)
        handle = _start([lambda: original(group)], group, [])
        if async_op:
            return handle
        handle._event.synchronize()
        raise_failure()
        return None

    return barrier


def install() -> None:
    """Put it in the place of NCCL. Before Megatron is imported, which takes some functions by name."""
    make_default, make_group, backend_of = dist.init_process_group, dist.new_group, dist.get_backend

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        make_default("gloo", *args, **kwargs)
        group = c10d._get_default_group()
        _names[id(group)] = (group, backend or "nccl")

    def new_group(
        ranks: Any = None, timeout: Any = None, backend: str | None = None, pg_options: Any = None, **kwargs: Any
    ) -> Any:
        kwargs.pop("device_id", None)
        group = make_group(ranks, timeout, "gloo", **kwargs)
        if isinstance(group, dist.ProcessGroup):
            _names[id(group)] = (group, backend or get_backend())
        return group

    def get_backend(group: Any = None) -> str:
        found = group or c10d._get_default_group()
        return _names[id(found)][1] if id(found) in _names else backend_of(found)

    replaced: dict[str, Callable[..., Any]] = {
        "init_process_group": init_process_group,
        "new_group": new_group,
        "get_backend": get_backend,
        "barrier": _barrier(dist.barrier),
        "batch_isend_irecv": _batch_isend_irecv,
        "_coalescing_manager": _coalescing_manager,
    }
    for name in (*_COLLECTIVES, *_POINT_TO_POINT):
        replaced[name] = _collective(getattr(c10d, name))
    for name, function in replaced.items():
        for module in (dist, c10d):
            if hasattr(module, name):
                setattr(module, name, function)
