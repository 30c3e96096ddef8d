# SPDX-License-Identifier: Apache-2.0
"""Each protection of docs/cases.md, taken away: a mutation puts something that lacks it in the place of real code.

A mutation is a function of `replace(object, attribute, value)`; its docstring says what is gone. `Megatron.train` can
have it called in the ranks by name (`prepare="mutations:..."`), `apply` calls it for the tests. It takes away what it
says and leaves the rest working, so that what fails is the check of the fault and nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Replace = Callable[[Any, str, Any], None]


def apply(name: str, replace: Replace = setattr) -> None:
    """Apply the mutation of this name."""
    globals()[name](replace)


# ---- Silent corruption ----------------------------------------------------------------------------------------------


def masters_ignore_loaded_weights(replace: Replace = setattr) -> None:
    """Case 1: after construction the masters are never taken from the weights again."""
    from megatron_dos.optimizer import DeepStatesOptimizer

    original = DeepStatesOptimizer._copy_model_params_to_main_params
    built: set[int] = set()

    def only_at_construction(self: Any, state_dict: Any = None) -> None:
        if id(self) not in built:
            built.add(id(self))
            original(self, state_dict)

    replace(DeepStatesOptimizer, "_copy_model_params_to_main_params", only_at_construction)


def fp32_params_are_not_adopted(replace: Replace = setattr) -> None:
    """Case 1: masters of FP32 params, which Megatron does not reload, stay as they were."""
    from megatron_dos.adapter.fp32_params import Fp32Params

    replace(Fp32Params, "adopt", lambda self: None)


def masters_are_taken_from_rounded_weights(replace: Replace = setattr) -> None:
    """Cases 1 and 12: whatever masters a file holds, they are rebuilt from the model's rounded weights."""
    from megatron_dos.optimizer import DeepStatesOptimizer

    reload = DeepStatesOptimizer._copy_model_params_to_main_params
    load = DeepStatesOptimizer._set_main_param_and_optimizer_states

    def load_rounded(self: Any, model_param: Any, tensors: Any) -> None:
        load(self, model_param, {**tensors, "param": tensors["param"].to(model_param.dtype).float()})

    replace(DeepStatesOptimizer, "_copy_model_params_to_main_params", lambda self, state_dict=None: reload(self))
    replace(DeepStatesOptimizer, "_set_main_param_and_optimizer_states", load_rounded)


def step_restarts_at_a_load(replace: Replace = setattr) -> None:
    """Case 2: the saved step is not taken over."""
    from megatron_dos.adapter.host_adam import HostAdam

    original = HostAdam.load_state_dict

    def load(self: Any, state_dict: Any) -> None:
        before = self.step_count
        original(self, state_dict)
        self.step_count = before

    replace(HostAdam, "load_state_dict", load)


def empty_groups_have_no_step(replace: Replace = setattr) -> None:
    """Cases 2 and 14: a group reports the step of its own params, so 0 on a rank where it has none."""
    from megatron_dos.adapter.host_adam import HostAdam

    original = HostAdam.groups_to_save

    def of_its_own_params(self: Any) -> list[dict[str, Any]]:
        groups = original(self)
        for group in groups:
            group["step"] = group["step"] if group["params"] else 0
        return groups

    replace(HostAdam, "groups_to_save", of_its_own_params)


def loads_leave_the_masters_behind(replace: Replace = setattr) -> None:
    """Case 3: the moments are loaded, the masters are not."""
    from megatron_dos.checkpointing import parameter_file
    from megatron_dos.checkpointing.states_on_file import StatesOnFile
    from megatron_dos.optimizer import DeepStatesOptimizer

    load_content = parameter_file.load_content

    def load_moments(owners: Any, *args: Any) -> None:
        kept = [[one._engine.owner_states(i)["master"].clone() for i in range(len(one._owner_of))] for one in owners]
        load_content(owners, *args)
        for one, masters in zip(owners, kept, strict=True):
            for owner, master in enumerate(masters):
                one._engine.write_owner_states(owner, {"master": master})

    replace(parameter_file, "load_content", load_moments)
    describe = DeepStatesOptimizer.sharded_state_dict
    get, put = StatesOnFile.hand_out, StatesOnFile.put
    loading: list[bool] = []

    def describe_without_masters(self: Any, model_state: Any = {}, is_loading: bool = False, **kwargs: Any) -> Any:  # noqa: B006
        loading.extend([True] if is_loading else [])
        try:
            return describe(self, model_state, is_loading, **kwargs)
        finally:
            loading.clear()

    def get_copy(self: Any, model_param: Any) -> dict[str, torch.Tensor]:
        states = get(self, model_param)
        return {**states, "param": states["param"].clone()} if loading else states

    def put_moments(self: Any, model_param: Any, tensors: Any) -> None:
        put(self, model_param, {**tensors, "param": get(self, model_param)["param"].clone()})

    replace(DeepStatesOptimizer, "sharded_state_dict", describe_without_masters)
    replace(StatesOnFile, "hand_out", get_copy)
    replace(StatesOnFile, "put", put_moments)


