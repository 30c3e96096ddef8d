# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of callers that change Adam's state: the same code on ours and on the stock optimizer.

The stock optimizer is Megatron's own around `numpy_adam.NumpyAdamW`, whose interface and bits are known: one step in
each param group, moments in `state`. Params have one element to 32,768, so that one of them lies across the border
where a share of the states resides on the device.
"""

from __future__ import annotations

import copy
import os
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import flat
import torch
from checkpoint_faults import differences as other_states
from flat import SHAPES, FlatRun, load_states, random_grads, save_states, stock_with_numpy_adam

MOMENTS = ("exp_avg", "exp_avg_sq")
ACROSS_THE_BORDER = 0.5  # a resident share that cuts the largest param


def shards(inner: Any) -> list[torch.Tensor]:
    return [shard for group in inner.param_groups for shard in group["params"]]


def other_weights(weights: list[torch.Tensor], expected: list[torch.Tensor]) -> list[str]:
    """Names of the weights whose bits differ."""
    pairs = enumerate(zip(weights, expected, strict=True))
    return [f"weight p{i}" for i, (a, b) in pairs if not torch.equal(a.view(torch.uint8), b.view(torch.uint8))]


def set_step(inner: Any, step: int) -> None:
    for group in inner.param_groups:
        if "step" in group:
            group["step"] = step


# ---- What callers do: each takes a run with an inner optimizer of either kind ---------------------------------------


def reset_in_place(run: FlatRun) -> None:
    """As frameworks reset an optimizer."""
    for states in run.inner.optimizer.state.values():
        for key in MOMENTS:
            if key in states:
                states[key].zero_()
    set_step(run.inner.optimizer, 0)


def reset_by_assignment(run: FlatRun) -> None:
    for shard, states in run.inner.optimizer.state.items():
        states["exp_avg"] = torch.zeros_like(states["exp_avg"])
        run.inner.optimizer.state[shard]["exp_avg_sq"] = torch.zeros_like(states["exp_avg_sq"])
    set_step(run.inner.optimizer, 0)


def moments_alone(run: FlatRun) -> None:
    """The step goes on."""
    for states in run.inner.optimizer.state.values():
        states["exp_avg"].mul_(0.5)
        states["exp_avg_sq"][: states["exp_avg_sq"].numel() // 2].add_(1.0)


def step_alone(run: FlatRun) -> None:
    set_step(run.inner.optimizer, 3)


def step_through_the_outer_optimizer(run: FlatRun) -> None:
    for group in run.optimizer.param_groups:
        group["step"] = 40


def data_is_exchanged(run: FlatRun) -> None:
    for states in run.inner.optimizer.state.values():
        states["exp_avg"].data = states["exp_avg"].data * 0.25
        states["exp_avg_sq"].data.mul_(4.0)


def empty_dict(run: FlatRun) -> None:
    run.inner.optimizer.state = defaultdict(dict)


def empty_dict_and_step(run: FlatRun) -> None:
    run.inner.optimizer.state = defaultdict(dict)
    set_step(run.inner.optimizer, 0)


def clear(run: FlatRun) -> None:
    run.inner.optimizer.state.clear()


def pop(run: FlatRun) -> None:
    for shard in shards(run.inner.optimizer)[::2]:
        popped = run.inner.optimizer.state.pop(shard)
        assert popped["exp_avg"].any()


def delete(run: FlatRun) -> None:
    for shard in shards(run.inner.optimizer):
        del run.inner.optimizer.state[shard]


def entries(run: FlatRun) -> None:
    """Each shard is given a new dict, of which the first is empty."""
    for index, shard in enumerate(shards(run.inner.optimizer)):
        old = run.inner.optimizer.state[shard]
        run.inner.optimizer.state[shard] = {key: old[key] * 2 for key in MOMENTS} if index else {}


def clear_entries(run: FlatRun) -> None:
    for states in run.inner.optimizer.state.values():
        states.clear()


def held_over_a_step(run: FlatRun) -> None:
    held = [states[key] for states in run.inner.optimizer.state.values() for key in MOMENTS]
    run.step(random_grads(50))
    for tensor in held:
        tensor.mul_(0.5)
    run.step(random_grads(51))
    for tensor in held:
        tensor.data = tensor + 1.0


def rollback(run: FlatRun) -> None:
    inner = run.inner.optimizer
    saved = copy.deepcopy(inner.state_dict())
    for states in saved["state"].values():
        states.pop("master_param", None)  # stock has its masters elsewhere
    for step in (60, 61):
        run.step(random_grads(step))
    inner.load_state_dict(saved)


def masters_of_stock(run: FlatRun) -> Callable[[], None]:
    """A function that brings back the masters of now. Those of ours are a part of its states, as in other optimizers
    that own them; those of stock are the tensors of its param groups."""
    inner = run.inner.optimizer
    kept = [] if hasattr(run.inner, "_engine") else [(shard, shard.clone()) for shard in shards(inner)]

    def put_back() -> None:
        with torch.no_grad():
            for shard, master in kept:
                shard.copy_(master)

    return put_back


def whole_rollback(run: FlatRun) -> None:
    inner, put_masters_back = run.inner.optimizer, masters_of_stock(run)
    saved = copy.deepcopy(inner.state_dict())
    for step in (60, 61):
        run.step(random_grads(step))
    inner.load_state_dict(saved)
    put_masters_back()


def state_dict_without_states(run: FlatRun) -> None:
    saved = run.inner.optimizer.state_dict()
    run.inner.optimizer.load_state_dict({"state": {}, "param_groups": saved["param_groups"]})


def identity_of_the_inner_state_dict(run: FlatRun) -> None:
    run.inner.optimizer.load_state_dict(run.inner.optimizer.state_dict())


def identity_of_the_outer_state_dict(run: FlatRun) -> None:
    if torch.distributed.get_world_size() == 1 or not hasattr(run.inner, "_engine"):
        run.optimizer.load_state_dict(run.optimizer.state_dict())
    else:
        run.inner.load_state_dict(run.inner.state_dict())


def references_put_back(run: FlatRun) -> None:
    """A second set of states for two steps, and then the first again: old dicts are kept, not copied."""
    inner = run.inner.optimizer
    saved, step, put_masters_back = dict(inner.state), inner.param_groups[0]["step"], masters_of_stock(run)
    inner.state = defaultdict(dict)
    set_step(inner, 0)
    for seed in (70, 71):
        run.step(random_grads(seed))
    inner.state = saved
    set_step(inner, step)
    put_masters_back()


def mapping_put_back(run: FlatRun) -> None:
    inner, put_masters_back = run.inner.optimizer, masters_of_stock(run)
    saved = inner.state
    inner.state = defaultdict(dict)
    run.step(random_grads(70))
    inner.state = saved
    put_masters_back()


def tensors_put_back(run: FlatRun) -> None:
    inner = run.inner.optimizer
    saved = {shard: {key: inner.state[shard][key] for key in MOMENTS} for shard in shards(inner)}
    for shard in shards(inner):
        for key in MOMENTS:
            inner.state[shard][key] = torch.zeros_like(saved[shard][key])
    run.step(random_grads(70))
    for shard, states in saved.items():
        for key, tensor in states.items():
            inner.state[shard][key] = tensor


def adapters(run: FlatRun) -> None:
    """Two adapters in the same params: states, masters, weights and scalars are saved and restored by copies."""
    inner = run.inner.optimizer

    def save() -> Any:
        states = {s: {k: v.clone() for k, v in inner.state[s].items()} for s in shards(inner)}
        scalars = [{k: v for k, v in group.items() if k != "params"} for group in inner.param_groups]
        return states, scalars, [s.clone() for s in shards(inner)], run.weights()

    def restore(saved: Any) -> None:
        states, scalars, of_shards, weights = saved
        with torch.no_grad():
            for param, weight in zip(run.params, weights, strict=True):
                param.copy_(weight)
            for shard, values in zip(shards(inner), of_shards, strict=True):
                shard.copy_(values)
        for shard, of_shard in states.items():
            for key, tensor in of_shard.items():
                inner.state[shard][key] = tensor.clone()
        for group, values in zip(inner.param_groups, scalars, strict=True):
            group.update(values)

    first = save()
    run.step(random_grads(80))
    run.step(random_grads(81))
    second = save()
    restore(first)
    run.step(random_grads(82))
    third = save()
    restore(second)
    run.step(random_grads(83))
    restore(third)


def default_lr(run: FlatRun) -> None:
    run.inner.optimizer.defaults["lr"] = run.inner.optimizer.defaults["lr"] * 100


ACTIONS: dict[str, Callable[[FlatRun], None]] = {
    function.__name__: function
    for function in (
        *(reset_in_place, reset_by_assignment, moments_alone, step_alone, step_through_the_outer_optimizer),
        *(data_is_exchanged, empty_dict, empty_dict_and_step, clear, pop, delete, entries, clear_entries),
        *(held_over_a_step, rollback, state_dict_without_states, mapping_put_back, tensors_put_back, adapters),
    )
}
IDENTITIES = {
    function.__name__: function
    for function in (
        *(identity_of_the_inner_state_dict, identity_of_the_outer_state_dict, default_lr),
        *(whole_rollback, references_put_back),
    )
}


# ---- Protections, and what is in their place without them -----------------------------------------------------------


def private_counter() -> None:
    """The step is counted beside the groups, and what a caller sets there is not read."""
    from megatron_dos.adapter.host_adam import HostAdam

    HostAdam.step_count = property(
        lambda self: self.__dict__.get("_count", 0), lambda self, step: self.__dict__.update(_count=step)
    )


def nothing_is_replaced() -> None:
    from megatron_dos.update.live_states import StateStore

    StateStore.replace = lambda self, owner, states, whole=True: None


def copies_stay_copies() -> None:
    """What is no view of the states is not written back."""
    from megatron_dos.update.handed_out import HandedOut

    HandedOut.settle = lambda self, owner: None


def held_is_not_kept() -> None:
    """What a caller holds changes with the states that replace it."""
    from megatron_dos.update.handed_out import HandedOut
    from megatron_dos.update.live_states import LiveStates, ShardStates

    HandedOut.let_go = lambda self, owner, names: None
    ShardStates.keep = LiveStates.keep = lambda self: None


def any_class_is_taken() -> None:
    from megatron_dos import optimizer

    optimizer.require_adam = lambda inner: None


def every_state_dict_is_of_a_file() -> None:
    from megatron_dos.checkpointing.whole_states import WholeStates

    WholeStates.has_given = lambda self, state_dict: False


def every_state_dict_is_its_own() -> None:
    from megatron_dos.checkpointing.whole_states import WholeStates

    WholeStates.has_given = lambda self, state_dict: "param_state" not in state_dict


def without(protection: str | None) -> None:
    if protection is not None:
        globals()[protection]()


# ---- What the tests call --------------------------------------------------------------------------------------------


def on_both(action: str, share: float = 0.0, dtype: str = "bfloat16", protection: str | None = None) -> dict[str, Any]:
    """Five steps, the action, two more steps: how ours differs from stock, and from a run without the action."""
    without(protection)
    # Where params kept in FP32 are among others, the stock optimizer looks up the states of one under another.
    flat.KEPT_IN_FP32 = ()
    runs, done = {}, {**ACTIONS, **IDENTITIES}[action]
    for name, deep, acts in (("ours", True, True), ("stock", False, True), ("undisturbed", False, False)):
        options = {"dos_resident_share": share} if deep else {}
        run = runs[name] = (
            stock_with_numpy_adam(dtype, clip_grad=1.0) if not deep else FlatRun(dtype, clip_grad=1.0, **options)
        )
        for step in range(1, 6):
            run.step(random_grads(step))
        if acts:
            done(run)
        for step in (100, 101):
            run.step(random_grads(step))
    ours, stock, undisturbed = runs["ours"], runs["stock"], runs["undisturbed"]
    of_stock = stock.states()
    saved = [run.inner.state_dict()["optimizer"]["param_groups"] for run in (ours, stock)]
    return {
        "differences": other_weights(ours.weights(), stock.weights()) + other_states(ours, of_stock),
        "steps": [sorted({group["step"] for group in groups}) for groups in saved],
        "keys": [[list(group) for group in groups] for groups in saved],
        "has_effect": other_weights(ours.weights(), undisturbed.weights()) + other_states(ours, undisturbed.states()),
        "straddles": straddles(ours),
    }


def straddles(run: FlatRun) -> bool:
    """Whether a shard of this rank lies in host memory and on the device."""
    engine = run.inner._engine
    return any(len(parts["master"]) == 2 for parts in map(engine.owner_parts, range(len(run.inner._shards))))


def first_update(step: int, resets: bool, share: float, protection: str | None = None) -> dict[str, list[float]]:
    """The largest update of the first step after the moments were set to zero at a step, in learning rates; with grads
    of 1 all through."""
    without(protection)
    found: dict[str, list[float]] = {}
    for name, deep in (("ours", True), ("stock", False)):
        options: dict[str, Any] = {"weight_decay": 0.0}
        run = FlatRun(**options, dos_resident_share=share) if deep else stock_with_numpy_adam("bfloat16", **options)
        grads = [torch.ones(shape) for shape in SHAPES]
        run.step(grads)
        if deep and protection == "private_counter":
            run.inner.optimizer.step_count = step
        set_step(run.inner.optimizer, step)
        if resets:
            reset_in_place(run)
        else:
            for states in run.inner.optimizer.state.values():
                for key in MOMENTS:
                    states[key].zero_()
        before = run.states()
        run.step(grads)
        moved = [(b["param"] - a["param"]).abs() for a, b in zip(before, run.states(), strict=True) if a is not None]
        found[name] = [min(float(m.min()) for m in moved) / 1e-3, max(float(m.max()) for m in moved) / 1e-3]
    return found


def reset_moments(share: float, protection: str | None = None) -> dict[str, int]:
    """How many of the largest param's moments are zero after a reset in place."""
    without(protection)
    run = FlatRun(dos_resident_share=share)
    run.step(random_grads(1))
    run.step(random_grads(2))
    reset_in_place(run)
    (largest,) = (state for state, shape in zip(run.states(), SHAPES, strict=True) if shape == (512, 64))
    return {
        "numel": largest["exp_avg"].numel(),
        "zeros": int((largest["exp_avg_sq"] == 0).sum()),
        "cut": straddles(run),
    }


