# SPDX-License-Identifier: Apache-2.0
"""The inner optimizer: AdamW on host states, behind torch's optimizer interface."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from megatron_dos.adapter.deferred_grads import DeferredGrads
from megatron_dos.adapter.early_grads import EarlyGrads
from megatron_dos.adapter.param_gather import EarlyParamGather
from megatron_dos.kernels import AdamScalars
from megatron_dos.kernels.fp_environment import ieee_environment
from megatron_dos.update.engine import UpdateEngine
from megatron_dos.update.live_states import LiveStates, StateStore
from megatron_dos.update.operations import StepInputs
from megatron_dos.words import plural

__all__ = ["HostAdam"]


class HostAdam(torch.optim.Optimizer):
    """The inner optimizer: AdamW (or Adam with L2 decay) on host states, behind torch's optimizer interface.

    Args:
        param_groups: Megatron's groups, kept as they are; their `params` are flat shards of the model params, and
            `lr`, `betas`, `eps` and `weight_decay` are read from them at each step.
        engine: the states and their update.
        owners: shard -> index of that shard in the engine.
        decoupled: AdamW when true, else the decay is added to the grad.
        deferred: the step's grads that Megatron does not scale in place.
        early_gather: called with buckets whose params are written.
        early_grads: knows which of the grads that were sent early have been edited since.
        defaults: of the hyper-parameters, for whoever reads them.

    `group["step"]` counts the updates, in every param group and the same in all, as FusedAdam's does: an int that a
    caller may set, in all of them. There is none per subgroup or parameter. `state` is `LiveStates`, which a caller may
    change as well.
    """

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        engine: UpdateEngine,
        owners: dict[torch.Tensor, int],
        decoupled: bool,
        deferred: DeferredGrads,
        early_gather: EarlyParamGather | None = None,
        early_grads: EarlyGrads | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        # torch would refuse shards of FP32 params, which are views that autograd knows: give it the groups after.
        super().__init__([{"params": []}], defaults=dict(defaults or {}))
        self.param_groups = param_groups
        for group in param_groups:
            group.setdefault("step", 0)
        self._engine = engine
        self._owners = owners
        self._decoupled = decoupled
        self._deferred = deferred
        self._early_gather = early_gather
        self._early_grads = early_grads
        self._store = StateStore(engine, owners)
        self._state = LiveStates(self._store)

    @property  # type: ignore[override]  # in torch it is an attribute
    def state(self) -> LiveStates:
        """Shard -> its states."""
        return self._state

    @state.setter
    def state(self, states: Mapping[torch.Tensor, Mapping[str, torch.Tensor]]) -> None:
        """Replace all states: shards that have none in `states` get fresh ones.

        Raises:
            KeyError, TypeError, ValueError: what is given cannot be the states. Nothing has been changed.
        """
        if not hasattr(self, "_store"):  # torch's constructor
            return
        if states is not self._state:
            self._replace_states({self._store.owner(shard): of_shard for shard, of_shard in states.items()})

    def _replace_states(self, states: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        for owner, of_owner in states.items():
            self._store.checked(owner, of_owner)
        previous = weakref.ref(self._state)
        self._state = LiveStates(self._store)
        if (held := previous()) is not None:
            held.keep()
        for owner in self._owners.values():
            self._store.replace(owner, states.get(owner, {}))

    @property
    def step_count(self) -> int:
        """The step that all param groups have; 0 before the first.

        Raises:
            ValueError: they disagree, or have something else than a whole number.
        """
        steps = [_step_of(group) for group in self.param_groups]
        if len(set(steps)) > 1:
            of_groups = ", ".join(f"{step} in group {index}" for index, step in enumerate(steps))
            raise ValueError(
                f'the param groups of the optimizer disagree on the step: {of_groups}. Set group["step"] to the same '
                "number in all of optimizer.param_groups"
            )
        return steps[0] if steps else 0

    @step_count.setter
    def step_count(self, step: int) -> None:
        for group in self.param_groups:
            group["step"] = step

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the states are made: they are those of the shards that Megatron has assigned to this rank."""
        if hasattr(self, "_store"):
            raise ValueError(
                "a param group cannot be added to an optimizer with deep optimizer states, which are made for the "
                "params of its model: build the optimizer again, with get_megatron_optimizer()"
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    @ieee_environment()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure is taken
        """Update all states and params from the grads in the shards' `decoupled_grad`.

        Raises:
            ValueError: a hyper-parameter of a param group is not usable, the groups disagree on the step, or their
                params are not the shards (nothing has been updated then).
            RuntimeError: a shard has no grad: `step` was called before the grads were prepared.
        """
        if closure is not None:
            raise ValueError("HostAdam.step takes no closure: Megatron computes the grads before the step")
        step = self.step_count + 1
        scalars: dict[int, AdamScalars] = {}
        grads: dict[int, torch.Tensor] = {}
        for group, owners in zip(self.param_groups, self._owners_in_groups(), strict=True):
            of_group = AdamScalars.at_step(
                step,
                lr=float(group["lr"]),
                betas=tuple(group["betas"]),
                eps=float(group["eps"]),
                weight_decay=float(group["weight_decay"]),
                decoupled=self._decoupled,
            )
            for shard, owner in zip(group["params"], owners, strict=True):
                grad = self._deferred.grad(owner)
                grad = shard.decoupled_grad if grad is None else grad
                if grad is None:
                    raise RuntimeError("HostAdam.step: a parameter shard has no grad; prepare_grads() comes first")
                scalars[owner], grads[owner] = of_group, grad
        count = len(self._owners)
        inputs = StepInputs(
            grads=[grads[i] for i in range(count)],
            scalars=[scalars[i] for i in range(count)],
            grad_scales=self._deferred.factors(),
            edited=self._early_grads.edited() if self._early_grads else (),
        )
        if self._early_gather is None:
            self._engine.update(inputs)
        else:
            self._early_gather.begin()
            self._engine.update(replace(inputs, release_bucket=self._early_gather.release))
            self._early_gather.finish()
        self.step_count = step

    def _owners_in_groups(self) -> list[list[int]]:
        """For each param group the index of its shards in the engine.

        Raises:
            ValueError: the groups do not hold each shard once.
        """
        owners = [[self._owners.get(shard, -1) for shard in group["params"]] for group in self.param_groups]
        found = sorted(itertools.chain.from_iterable(owners))
        if found != list(range(len(self._owners))):
            foreign, missing = found.count(-1), len(self._owners) - len(set(found) - {-1})
            raise ValueError(
                f"the param groups of the optimizer no longer hold each of its {len(self._owners)} parameter shards "
                f"once: {missing} missing, {plural(foreign, 'tensor')} of another kind, such as clones, "
                f"{len(found) - foreign - len(set(found) - {-1})} listed twice. Keep the tensors in "
                'param_groups[...]["params"] as Megatron put them there; to freeze params, set requires_grad = False '
                "before the optimizer is built"
            )
        return owners

    def state_dict(self) -> dict[str, Any]:
        """torch's layout: `state` by position of the parameter, `param_groups` with positions for `params`. The
        tensors are those of `state`, not copies."""
        state = {
            position: dict(self.state[shard])
            for position, shard in enumerate(shard for group in self.param_groups for shard in group["params"])
        }
        return {"state": state, "param_groups": self.groups_to_save()}

    def groups_to_save(self) -> list[dict[str, Any]]:
        """The param groups, with positions for `params` and the step as a plain number."""
        step, positions = self.step_count, itertools.count()
        return [
            {**group, "params": [next(positions) for _ in group["params"]], "step": step} for group in self.param_groups
        ]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over hyper-parameters, the step and the states, as torch's optimizers do: shards without states in
        `state_dict` start from zero. States that are those of this optimizer stay.

        Raises:
            TypeError, ValueError: the number of groups or params differs, the groups do not agree on the step, or a
                state does not fit. Nothing has been changed.
        """
        saved_groups = state_dict["param_groups"]
        if len(saved_groups) != len(self.param_groups):
            raise ValueError(
                f"the checkpoint has {len(saved_groups)} optimizer param groups, this model {len(self.param_groups)}: "
                "it was saved from a different model or with different --decoupled-lr / weight-decay settings"
            )
        owners = self._owners_in_groups()
        sizes = [len(group["params"]) for group in saved_groups]
        if sizes != [len(of_group) for of_group in owners]:
            raise ValueError(
                f"the optimizer param groups of the checkpoint have {sizes} params on this rank, this model's have "
                f"{[len(of_group) for of_group in owners]}: it is of another model or layout"
            )
        states, steps = {}, {int(group["step"]) for group in saved_groups if group.get("step") is not None}
        for saved, of_group in zip(saved_groups, owners, strict=True):
            for position, owner in zip(saved["params"], of_group, strict=True):
                of_shard = dict(state_dict["state"].get(position, {}))
                if (step := of_shard.pop("step", None)) is not None:  # where torch's own AdamW keeps it
                    steps.add(int(step))
                states[owner] = of_shard
        if len(steps) > 1:
            raise ValueError(f"the optimizer param groups of the checkpoint disagree on the step: {sorted(steps)}")
        self._replace_states(states)
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            group.update({key: value for key, value in saved.items() if key not in ("params", "step")})
        self.step_count = steps.pop() if steps else 0


def _step_of(group: Mapping[str, Any]) -> int:
    """The step of a param group as a plain number; a caller may have set a tensor or an integral float."""
    step = group.get("step", 0)
    try:
        whole = int(step)
    except (TypeError, ValueError, RuntimeError):
        whole = -1
    if whole < 0 or whole != step:
        raise ValueError(
            f'group["step"] of a param group is {step!r}: it counts the updates, so set it to a whole number from 0 on'
        )
    return whole
