# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of checkpoints: save in many ways, load from many folders, tell states apart.

The functions take their instructions from environment variables in JSON, since hooks of the harness take no arguments:
CHECKPOINTS names the folder and the ways (see WAYS) to save in or load from.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import rank_main
import torch
from rank_main import distributed_optimizers, named_params, step_of

WAYS: dict[str, dict[str, Any]] = {
    "torch": {"ckpt_format": "torch", "use_dist_ckpt": False},
    "torch_dist": {},
    "torch_dist, not fully parallel": {"ckpt_fully_parallel_save": False},
    "torch_dist, --async-save": {"async_save": True, "async_strategy": "mcore"},
    "torch_dist, fully reshardable": {"dist_ckpt_optim_fully_reshardable": True},
    "torch_dist, fully reshardable, not fully parallel": {
        "dist_ckpt_optim_fully_reshardable": True,
        "ckpt_fully_parallel_save": False,
    },
    "torch_dist, fully reshardable, memory-efficient": {
        "dist_ckpt_optim_fully_reshardable": True,
        "distrib_optim_fully_reshardable_mem_efficient": True,
    },
    "torch_dist, fully reshardable, --async-save": {
        "dist_ckpt_optim_fully_reshardable": True,
        "async_save": True,
        "async_strategy": "mcore",
    },
    # No flag of this Megatron saves in these two; older ones did.
    "torch_dist, gathered on the first rank (until 0.13)": {"older_layout": "dp_zero_gather_scatter"},
    "torch_dist, in the space of the model (until 0.13)": {"older_layout": "fully_sharded_model_space"},
}
"""Name of a way to save -> the arguments of Megatron's that choose it, by attribute."""


def folder_of(way: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in way)


@contextlib.contextmanager
def arguments_of(args: Any, way: str, **more: Any) -> Iterator[None]:
    """Megatron's arguments as if the flags of `way` had been given."""
    from megatron.training import checkpointing

    changes = {**WAYS[way], **more}
    older = changes.pop("older_layout", None)
    before = {name: getattr(args, name) for name in changes}
    metadata = checkpointing._build_sharded_state_dict_metadata
    vars(args).update(changes)
    if older:
        checkpointing._build_sharded_state_dict_metadata = lambda *given, **named: {
            **metadata(*given, **named),
            "distrib_optim_sharding_type": older,
        }
    try:
        yield
    finally:
        vars(args).update(before)
        checkpointing._build_sharded_state_dict_metadata = metadata


def save(model: Any, optimizer: Any, args: Any, folder: Path, way: str = "torch_dist", iteration: int = 0) -> None:
    """Megatron's save_checkpoint into `folder`, in the given way; returns when the files are there."""
    from megatron.training import async_utils, checkpointing

    with arguments_of(args, way, save=str(folder)):
        iteration = iteration or args.curr_iteration + 1
        checkpointing.save_checkpoint(iteration, model, optimizer, rank_main.running.scheduler, 0)
        async_utils.maybe_finalize_async_save(blocking=True)


def load(model: Any, optimizer: Any, args: Any, folder: Path, way: str = "torch_dist", **more: Any) -> None:
    """Megatron's load_checkpoint from `folder`."""
    from megatron.training import checkpointing

    formats = {name: value for name, value in WAYS[way].items() if name in ("ckpt_format", "use_dist_ckpt")}
    # Files that were written by one rank each are read by all ranks in parallel, so that both kinds of load are used.
    formats["ckpt_fully_parallel_load"] = not WAYS[way].get("ckpt_fully_parallel_save", True)
    before = {name: getattr(args, name) for name in (*formats, *more)}
    vars(args).update(load=str(folder), **formats, **more)
    try:
        checkpointing.load_checkpoint(model, optimizer, rank_main.running.scheduler)
    finally:
        vars(args).update(before)


# ---- What a training is in, whatever the layout ---------------------------------------------------------------------


