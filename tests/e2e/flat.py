# SPDX-License-Identifier: Apache-2.0
"""FLAT: Megatron's own DDP and optimizer around a handful of odd-shaped parameters, run inside the ranks.

There is no forward pass: tests put grads into `main_grad` themselves, so that every number is known. Each function
here that a test calls takes and returns plain values and tensors, and runs in every rank.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

SHAPES = ((1,), (3, 5), (17,), (64, 64), (129, 7), (512, 64))
KEPT_IN_FP32 = (2, 4)  # as routers and norms are, among 16-bit params


def make_model(dtype: torch.dtype, seed: int, names: dict[int, str] | None = None) -> torch.nn.Module:
    """Params of SHAPES; `names` gives some of them another name than p0, p1, ..."""
    from megatron.core.transformer.module import MegatronModule

    class Flat(MegatronModule):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            generator = torch.Generator().manual_seed(seed)
            for index, shape in enumerate(SHAPES):
                values = torch.randn(shape, generator=generator)
                param = torch.nn.Parameter(values.to(torch.float32 if index in KEPT_IN_FP32 else dtype).cuda())
                self.register_parameter((names or {}).get(index, f"p{index}"), param)

    from megatron.core.transformer import TransformerConfig

    return Flat(TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1))


class FlatRun:
    """A model of SHAPES with Megatron's optimizer around it.

    Args:
        dtype: of the params that are not KEPT_IN_FP32.
        grads_in_fp32: dtype of the main grads: FP32, or that of the param.
        deep: deep optimizer states, or Megatron's own optimizer.
        overlap_grad_reduce: reduce the grads in the backward pass.
        bucket_size: least number of parameters in a bucket; None for Megatron's default.
        names: see `make_model`.
        options: more fields of OptimizerConfig.
    """

    def __init__(
        self,
        dtype: str = "bfloat16",
        grads_in_fp32: bool = True,
        deep: bool = True,
        seed: int = 0,
        overlap_grad_reduce: bool = False,
        bucket_size: int | None = None,
        names: dict[int, str] | None = None,
        **options: Any,
    ) -> None:
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
            parallel_state.initialize_model_parallel()
            tensor_parallel.model_parallel_cuda_manual_seed(1)
        torch_dtype = getattr(torch, dtype)
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=grads_in_fp32,
            use_distributed_optimizer=True,
            overlap_grad_reduce=overlap_grad_reduce,
            **({} if bucket_size is None else {"bucket_size": bucket_size}),
        )
        module = make_model(torch_dtype, seed, names)
        self.ddp = DistributedDataParallel(module.config, ddp_config, module)
        self.params = list(module.parameters())
        settings: dict[str, Any] = {
            "lr": 1e-3,
            "weight_decay": 0.1,
            "clip_grad": 0.0,
            "bf16": torch_dtype == torch.bfloat16,
            "fp16": torch_dtype == torch.float16,
            "params_dtype": torch_dtype,
        }
        if deep:
            settings |= {"use_deep_optimizer_states": True, "dos_subgroup_size": 1000}
        config = OptimizerConfig(use_distributed_optimizer=True, optimizer="adam", **{**settings, **options})
        self.optimizer = get_megatron_optimizer(config, [self.ddp])

    @property
    def inner(self) -> Any:
        """The one distributed optimizer inside Megatron's chain."""
        (only,) = self.optimizer.chained_optimizers
        return only

    def step(self, grads: list[torch.Tensor]) -> tuple[bool, float | None, float | None]:
        """Put the same grads into every rank's grad buffer, reduce them and step."""
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        return self.step_with(lambda param, grad: param.main_grad.copy_(grad), grads)

    def step_with(self, put: Any, grads: list[torch.Tensor]) -> tuple[bool, float | None, float | None]:
        for param, grad in zip(self.params, grads, strict=True):
            put(param, grad)
        self.ddp.finish_grad_sync()
        return self.optimizer.step()

    def backward(self, *micro_batches: list[torch.Tensor]) -> None:
        """Backward passes that accumulate these grads, and their reduction."""
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        for number, grads in enumerate(micro_batches, 1):
            with nullcontext() if number == len(micro_batches) else self.ddp.no_sync():
                pairs = zip(self.params, grads, strict=True)
                sum((param * grad.to(param)).sum() for param, grad in pairs).backward()
        self.ddp.finish_grad_sync()

    def sharded_model(self) -> dict[str, Any]:
        """The model's sharded state dict, as Megatron's optimizers need it for checkpoints."""
        from megatron.core.dist_checkpointing import ShardedTensor

        replica = (0, 0, torch.distributed.get_rank())
        return {
            name: ShardedTensor.from_rank_offsets(name, param, replica_id=replica)
            for name, param in self.ddp.module.named_parameters()
        }

    def weights(self) -> list[torch.Tensor]:
        return [param.detach().cpu().clone() for param in self.params]

    def states(self) -> list[dict[str, torch.Tensor] | None]:
        """For each param what this rank holds of it, with the owned range; None where it owns nothing of it."""
        found: list[dict[str, torch.Tensor] | None] = []
        for param in self.params:
            if param not in self.inner.model_param_gbuf_map:
                found.append(None)
                continue
            owned = self.inner._get_model_param_range_map(param)["param"]
            tensors = self.inner._get_main_param_and_optimizer_states(param)
            kept = {key: tensors[key].detach().cpu().clone() for key in ("param", "exp_avg", "exp_avg_sq")}
            found.append({"range": torch.tensor([owned.start, owned.end]), **kept})
        return found