def shifted_states_are_loaded(replace: Replace = setattr) -> None:
    """Case 3: nobody compares the master params of a fully reshardable checkpoint with its weights."""
    from megatron_dos.checkpointing import states_on_file

    replace(states_on_file, "misplaced", lambda master, weights: "")


def gathered_states_lose_their_padding(replace: Replace = setattr) -> None:
    """Case 3: states that Megatron gathers for a fully reshardable save are not put where it looks for them."""
    from megatron_dos.checkpointing import states_on_file

    replace(states_on_file, "put_padding_back", lambda states, buckets: None)


def forked_writers_see_later_steps(replace: Replace = setattr) -> None:
    """Case 4: what a save has handed out is not copied before a writer is forked."""
    from megatron_dos.checkpointing import handouts

    replace(handouts.Handouts, "detach", lambda handouts: 0)


def grads_are_taken_when_they_first_arrive(replace: Replace = setattr) -> None:
    """Case 5: the update uses each grad as it was after the first micro-batch."""
    from megatron_dos.optimizer import DeepStatesOptimizer

    build, take = DeepStatesOptimizer.__init__, DeepStatesOptimizer._copy_model_grads_to_main_grads
    first: dict[torch.nn.Parameter, torch.Tensor] = {}

    def listening(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        for param in self._owned_params:
            param.register_hook(functools.partial(remember, param))

    def remember(param: torch.nn.Parameter, grad: torch.Tensor) -> None:
        first.setdefault(param, grad.detach().clone())

    def early(self: Any) -> None:
        for param in self._owned_params:
            param.main_grad.copy_(first[param])
        take(self)

    replace(DeepStatesOptimizer, "__init__", listening)
    replace(DeepStatesOptimizer, "_copy_model_grads_to_main_grads", early)


def edits_of_sent_grads_go_unseen(replace: Replace = setattr) -> None:
    """Case 5: grads that were sent in the backward pass are taken for those of the step."""
    from megatron_dos.adapter.early_grads import EarlyGrads

    replace(EarlyGrads, "edited", lambda self: frozenset())


def edits_are_counted_in_main_grads_only(replace: Replace = setattr) -> None:
    """Case 5: nobody looks whether a bucket or a buffer has been edited as a whole."""
    from megatron_dos.adapter.early_grads import EarlyGrads

    replace(EarlyGrads, "_edits", lambda self, owner: (self._main_grads[owner]._version,))


def other_tensors_go_unseen(replace: Replace = setattr) -> None:
    """Case 5: nobody looks whether a param has another tensor for its grad."""
    from megatron_dos.adapter.early_grads import EarlyGrads

    replace(EarlyGrads, "_are_replaced", lambda self, owners: False)


def all_grads_share_one_count(replace: Replace = setattr) -> None:
    """Case 5: torch's count of edits stays that of the whole buffer, which the backward pass moves."""
    from megatron_dos.adapter import early_grads

    replace(early_grads, "_count_edits_apart", lambda buffers: None)


def reductions_count_as_edits(replace: Replace = setattr) -> None:
    """Case 5: what a reduction writes when it is waited for is taken for an edit."""
    from megatron_dos.adapter.early_grads import EarlyGrads

    replace(EarlyGrads, "_finish_grad_sync", lambda self, buckets, finish, *args, **kwargs: finish(*args, **kwargs))


def only_matrices_are_known(replace: Replace = setattr) -> None:
    """Case 5: vectors, whose grads Megatron may sum once more, are taken for matrices."""
    _without_a_reason_to_change(replace, lambda name, param: (name, param.flatten().unsqueeze(0)))


def embeddings_are_not_known_by_name(replace: Replace = setattr) -> None:
    """Case 5: an embedding, whose grad Megatron may sum once more, needs a mark to be known."""
    _without_a_reason_to_change(replace, lambda name, param: ("", param))


def _without_a_reason_to_change(replace: Replace, disguise: Callable[[str, Any], tuple[str, Any]]) -> None:
    from megatron_dos.adapter import early_grads

    original = early_grads.may_change
    replace(early_grads, "may_change", lambda name, param: original(*disguise(name, param)))


def buckets_are_released_at_once(replace: Replace = setattr) -> None:
    """Case 6: the all-gather of a bucket, and with it the next forward pass, does not wait for its last write.

    The gathers are over when they have been started, as on a fast network: else a slow one would hide the fault.
    """
    from megatron_dos.adapter.param_gather import EarlyParamGather

    release = EarlyParamGather.release

    def release_and_gather(self: Any, bucket: tuple[int, int]) -> None:
        release(self, bucket)
        for _, group in self._groups[: self._started]:
            group.param_gather_handle.wait()

    replace(EarlyParamGather, "release", release_and_gather)
    _without_waits(replace, lambda kind: kind.value == "release_bucket")


def slots_are_reused_at_once(replace: Replace = setattr) -> None:
    """Case 6: what still reads a staging slot is not waited for before the slot is filled anew."""
    from megatron_dos.program import schedule

    original = schedule._Builder.add

    def forgetful(self: Any, *args: Any, **kwargs: Any) -> None:
        self._reads_since.clear()
        original(self, *args, **kwargs)

    replace(schedule._Builder, "add", forgetful)


def copies_wait_for_their_own_stream_only(replace: Replace = setattr) -> None:
    """Case 6: copies between host and device are ordered on their own streams and after nothing else."""
    _without_waits(replace, lambda kind: "_to_" in kind.value)


def _without_waits(replace: Replace, of: Callable[[Any], bool]) -> None:
    """Programs in which the operations of some kinds wait for no other stream."""
    from megatron_dos.update import engine

    original = engine.build_program

    def build(*args: Any, **kwargs: Any) -> Any:
        program = original(*args, **kwargs)
        ops = tuple(dataclasses.replace(op, depends_on=()) if of(op.kind) else op for op in program.ops)
        return dataclasses.replace(program, ops=ops)

    replace(engine, "build_program", build)


def caller_does_not_wait_for_the_streams(replace: Replace = setattr) -> None:
    """Case 6: staging memory goes back to the allocator while copies may still read it."""
    from megatron_dos.device.cuda import CudaDevice

    original = CudaDevice._after

    def no_way_back(self: Any, stream: Any, others: Any) -> None:
        others = list(others)
        if len(others) > 1:  # the streams wait for the caller, and nothing the other way round
            original(self, stream, others)

    replace(CudaDevice, "_after", no_way_back)


def steps_are_counted_by_the_kernel(replace: Replace = setattr) -> None:
    """Case 7: the bias correction follows a running product of betas, one factor a step seen."""
    from megatron_dos.adapter import host_adam

    class Counting:
        seen = 0
        last: Any = None

        @classmethod
        def at_step(cls, step: int, **hyper: Any) -> Any:
            if step != cls.last:
                cls.seen, cls.last = cls.seen + 1, step
            return original.at_step(cls.seen, **hyper)

    original = host_adam.AdamScalars
    replace(host_adam, "AdamScalars", Counting)


def every_place_counts_its_own_steps(replace: Replace = setattr) -> None:
    """Case 7: each call of the CPU kernel is a step of its own, so subgroups are at different steps."""
    from megatron_dos.kernels import AdamScalars
    from megatron_dos.update import operations

    original = operations.cpu_kernel.submit
    calls = [0]

    def submit(pieces: Any, threads: int) -> Any:
        calls[0] += 1
        own = AdamScalars.at_step(
            calls[0], lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, decoupled=True
        ).rsqrt_bias_correction2
        counted = [(*p[:4], dataclasses.replace(p[4], rsqrt_bias_correction2=own), *p[5:]) for p in pieces]
        return original(counted, threads)

    replace(operations.cpu_kernel, "submit", submit)


def experts_are_cut_by_the_dense_group(replace: Replace = setattr) -> None:
    """Case 8: the buffers of experts are cut over the data-parallel group of the dense params."""
    from megatron.core import parallel_state

    from megatron_dos.optimizer import DeepStatesOptimizer

    original = DeepStatesOptimizer._build_model_gbuf_range.__func__

    class OfDenseGroup:
        num_optimizer_shards = None

        def __init__(self, buffer: Any) -> None:
            self._buffer = buffer
            self.data_parallel_group = parallel_state.get_data_parallel_group(with_context_parallel=True)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._buffer, name)

    def build(cls: Any, buffer: Any, bucket_index: int) -> Any:
        return original(cls, OfDenseGroup(buffer), bucket_index)

    replace(DeepStatesOptimizer, "_build_model_gbuf_range", classmethod(build))


