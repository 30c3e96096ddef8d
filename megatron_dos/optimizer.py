# SPDX-License-Identifier: Apache-2.0
"""The distributed optimizer whose Adam states live in host memory: a subclass of Megatron's own.

[Note: the precision-aware seat] Megatron's `DistributedOptimizer` has a mode in which the inner optimizer owns the
FP32 master params (it was made for an Adam of transformer-engine and sits behind the derived attribute
`use_precision_aware_optimizer_no_fp8_or_ds_fp8` of the config). In that mode the base class makes no FP32 params on
the device, hands the reduced grads over in place as `decoupled_grad`, leaves writing the params to the inner
optimizer and asks `_get/_set_main_param_and_optimizer_states` for the states at checkpoints. That is exactly the
seat this optimizer needs, so it switches the attribute on, without asking the user for the flag behind it; the
inner optimizer then is `HostAdam`. Partitioning, grad reduction, unscaling, norm, clipping, the parameter
all-gather, the checkpoint layouts and every process group stay Megatron's own code.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_dos.adapter.buffers import owned_shards
from megatron_dos.adapter.deferred_grads import DeferredGrads
from megatron_dos.adapter.early_grads import EarlyGrads, changing_shards
from megatron_dos.adapter.fp32_params import Fp32Params
from megatron_dos.adapter.hooks import hook_megatron
from megatron_dos.adapter.host_adam import HostAdam
from megatron_dos.adapter.main_params import answer_main_param
from megatron_dos.adapter.param_gather import EarlyParamGather
from megatron_dos.adapter.setup import Setup, announce, choose, complain, facts_of, require_adam
from megatron_dos.arguments import validate_optimizer
from megatron_dos.checkpointing import parameter_file
from megatron_dos.checkpointing.handouts import require_shared_memory
from megatron_dos.checkpointing.states_on_file import StatesOnFile, param_names, zero_padding
from megatron_dos.checkpointing.whole_states import WholeStates
from megatron_dos.node import ranks as node
from megatron_dos.node import threads
from megatron_dos.observing.monitor import StepMonitor
from megatron_dos.options.options import DosOptions
from megatron_dos.update.engine import UpdateEngine

__all__ = ["DeepStatesOptimizer"]


class DeepStatesOptimizer(DistributedOptimizer):
    """Megatron's distributed optimizer with FP32 master params, exp_avg and exp_avg_sq in host memory.

    Takes the base class's arguments; see its docstring for them. The inner optimizer that Megatron built is used
    for its param groups only: it never holds a state.

    Attributes:
        on_file: the states as checkpoints have them; a rank without any has none.
    """

    def __init__(self, optimizer, config, grad_scaler, init_state_fn, model_chunks, *args, **kwargs) -> None:
        """Replaces: FP32 params on the device and the inner optimizer. The rest is the base class's."""
        validate_optimizer(config, model_chunks)
        require_adam(optimizer)
        node.meet()  # on ranks without a parameter, too
        # See [Note: the precision-aware seat].
        config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        super().__init__(optimizer, config, grad_scaler, init_state_fn, model_chunks, *args, **kwargs)
        hook_megatron(self)
        if self.is_stub_optimizer:
            return
        options = DosOptions.from_config(config)
        self._owned_params, self._shards = owned_shards(self)
        self._owner_of = {param: owner for owner, param in enumerate(self._owned_params)}
        setup = choose(options, facts_of(self, self._shards, self._owner_of, model_chunks))
        self._place = setup.place
        announce(setup, options)
        complain(options)
        self._engine = self._make_engine(setup)
        if options.async_save:
            require_shared_memory(self._engine.memory.states.nbytes)
        self._whole = WholeStates()
        self._engine.changes = self._whole.step
        self._fp32_params = Fp32Params(self._engine, self._shards)
        self.on_file = StatesOnFile(self, self._engine, self._owner_of, self._whole, self._fp32_params.follow)
        self.optimizer = self._make_inner(setup)
        self._monitor = self._make_monitor(setup, options)
        self._copy_model_params_to_main_params()

    def _make_engine(self, setup: Setup) -> UpdateEngine:
        names = param_names(self.model_chunks)
        engine = UpdateEngine(
            setup.subgroups,
            [shard.detach() for shard in self._shards],
            setup.engine,
            setup.device,
            setup.kernel,
            changing=changing_shards(self._owned_params, names) if setup.sends_early else (),
        )
        for owner, param in enumerate(self._owned_params):
            if param.dtype != torch.float32:  # which is its own master, for the base
                answer_main_param(param, engine, owner)
        return engine

    def _make_inner(self, setup: Setup) -> HostAdam:
        chunks, engine = self.model_chunks, self._engine
        early_grads = early_gather = None
        if setup.sends_early:
            early_grads = EarlyGrads(chunks, self.buffers, engine, self._owned_params, self._grad_of)
        if setup.gathers_early:
            early_gather = EarlyParamGather(chunks, self.buffers, engine.memory.buckets)
        self._deferred = DeferredGrads(fp32_too=setup.sends_early)
        return HostAdam(
            self.optimizer.param_groups,
            engine,
            {shard: owner for owner, shard in enumerate(self._shards)},
            decoupled=self.config.decoupled_weight_decay,
            deferred=self._deferred,
            early_gather=early_gather,
            early_grads=early_grads,
            defaults=self.optimizer.defaults,
        )

    def _make_monitor(self, setup: Setup, options: DosOptions) -> StepMonitor:
        expert = any(not getattr(param, "allreduce", True) for param in self._owned_params)
        return StepMonitor(
            self._engine,
            self._place,
            options,
            tunes=setup.finds_share,
            costs=setup.first.costs,
            rank=torch.distributed.get_rank(),
            announces=threads.is_first_on_node(),
            label="experts" if expert else "",
        )

    def _grad_of(self, owner: int) -> torch.Tensor:
        param = self._owned_params[owner]
        owned = self._get_model_param_range_map(param)["param"]
        return param.main_grad.view(-1)[owned.start : owned.end]

    # --- A step

    def prepare_grads(self) -> bool:
        """Adds to the base: the step's time is taken from here on, if this is a step to be measured."""
        if self.is_stub_optimizer:
            return super().prepare_grads()
        self._monitor.begin(self.optimizer.step_count + 1)
        with self._monitor.phase("prepare grads"):
            return super().prepare_grads()

    def _copy_model_grads_to_main_grads(self) -> None:
        """Adds to the base: grads that are not scaled in place get stand-ins, see `deferred_grads`."""
        super()._copy_model_grads_to_main_grads()
        if self.is_stub_optimizer:
            return
        self._deferred.collect(
            self._shards,
            self.grad_scaler.inv_scale if self.grad_scaler else None,
            count_zeros=self.config.log_num_zeros_in_grad,
        )

    def _collect_main_grad_data_for_unscaling(self) -> list[torch.Tensor]:
        """Replaces: grads that are not scaled in place, in the list of those that are, by their magnitudes."""
        in_place = [
            shard.decoupled_grad.data for owner, shard in enumerate(self._shards) if self._deferred.grad(owner) is None
        ]
        return in_place + self._deferred.magnitudes()

    def get_grads_for_grad_norm(self, *args, **kwargs) -> list[torch.Tensor]:
        """Replaces: grads that are not scaled in place, in the list that the norm is taken of, by their norms."""
        grads = super().get_grads_for_grad_norm(*args, **kwargs)
        return grads if self.is_stub_optimizer else self._deferred.for_norm(grads)

    def step_with_ready_grads(self) -> bool:
        """Adds to the base: FP32 params are adopted first, and the update is measured.

        Raises:
            CheckpointError: the states are not whole, since a step or a load has failed.
        """
        if self.is_stub_optimizer:
            return super().step_with_ready_grads()
        self._whole.require("step")
        self._whole.loads.end()  # of one that was given up before anything was read
        self._whole.begin()
        self._fp32_params.adopt()
        with self._monitor.phase("update"):
            success = super().step_with_ready_grads()
        self._monitor.collect()
        return success

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Adds to the base: the step's grads that were not scaled in place are let go, its times are collected."""
        super().zero_grad(set_to_none)
        if not self.is_stub_optimizer:
            self._deferred.clear()
            self._monitor.collect()

    # --- Master params and states

    def _copy_model_params_to_main_params(self, state_dict=None) -> None:
        """Replaces: the precision-aware mode would leave the master params as they are.

        The masters are taken from the model params, or from `state_dict` where it is given: its params may have
        more precision than the model's.
        """
        sources = {}
        if state_dict is not None:
            sources = self._build_model_param_to_state_dict_param_map(state_dict)
        for owner, param in enumerate(self._owned_params):
            owned = self._get_model_param_range_map(param)["param"]
            source = sources.get(param, param).detach().view(-1)[owned.start : owned.end]
            self._engine.write_owner_states(owner, {"master": source})

    def _get_main_param_and_optimizer_states(self, model_param) -> dict[str, torch.Tensor]:
        """Replaces: the lookup in an inner optimizer of transformer-engine. Views of the host states, no copies."""
        return self.on_file.hand_out(model_param)

    def _set_main_param_and_optimizer_states(self, model_param, tensors) -> None:
        """Replaces: the counterpart of `_get_main_param_and_optimizer_states`. Copies into the states, where the load
        has not read into them already."""
        self.on_file.put(model_param, tensors)

    def offload_to_cpu(self) -> None:
        """Replaces: moving states off the device. Only resident ones are there, and the shards are views of the params.
        What the steps' slots have left in the caching allocator is given back to the device."""
        if not self.is_stub_optimizer:
            self._engine.move_resident(torch.device("cpu"))
            if self._place.type == "cuda":
                torch.cuda.empty_cache()

    def restore_from_cpu(self) -> None:
        """Replaces: the counterpart of `offload_to_cpu`."""
        if not self.is_stub_optimizer:
            self._engine.move_resident(self._place)

    # --- Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Replaces: how the step is found. The base reads it from per-tensor states and fails on a rank without any."""
        groups = self.optimizer.groups_to_save()
        for group in groups:
            del group["params"]
        self._whole.gave(groups)
        state_dict: dict[str, Any] = {"optimizer": {"param_groups": groups}}
        if self.grad_scaler:
            state_dict["grad_scaler"] = self.grad_scaler.state_dict()
        return state_dict

    def load_state_dict(self, state_dict) -> None:
        """Adds to the base: no step is possible before the states that belong to `state_dict` are loaded too. They are
        there if it is what `state_dict()` has returned since the last step."""
        if self.is_stub_optimizer or self._whole.has_given(state_dict):
            super().load_state_dict(state_dict)
            return
        self._whole.begin()
        if state_dict.get("param_state_sharding_type") == "fully_reshardable":
            self.on_file.refuse_shifted(state_dict.get("param_state", {}))
        self._whole.failed("a checkpoint was loaded in part, its step without its optimizer states or the reverse")
        super().load_state_dict(state_dict)
        self._whole.loads.end()
        if "param_state_sharding_type" in state_dict:  # of a rank that owns nothing, that is all there is
            self._whole.done()

    def sharded_state_dict(self, model_sharded_state_dict=None, is_loading: bool = False, *args, **kwargs):
        """Adds to the base: a load that reads into the states themselves is watched, see `loads`."""
        if not self.is_stub_optimizer:
            self.on_file.sharding(is_loading)
        state_dict = super().sharded_state_dict(model_sharded_state_dict or {}, is_loading, *args, **kwargs)
        if not self.is_stub_optimizer:
            self.on_file.sharded(state_dict, is_loading)
        return state_dict

    def sharded_param_state_dp_reshardable(self, *args, **kwargs):
        """Adds to the base: padding is zeros, so that two saves of the same states are the same files."""
        param_state = super().sharded_param_state_dp_reshardable(*args, **kwargs)
        zero_padding(param_state)
        return param_state

    def sharded_param_state_fully_reshardable(self, model_sharded_state_dict, is_loading: bool = False, metadata=None):
        """Replaces: gathering the states to save them, and loading whole tensors. See `reshardable`."""
        gathered = super().sharded_param_state_fully_reshardable
        return self.on_file.fully_reshardable(
            model_sharded_state_dict, is_loading, lambda: gathered(model_sharded_state_dict, is_loading, metadata)
        )

    def get_parameter_state_dp_zero(self, *args, **kwargs) -> dict[Any, Any] | None:
        """Adds to the base: for a fully reshardable checkpoint, each bucket's padding. See [Note: shifted states]."""
        return self.on_file.gathered(super().get_parameter_state_dp_zero(*args, **kwargs))

    def load_parameter_state_from_fully_reshardable(self, state_dict) -> None:
        """Replaces: the counterpart of `sharded_param_state_fully_reshardable`."""
        self.on_file.load_fully_reshardable(state_dict)

    def save_parameter_state(self, filename) -> None:
        """Replaces: gathering all states before they are written. See `parameter_file`."""
        parameter_file.save([self.on_file], filename)

    def load_parameter_state(self, filename, *, update_legacy_format: bool = False) -> None:
        """Replaces: reading all states before they are sent to those who own them. See `parameter_file`."""
        if update_legacy_format:
            super().load_parameter_state(filename, update_legacy_format=True)
        elif not self.is_stub_optimizer:
            parameter_file.load([self.on_file], filename)

    def load_parameter_state_from_dp_zero(self, state_dict, *, update_legacy_format: bool = False) -> None:
        """Replaces: sending all states at once. What does not fit is refused before anything is changed."""
        if update_legacy_format:
            super().load_parameter_state_from_dp_zero(state_dict, update_legacy_format=True)
            self.on_file.parameters_loaded()
        else:
            parameter_file.load_content([self.on_file], [state_dict])