def stock_with_numpy_adam(*arguments: Any, **options: Any) -> FlatRun:
    """Megatron's own optimizer around the specified AdamW. What is built afterwards finds Megatron's own Adam, as ours
    takes no other; the checkpoint code of Megatron stays that for Apex's."""
    import megatron.core.optimizer as optimizer
    from numpy_adam import use_numpy_adam

    before = optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER
    use_numpy_adam()
    try:
        return FlatRun(*arguments, deep=False, **options)
    finally:
        optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = before


def sharded(run: FlatRun, is_loading: bool = False, layout: str = "dp_reshardable") -> dict[str, Any]:
    """What is saved of the optimizer in a distributed checkpoint, or wanted from one."""
    metadata = {"distrib_optim_sharding_type": layout, "chained_optim_avoid_prefix": True}
    state_dict = run.optimizer.sharded_state_dict(run.sharded_model(), is_loading=is_loading, metadata=metadata)
    return {"optimizer": state_dict}


def save_states(run: FlatRun, folder: Path, layout: str = "dp_reshardable") -> None:
    """Save the optimizer's states into an empty folder."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async.get_write_results_queue("fork")  # Megatron would spawn it, which takes seconds
    dist_checkpointing.save(sharded(run, layout=layout), str(folder), content_metadata={})


def load_states(run: FlatRun, folder: Path, layout: str = "dp_reshardable") -> FlatRun:
    """Load them into another one."""
    from megatron.core import dist_checkpointing

    loaded = dist_checkpointing.load(sharded(run, True, layout), str(folder))
    run.optimizer.load_state_dict(loaded["optimizer"])
    return run


def random_grads(seed: int, scale: float = 1.0) -> list[torch.Tensor]:
    """FP32 grads whose values bf16 and fp16 hold exactly, so that they are the same in every grad buffer."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=generator) * scale).bfloat16().half().float() for shape in SHAPES]