def slab_offsets_have_32_bits(replace: Replace = setattr) -> None:
    """Case 9: where a subgroup lies in the states wraps around at 2^31."""
    from megatron_dos.program import partition

    original = partition.partition

    def wrapped(*args: Any) -> Any:
        whole = original(*args)
        return dataclasses.replace(whole, subgroups=tuple(map(wrap, whole.subgroups)))

    def wrap(subgroup: Any) -> Any:
        back = subgroup.start - subgroup.start % 2**31
        pieces = tuple(dataclasses.replace(piece, slab=piece.slab - back) for piece in subgroup.pieces)
        return dataclasses.replace(subgroup, start=subgroup.start - back, stop=subgroup.stop - back, pieces=pieces)

    replace(partition, "partition", wrapped)


def updates_start_before_grads_are_checked(replace: Replace = setattr) -> None:
    """Case 10: the update runs as soon as the grads are reduced, before the check for inf and before clipping."""
    from megatron_dos.adapter.host_adam import HostAdam
    from megatron_dos.optimizer import DeepStatesOptimizer

    prepare, step = DeepStatesOptimizer.prepare_grads, HostAdam.step

    def early(self: Any) -> bool:
        self._copy_model_grads_to_main_grads()
        step(self.optimizer)
        return prepare(self)

    replace(DeepStatesOptimizer, "prepare_grads", early)
    replace(HostAdam, "step", lambda self, closure=None: None)