def message_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusals(share: float) -> dict[str, Any]:
    """What each of these says, and what is not as it was before it."""
    run = FlatRun(dos_resident_share=share)
    run.step(random_grads(1))
    inner = run.inner.optimizer
    shard = shards(inner)[-1]
    outcomes: dict[str, Any] = {}

    def attempt(name: str, action: Callable[[], Any], then_steps: bool = False) -> None:
        groups, kept = inner.param_groups, [dict(group, params=list(group["params"])) for group in inner.param_groups]
        states, weights = run.states(), run.weights()
        message = message_of(action)
        if then_steps:
            assert not message, message
            message = message_of(lambda: run.step(random_grads(2)))
        inner.param_groups = groups
        for group, before in zip(groups, kept, strict=True):
            group.clear()
            group.update(before)
        changed = other_states(run, states) + other_weights(run.weights(), weights)
        outcomes[name] = (message, changed)

    def of_groups(**values: Any) -> Callable[[], None]:
        return lambda: inner.param_groups[0].update(values)

    params = inner.param_groups[0]["params"]
    state = inner.state
    attempt("groups disagree", of_groups(step=7), then_steps=True)
    attempt("a step that is none", lambda: [g.update(step=1.5) for g in inner.param_groups], then_steps=True)
    attempt("clones", of_groups(params=[p.clone() for p in params]), then_steps=True)
    attempt("a shard is dropped", of_groups(params=params[1:]), then_steps=True)
    attempt("a shard twice", of_groups(params=[*params, params[0]]), then_steps=True)
    attempt("states of a clone", lambda: state[shard.clone()])
    attempt("states of whole params", lambda: state[shard].update(exp_avg=torch.zeros(2, shard.numel())))
    attempt("a number for a state", lambda: state[shard].update(exp_avg=0))
    attempt("step in the states", lambda: state[shard].update(step=torch.tensor(0.0)))
    attempt("a state of its own", lambda: state[shard].update(ema=torch.zeros(shard.numel())))
    attempt("a state is removed", lambda: state[shard].pop("exp_avg"))
    attempt("half an entry", lambda: state.update({shard: {"exp_avg": torch.zeros(shard.numel())}}))
    attempt("no dict", lambda: state.update({shard: None}))
    attempt("a foreign key", lambda: setattr(inner, "state", {shard.clone(): {}}))
    attempt("popitem", state.popitem)
    attempt("a new group", lambda: inner.add_param_group({"params": [torch.zeros(3)]}))

    def fewer_params() -> None:
        saved = inner.state_dict()
        saved["param_groups"][0]["params"] = saved["param_groups"][0]["params"][1:]
        inner.load_state_dict(saved)

    attempt("fewer params", fewer_params)
    view = inner.state[shards(inner)[0]]["exp_avg"].detach()
    attempt("a view is kept", lambda: state.pop(shards(inner)[0]))
    del view
    return outcomes


