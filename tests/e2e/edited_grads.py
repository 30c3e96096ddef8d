# SPDX-License-Identifier: Apache-2.0
"""Grads that are edited between their reduction and the step: what a step makes of them, beside the stock optimizer.

Ours sends its grads in the backward pass; the operations of its steps run in random orders. The stock optimizer has the
specified AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from flat import SHAPES, FlatRun, random_grads, stock_with_numpy_adam
from hooks import use_adversarial_device

STEPS = 3
NO_MATRICES = {0, 2}  # params whose grads are sent again in each step


@dataclass(frozen=True)
class Edit:
    """An edit of reduced grads.

    Attributes:
        edit: what is done.
        seen_in: indices of the params whose grads count as edited; None for all.
        only_last: of all steps, only the last has edited grads.
    """

    edit: Callable[[FlatRun], Any]
    seen_in: set[int] | None
    only_last: bool = False


def _grad(run: FlatRun, index: int) -> torch.Tensor:
    return run.params[index].main_grad


def _without_grad(run: FlatRun) -> None:
    with torch.no_grad():
        _grad(run, 5).mul_(0.5)


def _in_inference_mode(run: FlatRun) -> None:
    with torch.inference_mode():
        _grad(run, 5).mul_(0.5)


def _mask_by_view(run: FlatRun) -> None:
    _grad(run, 3).view(-1)[::3] = 0


def _mask_detached(run: FlatRun) -> None:
    _grad(run, 4).detach().t().masked_fill_(_grad(run, 4).t() > 0, 0)


def _write_by_kernel_and_count(run: FlatRun) -> None:
    _grad(run, 3).data.zero_()
    torch.autograd.graph.increment_version(_grad(run, 3))


def _replace(run: FlatRun) -> None:
    run.params[3].main_grad = _grad(run, 3) * (_grad(run, 3) > 0)


def _buffer_of(run: FlatRun, index: int) -> Any:
    return next(buffer for buffer in run.ddp.buffers if run.params[index] in buffer.param_to_bucket)


def _halve_bucket(run: FlatRun) -> None:
    bucket = _buffer_of(run, 5).param_to_bucket[run.params[5]]
    assert {run.params[5]} == bucket.params
    bucket.grad_data.mul_(0.5)


def _halve_buffer(run: FlatRun) -> None:
    _buffer_of(run, 5).grad_data.mul_(0.5)


EDITS = {
    "none": Edit(lambda run: None, set()),
    "a matrix zeroed": Edit(lambda run: _grad(run, 3).zero_(), {3}),
    "scaled without grad": Edit(_without_grad, {5}),
    "scaled in inference mode": Edit(_in_inference_mode, {5}),
    "masked by a view": Edit(_mask_by_view, {3}),
    "masked by a detached, transposed view": Edit(_mask_detached, {4}),
    "all scaled at once": Edit(lambda run: torch._foreach_mul_([p.main_grad for p in run.params], 0.5), None),
    "a bucket scaled": Edit(_halve_bucket, {5}),
    "a buffer scaled": Edit(_halve_buffer, {0, 1, 3, 5}),
    "scaled by DDP": Edit(lambda run: run.ddp.scale_gradients(0.5), None),
    "written by a kernel and counted": Edit(_write_by_kernel_and_count, {3}),
    "another tensor": Edit(_replace, None, only_last=True),
}


def edit_reduced_grads(
    dtype: str = "bfloat16", grads_in_fp32: bool = True, when: str = "before prepare_grads", inf_at: int = 0
) -> dict[str, dict[str, Any]]:
    """For each edit, some steps with it: what differs from the stock optimizer, what moved, and what was sent again.

    Args:
        when: before or after Megatron's prepare_grads, or in a hook of the inner optimizer's step.
        inf_at: a step that is skipped as there is an inf in its grads; 0 for none.
    """
    use_adversarial_device(all_early=True)
    return {name: _outcome(edit, dtype, grads_in_fp32, when, inf_at) for name, edit in EDITS.items()}


def sum_reduced_grads() -> list[str]:
    """Steps in which grads are summed once more, as Megatron does for norms and embeddings: which params then differ.

    None of the params has a mark; three are no matrices or have the name of an embedding.
    """
    use_adversarial_device(all_early=True)
    settings: dict[str, Any] = {"names": {3: "word_embeddings_weight"}, "overlap_grad_reduce": True, "bucket_size": 20}
    early = {"dos_overlap_grad_d2h": "on", "dos_early_grad_slots": 1000}
    ours, stock = FlatRun(**settings, **early), stock_with_numpy_adam(**settings)
    for step in range(1, STEPS + 1):
        for run in (ours, stock):
            run.backward(random_grads(step))
            # Another sum in each step: Adam does not see a constant factor.
            for index in (*NO_MATRICES, 3):
                for _ in range(step):
                    torch.distributed.all_reduce(_grad(run, index))
            run.optimizer.step()
    return _differences(ours, stock)


def _differences(run: FlatRun, other: FlatRun) -> list[str]:
    pairs = enumerate(zip(run.weights(), other.weights(), strict=True))
    return [f"p{index}" for index, (mine, theirs) in pairs if not torch.equal(mine, theirs)]


def _outcome(edit: Edit, dtype: str, grads_in_fp32: bool, when: str, inf_at: int) -> dict[str, Any]:
    settings: dict[str, Any] = {"weight_decay": 0.0, "clip_grad": 0.5, "overlap_grad_reduce": True, "bucket_size": 20}
    if dtype == "float16":
        settings["initial_loss_scale"] = 1024.0
    early = {"dos_overlap_grad_d2h": "on", "dos_early_grad_slots": 1000, "dos_gpu_share": 0.2}
    ours = FlatRun(dtype, grads_in_fp32, **settings, **early)
    stock = stock_with_numpy_adam(dtype, grads_in_fp32, **settings)
    before, steps = ours.weights(), []
    for step in range(1, STEPS + 1):
        edits = edit.edit if step == STEPS or not edit.only_last else EDITS["none"].edit
        grads = random_grads(step, 0.5 * float(ours.optimizer.get_loss_scale()) * 1e-3)
        if step == inf_at:
            grads[0].fill_(math.inf)
        for run in (ours, stock):
            run.backward(grads, grads)
        steps.append([_step(run, edits, when) for run in (ours, stock)])
    changed = set(range(len(SHAPES))) if edit.seen_in is None else edit.seen_in | NO_MATRICES
    return {
        "differences": _differences(ours, stock),
        "steps": steps,
        "moved": [int((one != other).sum()) for one, other in zip(before, ours.weights(), strict=True)],
        "again": _sent_again(ours),
        "expected again": _subgroups_of(ours, changed),
    }


def _step(run: FlatRun, edit: Callable[[FlatRun], Any], when: str) -> tuple[bool, float | None]:
    """A step with edited grads: whether it was taken, and the norm."""
    inner = run.inner
    if when == "in a hook":
        handle = inner.optimizer.register_step_pre_hook(lambda *_: (edit(run), None)[1])
        taken, norm, _ = run.optimizer.step()
        handle.remove()
        return taken, norm
    if when == "before prepare_grads":
        edit(run)
        taken, norm, _ = run.optimizer.step()
        return taken, norm
    inner.prepare_grads()
    edit(run)
    norm = inner.clip_grad_norm(inner.config.clip_grad)
    return inner.step_with_ready_grads(), norm


def _sent_again(run: FlatRun) -> list[int]:
    """The subgroups whose grads were sent early and, in part, again in the last step."""
    program = run.inner._engine._program
    assert len(program.early) == sum(placement.name == "HOST" for placement in program.placements)
    return [op.subgroup for op in program.ops if op.kind.name == "GRAD_TO_HOST" and op.subgroup in program.early]


def _subgroups_of(run: FlatRun, params: set[int]) -> list[int]:
    """Those that are updated on the CPU and hold a part of one of the params, in the order of the program."""
    engine = run.inner._engine
    owners = {run.inner._owner_of[run.params[i]] for i in params if run.params[i] in run.inner._owner_of}
    return [
        subgroup.index
        for subgroup, placement in zip(engine.partition.subgroups, engine._program.placements, strict=True)
        if placement.name == "HOST" and any(piece.owner in owners for piece in subgroup.pieces)
    ]