def grads_come_from_another_attribute(replace: Replace = setattr) -> None:
    """Case 11: the update reads a buffer of the grad's shape into which nothing is reduced."""
    from megatron_dos.update.engine import UpdateEngine

    original = UpdateEngine.update

    def update(self: Any, inputs: Any) -> None:
        original(self, dataclasses.replace(inputs, grads=[torch.zeros_like(grad) for grad in inputs.grads]))

    replace(UpdateEngine, "update", update)


def construction_runs_an_update(replace: Replace = setattr) -> None:
    """Case 13: states are initialised by a real step with random grads."""
    from megatron_dos.optimizer import DeepStatesOptimizer

    original = DeepStatesOptimizer.__init__

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for shard in self._shards:
            shard.decoupled_grad = torch.randn(shard.shape)
        self.optimizer.step()
        self.optimizer.step_count = 0

    replace(DeepStatesOptimizer, "__init__", build)


# ---- Crashes, hangs, refusals ---------------------------------------------------------------------------------------


def groups_hold_class_objects(replace: Replace = setattr) -> None:
    """Case 14: the saved groups hold the scalars of the step, an object of a class of ours."""
    from megatron_dos.adapter.host_adam import HostAdam
    from megatron_dos.kernels import AdamScalars

    original = HostAdam.groups_to_save
    scalars = AdamScalars.at_step(1, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, decoupled=True)

    def with_scalars(self: Any) -> list[dict[str, Any]]:
        groups = original(self)
        for group in groups:
            group["scalars"] = scalars
        return groups

    replace(HostAdam, "groups_to_save", with_scalars)


def states_hold_a_number(replace: Replace = setattr) -> None:
    """Case 14: each param's saved states hold its step, which is no tensor."""
    from megatron_dos.optimizer import DeepStatesOptimizer

    original = DeepStatesOptimizer._get_main_param_and_optimizer_states

    def with_number(self: Any, model_param: Any) -> dict[str, Any]:
        return {**original(self, model_param), "number_of_updates": self.optimizer.step_count}

    replace(DeepStatesOptimizer, "_get_main_param_and_optimizer_states", with_number)


def new_params_are_staged_in_bf16(replace: Replace = setattr) -> None:
    """Case 15: whatever the dtype of a param, its new values pass through a slot in bf16."""
    from megatron_dos.update.operations import StepOperations

    original = StepOperations._param

    def rounded(self: Any, piece: Any) -> torch.Tensor:
        param = original(self, piece)
        if param.dtype == torch.float32:
            param.copy_ = lambda source, **kwargs: torch.Tensor.copy_(param, source.bfloat16().float())
        return param

    replace(StepOperations, "_param", rounded)


