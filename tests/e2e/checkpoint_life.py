# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of the life of a training around checkpoints: offloads, and looks at the files."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import flat
import torch
from checkpoint_faults import differences, reason_of, step_with_no_grads
from flat import FlatRun, load_states, random_grads, save_states


def offload_between_steps(point: str, model: Any, optimizer: Any, args: Any) -> None:
    """After each step, as reinforcement learning does around its inference: grad buffers and optimizer off the device
    and back, in other orders and counts each time."""
    if point != "step":
        return
    for calls in (
        ("offload_to_cpu", "restore_from_cpu"),
        ("offload_to_cpu", "offload_to_cpu", "restore_from_cpu", "restore_from_cpu"),
        ("restore_from_cpu", "offload_to_cpu", "restore_from_cpu", "offload_to_cpu", "restore_from_cpu"),
    )[: args.curr_iteration + 1]:
        model[0].offload_grad_buffers()
        for call in calls:
            getattr(optimizer, call)()
        model[0].restore_grad_buffers()


def torch_is_too_old() -> None:
    """Before set-up: as if torch could not save tensors that are cut unevenly."""
    from megatron_dos.checkpointing import states_on_file

    states_on_file.may_be_cut = lambda: False


def params_are_cut_by_columns() -> None:
    """Before set-up: a checkpoint keeps the left and the right half of a gated MLP's matrix, which are no ranges of it.
    Without tensor parallelism."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.transformer import mlp

    make = mlp.apply_swiglu_sharded_factory

    def by_columns(entry: Any, offsets: Any, *args: Any, **kwargs: Any) -> Any:
        def build(key: str, tensor: torch.Tensor, replica_id: Any, flattened_range: Any) -> list[Any]:
            last, cut = len(offsets) + tensor.ndim - 1, {"replica_id": replica_id, "prepend_axis_num": len(offsets)}
            halves = [half.contiguous() for half in tensor.chunk(2, dim=-1)]
            return [
                ShardedTensor.from_rank_offsets(key, half, *offsets, (last, index, 2), **cut)
                for index, half in enumerate(halves)
            ]

        factory = make(entry, offsets, *args, **kwargs)
        return replace(factory, build_fn=build, merge_fn=lambda halves: torch.cat(halves, dim=-1))

    mlp.apply_swiglu_sharded_factory = by_columns


def loads_and_steps(point: str, model: Any, optimizer: Any, args: Any) -> Any:
    """At the start: load from each folder of CHECKPOINTS, step and save; what was raised by each."""
    if point != "start":
        return None
    outcomes = []
    for folder in map(Path, json.loads(os.environ["CHECKPOINTS"])["folders"]):
        outcomes.append({
            "load": reason_of(lambda folder=folder: checkpoints.load(model, optimizer, args, folder)),
            "step": reason_of(lambda: step_with_no_grads(model, optimizer)),
            "save": reason_of(lambda folder=folder: checkpoints.save(model, optimizer, args, folder / "again")),
        })  # fmt: skip
    return outcomes


def trained_on_after_a_load(folder: str) -> list[str]:
    """Save a model that is so small that ranks own nothing, load it into another and step; what differs from stepping
    at once."""
    flat.SHAPES, flat.KEPT_IN_FP32 = ((2, 2),), ()
    run, layout = FlatRun("bfloat16"), "fully_reshardable"
    run.step(random_grads(1))
    save_states(run, Path(folder), layout)
    other = load_states(FlatRun("bfloat16", seed=1), Path(folder), layout)
    for each in (run, other):
        each.step(random_grads(2))
    return [*differences(other, run.states()), f"owns {sum(one is not None for one in run.states())}"]


def files_of_two_saves(folder: str) -> dict[str, Any]:
    """Save the same states twice, in all layouts. A hash of each file by name, and what all ranks have in common."""
    run = FlatRun("bfloat16")
    run.step(random_grads(1))
    first = torch.distributed.get_rank() == 0
    hashes = []
    for number in range(2):
        target = Path(folder) / str(number)
        if first:
            (target / "dist").mkdir(parents=True)
            (target / "reshardable").mkdir()
        torch.distributed.barrier()
        # Padding is memory that nobody has written, so let it hold something else for each save.
        leftover = torch.full((100_000,), float(number + 1), device="cpu")
        del leftover
        for name, layout in (("dist", "dp_reshardable"), ("reshardable", "fully_reshardable")):
            save_states(run, target / name, layout)
        run.optimizer.save_parameter_state(str(target / "distrib_optim.pt"))
        if first:
            torch.save(run.optimizer.state_dict(), target / "optimizer.pt")
        torch.distributed.barrier()
        hashes.append(
            {str(path.relative_to(target)): _hash_of(path) for path in sorted(target.rglob("*")) if path.is_file()}
        )
    return {"hashes": hashes, "common": run.optimizer.state_dict()}


def _hash_of(path: Path) -> str:
    data = path.read_bytes()
    if path.name == ".metadata":  # which torch gives a number of its own for each save
        metadata = pickle.loads(data)
        data = repr((metadata.state_dict_metadata, metadata.storage_data)).encode()
    return hashlib.sha256(data).hexdigest()