class Oracle:
    """The same parameters updated by numpy, whole."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        self.dtypes = [weight.dtype for weight in weights]
        self.master = [weight.float().numpy().reshape(-1).copy() for weight in weights]
        self.exp_avg = [np.zeros_like(master) for master in self.master]
        self.exp_avg_sq = [np.zeros_like(master) for master in self.master]

    def step(
        self, step: int, grads: list[torch.Tensor], decays: list[float], lr: float = 1e-3, **settings: Any
    ) -> None:
        from megatron_dos.kernels import AdamScalars, reference

        settings = {"betas": (0.9, 0.999), "eps": 1e-8, "decoupled": True, **settings}
        for index, grad in enumerate(grads):
            scalars = AdamScalars.at_step(step, lr=lr, weight_decay=decays[index], **settings)
            state = (self.master[index], self.exp_avg[index], self.exp_avg_sq[index])
            reference.adamw(*state, grad.float().numpy().reshape(-1), scalars)

    def differences(self, run: FlatRun) -> list[str]:
        """Where states or weights of this rank differ from the oracle by a bit."""
        found = []
        for index, state in enumerate(run.states()):
            if state is not None:
                owned = slice(*state["range"].tolist())
                for name in ("param", "exp_avg", "exp_avg_sq"):
                    expected = getattr(self, "master" if name == "param" else name)[index][owned]
                    if (state[name].numpy().view(np.uint32) != expected.view(np.uint32)).any():
                        found.append(f"{name} of p{index}")
            rounded = torch.from_numpy(self.master[index]).to(self.dtypes[index])
            if not torch.equal(run.weights()[index].view(-1).view(torch.uint8), rounded.view(torch.uint8)):
                found.append(f"weight p{index}")
        return found


def decays_of(run: FlatRun) -> list[float]:
    """The weight decay that Megatron's param groups give each param (biases and 1-D params have none)."""
    decays = [0.0] * len(run.params)
    owner = {id(shard): param for param, shard in _shards(run)}
    for group in run.optimizer.param_groups:
        for shard in group["params"]:
            for index, param in enumerate(run.params):
                if owner.get(id(shard)) is param:
                    decays[index] = group["weight_decay"]
    # A rank knows the groups of what it owns; the others' follow from the same rule, so take the largest over ranks.
    shared = torch.tensor(decays, dtype=torch.float64)
    torch.distributed.all_reduce(shared, op=torch.distributed.ReduceOp.MAX)
    return shared.tolist()


def _shards(run: FlatRun) -> list[tuple[torch.Tensor, torch.Tensor]]:
    pairs = []
    for params, shards in (
        (run.inner.model_float16_groups, run.inner.shard_float16_groups),
        (run.inner.model_fp32_groups, run.inner.shard_fp32_groups),
    ):
        for params_of_group, shards_of_group in zip(params, shards, strict=True):
            pairs += zip(params_of_group, shards_of_group, strict=True)
    return pairs


# ---- What the tests call --------------------------------------------------------------------------------------------


def follows_the_reference(dtype: str, grads_in_fp32: bool, steps: int = 6) -> list[str]:
    """Seeded grads, lr and betas changed on the way: differences to numpy after all steps."""
    run = FlatRun(dtype, grads_in_fp32)
    oracle, decays = Oracle(run.weights()), decays_of(run)
    for step in range(1, steps + 1):
        lr, betas = 1e-3 / step, (0.9, 0.999 if step < 4 else 0.95)
        for group in run.optimizer.param_groups:
            group.update(lr=lr, betas=betas)
        grads = random_grads(step)
        run.step(grads)
        oracle.step(step, grads, decays, lr=lr, betas=betas)
    return oracle.differences(run)


def after_a_load(how: str) -> dict[str, Any]:
    """Overwrite the weights after the optimizer was built, reload, and step: with zero grads, or with real ones."""
    run = FlatRun("bfloat16")
    generator = torch.Generator().manual_seed(99)
    loaded = [torch.randn(shape, generator=generator) for shape in SHAPES]  # more precise than bf16
    state_dict = None
    with torch.no_grad():
        for param, value in zip(run.params, loaded, strict=True):
            param.copy_(value)
    if how == "state_dict":
        state_dict = {"model": {f"p{index}": value.cuda() for index, value in enumerate(loaded)}}
    run.optimizer.reload_model_params(state_dict)
    start = [
        value if state_dict else value.to(param.dtype).float() for param, value in zip(run.params, loaded, strict=True)
    ]
    before, masters = run.weights(), _masters(run, start)
    decays = decays_of(run)
    oracle = Oracle(start)
    oracle.dtypes = [param.dtype for param in run.params]
    grads = random_grads(5)
    if how == "zero grads":
        for group in run.optimizer.param_groups:
            group["weight_decay"] = 0.0
        grads, decays = [torch.zeros(shape) for shape in SHAPES], [0.0] * len(SHAPES)
    run.step(grads)
    oracle.step(1, grads, decays)
    unchanged = all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(before, run.weights(), strict=True)
    )
    return {"masters": masters, "unchanged": unchanged, "step": oracle.differences(run)}


def _masters(run: FlatRun, expected: list[torch.Tensor]) -> list[str]:
    return [
        f"master of p{index}"
        for index, state in enumerate(run.states())
        if state is not None
        and not torch.equal(state["param"], expected[index].reshape(-1)[slice(*state["range"].tolist())])
    ]