def shards_go_to_torchs_constructor(replace: Replace = setattr) -> None:
    """Case 15: torch's own constructor is given the shards, of which those of FP32 params are no leaves."""
    from megatron_dos.adapter.host_adam import HostAdam

    original = HostAdam.__init__

    def build(self: Any, param_groups: Any, *args: Any, **kwargs: Any) -> None:
        torch.optim.Optimizer(param_groups, {})
        original(self, param_groups, *args, **kwargs)

    replace(HostAdam, "__init__", build)


def fp32_params_have_no_owner(replace: Replace = setattr) -> None:
    """Case 15: only params that have FP32 masters of Megatron's get states."""
    from megatron_dos.adapter import setup

    original = setup.owned_ranges

    def of_16_bit_params(ranges: Any, owners: dict[torch.Tensor, int]) -> Any:
        return original(ranges, {param: owner for param, owner in owners.items() if param.dtype != torch.float32})

    replace(setup, "owned_ranges", of_16_bit_params)


def nothing_is_refused(replace: Replace = setattr) -> None:
    """Cases 16 and 17: the table of what deep optimizer states cannot work with is empty."""
    from megatron_dos.options import refusals

    replace(refusals, "REFUSALS", ())


def kernel_looks_at_addresses_only(replace: Replace = setattr) -> None:
    """Case 18: the kernel is handed addresses without a look at the tensors behind them."""
    from megatron_dos.kernels import cpu

    replace(cpu, "_code", lambda name, tensor, numel, dtypes: dtypes.get(tensor.dtype, 0))


# ---- Memory and speed -----------------------------------------------------------------------------------------------


def states_are_held_twice(replace: Replace = setattr) -> None:
    """Case 19: the inner optimizer keeps copies of the states that the engine has."""
    from megatron_dos.adapter.host_adam import HostAdam

    original = HostAdam.__init__

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._engine.copies = [state.clone() for states in self.state.values() for state in states.values()]

    replace(HostAdam, "__init__", build)