def digest(model: Any, optimizer: Any) -> dict[str, Any]:
    """All that a checkpoint has to bring back, equal exactly when all bits are.

    tensors: for every param of the whole model, under Megatron's global name, a hash of the whole weight and of its
    whole master param, exp_avg and exp_avg_sq, whichever ranks hold what part; on the first rank only. The others hold
    for the first rank: step, groups (hyper-parameters), scheduler, loss scale, random state.
    """
    return {
        "tensors": _tensors(model, optimizer),
        "step": [step_of(one) for one in distributed_optimizers(optimizer)],
        "groups": sorted({
            repr(sorted((key, group[key]) for key in ("lr", "weight_decay", "betas", "eps", "max_lr", "min_lr",
                                                      "wd_mult", "lr_mult", "is_expert_parallel") if key in group))
            for group in optimizer.param_groups if group["params"]
        }),
        "scheduler": repr(rank_main.running.scheduler.state_dict()),
        "scaler": repr([one.grad_scaler.state_dict() for one in distributed_optimizers(optimizer) if one.grad_scaler]),
        "random": _random_state(),
    }  # fmt: skip


def local_digest(model: Any, optimizer: Any) -> dict[str, str]:
    """Hashes of what this rank holds alone, whether or not it agrees with the others."""
    return {
        "weights": _hash(_weights(model)),
        "states": _hash(_states(model, optimizer)),
        "step": repr([step_of(one) for one in distributed_optimizers(optimizer)]),
        "scheduler": repr(rank_main.running.scheduler.state_dict()),
    }


def _hash(parts: Iterator[tuple[str, Any, Any, int, np.ndarray]]) -> str:
    together = hashlib.sha256()
    for *what, values in parts:
        together.update(repr(what).encode() + values.tobytes())
    return together.hexdigest()


def _random_state() -> str:
    from megatron.core import tensor_parallel

    trackers = tensor_parallel.get_cuda_rng_tracker().get_states()
    numbers = [torch.get_rng_state(), torch.cuda.get_rng_state(), *(trackers[name] for name in sorted(trackers))]
    plain = (random.getstate(), np.random.get_state()[1].tolist(), [one.tolist() for one in numbers])
    return hashlib.sha256(repr(plain).encode()).hexdigest()


def _tensors(model: Any, optimizer: Any) -> dict[str, str]:
    """Hashes of whole tensors; empty on all ranks but the first."""
    mine = [*_weights(model), *_states(model, optimizer)]
    gathered: list[Any] = [None] * torch.distributed.get_world_size() if torch.distributed.get_rank() == 0 else None
    torch.distributed.gather_object(mine, gathered)
    if gathered is None:
        return {}
    whole: dict[str, np.ndarray] = {}
    written: dict[str, np.ndarray] = {}
    for name, shape, index, start, values in (part for parts in gathered for part in parts):
        if name not in whole:
            whole[name], written[name] = np.zeros(shape, values.dtype), np.zeros(shape, bool)
        part, known = whole[name][index].reshape(-1), written[name][index].reshape(-1)
        owned = slice(start, start + values.size)
        replica = np.where(known[owned], part[owned], values)
        assert (replica == values).all(), f"replicas of {name} differ"  # values are bits, as integers
        part[owned], known[owned] = values, True
        whole[name][index] = part.reshape(whole[name][index].shape)
        written[name][index] = known.reshape(written[name][index].shape)
    missing = [name for name, known in written.items() if not known.all()]
    assert not missing, f"no rank holds all of {missing}"
    return {name: hashlib.sha256(values.tobytes()).hexdigest() for name, values in whole.items()}