def accumulate() -> dict[str, Any]:
    """Four micro-batches of +g, -g, +3g and nothing."""
    outcome = {}
    for name, deep in (("ours", True), ("stock", False)):
        run = FlatRun("bfloat16", deep=deep, clip_grad=1.0)
        oracle, decays = Oracle(run.weights()), decays_of(run) if deep else None
        grads = random_grads(7)
        run.ddp.zero_grad_buffer()
        for factor in (1, -1, 3, 0):
            for param, grad in zip(run.params, grads, strict=True):
                param.main_grad.add_(grad.cuda(), alpha=factor)
        _, norm, _ = run.step_with(lambda param, grad: None, grads)
        outcome[name] = norm
        if deep:
            whole = math.sqrt(sum(float((3 * grad.double()).square().sum()) for grad in grads))
            clip = float(np.float32(1.0 / (norm + 1e-6)))
            oracle.step(1, [3 * grad * clip for grad in grads], decays)
            outcome |= {"differences": oracle.differences(run), "expected": whole}
    return outcome


def skips(dtype: str, grads_in_fp32: bool, value: float, threshold: bool) -> dict[str, Any]:
    """One good step, then one whose last element is inf or NaN, or whose norm is above the threshold."""
    options: dict[str, Any] = {"clip_grad": 1.0}
    if dtype == "float16":
        options["initial_loss_scale"] = 1024.0
    if threshold:
        options["grad_norm_skip_threshold"] = 1e4
    run = FlatRun(dtype, grads_in_fp32, **options)
    scale = float(run.optimizer.get_loss_scale())
    run.step([grad * scale for grad in random_grads(1, 1e-3)])
    before, weights, counter = run.states(), run.weights(), run.inner.optimizer.step_count
    grads = [grad * scale for grad in random_grads(2, 1e-3)]
    grads[0].view(-1)[-1] = value  # p0 is in the last bucket: buckets are filled from the last param on
    success, _, _ = run.step(grads)
    same = all(
        (one is None) == (other is None)
        and (
            one is None
            or all(
                torch.equal(one[key].view(torch.int32), other[key].view(torch.int32)) for key in one if key != "range"
            )
        )
        for one, other in zip(before, run.states(), strict=True)
    )
    weights_same = all(
        torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))
        for one, other in zip(weights, run.weights(), strict=True)
    )
    return {
        "success": success,
        "states_same": same,
        "weights_same": weights_same,
        "counter": (counter, run.inner.optimizer.step_count),
    }


def one_huge_grad(grads_in_fp32: bool) -> dict[str, Any]:
    """Clipping at the very first step: ours and Megatron's own norm, and ours against numpy with the clipped grads."""
    outcome = {}
    for name, deep in (("ours", True), ("stock", False)):
        run = FlatRun("bfloat16", grads_in_fp32, deep=deep, clip_grad=1.0)
        oracle, decays = Oracle(run.weights()), decays_of(run) if deep else None
        grads = random_grads(3)
        grads[3].view(-1)[100] = 2.0**20
        _, outcome[name], _ = run.step(grads)
        if deep:
            clip = float(np.float32(1.0 / (outcome[name] + 1e-6)))
            oracle.step(1, [grad * clip for grad in grads], decays)
            outcome["differences"] = oracle.differences(run)
    return outcome


def constant_grad() -> dict[str, Any]:
    """Every element of every param moves, and by the same amount."""
    run = FlatRun("bfloat16", weight_decay=0.0)
    before = run.states()
    run.step([torch.ones(shape) for shape in SHAPES])
    moves = [
        (one["param"] - other["param"]) for one, other in zip(before, run.states(), strict=True) if one is not None
    ]
    return {"smallest": min(float(move.min()) for move in moves), "largest": max(float(move.max()) for move in moves)}