def slabs_are_rounded_up_to_powers_of_two(replace: Replace = setattr) -> None:
    """Case 19: memory comes in blocks of powers of two, as from torch's own page-locked allocator."""
    from megatron_dos.node import slab

    original = slab.zeros

    def zeros(numel: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        return original(1 << max(numel - 1, 0).bit_length(), *args, **kwargs)[:numel]

    replace(slab, "zeros", zeros)


def estimate_comes_too_late(replace: Replace = setattr) -> None:
    """Case 19: what the states take is said after it has been taken."""
    from megatron_dos import optimizer

    announce, engine = optimizer.announce, optimizer.UpdateEngine

    def build(*args: Any, **kwargs: Any) -> Any:
        built = engine(*args, **kwargs)
        for late in waiting:
            announce(*late)
        return built

    waiting: list[tuple] = []
    replace(optimizer, "announce", lambda *args: waiting.append(args))
    replace(optimizer, "UpdateEngine", build)


def nobody_asks_whether_states_fit(replace: Replace = setattr) -> None:
    """Case 19: memory is taken without a look at what there is."""
    from megatron_dos.update import memory

    replace(memory, "require_host_memory", lambda needed: None)


def saves_keep_a_copy(replace: Replace = setattr) -> None:
    """Case 19: every save leaves a copy of the states behind."""
    from megatron_dos.optimizer import DeepStatesOptimizer

    original = DeepStatesOptimizer.state_dict
    kept: list[torch.Tensor] = []

    def keeping(self: Any) -> dict[str, Any]:
        kept.extend(state.clone() for states in self.optimizer.state.values() for state in states.values())
        return original(self)

    replace(DeepStatesOptimizer, "state_dict", keeping)


def steps_keep_their_staging(replace: Replace = setattr) -> None:
    """Case 19: the device memory that a step takes is not given back."""
    from megatron_dos.update.operations import StepOperations

    original = StepOperations.__init__
    kept: list[Any] = []

    def keeping(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        kept.append(self)

    replace(StepOperations, "__init__", keeping)


def threads_follow_omp_num_threads(replace: Replace = setattr) -> None:
    """Case 20: as many threads as OMP_NUM_THREADS says, which torchrun sets to 1."""
    for name in ("megatron_dos.node.threads", "megatron_dos.kernels.cpu"):
        if name in sys.modules:
            replace(sys.modules[name], "default_threads", lambda: int(os.environ.get("OMP_NUM_THREADS", "1")))


def every_rank_takes_all_cpus(replace: Replace = setattr) -> None:
    """Case 20: ranks do not divide the CPUs of their node."""
    from megatron_dos.node import threads

    replace(threads, "default_threads", lambda: len(os.sched_getaffinity(0)))
    replace(threads, "cpus_of_rank", lambda: sorted(os.sched_getaffinity(0)))


def cpus_are_divided_without_regard_to_nodes(replace: Replace = setattr) -> None:
    """Case 20: a rank's CPUs are the next ones, wherever its GPU hangs."""
    from megatron_dos.node import placement

    original = placement.divide_cpus

    def without(masks: Any, order: Any, nodes: Any, wanted: Any) -> Any:
        return original(masks, order, nodes, [None] * len(wanted))

    replace(placement, "divide_cpus", without)


def own_masks_are_divided_again(replace: Replace = setattr) -> None:
    """Case 20: a rank's CPUs are its mask over the ranks of the node, though its launcher has divided them already."""
    from megatron_dos.node import placement

    original = placement.divide_cpus

    def again(masks: Any, order: Any, nodes: Any, wanted: Any) -> Any:
        shares = original(masks, order, nodes, wanted)
        return [share[: len(mask) // len(masks)] for share, mask in zip(shares, masks, strict=True)]

    replace(placement, "divide_cpus", again)


def ranks_do_not_meet(replace: Replace = setattr) -> None:
    """Case 20: without a LOCAL_WORLD_SIZE a rank takes itself for the only one of its node."""
    from megatron_dos.node import ranks as node

    replace(node, "meet", lambda limit_s=None: None)


def quotas_are_ignored(replace: Replace = setattr) -> None:
    """Case 20: the CPU quota of a container does not count."""
    from megatron_dos.node import ranks as node

    replace(node, "cpu_quotas", dict)


def machines_are_told_apart_by_name(replace: Replace = setattr) -> None:
    """Case 20: machines of one host name are taken for one."""
    import socket

    from megatron_dos.node import ranks as node

    replace(node, "machine_id", socket.gethostname)


def params_are_not_split(replace: Replace = setattr) -> None:
    """Case 21: a subgroup ends where a param ends, so the share comes in steps of whole params."""
    from megatron_dos.adapter import setup
    from megatron_dos.program import partition

    def whole_params(ranges: Any, size: int) -> Any:
        cut = original(ranges, 2**40)
        params = [
            dataclasses.replace(cut.subgroups[0], index=index, start=start, stop=stop)
            for index, (start, stop) in enumerate(sorted(cut.slab_ranges.values()))
        ]
        return dataclasses.replace(cut, subgroups=tuple(params))

    original = partition.partition
    replace(partition, "partition", whole_params)
    replace(setup, "partition", whole_params)


def denormals_stay_in_the_moments(replace: Replace = setattr) -> None:
    """Case 22: both kernels lack the rule that sets moments below the smallest normal number to zero."""
    from megatron_dos.kernels import device_kernel, reference
    from megatron_dos.update import operations

    class Done:
        def wait(self) -> None: ...

        def poll(self) -> bool:
            return True

    def kernel(param: Any, exp_avg: Any, exp_avg_sq: Any, grad: Any, scalars: Any, *factors: Any, **named: Any) -> None:
        reference.adamw(*(t.numpy() for t in (param, exp_avg, exp_avg_sq, grad)), scalars)

    def submit(pieces: Any, threads: int) -> Done:
        for piece in pieces:
            kernel(*piece)
        return Done()

    replace(reference, "SMALLEST_NORMAL", np.float32(0.0))
    replace(operations.cpu_kernel, "submit", submit)
    replace(device_kernel, "select", lambda *args, **kwargs: kernel)


def first_update_compiles(replace: Replace = setattr) -> None:
    """Case 23: the first update asks for a compiler, as extensions that are built when needed do."""
    from megatron_dos.kernels import cpu

    original = cpu.pool

    @functools.cache
    def compile_once() -> None:
        subprocess.run(["c++", "--version"], capture_output=True, check=False)

    def pool(threads: int | None = None) -> Any:
        compile_once()
        return original(threads)

    replace(cpu, "pool", pool)


def tickets_are_waited_for_in_the_open(replace: Replace = setattr) -> None:
    """Case 23: after an error, what is still in flight is waited for and may raise errors of its own."""
    from megatron_dos.device import cuda

    def wait(self: Any) -> list[BaseException]:
        while self._tickets:
            self._tickets.popitem()[1].wait()
        return []

    replace(cuda._Run, "wait_for_tickets", wait)
