# SPDX-License-Identifier: Apache-2.0
"""How the states of one optimizer go into Megatron's checkpoint layouts, and come out of them.

`DeepStatesOptimizer` overrides Megatron's methods of the same layouts and hands each on to its `StatesOnFile`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_dos.checkpointing.handouts import CheckpointError, Handouts
from megatron_dos.checkpointing.loads import require_same_size
from megatron_dos.checkpointing.reshardable import (
    joined,
    may_be_cut,
    misplaced,
    put_padding_back,
    sharded_boxes,
    slices_of,
    tensors_of,
)
from megatron_dos.checkpointing.state_stream import DividedTensor, first_problem
from megatron_dos.checkpointing.whole_states import WholeStates

__all__ = ["EngineStates", "StatesOnFile", "param_names", "zero_padding"]

# Layouts of the states in a distributed checkpoint that Megatron reads into the states themselves.
LOADED_IN_PLACE = ("dp_reshardable", "fully_sharded_model_space")


class EngineStates(Protocol):
    """What holds the states: an update engine."""

    handed_out: Any

    def owner_states(self, owner: int) -> dict[str, torch.Tensor]:
        """The states of a parameter shard."""

    def owner_parts(self, owner: int) -> dict[str, list[torch.Tensor]]:
        """Views of the parts of each state of a parameter shard."""

    def write_owner_states(self, owner: int, states: Mapping[str, torch.Tensor]) -> None:
        """Copy into the states of a parameter shard."""


class StatesOnFile:
    """The states of one optimizer, as its checkpoints have them.

    Args:
        optimizer: Megatron's, which knows the params, their ranges and their groups.
        engine: holds the states.
        owner_of: param -> index of its shard in the engine.
        whole: keeps whether the states are whole.
        master_loaded: called with each shard whose master params were loaded.
    """

    def __init__(
        self,
        optimizer: DistributedOptimizer,
        engine: EngineStates,
        owner_of: Mapping[torch.nn.Parameter, int],
        whole: WholeStates,
        master_loaded: Callable[[int], None],
    ) -> None:
        self._optimizer = optimizer
        self._engine = engine
        self._owner_of = owner_of
        self._whole = whole
        self._master_loaded = master_loaded
        self._handouts = Handouts()
        self._loads_whole_tensors = False  # of a fully reshardable checkpoint, in the load that goes on
        self._gathers_whole_buffers = False  # to save these

    # --- One param

    def states_of(self, param: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """The states of what this rank owns of a param, by Megatron's names. Views of host memory, no copies."""
        states = self._engine.owner_states(self._owner_of[param])
        return {"param": states["master"], "exp_avg": states["exp_avg"], "exp_avg_sq": states["exp_avg_sq"]}

    def hand_out(self, param: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """The same for whoever saves or loads them."""
        states = self.states_of(param)
        self._handouts.add(states.values())
        return states

    def put(self, param: torch.nn.Parameter, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy loaded states into those of a param, where the load has not read into them already.

        Raises:
            CheckpointError: one is missing, or has another size. Nothing has been copied.
        """
        states, owner = self.states_of(param), self._owner_of[param]
        require_same_size(f"a parameter of shape {tuple(param.shape)}", states, tensors)
        new = {key: tensors[key] for key, state in states.items() if state.data_ptr() != tensors[key].data_ptr()}
        if "param" in new:
            new["master"] = new.pop("param")
        self._engine.write_owner_states(owner, new)
        self._master_loaded(owner)

    # --- Distributed checkpoints

    def sharding(self, is_loading: bool) -> None:
        """A sharded state dict is about to be made.

        Raises:
            CheckpointError: to save states that are not whole.
        """
        if is_loading:
            self._whole.loads.end()  # of one that was given up
        else:
            self._whole.require("save")

    def sharded(self, state_dict: Mapping[str, Any], is_loading: bool) -> None:
        """It has been made: from here on a load may read into the states."""
        if is_loading and state_dict["param_state_sharding_type"] in LOADED_IN_PLACE:
            self._whole.loads.begin({})  # of these, every rank has tensors of its own

    def fully_reshardable(
        self, model_sharded_state_dict: Any, is_loading: bool, gathered: Callable[[], dict[int, Any]]
    ) -> dict[int, Any]:
        """The states for a fully reshardable checkpoint, without gathering them to save, or loading whole tensors.

        Args:
            model_sharded_state_dict: of the model, made with keep_vars=True.
            gathered: Megatron's way, which is taken where torch is too old for uneven cuts, and for params whose
                checkpoint is no cut of them. What it gathers is put into the places where it looks for it.

        Raises:
            ValueError: the model's state dict lacks params of this optimizer.
        """
        entries, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
        entry_of = {entry.data: entry for entry in nested_values(entries)}
        if missing := [tuple(param.shape) for param in self._numbered_params() if param not in entry_of]:
            raise ValueError(
                f"params of shapes {missing} are not in the model's sharded state dict: it has to be made with "
                "keep_vars=True"
            )
        cuts = {index: slices_of(entry_of[param]) for index, param in enumerate(self._numbered_params())}
        slices = {index: of_param for index, of_param in cuts.items() if of_param is not None}
        self._loads_whole_tensors = not may_be_cut() or len(slices) < len(cuts)
        if self._loads_whole_tensors:
            self._gathers_whole_buffers = True
            try:
                return gathered()
            finally:
                self._gathers_whole_buffers = False
        if is_loading:
            every_slice = itertools.chain.from_iterable(slices.values())
            tensors = tensors_of(every_slice, self._keys)
            # Its ranks agree in load_state_dict on what was read.
            self._whole.loads.begin(tensors, self._optimizer.data_parallel_group)
        replica, param_state = self._optimizer.distributed_optimizer_instance_id, {}
        for index, param in self._numbered_owned_params():
            start = self._owned(param).start
            param_state[index] = {
                key: sharded_boxes(slices[index], start, state, key, replica, is_loading=is_loading)
                for key, state in self.states_of(param).items()
            }
            for parts in param_state[index].values():
                self._handouts.add(part.data for part in parts)
        return param_state

    def gathered(self, by_buffer: dict[Any, Any] | None) -> dict[Any, Any] | None:
        """What Megatron has gathered, with each bucket's padding for a fully reshardable checkpoint. See [Note: shifted
        states]."""
        if self._gathers_whole_buffers and by_buffer is not None:
            for index, buffer in enumerate(self._optimizer.buffers):
                buckets = [(bucket.grad_data.numel(), bucket.numel_unpadded) for bucket in buffer.buckets]
                for states in by_buffer[index].values():
                    put_padding_back(states, buckets)
        return by_buffer

    def load_fully_reshardable(self, state_dict: Mapping[int, Mapping[str, Any]]) -> None:
        """The counterpart of `fully_reshardable`."""
        for index, param in self._numbered_owned_params():
            self.put(param, self._loaded(param, state_dict.get(index, {})))

    def refuse_shifted(self, state_dict: Mapping[int, Mapping[str, Any]]) -> None:
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
        if problem := first_problem(problem, self._optimizer.data_parallel_group):
            self._whole.failed("the optimizer states of a checkpoint were read, and then refused")
            raise CheckpointError(problem)

    def _loaded(self, param: torch.nn.Parameter, parts: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """What this rank owns of a param's states, as a fully reshardable checkpoint has brought them."""
        if self._loads_whole_tensors:
            owned = self._owned(param)
            return {key: whole.flatten()[owned.start : owned.end] for key, whole in parts.items()}
        return {key: joined(parts[key], state) for key, state in self.states_of(param).items() if key in parts}

    def _misplaced(self, param: torch.nn.Parameter, parts: Mapping[str, Any]) -> str:
        """What is wrong with the places of a param's loaded master params, if anything is."""
        parts = {key: part for key, part in parts.items() if key == "param"}
        for master in self._loaded(param, parts).values():
            # A shift may be longer than the param. In the buffer it is seen where that has the layout of the save.
            start = self._owned(param).start
            buffer = self._optimizer.buffers[self._optimizer.model_param_gbuf_map[param][0]]
            in_buffer = buffer.param_data.view(-1)[buffer.param_index_map[param][0] + start :]
            for weights in (param.detach().view(-1)[start:], in_buffer):
                if what := misplaced(master, weights):
                    name = param_names(self._optimizer.model_chunks)[param].rpartition("module.")[2]
                    return f"the master params of {name} are {what}"
        return ""

    # --- The file of optimizer states beside a `torch` checkpoint: see `parameter_file`

    @property
    def data_parallel_group_gloo(self) -> Any:
        """The process group over which the states of a file are sent."""
        return self._optimizer.data_parallel_group_gloo

    def require_whole_states(self, what: str) -> None:
        """Raise CheckpointError if `what` must not be done with the states as they are."""
        self._whole.require(what)

    def divided_states(self) -> dict[int, dict[Any, dict[str, DividedTensor]]]:
        """The states by buffer, its dtypes and Megatron's name, as the flat tensors that Megatron gathers them into."""
        states: dict[int, dict[Any, dict[str, DividedTensor]]] = {}
        for index, of_buffer in enumerate(self._optimizer.gbuf_ranges):
            of_its_buckets = self._optimizer.buffers[index].buckets
            buckets = [(bucket.grad_data.numel(), bucket.numel_unpadded) for bucket in of_its_buckets]
            states[index] = {}
            for dtypes, ranges in of_buffer.items():
                of_state = {key: DividedTensor(buckets, []) for key in self._keys}
                states[index][dtypes] = of_state
                base = 0
                for (_, unpadded), range_map in zip(buckets, ranges, strict=True):
                    for param, where in range_map["param_map"].items():
                        parts = self._engine.owner_parts(self._owner_of[param])
                        for key, tensor in of_state.items():
                            start = base + where["gbuf_world_in_bucket"].start
                            for part in parts["master" if key == "param" else key]:
                                tensor.views.append((start, part))
                                start += len(part)
                    base += unpadded
        return states

    def parameters_loaded(self, problem: str = "") -> None:
        """All states have been loaded from Megatron's gathered ones; or, with a problem, some."""
        self._whole.begin()
        for owner in self._owner_of.values():
            self._engine.handed_out.refresh(owner)
        if problem:
            self._whole.failed(problem)
            return
        for owner in self._owner_of.values():
            self._master_loaded(owner)
        self._whole.done()

    # --- What Megatron's optimizer knows

    @property
    def _keys(self) -> Sequence[str]:
        return ("param", *self._optimizer.optimizer_state_keys)

    def _owned(self, param: torch.nn.Parameter) -> Any:
        """The range of a flattened param that this rank owns, with `start` and `end`."""
        return self._optimizer._get_model_param_range_map(param)["param"]

    def _numbered_owned_params(self) -> list[tuple[int, torch.nn.Parameter]]:
        return [(index, param) for index, param in enumerate(self._numbered_params()) if param in self._owner_of]

    def _numbered_params(self) -> Iterator[torch.nn.Parameter]:
        """All params of this optimizer in Megatron's order, which is the same on all data-parallel ranks."""
        for buffer in self._optimizer.buffers:
            yield from buffer.param_index_map


def param_names(model_chunks: Sequence[Any]) -> dict[torch.nn.Parameter, str]:
    """Param -> its name in its chunk."""
    return {param: name for chunk in model_chunks for name, param in chunk.named_parameters()}


def zero_padding(param_state: dict[Any, Any]) -> None:
    """Fill with zeros what Megatron adds between the params of a `dp_reshardable` state to save, else uninitialised.

    Args:
        param_state: what `sharded_param_state_dp_reshardable` returns: buffer index -> dtypes -> per bucket the list
            of its params' sharded tensors, with `padding` telling which are none.
    """
    for of_buffer in param_state.values():
        if not isinstance(of_buffer, dict):
            continue
        for buckets in of_buffer.values():
            for tensors in (tensors for bucket in buckets for tensors in bucket):
                if tensors["padding"].unwrap():
                    for tensor in tensors.values():
                        if hasattr(tensor, "data"):
                            tensor.data.zero_()
