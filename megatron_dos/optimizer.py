# SPDX-License-Identifier: Apache-2.0
"""The distributed optimizer whose Adam states live in host memory: a subclass of Megatron's own.

[Note: the precision-aware seat] Megatron's `DistributedOptimizer` has a mode in which the inner optimizer owns the
FP32 master params (it was made for an Adam of transformer-engine and sits behind the derived attribute
`use_precision_aware_optimizer_no_fp8_or_ds_fp8` of the config). In that mode the base class makes no FP32 params on
the device, hands the reduced grads over in place as `decoupled_grad`, leaves writing the params to the inner
optimizer and asks `_get/_set_main_param_and_optimizer_states` for the states at checkpoints. That is exactly the
seat this optimizer needs, so it switches the attribute on, without asking the user for the flag behind it; the
inner optimizer then is `HostAdam` below. Partitioning, grad reduction, unscaling, norm, clipping, the parameter
all-gather, the checkpoint layouts and every process group stay Megatron's own code.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_dos.adapter.buffers import owned_ranges
from megatron_dos.adapter.deferred_grads import DeferredGrads
from megatron_dos.adapter.early_grads import EarlyGrads, may_change
from megatron_dos.adapter.hooks import (
    let_chains_stream,
    refuse_mimo,
    share_before_async_saves,
    watch_asynchronous_saves,
)
from megatron_dos.adapter.host_adam import HostAdam
from megatron_dos.adapter.main_params import answer_main_param
from megatron_dos.adapter.param_gather import EarlyParamGather, is_possible
from megatron_dos.adapter.setup import (
    MOST_SUBGROUPS,
    _announce,
    _complain,
    _engine_options,
    _require_adam,
    _sends_early,
    _tunes,
    make_device,
)
from megatron_dos.arguments import validate_optimizer
from megatron_dos.calibration.cache import cached_machine
from megatron_dos.checkpointing import parameter_file
from megatron_dos.checkpointing.handouts import (
    CheckpointError,
    Handouts,
    require_shared_memory,
)
from megatron_dos.checkpointing.loads import LoadsInPlace, require_same_size, zero_padding
from megatron_dos.checkpointing.reshardable import (
    joined,
    may_be_cut,
    misplaced,
    put_padding_back,
    sharded_boxes,
    slices_of,
    tensors_of,
)
from megatron_dos.checkpointing.state_stream import Share, first_problem
from megatron_dos.kernels import device_kernel
from megatron_dos.node import ranks as node
from megatron_dos.node import threads
from megatron_dos.observing.monitor import StepMonitor
from megatron_dos.observing.tuner import FirstChoice, first_choice
from megatron_dos.options.options import AUTOMATIC_EARLY_SLOTS, DosOptions, UnsupportedOptionError
from megatron_dos.planning.workload import Workload
from megatron_dos.program.partition import Partition, automatic_subgroup_size, partition
from megatron_dos.update.engine import EngineOptions, UpdateEngine

__all__ = ["DeepStatesOptimizer"]

# Layouts of the states in a distributed checkpoint that the base reads into the states themselves.
LOADED_IN_PLACE = ("dp_reshardable", "fully_sharded_model_space")


def _names(model_chunks: list[Any]) -> dict[torch.nn.Parameter, str]:
    return {param: name for chunk in model_chunks for name, param in chunk.named_parameters()}


class DeepStatesOptimizer(DistributedOptimizer):
    """Megatron's distributed optimizer with FP32 master params, exp_avg and exp_avg_sq in host memory.

    Takes the base class's arguments; see its docstring for them. The inner optimizer that Megatron built is used
    for its param groups only: it never holds a state.
    """

    def __init__(self, optimizer, config, grad_scaler, init_state_fn, model_chunks, *args, **kwargs) -> None:
        """Replaces: FP32 params on the device and the inner optimizer. The rest is the base class's."""
        validate_optimizer(config, model_chunks)
        _require_adam(optimizer)
        node.meet()  # on ranks without a parameter, too
        # See [Note: the precision-aware seat].
        config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        super().__init__(optimizer, config, grad_scaler, init_state_fn, model_chunks, *args, **kwargs)
        share_before_async_saves()  # on all ranks, whether or not they own states: they tell each other
        if self.is_stub_optimizer:
            return
        options = DosOptions.from_config(config)

        # One shard a parameter that this rank owns a part of: the flat view that base class made of it.
        self._owned_params: list[torch.nn.Parameter] = []
        self._shards: list[torch.Tensor] = []
        for params, shards in (
            (self.model_float16_groups, self.shard_float16_groups),
            (self.model_fp32_groups, self.shard_fp32_groups),
        ):
            for params_of_group, shards_of_group in zip(params, shards, strict=True):
                self._owned_params += params_of_group
                self._shards += shards_of_group
        self._owner_of = {param: owner for owner, param in enumerate(self._owned_params)}

        # A rank can have param groups and yet no buffer: a pipeline stage without experts, say.
        self._device = self.buffers[0].grad_data.device if self.buffers else torch.device("cpu")
        ranges = owned_ranges(self.gbuf_ranges, self._owner_of)
        owned = sum(part.numel for part in ranges)
        size = options.dos_subgroup_size or automatic_subgroup_size(owned)
        if owned > size * MOST_SUBGROUPS:
            raise UnsupportedOptionError(
                f"--dos-subgroup-size {size} cuts the {owned:,} parameters that this rank owns into more than "
                f"{MOST_SUBGROUPS:,} subgroups. Give at least {-(-owned // MOST_SUBGROUPS):,}, or 0 (automatic)."
            )
        subgroups = partition(ranges, size)
        gathers_early = is_possible(config, self.ddp_config, model_chunks[0].config)
        device = make_device(self._device)
        engine_options = replace(_engine_options(options), last_bucket_first=gathers_early)
        sends_early = not device.shares_memory and _sends_early(options, self._device, config, model_chunks)
        first, tunes = FirstChoice(engine_options.host_share), _tunes(options, self._device)
        if tunes and owned:
            work = self._workload(subgroups, engine_options)
            first = first_choice(cached_machine(), work, engine_options.resident_share)
            engine_options = replace(engine_options, host_share=first.host_share)
        if device.shares_memory:
            engine_options = replace(engine_options, host_slots=0)
        elif sends_early:
            engine_options = replace(engine_options, early_slots=options.dos_early_grad_slots or AUTOMATIC_EARLY_SLOTS)
        _announce(subgroups, engine_options, first.reason, options)
        _complain(options)
        self._engine = UpdateEngine(
            subgroups,
            [shard.detach() for shard in self._shards],
            engine_options,
            device,
            device_kernel.select(options.dos_gpu_kernel, self._device, engine_options.threads) if owned else None,
            changing=self._changing(model_chunks) if sends_early else (),
        )
        for owner, param in enumerate(self._owned_params):
            if param.dtype != torch.float32:  # which is its own master, for the base
                answer_main_param(param, self._engine, owner)
        if options.async_save:
            require_shared_memory(self._engine.memory.states.nbytes)
        self._handouts = Handouts()
        self._loads = LoadsInPlace(self._refuse_until_loaded)
        self._half_loaded = ""  # why no step is possible, or nothing
        self._given_groups: deque[list[dict[str, Any]]] = deque(maxlen=16)  # see _is_own
        self._loads_whole_tensors = False  # of a fully reshardable checkpoint, in the load that goes on
        self._gathers_whole_buffers = False  # to save these
        let_chains_stream(DeepStatesOptimizer)
        watch_asynchronous_saves()
        refuse_mimo(DeepStatesOptimizer)
        early_grads = None
        if sends_early:
            early_grads = EarlyGrads(model_chunks, self.buffers, self._engine, self._owned_params, self._grad_of)
        self._deferred = DeferredGrads(fp32_too=sends_early)
        self.optimizer = HostAdam(
            self.optimizer.param_groups,
            self._engine,
            {shard: owner for owner, shard in enumerate(self._shards)},
            decoupled=config.decoupled_weight_decay,
            deferred=self._deferred,
            early_gather=EarlyParamGather(model_chunks, self.buffers, self._engine.memory.buckets) if gathers_early else None,
            early_grads=early_grads,
            defaults=self.optimizer.defaults,
        )
        expert = any(not getattr(param, "allreduce", True) for param in self._owned_params)
        self._monitor = StepMonitor(
            self._engine,
            self._device,
            options,
            tunes=tunes,
            costs=first.costs,
            rank=torch.distributed.get_rank(),
            announces=threads.is_first_on_node(),
            label="experts" if expert else "",
        )
        self._copy_model_params_to_main_params()
        self._fp32_params_were_set = True

    def _workload(self, subgroups: Partition, options: EngineOptions) -> Workload:
        """This rank's update as the performance model sees it, which knows all grads as sent early or none: none."""
        grad_bytes = self.buffers[0].grad_data.element_size()
        casts = options.grads_as_fp32 and grad_bytes < 4
        return Workload(
            parameters=subgroups.numel,
            ranks=threads.ranks_on_machine(),
            threads=options.threads,
            subgroup=subgroups.largest,
            grad_bytes=4 if casts else grad_bytes,
            param_bytes=self._shards[0].element_size(),
            casts=casts,
            host_slots=options.host_slots,
            device_slots=options.device_slots,
        )

    def _changing(self, model_chunks: list[Any]) -> list[int]:
        """The shards whose grads may change after their reduction."""
        names = _names(model_chunks)
        return [owner for owner, param in enumerate(self._owned_params) if may_change(names[param], param)]

    def _grad_of(self, owner: int) -> torch.Tensor:
        param = self._owned_params[owner]
        owned = self._get_model_param_range_map(param)["param"]
        return param.main_grad.view(-1)[owned.start : owned.end]

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
        """Adds to the base: FP32 params are adopted first, and the update is measured."""
        if not self.is_stub_optimizer:
            self.require_whole_states("step")
            self._loads.end()  # of one that was given up before anything was read
            self._given_groups.clear()
        self._adopt_fp32_params()
        if self.is_stub_optimizer:
            return super().step_with_ready_grads()
        with self._monitor.phase("update"):
            success = super().step_with_ready_grads()
        self._monitor.collect()
        return success

    def require_whole_states(self, what: str) -> None:
        """Nothing is done with the states of a step or a load that has failed in its middle, which a caller may have
        caught."""
        if self.is_stub_optimizer:
            return
        problem = self._half_loaded
        if self._engine.torn:
            problem = "a step failed in the middle, and only some of the optimizer states are those after it"
        if problem:
            raise CheckpointError(f"no {what} is possible: {problem}. Load a whole checkpoint first.")

    def _adopt_fp32_params(self) -> None:
        """Before the first step after construction or a load: masters of FP32 params are what the params are.

        For Megatron an FP32 param is its own master, so it does not call `reload_model_params` after it has loaded FP32
        weights without optimizer states. From then on the update itself keeps the two the same.
        """
        if self.is_stub_optimizer or not self._fp32_params_were_set:
            return
        for owner, shard in enumerate(self._shards):
            if shard.dtype == torch.float32:
                self._engine.write_owner_states(owner, {"master": shard.detach()})
        self._fp32_params_were_set = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Adds to the base: the step's grads that were not scaled in place are let go, its times are collected."""
        super().zero_grad(set_to_none)
        if not self.is_stub_optimizer:
            self._deferred.clear()
            self._monitor.collect()

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
        states = self._states_of(model_param)
        self._handouts.add(states.values())
        return states

    def _states_of(self, model_param) -> dict[str, torch.Tensor]:
        states = self._engine.owner_states(self._owner_of[model_param])
        return {"param": states["master"], "exp_avg": states["exp_avg"], "exp_avg_sq": states["exp_avg_sq"]}

    def _set_main_param_and_optimizer_states(self, model_param, tensors) -> None:
        """Replaces: the counterpart of `_get_main_param_and_optimizer_states`. Copies into the states, where the load
        has not read into them already."""
        states = self._states_of(model_param)
        require_same_size(f"a parameter of shape {tuple(model_param.shape)}", states, tensors)
        new = {key: tensors[key] for key, state in states.items() if state.data_ptr() != tensors[key].data_ptr()}
        if "param" in new:
            new["master"] = new.pop("param")
        self._engine.write_owner_states(self._owner_of[model_param], new)
        if model_param.dtype == torch.float32:  # its own master, for the base
            self._shards[self._owner_of[model_param]].detach().copy_(tensors["param"])
            self._fp32_params_were_set = True

    def sharded_state_dict(self, model_sharded_state_dict=None, is_loading: bool = False, *args, **kwargs):
        """Adds to the base: a load that reads into the states themselves is watched, see `checkpoint`."""
        if self.is_stub_optimizer:
            return super().sharded_state_dict(model_sharded_state_dict or {}, is_loading, *args, **kwargs)
        if is_loading:
            self._loads.end()  # of one that was given up
        else:
            self.require_whole_states("save")
        state_dict = super().sharded_state_dict(model_sharded_state_dict or {}, is_loading, *args, **kwargs)
        if is_loading and state_dict["param_state_sharding_type"] in LOADED_IN_PLACE:
            self._loads.begin({})  # of these, every rank has tensors of its own
        return state_dict

    def sharded_param_state_dp_reshardable(self, *args, **kwargs):
        """Adds to the base: padding is zeros, so that two saves of the same states are the same files."""
        param_state = super().sharded_param_state_dp_reshardable(*args, **kwargs)
        zero_padding(param_state)
        return param_state

    def sharded_param_state_fully_reshardable(self, model_sharded_state_dict, is_loading: bool = False, metadata=None):
        """Replaces: gathering the states to save them, and loading whole tensors. See `reshardable`.

        The base does it where torch is too old for uneven cuts, and for params whose checkpoint is no cut of them; what
        it gathers is put into the places where it looks for it.
        """
        entries, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
        entry_of = {entry.data: entry for entry in nested_values(entries)}
        if missing := [tuple(param.shape) for param in self._numbered_params() if param not in entry_of]:
            raise ValueError(
                f"params of shapes {missing} are not in the model's sharded state dict: it has to be made with "
                "keep_vars=True"
            )
        slices = {index: slices_of(entry_of[param]) for index, param in enumerate(self._numbered_params())}
        self._loads_whole_tensors = not may_be_cut() or None in slices.values()
        if self._loads_whole_tensors:
            self._gathers_whole_buffers = True
            try:
                return super().sharded_param_state_fully_reshardable(model_sharded_state_dict, is_loading, metadata)
            finally:
                self._gathers_whole_buffers = False
        if is_loading:
            every_slice = itertools.chain.from_iterable(slices.values())
            tensors = tensors_of(every_slice, ("param", *self.optimizer_state_keys))
            self._loads.begin(tensors, self.data_parallel_group)  # which agree in load_state_dict on what was read
        param_state = {}
        for index, param in enumerate(self._numbered_params()):
            if param not in self._owner_of:
                continue
            start = self._get_model_param_range_map(param)["param"].start
            param_state[index] = {
                key: sharded_boxes(
                    slices[index], start, state, key, self.distributed_optimizer_instance_id, is_loading=is_loading
                )
                for key, state in self._states_of(param).items()
            }
            for parts in param_state[index].values():
                self._handouts.add(part.data for part in parts)
        return param_state

    def get_parameter_state_dp_zero(self, *args, **kwargs) -> dict[Any, Any] | None:
        """Adds to the base: for a fully reshardable checkpoint, each bucket's padding. See [Note: shifted states]."""
        gathered = super().get_parameter_state_dp_zero(*args, **kwargs)
        if self._gathers_whole_buffers and gathered is not None:
            for index, buffer in enumerate(self.buffers):
                buckets = [(bucket.grad_data.numel(), bucket.numel_unpadded) for bucket in buffer.buckets]
                for states in gathered[index].values():
                    put_padding_back(states, buckets)
        return gathered

    def load_parameter_state_from_fully_reshardable(self, state_dict) -> None:
        """Replaces: the counterpart of `sharded_param_state_fully_reshardable`."""
        for index, param in self._numbered_owned_params():
            self._set_main_param_and_optimizer_states(param, self._loaded_states(param, state_dict.get(index, {})))

    def _loaded_states(self, param: torch.nn.Parameter, parts: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """What this rank owns of a param's states, as a fully reshardable checkpoint has brought them."""
        if self._loads_whole_tensors:
            owned = self._get_model_param_range_map(param)["param"]
            return {key: whole.flatten()[owned.start : owned.end] for key, whole in parts.items()}
        return {key: joined(parts[key], state) for key, state in self._states_of(param).items() if key in parts}

    def _refuse_shifted_states(self, state_dict) -> None:
        """Refuse a fully reshardable checkpoint of Megatron's that holds other states than were to be saved, before it
        is used. See [Note: shifted states].

        Raises:
            CheckpointError: on all data-parallel ranks, where one has seen it.
        """
        problem = ""
        for index, param in self._numbered_owned_params():
            if found := self._misplaced(param, state_dict.get(index, {})):
                problem = (
                    f"the optimizer states of this checkpoint are shifted: {found}. Megatron's own optimizer saves "
                    "them so with --dist-ckpt-optim-fully-reshardable where a bucket is padded, and what they were "
                    "cannot be restored. Load a checkpoint that was saved without that flag; or load the weights "
                    "alone, which are whole, with --no-load-optim or --finetune."
                )
                break
        if problem := first_problem(problem, self.data_parallel_group):
            self._refuse_until_loaded("the optimizer states of a checkpoint were read, and then refused")
            raise CheckpointError(problem)

    def _misplaced(self, param: torch.nn.Parameter, parts: Mapping[str, Any]) -> str:
        """What is wrong with the places of a param's loaded master params, if anything is."""
        parts = {key: part for key, part in parts.items() if key == "param"}
        for master in self._loaded_states(param, parts).values():
            # A shift may be longer than the param. In the buffer it is seen where that has the layout of the save.
            start = self._get_model_param_range_map(param)["param"].start
            buffer = self.buffers[self.model_param_gbuf_map[param][0]]
            in_buffer = buffer.param_data.view(-1)[buffer.param_index_map[param][0] + start :]
            for weights in (param.detach().view(-1)[start:], in_buffer):
                if what := misplaced(master, weights):
                    name = _names(self.model_chunks)[param].rpartition("module.")[2]
                    return f"the master params of {name} are {what}"
        return ""

    def _numbered_owned_params(self) -> list[tuple[int, torch.nn.Parameter]]:
        return [(index, param) for index, param in enumerate(self._numbered_params()) if param in self._owner_of]

    def _numbered_params(self) -> Iterator[torch.nn.Parameter]:
        """All params of this optimizer in Megatron's order, which is the same on all data-parallel ranks."""
        for buffer in self.buffers:
            yield from buffer.param_index_map

    def load_state_dict(self, state_dict) -> None:
        """Adds to the base: no step is possible before the states that belong to `state_dict` are loaded too. They are
        there if it is what `state_dict()` has returned since the last step."""
        if self.is_stub_optimizer or self._is_own(state_dict):
            super().load_state_dict(state_dict)
            return
        self._given_groups.clear()
        if state_dict.get("param_state_sharding_type") == "fully_reshardable":
            self._refuse_shifted_states(state_dict.get("param_state", {}))
        self._half_loaded = "a checkpoint was loaded in part, its step without its optimizer states or the reverse"
        super().load_state_dict(state_dict)
        self._loads.end()
        if "param_state_sharding_type" in state_dict:  # of a rank that owns nothing, that is all there is
            self._half_loaded, self._engine.torn = "", False

    def _is_own(self, state_dict: Mapping[str, Any]) -> bool:
        """Whether this is an object that `state_dict()` has returned, with no step or load since. An equal one may
        come from a file."""
        groups = state_dict.get("optimizer", {}).get("param_groups")
        return "param_state" not in state_dict and any(groups is given for given in self._given_groups)

    def save_parameter_state(self, filename) -> None:
        """Replaces: gathering all states before they are written. See `parameter_file`."""
        parameter_file.save([self], filename)

    def load_parameter_state(self, filename, *, update_legacy_format: bool = False) -> None:
        """Replaces: reading all states before they are sent to those who own them. See `parameter_file`."""
        if update_legacy_format:
            super().load_parameter_state(filename, update_legacy_format=True)
        elif not self.is_stub_optimizer:
            parameter_file.load([self], filename)

    def load_parameter_state_from_dp_zero(self, state_dict, *, update_legacy_format: bool = False) -> None:
        """Replaces: sending all states at once. What does not fit is refused before anything is changed."""
        if update_legacy_format:
            super().load_parameter_state_from_dp_zero(state_dict, update_legacy_format=True)
            self.parameters_loaded()
        else:
            parameter_file.load_content([self], [state_dict])

    def parameter_shares(self) -> dict[int, dict[Any, dict[str, Share]]]:
        """The states by buffer, its dtypes and Megatron's name, as the flat tensors that Megatron gathers them into."""
        shares: dict[int, dict[Any, dict[str, Share]]] = {}
        for index, of_buffer in enumerate(self.gbuf_ranges):
            buckets = [(bucket.grad_data.numel(), bucket.numel_unpadded) for bucket in self.buffers[index].buckets]
            shares[index] = {}
            for dtypes, ranges in of_buffer.items():
                of_state = {key: Share(buckets, []) for key in ("param", *self.optimizer_state_keys)}
                shares[index][dtypes] = of_state
                base = 0
                for (_, unpadded), range_map in zip(buckets, ranges, strict=True):
                    for param, where in range_map["param_map"].items():
                        parts = self._engine.owner_parts(self._owner_of[param])
                        for key, share in of_state.items():
                            start = base + where["gbuf_world_in_bucket"].start
                            for part in parts["master" if key == "param" else key]:
                                share.views.append((start, part))
                                start += len(part)
                    base += unpadded
        return shares

    def parameters_loaded(self, problem: str = "") -> None:
        """All states have been loaded from Megatron's gathered ones; or, with a problem, some."""
        self._given_groups.clear()
        for owner in range(len(self._shards)):
            self._engine.handed_out.refresh(owner)
        if problem:
            self._half_loaded = problem
            return
        for owner, shard in enumerate(self._shards):
            if shard.dtype == torch.float32:  # its own master, for the base
                shard.detach().copy_(self._engine.owner_states(owner)["master"])
                self._fp32_params_were_set = True
        self._half_loaded, self._engine.torn = "", False

    def _refuse_until_loaded(self, reason: str) -> None:
        self._half_loaded = reason

    def state_dict(self) -> dict[str, Any]:
        """Replaces: how the step is found. The base reads it from per-tensor states and fails on a rank without any."""
        groups = self.optimizer.groups_to_save()
        for group in groups:
            del group["params"]
        self._given_groups.append(groups)
        state_dict: dict[str, Any] = {"optimizer": {"param_groups": groups}}
        if self.grad_scaler:
            state_dict["grad_scaler"] = self.grad_scaler.state_dict()
        return state_dict

    def offload_to_cpu(self) -> None:
        """Replaces: moving states off the device. Only resident ones are there, and the shards are views of the params.
        What the steps' slots have left in the caching allocator is given back to the device."""
        if not self.is_stub_optimizer:
            self._engine.move_resident(torch.device("cpu"))
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def restore_from_cpu(self) -> None:
        """Replaces: the counterpart of `offload_to_cpu`."""
        if not self.is_stub_optimizer:
            self._engine.move_resident(self._device)