def resized(share: float) -> dict[str, Any]:
    """A helper that frees the memory of states: what it is told, and what it has changed."""
    run = FlatRun(dos_resident_share=share)
    run.step(random_grads(1))
    before = run.states()
    messages = [
        message_of(lambda tensor=tensor: tensor.untyped_storage().resize_(0))
        for states in run.inner.optimizer.state.values()
        for tensor in states.values()
    ]
    return {"messages": messages, "changed": other_states(run, before)}


def offloaded(share: float) -> list[str]:
    """States that a caller holds while Megatron moves the resident ones to the host and back: differences to an
    undisturbed run that is changed in the same way."""
    runs = []
    for offloads in (True, False):
        run = FlatRun(dos_resident_share=share)
        run.step(random_grads(1))
        held = [states["exp_avg"] for states in run.inner.optimizer.state.values()]
        if offloads:
            run.optimizer.offload_to_cpu()
        for tensor in held:
            tensor.mul_(0.5)
        if offloads:
            run.optimizer.restore_from_cpu()
        for tensor in held:
            tensor.add_(1.0)
        run.step(random_grads(2))
        runs.append(run)
    return other_states(runs[0], runs[1].states())


def inner_class(kind: str, protection: str | None = None) -> str:
    """Why deep optimizer states are refused with a class in the place of Megatron's Adam; nothing if they are not."""
    import megatron.core.optimizer as optimizer

    without(protection)

    class StatelessAdam(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float = 1e-3, **options: Any) -> None:
            super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8})

    class AdamW(torch.optim.AdamW):
        """A variant with the name of the original."""

        def __init__(self, params: Any, adam_w_mode: bool = True, **options: Any) -> None:
            super().__init__(params, **options)

    swapped = {"stateless": StatelessAdam, "derived": AdamW}
    if kind in swapped:
        optimizer.USING_PYTORCH_OPTIMIZER = False
        optimizer.Adam = swapped[kind]
    return message_of(lambda: FlatRun(decoupled_weight_decay=kind != "L2"))