class Place(NamedTuple):
    """Where a range of a flattened param is in a whole tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]
    index: tuple[Any, ...]
    start: int
    stop: int


def _places(model: Any) -> dict[int, list[Place]]:
    """id of a param -> where its ranges are. Halves of a gated MLP are apart in the whole tensor."""
    from megatron.core import mpu
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
    from megatron.core.utils import unwrap_model

    metadata = {
        "singleton_local_shards": False,
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
    }
    places: dict[int, list[Place]] = {}
    for chunk in unwrap_model(model):
        for entry in nested_values(chunk.sharded_state_dict(metadata=metadata)):
            if not isinstance(entry, (ShardedTensor, ShardedTensorFactory)):
                continue
            found = places.setdefault(id(entry.data), [])
            for part in [entry] if isinstance(entry, ShardedTensor) else entry.build():
                start = part.data.storage_offset() - entry.data.storage_offset()
                where = (part.key, tuple(part.global_shape), tuple(part.global_slice()))
                found.append(Place(*where, start, start + part.data.numel()))
    return places


def _cut(places: list[Place], start: int, values: np.ndarray, what: str) -> Iterator[tuple[str, Any, Any, int, Any]]:
    """The values of a flattened param from `start` on, by whole tensors."""
    for place in places:
        low, high = max(place.start, start), min(place.stop, start + values.size)
        if low < high:
            where = (place.shape, place.index, low - place.start)
            yield f"{what} {place.name}", *where, values[low - start : high - start]


def _bits(tensor: torch.Tensor) -> np.ndarray:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.int16 if flat.element_size() == 2 else torch.int32).numpy().copy()


def _weights(model: Any) -> Iterator[tuple[str, Any, Any, int, np.ndarray]]:
    places = _places(model)
    for param in named_params(model).values():
        # The output layer's tied copy is not saved.
        yield from _cut(places.get(id(param), []), 0, _bits(param), "weight")


def _states(model: Any, optimizer: Any) -> Iterator[tuple[str, Any, Any, int, np.ndarray]]:
    places = _places(model)
    for one in distributed_optimizers(optimizer):
        for param in one.model_param_gbuf_map:
            owned = one._get_model_param_range_map(param)["param"]
            for key, tensor in one._get_main_param_and_optimizer_states(param).items():
                if key in ("param", "exp_avg", "exp_avg_sq"):
                    yield from _cut(places.get(id(param), []), owned.start, _bits(tensor), key)


# ---- Hooks ----------------------------------------------------------------------------------------------------------


def save_in_all_ways(point: str, model: Any, optimizer: Any, args: Any) -> Any:
    """At the end: save in each way of CHECKPOINTS; what the training is in, and which ways failed, with the reason."""
    if point != "end":
        return None
    order = json.loads(os.environ["CHECKPOINTS"])
    failed = {}
    for way in order["ways"]:
        try:
            save(model, optimizer, args, Path(order["folder"]) / folder_of(way), way)
        except BaseException as error:
            failed[way] = _reason(error)
    return {"digest": digest(model, optimizer), "failed": failed}


def load_from_all(point: str, model: Any, optimizer: Any, args: Any) -> Any:
    """At the start: load from each folder of CHECKPOINTS, everything having been spoiled before; for each what came
    back, or the reason why it failed."""
    if point != "start":
        return None
    order = json.loads(os.environ["CHECKPOINTS"])
    outcomes: dict[str, Any] = {}
    for folder in order["folders"]:
        for way in order["ways"]:
            spoil(model, optimizer)
            try:
                load(model, optimizer, args, Path(folder) / folder_of(way), way)
            except BaseException as error:  # torch's own derives from it, and Megatron exits where a file is missing
                outcome: Any = {"error": _reason(error)}
            else:
                outcome = {"error": ""}
            everybody: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(everybody, outcome)
            if not any(one["error"] for one in everybody):
                outcome |= digest(model, optimizer)
            outcomes[f"{folder}: {way}"] = outcome
    return outcomes


def _reason(error: BaseException) -> str:
    """Type and last line of an error, which is where torch puts the message of one that it wraps."""
    text = str(error).strip() or "(no message)"
    return f"{type(error).__name__}: {text.splitlines()[-1][:200]}"


def spoil(model: Any, optimizer: Any) -> None:
    """Make everything that a checkpoint brings back something else, as a training from scratch would have it."""
    with torch.no_grad():
        for param in named_params(model).values():
            param.fill_(0.25)
        for one in distributed_optimizers(optimizer):
            # Looking for states of the stock optimizer that it has not made yet would make empty ones.
            for param in one.model_param_gbuf_map if one.optimizer.state else ():
                for key, tensor in one._get_main_param_and_optimizer_states(param).items():
                    if key in ("param", "exp_avg", "exp_avg_sq"):
                        tensor.fill_(7.0)
            if hasattr(one.optimizer, "step_count"):
                one.optimizer.step_count = 99
            for group in one.optimizer.param_groups:
                group.update(lr=9.0, weight_decay=9.0)
                if "step" in group:
                    group["step"] = 99
    rank_main.running.scheduler.num_steps = 0  # loading adds to it
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    torch.cuda.manual_seed(1)