def construction_is_quiet() -> dict[str, Any]:
    """Building the optimizer changes no weight and draws no random number."""
    module = make_model(torch.bfloat16, 0)
    expected = [param.detach().cpu().clone() for param in module.parameters()]
    FlatRun("bfloat16")  # initialises torch.distributed and the seeds
    state = torch.get_rng_state(), torch.cuda.get_rng_state()
    run = FlatRun("bfloat16")
    after = torch.get_rng_state(), torch.cuda.get_rng_state()
    return {
        "weights": all(torch.equal(a, b) for a, b in zip(expected, run.weights(), strict=True)),
        "random": all(torch.equal(a, b) for a, b in zip(state, after, strict=True)),
        "moments": [bool(s["exp_avg"].any()) or bool(s["exp_avg_sq"].any()) for s in run.states() if s is not None],
        "step": run.inner.optimizer.step_count,
    }


def memory_of_states() -> dict[str, Any]:
    """Bytes of the states, and which tensors of the optimizer are on the device."""
    run = FlatRun("bfloat16")
    run.step(random_grads(1))
    owned = sum(int(s["range"][1] - s["range"][0]) for s in run.states() if s is not None)
    inner = run.inner.optimizer
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for state in inner.state.values()
        for tensor in state.values()
    }
    return {
        "owned": owned,
        "bytes": sum(storages.values()),
        "on_device": sum(tensor.is_cuda for state in inner.state.values() for tensor in state.values()),
        "fp32_params_on_device": sum(
            s is not None for group in run.inner.shard_fp32_from_float16_groups for s in group
        ),
    }


def offloads_are_no_ops() -> dict[str, Any]:
    """Megatron's offload_to_cpu / restore_from_cpu in any order, then a step that must equal an undisturbed one."""
    run = FlatRun("bfloat16")
    oracle, decays = Oracle(run.weights()), decays_of(run)
    for calls in (("offload_to_cpu",), ("restore_from_cpu", "restore_from_cpu"), ("offload_to_cpu",) * 2):
        for call in calls:
            getattr(run.optimizer, call)()
    run.step(random_grads(1))
    oracle.step(1, random_grads(1), decays)
    run.optimizer.restore_from_cpu()
    run.step(random_grads(2))
    oracle.step(2, random_grads(2), decays)
    return {"differences": oracle.differences(run)}


def resident_states_that_leave_the_device() -> list[bool]:
    """Which of the resident states' storages are gone once the states have been moved."""
    from torch.multiprocessing.reductions import StorageWeakRef

    run = FlatRun("bfloat16", dos_resident_share=1.0)
    run.step(random_grads(1))
    resident = run.inner._engine.memory.resident
    before = [StorageWeakRef(getattr(resident, name).untyped_storage()) for name in ("master", "exp_avg", "exp_avg_sq")]
    run.inner._engine.move_resident(torch.device("meta"))
    return [storage.expired() for storage in before]


def a_step_that_fails_in_the_middle(filename: str) -> dict[str, Any]:
    """The second subgroup cannot be updated: what step and saves say after that, and after a load."""
    from megatron_dos.update.operations import StepOperations

    run = FlatRun("bfloat16")
    run.step(random_grads(1))
    run.optimizer.save_parameter_state(filename)
    saved, update = run.optimizer.state_dict(), StepOperations.update_on_host

    def failing(self: Any, op: Any) -> Any:
        if op.subgroup == 1:
            raise RuntimeError("out of luck")
        return update(self, op)

    def message(action: Any) -> str:
        try:
            action()
        except RuntimeError as error:
            return str(error)
        return ""

    StepOperations.update_on_host = failing
    messages = {"failing": message(lambda: run.step(random_grads(2)))}
    StepOperations.update_on_host = update
    messages["step"] = message(lambda: run.step(random_grads(2)))
    messages["file"] = message(lambda: run.optimizer.save_parameter_state(filename))
    messages["sharded"] = message(lambda: run.optimizer.sharded_state_dict({}))
    run.optimizer.load_state_dict(saved)
    run.optimizer.load_parameter_state(filename)
    return {**messages, "after a load": message(lambda: run.step(random_grads(2)))}


def in_a_mimo_optimizer(deep: bool) -> str:
    """Why an optimizer cannot be a part of that of a MimoModel; nothing if it can."""
    from megatron.core.models.mimo.optimizer import MimoOptimizer, ModuleOptimizerInfo

    FlatRun()  # whatever is changed in Megatron then concerns deep states alone
    run = FlatRun(deep=deep)
    try:
        MimoOptimizer({"language": ModuleOptimizerInfo(run.optimizer, None, None, True)}, run.optimizer.config)
    except ValueError as error:
        return str(error)
    return ""