def in_memory_and_half_loaded(protection: str | None = None) -> dict[str, Any]:
    """Whether a step is possible after loads of state dicts that are this optimizer's own, or only look so."""
    without(protection)
    run = FlatRun()
    run.step(random_grads(1))
    outcomes: dict[str, Any] = {}

    def load(name: str, state_dict: Any) -> None:
        before = run.states()
        run.optimizer.load_state_dict(state_dict)
        outcomes[name] = message_of(lambda: run.step(random_grads(2)))
        if outcomes[name]:
            outcomes[f"{name}: changed"] = other_states(run, before)
            run.inner._whole.problem = ""

    first = run.optimizer.state_dict()
    run.optimizer.state_dict()
    load("own", first)
    load("own, before a step", first)
    load("equal to its own", copy.deepcopy(run.optimizer.state_dict()))
    other = FlatRun()
    other.step(random_grads(1))
    load("of another", other.optimizer.state_dict())
    own = run.optimizer.state_dict()
    run.inner._whole.problem = "a load has failed"
    load("own, half loaded", own)
    return outcomes


def through_files(folder: str, share: float) -> dict[str, Any]:
    """A reset, a save, a load into another: states and step as they were; and the kinds of what is in the groups."""
    rank = int(os.environ["RANK"])
    run = FlatRun(dos_resident_share=share)
    run.step(random_grads(1))
    for states in run.inner.optimizer.state.values():
        states["exp_avg"].fill_(0.25)
    for group in run.optimizer.param_groups:
        group["step"] = torch.tensor(40)
    kinds = {type(v).__name__ for g in run.inner.state_dict()["optimizer"]["param_groups"] for v in g.values()}
    outcome: dict[str, Any] = {"kinds": sorted(kinds)}
    for layout in ("dp_reshardable", "fully_reshardable"):
        target = os.path.join(folder, layout)
        if rank == 0:
            os.makedirs(target)
        torch.distributed.barrier()
        save_states(run, target, layout)
        loaded = FlatRun(seed=1, dos_resident_share=share)
        held = [states["exp_avg"] for states in loaded.inner.optimizer.state.values()]
        load_states(loaded, target, layout)
        outcome[layout] = other_states(loaded, run.states())
        outcome[f"{layout}: held"] = [float(tensor.min()) for tensor in held] + [float(t.max()) for t in held]
        outcome[f"{layout}: step"] = [group["step"] for group in loaded.inner.optimizer.param_groups]
    file = os.path.join(folder, "states.pt")
    run.optimizer.save_parameter_state(file)
    loaded = FlatRun(seed=1, dos_resident_share=share)
    held = [states["exp_avg"] for states in loaded.inner.optimizer.state.values()]
    loaded.optimizer.load_state_dict(run.optimizer.state_dict())
    loaded.optimizer.load_parameter_state(file)
    outcome["torch"] = other_states(loaded, run.states())
    outcome["torch: held"] = [float(tensor.min()) for tensor in held] + [float(t.max()) for t in held]
    return outcome
