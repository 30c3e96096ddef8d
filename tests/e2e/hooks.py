# SPDX-License-Identifier: Apache-2.0
"""What tests have the ranks do in the middle of a training: `inspect` hooks of the harness."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from rank_main import distributed_optimizers, named_params, states_of, weights_of


def state_at_start(point: str, model: Any, optimizer: Any, args: Any) -> Any:
    """Weights, states, step, learning rates and random state right after set-up, before any step."""
    if point != "start":
        return None
    return {
        "weights": weights_of(model),
        "states": states_of(model, optimizer),
        "groups": [
            {key: group[key] for key in ("lr", "weight_decay", "betas", "eps")} for group in optimizer.param_groups
        ],
        "random": torch.get_rng_state(),
        "loss_scale": float(optimizer.get_loss_scale()),
    }


def quiet_step(point: str, model: Any, optimizer: Any, args: Any) -> Any:
    """A step with zero grads and no weight decay: what it changed, by name."""
    if point != "start":
        return None
    before, states = weights_of(model), states_of(model, optimizer)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    _step_with(model, optimizer, 0.0)
    after, new_states = weights_of(model), states_of(model, optimizer)
    changed = [name for name in before if not _same(before[name], after[name])]
    changed += [
        f"{key} of {name}"
        for name, state in states.items()
        for key in ("param", "exp_avg", "exp_avg_sq")
        if not _same(state[key], new_states[name][key])
    ]
    return {"changed": changed, "compared": len(before)}


def constant_step(point: str, model: Any, optimizer: Any, args: Any) -> Any:
    """A step with all grads 1 and no weight decay: by how much each master element moved, and replicas' weights."""
    if point != "start":
        return None
    before = states_of(model, optimizer)
    for group in optimizer.param_groups:
        group.update(weight_decay=0.0, lr=1e-3)
    _step_with(model, optimizer, 1.0)
    moved = {name: before[name]["param"] - state["param"] for name, state in states_of(model, optimizer).items()}
    return {
        "moved": {name: (float(move.min()), float(move.max()), move.numel()) for name, move in moved.items()},
        "ranges": {name: (state["start"], state["end"]) for name, state in before.items()},
        "sizes": {name: param.numel() for name, param in named_params(model).items()},
        "weights": weights_of(model),
    }


def _step_with(model: Any, optimizer: Any, value: float) -> None:
    """One optimizer step with every main grad set to `value` after the reduction."""
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    clip = [one.config.clip_grad for one in distributed_optimizers(optimizer)]
    for one in distributed_optimizers(optimizer):
        one.config.clip_grad = 0.0
    for param in named_params(model).values():
        param.main_grad.fill_(value)
    optimizer.step()
    for one, clip_grad in zip(distributed_optimizers(optimizer), clip, strict=True):
        one.config.clip_grad = clip_grad


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def use_adversarial_device(seed: int = 0, all_early: bool = False) -> None:
    """Run every step's program in random orders that only its streams and dependencies limit.

    Args:
        all_early: what may run in the backward pass does so; otherwise some of it, by chance.
    """
    from megatron_dos.adapter import setup
    from megatron_dos.device.sim import SimDevice

    class PromptDevice(SimDevice):
        def begin(self, op: Any, handler: Any) -> None:
            handler(op)
            self._begun.add(op.subgroup)

    device_class = PromptDevice if all_early else SimDevice
    setup.inject(make_device=lambda place: device_class(seed=1000 * seed + torch.distributed.get_rank()))


def let_grads_be_scaled() -> None:
    """Early grads are not refused with --calculate-per-token-loss, under which Megatron scales all grads afterwards."""
    from megatron_dos.options import refusals

    rows = refusals.EARLY_GRADS_REFUSALS
    refusals.EARLY_GRADS_REFUSALS = tuple(row for row in rows if row.fields != ("calculate_per_token_loss",))
    assert len(refusals.EARLY_GRADS_REFUSALS) == len(rows) - 1


def do_not_look_at_buffers() -> None:
    """Edits of the whole grad buffer, as by `scale_gradients`, go unseen."""
    from megatron_dos.adapter.early_grads import EarlyGrads

    EarlyGrads._edits = lambda self, owner: (self._main_grads[owner]._version,)


def change_share(point: str, model: Any, optimizer: Any, args: Any) -> Any:
    """After each step another share of the parameters goes to the GPU, and another way for the grads."""
    if point != "step":
        return None
    shares = (0, 1, 0.5, 0.25, 0.9)
    for one in distributed_optimizers(optimizer):
        step = one.optimizer.step_count
        changed = replace(one._engine.options, host_share=shares[step % 5], grads_as_fp32=bool(step % 2))
        one._engine.use(changed)
    return None


def sent_early(point: str, model: Any, optimizer: Any, args: Any) -> Any:
    """Of each step's program: its subgroups on the CPU; of those with early grads, how many may change without a count,
    and how many came again."""
    if point != "step":
        return None
    programs = [one._engine._program for one in distributed_optimizers(optimizer)]
    if None in programs:  # no step has been taken yet
        return None
    again = [
        op
        for program in programs
        for op in program.ops
        if op.kind.name == "GRAD_TO_HOST" and op.subgroup in program.early
    ]
    engines = [one._engine for one in distributed_optimizers(optimizer)]
    changing = [
        subgroup
        for engine in engines
        for subgroup in engine._program.early
        if any(piece.owner in engine.changing for piece in engine.partition.subgroups[subgroup].pieces)
    ]
    return {
        "early": sum(len(program.early) for program in programs),
        "on_host": sum(place.name == "HOST" for program in programs for place in program.placements),
        "sent_again": len(again),
        "may_change": len(changing),
    }


def gathers_in_flight(point: str, model: Any, optimizer: Any, args: Any) -> Any:
    """After each step: for each bucket group whether its param all-gather has been started, and of how many buckets."""
    if point != "step":
        return None
    groups = [group for chunk in model for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)]
    return {"started": [group.param_gather_dispatched for group in groups], "buckets": len(groups)}


def step_again_and_watch(point: str, model: Any, optimizer: Any, args: Any) -> Any:
    """As `step_again`: how many param gathers nobody has waited for, and which of them the second step waits for."""
    if point != "step" or args.curr_iteration != 1:
        return None
    groups = [group for chunk in model for group in chunk.bucket_groups]
    pending = [group for group in groups if group.param_gather_handle is not None]
    waited: list[int] = []

    class Watched:
        def __init__(self, number: int, handle: Any) -> None:
            self._number, self._handle = number, handle

        def wait(self) -> None:
            self._handle.wait()
            waited.append(self._number)

    for number, group in enumerate(pending):
        group.param_gather_handle = Watched(number, group.param_gather_handle)
    optimizer.step()
    return {"pending": len(pending), "waited": sorted(waited)}


def forget_unused_gathers() -> None:
    """A new step does not wait for the param gathers that are still under way."""
    from megatron_dos.adapter.param_gather import EarlyParamGather

    def begin(self: Any) -> None:
        for _, group in self._groups:
            group.param_gather_handle = None
        self._written.clear()
        self._started = 0

    EarlyParamGather.begin = begin


def step_again(point: str, model: Any, optimizer: Any, args: Any) -> None:
    """After the second step another one, without a forward pass before it."""
    if point == "step" and args.curr_iteration == 1:
        optimizer.step()