def state_dict_of_an_empty_rank() -> dict[str, Any]:
    """Before any step, and after one: the saved step and groups, which must be plain values."""
    run = FlatRun("bfloat16")
    saved = [run.optimizer.state_dict()]
    run.step(random_grads(1))
    saved.append(run.optimizer.state_dict())
    kinds = {
        type(value).__name__ for one in saved for group in one["optimizer"]["param_groups"] for value in group.values()
    }
    owns = sum(s is not None for s in run.states())
    return {
        "steps": [[group["step"] for group in one["optimizer"]["param_groups"]] for one in saved],
        "kinds": sorted(kinds),
        "owns": owns,
        "groups": len(saved[0]["optimizer"]["param_groups"]),
    }


def storages_of_states() -> dict[str, Any]:
    """Bytes of each state that a checkpoint would save, and of the storage behind it."""
    run = FlatRun("bfloat16")
    states = [
        tensor for param in run.params for tensor in run.inner._get_main_param_and_optimizer_states(param).values()
    ]
    return {
        "tensors": [tensor.numel() * tensor.element_size() for tensor in states],
        "storages": [tensor.untyped_storage().nbytes() for tensor in states],
    }


def _norm_of_the_parameters(model: torch.nn.Module) -> float:
    """Megatron's, for a program that never parsed Megatron's arguments."""
    from types import SimpleNamespace
    from unittest import mock

    from megatron.training.utils import common_utils

    with mock.patch.object(common_utils, "get_args", return_value=SimpleNamespace(bf16=True)):
        return common_utils.calc_params_l2_norm(model)


def norms_of_the_parameters(kept_in_fp32: tuple[int, ...] = KEPT_IN_FP32, answered: bool = True) -> dict[str, Any]:
    """With ours, with states on the device, and with stock: the norm when built, after a step, after a reload of other
    weights.

    Args:
        kept_in_fp32: instead of KEPT_IN_FP32.
        answered: without it, `main_param` is what the base class leaves.
    """
    import megatron_dos.optimizer

    globals()["KEPT_IN_FP32"] = kept_in_fp32
    if not answered:
        megatron_dos.optimizer.answer_main_param = lambda *args: None
    found: dict[str, list[float]] = {}
    for name, options in (("ours", {}), ("resident", {"dos_resident_share": 0.5}), ("stock", {"deep": False})):
        run = FlatRun("bfloat16", **options)
        norms = found[name] = [_norm_of_the_parameters(run.ddp)]
        run.step(random_grads(1))
        norms.append(_norm_of_the_parameters(run.ddp))
        with torch.no_grad():
            for index, param in enumerate(run.params):
                param.fill_(index + 0.5)
        run.optimizer.reload_model_params()
        norms.append(_norm_of_the_parameters(run.ddp))
    return found


def saves_without_room(folder: str, watched: bool = True) -> dict[str, str]:
    """What saves say when /dev/shm has no room, with a config that knows nothing of them.

    Args:
        watched: without it, Megatron's saves are as Megatron has them.
    """
    import shutil
    from types import SimpleNamespace
    from unittest import mock

    from megatron.core import dist_checkpointing

    from megatron_dos.adapter import hooks

    if not watched:
        hooks._looking_for_room = lambda async_save: async_save
    run = FlatRun("bfloat16")
    run.step(random_grads(1))

    def saved(name: str, free: int, asynchronous: bool = True) -> str:
        target = Path(folder) / name
        target.mkdir(exist_ok=True)
        how = {"async_sharded_save": True, "async_strategy": "mcore"} if asynchronous else {}
        torch.distributed.barrier()
        try:
            with mock.patch.object(shutil, "disk_usage", return_value=SimpleNamespace(free=free)):
                request = dist_checkpointing.save(sharded(run), str(target), content_metadata={}, **how)
            if request is not None:
                request.execute_sync()
        except MemoryError as error:
            return str(error)
        return ""

    return {
        "full": saved("full", 0),
        "nothing was written": str(not list((Path(folder) / "full").rglob("*.distcp"))),
        "at once": saved("at once", 0, asynchronous=False),
        "with room": saved("room", 1 << 30),
        "the second": saved("second", 0),
    }
