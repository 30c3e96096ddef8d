# SPDX-License-Identifier: Apache-2.0
"""`main_param` of 16-bit params: what Megatron's norm of the parameters asks of an optimizer with FP32 master params.

[Note: main_param] The stock optimizer leaves each 16-bit param's shard of the masters at the param, as an attribute
`main_param` on the device. `calc_params_l2_norm` takes the norm of what it finds there, and nobody has to say in
advance that it will. Masters in host memory have no such tensor, and making one would take the memory that was to be
saved. The norm of all shards is the norm of the shards' norms, so one element on the device can stand for a shard. It
is computed from the masters whenever the attribute is read: nothing is computed in a step, and nothing can be out of
date.

An attribute of an instance cannot do that, and another class of params would be seen by whoever compares types. So the
class of the params gains a descriptor without `__set__`: params that it does not know have no `main_param`, as before,
and one that another optimizer puts into a param's own `__dict__` comes first. Which params it knows is kept apart from
them: pickles and deep copies of a model hold nothing of this, and neither params nor engine are kept alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from megatron_dos.update.engine import UpdateEngine

__all__ = ["answer_main_param"]

_CHUNK = 1 << 20  # elements: torch's norm loses digits on large tensors in host memory

# param -> (weak reference to its engine, index of its shard there)
_known = WeakTensorKeyDictionary()


def answer_main_param(param: torch.Tensor, engine: UpdateEngine, owner: int) -> None:
    """From now on `param.main_param` is a tensor of one element whose norm is that of the param's master shard.

    FP32, on the param's device. The attribute is there as long as the engine. See [Note: main_param].

    Args:
        param: a 16-bit param of the model.
        engine: where its master is.
        owner: index of its shard in the engine.
    """
    _known[param] = weakref.ref(engine), owner
    vars(param).pop("main_param", None)
    kind = type(param)
    if not isinstance(getattr(kind, "main_param", None), _MainParam):
        kind.main_param = _MainParam()  # type: ignore[attr-defined]  # see [Note: main_param]


class _MainParam:
    """The attribute of the class."""

    def __get__(self, param: torch.Tensor | None, kind: type | None = None) -> Any:
        if param is None:
            return self
        engine_of, owner = _known.get(param, (lambda: None, 0))
        engine = engine_of()
        if engine is None:
            raise AttributeError(f"'{type(param).__name__}' object has no attribute 'main_param'")
        parts = engine.owner_parts(owner)["master"]
        return _norm(parts, engine.options.threads).to(param.device)


@torch.no_grad()
def _norm(parts: Sequence[torch.Tensor], threads: int) -> torch.Tensor:
    """L2 norm of flat tensors taken as one: one FP32 element on the host."""
    chunks = list(chain.from_iterable(part.split(_CHUNK) for part in parts))
    if len(chunks) == 1:
        return torch.norm(chunks[0]).reshape(1).cpu()
    if torch.get_num_threads() > 1:
        norms = [torch.norm(chunk) for chunk in chunks]
    else:  # as launchers have it, which set OMP_NUM_THREADS=1
        with ThreadPoolExecutor(threads) as pool:
            norms = list(pool.map(torch.norm, chunks))
    return torch.stack([norm.cpu() for norm in norms]).double().norm().float().reshape(1)
