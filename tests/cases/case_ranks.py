# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a case do: functions for `Megatron.call`, hooks for `Megatron.train`.

Everything returned is plain: what the tests compare, mostly lists of the things that are wrong.
"""

from __future__ import annotations

import contextlib
import gc
import io
import math
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import flat
import mutations
import numpy as np
import torch
from edited_grads import edit_reduced_grads, sum_reduced_grads  # noqa: F401 (called by name)
from flat import FlatRun, Oracle, decays_of, load_states, random_grads, save_states, stock_with_numpy_adam
from hooks import use_adversarial_device
from rank_main import distributed_optimizers

STATES = ("param", "exp_avg", "exp_avg_sq")


def call(what: str, mutation: str | None = None, **arguments: Any) -> Any:
    """Call a function of this module, with a mutation applied first."""
    if mutation is not None:
        mutations.apply(mutation)
    return globals()[what](**arguments)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def other_weights(weights: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> list[str]:
    """Names of the params whose bits differ."""
    pairs = enumerate(zip(weights, expected, strict=True))
    return [f"weight p{index}" for index, (one, other) in pairs if not same(one, other)]


def other_states(run: FlatRun, expected: Sequence[dict[str, torch.Tensor] | None]) -> list[str]:
    """Names of the states of this rank whose bits differ."""
    return [
        f"{key} of p{index}"
        for index, (mine, theirs) in enumerate(zip(run.states(), expected, strict=True))
        if mine is not None
        for key in STATES
        if not same(mine[key], theirs[key])
    ]


# ---- Silent corruption ----------------------------------------------------------------------------------------------


def load_weights_after_construction(dtype: str, reload: bool) -> dict[str, list[str]]:
    """Overwrite the weights of a built optimizer in place; a step with nothing in it, and a real one."""
    wrong = {}
    for name, grads, decay in (("quiet", [torch.zeros(shape) for shape in flat.SHAPES], 0.0), ("real", None, 0.1)):
        run = FlatRun(dtype, seed=0, weight_decay=decay)
        built_after = FlatRun(dtype, seed=99, weight_decay=decay)
        loaded = built_after.weights()
        with torch.no_grad():
            for param, weight in zip(run.params, loaded, strict=True):
                param.copy_(weight)
        if reload:
            run.optimizer.reload_model_params()
        run.step(grads or random_grads(5))
        built_after.step(grads or random_grads(5))
        wrong[name] = other_weights(run.weights(), built_after.weights()) + other_states(run, built_after.states())
        if name == "quiet":
            wrong["changed"] = other_weights(run.weights(), loaded)
    owned = [state["range"].tolist() for state in run.states() if state is not None]
    sizes = [param.numel() for param, state in zip(run.params, run.states(), strict=True) if state is not None]
    split = [(low, high) for (low, high), size in zip(owned, sizes, strict=True) if high - low < size]
    return {**wrong, "split": split}


def count_from_999(point: str, model: Any, optimizer: Any, args: Any) -> Any:
    """Have the first step be number 1000; the masters after each step."""
    if point == "start":
        for one in distributed_optimizers(optimizer):
            one.optimizer.step_count = 999
    return masters_and_steps(point, model, optimizer, args)


def masters_and_steps(point: str, model: Any, optimizer: Any, args: Any) -> Any:
    """All masters of this rank in one tensor, and the step and number of params of each param group."""
    if point not in ("start", "step"):
        return None
    masters, groups = [], []
    for one in distributed_optimizers(optimizer):
        masters += [one._get_main_param_and_optimizer_states(param)["param"] for param in one.model_param_gbuf_map]
        steps = [group["step"] for group in one.state_dict()["optimizer"]["param_groups"]]
        groups += list(zip(steps, (len(group["params"]) for group in one.optimizer.param_groups), strict=True))
    return {"masters": torch.cat([master.detach().cpu() for master in masters]), "groups": groups}


def accumulate_micro_batches(early: bool) -> dict[str, Any]:
    """Real backward passes whose grads are +g, -g, +3g and 0; our step, and the stock optimizer's norm.

    Args:
        early: grads are sent to the CPU within the backward pass.
    """
    outcome: dict[str, Any] = {}
    if early:
        use_adversarial_device()
    # Few bits, so that 3g is exact in bf16.
    grads = [torch.randint(-15, 16, shape, generator=torch.Generator().manual_seed(7)) / 64 for shape in flat.SHAPES]
    for name, deep in (("ours", True), ("stock", False)):
        options = {"dos_overlap_grad_d2h": "on"} if deep and early else {}
        run = FlatRun("bfloat16", deep=deep, clip_grad=0.5, overlap_grad_reduce=early, **options)
        run.backward(*([grad * factor for grad in grads] for factor in (1, -1, 3, 0)))
        if deep:
            oracle, decays = Oracle(run.weights()), decays_of(run)
            outcome["early slots"] = run.inner._engine.options.early_slots
        _, outcome[name], _ = run.optimizer.step()
        if deep:
            clip = float(np.float32(0.5 / (outcome["ours"] + 1e-6)))
            oracle.step(1, [3 * grad * clip for grad in grads], decays)
            outcome["differences"] = oracle.differences(run)
    outcome["expected"] = math.sqrt(sum(float((3 * grad.double()).square().sum()) for grad in grads))
    return outcome


def bias_corrections(subgroup_size: int, share: float, seed: int) -> dict[str, Any]:
    """Twelve steps, from 2 straight to 5, beta2 changed at step 10, a fresh random order of operations each."""
    use_adversarial_device(seed)
    run = FlatRun("float32", dos_subgroup_size=subgroup_size, dos_gpu_share=share)
    oracle, decays = Oracle(run.weights()), decays_of(run)
    for step in (1, 2, *range(5, 15)):
        run.inner.optimizer.step_count = step - 1
        betas = (0.9, 0.999 if step < 10 else 0.95)
        for group in run.optimizer.param_groups:
            group["betas"] = betas
        grads = random_grads(step)
        run.step(grads)
        oracle.step(step, grads, decays, betas=betas)
    return {"subgroups": len(run.inner._engine.partition.subgroups), "differences": oracle.differences(run)}


def clipped_first_step(grads_in_fp32: bool) -> dict[str, Any]:
    """One huge grad in the first step: ours, half of it on the device, against the stock optimizer and numpy."""
    use_adversarial_device()
    ours = FlatRun("bfloat16", grads_in_fp32, clip_grad=1.0, dos_gpu_share=0.5)
    oracle, decays = Oracle(ours.weights()), decays_of(ours)
    grads = random_grads(3)
    grads[3].view(-1)[100] = 2.0**20
    _, norm, _ = ours.step(grads)
    reference = stock_with_numpy_adam("bfloat16", grads_in_fp32, clip_grad=1.0)
    _, norm_of_reference, _ = reference.step(grads)
    clip = float(np.float32(1.0 / (norm_of_reference + 1e-6)))
    oracle.step(1, [grad * clip for grad in grads], decays)
    return {
        "differences": other_weights(ours.weights(), reference.weights()) + oracle.differences(ours),
        "norms": (norm, norm_of_reference),
    }


def skipped_step(grads_in_fp32: bool) -> dict[str, Any]:
    """A good step, then one with an inf in the last element of the last bucket; half of the update on the device."""
    use_adversarial_device()
    run = FlatRun("float16", grads_in_fp32, clip_grad=1.0, initial_loss_scale=1024.0, dos_gpu_share=0.5)
    scale = float(run.optimizer.get_loss_scale())
    run.step([grad * scale for grad in random_grads(1, 1e-3)])
    before, weights, counter = run.states(), run.weights(), run.inner.optimizer.step_count
    grads = [grad * scale for grad in random_grads(2, 1e-3)]
    grads[0].view(-1)[-1] = math.inf  # p0 is in the last bucket: buckets are filled from the last param on
    success, _, _ = run.step(grads)
    return {
        "success": success,
        "changed": other_states(run, before) + other_weights(run.weights(), weights),
        "counters": (counter, run.inner.optimizer.step_count),
    }


def step_with_grads() -> list[str]:
    """A step with a grad in every param: names of those of which an element stayed as it was."""
    still = []
    for grads_in_fp32 in (True, False):
        run = FlatRun("bfloat16", grads_in_fp32, weight_decay=0.0)
        before = run.states()
        run.step([torch.ones(shape) for shape in flat.SHAPES])
        after = run.states()
        still += [
            f"p{index} ({'FP32' if grads_in_fp32 else 'bf16'} grads)"
            for index, (one, other) in enumerate(zip(before, after, strict=True))
            if one is not None and (one["param"] == other["param"]).any()
        ]
    return still


def build_and_prepare_to_load() -> dict[str, Any]:
    """What construction, and Megatron's preparations of a load, change: weights, states, random numbers, the step."""
    FlatRun("bfloat16")  # initialises torch.distributed and the seeds
    weights = [param.detach().cpu().clone() for param in flat.make_model(torch.bfloat16, 0).parameters()]
    random = torch.get_rng_state(), torch.cuda.get_rng_state()
    run = FlatRun("bfloat16")
    run.optimizer.sharded_state_dict(
        run.ddp.module.sharded_state_dict(), is_loading=True, metadata={"distrib_optim_sharding_type": "dp_reshardable"}
    )
    changed = other_weights(run.weights(), weights)
    for index, state in enumerate(run.states()):
        if state is not None:
            owned = slice(*state["range"].tolist())
            master = weights[index].view(-1)[owned].float()
            changed += [] if same(state["param"], master) else [f"master of p{index}"]
            changed += [f"{key} of p{index}" for key in ("exp_avg", "exp_avg_sq") if state[key].any()]
    after = torch.get_rng_state(), torch.cuda.get_rng_state()
    changed += [] if all(map(torch.equal, random, after)) else ["the random stream"]
    changed += [] if run.inner.optimizer.step_count == 0 else ["the step"]
    return {"changed": changed}


def async_save(folder: str, persistent: bool) -> dict[str, Any]:
    """What an asynchronous save wrote that was let go only after two more steps; states as they are with a GPU."""
    from checkpoint_faults import written_while_stepping

    return written_while_stepping(folder, "dp_reshardable", persistent, shared=True)


# ---- Crashes, hangs, refusals ---------------------------------------------------------------------------------------


def common_state() -> dict[str, Any]:
    """The common state before and after the first step: equal on all ranks, plain, readable with weights_only."""
    run = FlatRun("bfloat16")
    saved = []
    for step in range(2):
        if step:
            run.step(random_grads(1))
        buffer = io.BytesIO()
        torch.save(run.optimizer.state_dict(), buffer)
        buffer.seek(0)
        refused = ""
        try:
            torch.load(buffer, weights_only=True)
        except Exception as error:
            refused = str(error).splitlines()[0]
        saved.append({"text": repr(run.optimizer.state_dict()), "refused": refused})
    empty = [not group["params"] for group in run.inner.optimizer.param_groups]
    return {"saved": saved, "an empty group": any(empty)}


def params_kept_in_fp32(folder: str, steps: int = 3) -> dict[str, Any]:
    """Params kept in FP32 among bf16 ones, some steps, a save and a load: what differs from numpy and from the save."""
    use_adversarial_device()
    run = FlatRun("bfloat16", dos_gpu_share=0.3)
    oracle, decays = Oracle(run.weights()), decays_of(run)
    for step in range(1, steps + 1):
        run.step(random_grads(step))
        oracle.step(step, random_grads(step), decays)
    kept = [run.params[index] for index in flat.KEPT_IN_FP32]
    save_states(run, Path(folder))
    return {
        "differences": oracle.differences(run),
        "dtypes": [str(param.dtype) for param in kept],
        "have more than bf16": [not same(param, param.bfloat16().float()) for param in kept],
        "loaded": other_states(load_states(FlatRun("bfloat16", seed=1), Path(folder)), run.states()),
    }


def parse(command_lines: dict[str, list[str]]) -> dict[str, str]:
    """Megatron's own parser and validation on each command line: the error's type and text, or "accepted"."""
    from megatron.training import arguments

    outcome = {}
    for name, command_line in command_lines.items():
        sys.argv = ["pretrain_gpt.py", *command_line]
        try:
            arguments.validate_args(arguments.parse_args())
            outcome[name] = "accepted"
        except BaseException as error:
            outcome[name] = f"{type(error).__name__}: {error}"
    return outcome


# ---- Memory and speed -----------------------------------------------------------------------------------------------


def memory_of_states() -> dict[str, Any]:
    """Bytes of host memory behind the states and the staging, and where they are."""
    from megatron_dos.update.memory import host_bytes

    use_adversarial_device()
    run = FlatRun("bfloat16", dos_gpu_share=0.5)
    run.step(random_grads(1))
    owned = sum(int(s["range"][1] - s["range"][0]) for s in run.states() if s is not None)
    built = run.inner._engine
    return {
        "owned": owned,
        "states": sum(bytes_of(live_tensors(built.memory.states))),
        "all": sum(bytes_of(live_tensors(built))),
        "estimate": host_bytes(built.partition, built.options),
        "on the device": sum(s.is_cuda for states in run.inner.optimizer.state.values() for s in states.values()),
    }


def bytes_of(tensors: Any) -> list[int]:
    """Bytes of each storage behind the tensors, storages that share memory counted once."""
    return list({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def live_tensors(root: Any) -> Iterator[torch.Tensor]:
    """Tensors that `root` holds in its attributes, lists and dicts, to any depth; not those of Megatron's buffers."""
    seen: set[int] = set()
    waiting = _attributes(root)
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, (list, tuple)):
            waiting += value
        elif type(value).__module__.startswith("megatron_dos") and hasattr(value, "__dict__"):
            waiting += _attributes(value)


def _attributes(owner: Any) -> list[Any]:
    return [value for name, value in vars(owner).items() if name != "shards"]


def order_of_construction() -> list[str]:
    """What happens while an optimizer is built: the estimate is printed ("estimate"), memory taken ("memory")."""
    from megatron_dos.node import slab

    events: list[str] = []

    class Listening(io.StringIO):
        def write(self, text: str) -> int:
            if "host memory" in text:
                events.append("estimate")
            return len(text)

    zeros = slab.zeros

    def taken(*arguments: Any, **named: Any) -> torch.Tensor:
        events.append("memory")
        return zeros(*arguments, **named)

    slab.zeros = taken
    with contextlib.redirect_stdout(Listening()):
        FlatRun("bfloat16")
    return events


def refuse_what_does_not_fit() -> dict[str, Any]:
    """Build with one byte less than needed: the error, and how much memory had been taken by then."""
    from megatron_dos.node import memory, slab
    from megatron_dos.update.memory import host_bytes

    run = FlatRun("bfloat16")
    needed = host_bytes(run.inner._engine.partition, run.inner._engine.options)
    memory.available_host_memory = lambda: needed - 1
    taken: list[int] = []
    zeros = slab.zeros
    slab.zeros = lambda numel, *more, **named: taken.append(numel) or zeros(numel, *more, **named)
    try:
        FlatRun("bfloat16")
        error = "none"
    except memory.HostMemoryError as refusal:
        error = str(refusal)
    return {"error": error, "taken": taken}


def memory_between_steps() -> dict[str, int]:
    """Bytes of all tensors of this process after the first step and after the tenth."""
    use_adversarial_device()
    run = FlatRun("bfloat16", dos_gpu_share=0.5)
    found = {}
    for step in range(1, 11):
        run.step(random_grads(step))
        if step in (1, 10):
            gc.collect()
            found[f"step {step}"] = sum(
                bytes_of(o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter))
            )
    return found


def resident_size_over_saves(folder: str, saves: int) -> list[int]:
    """Resident bytes of this process after each of a row of steps with a save."""
    flat.SHAPES, flat.KEPT_IN_FP32 = ((512, 512),), ()
    run = FlatRun("bfloat16")
    sizes = []
    for number in range(saves):
        run.step(random_grads(number))
        target = Path(folder) / str(number)
        target.mkdir()
        save_states(run, target)
        shutil.rmtree(target)
        gc.collect()
        sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
    return sizes


def real_shares(asked: Sequence[float], subgroup_size: int) -> dict[float, float]:
    """A model with 60 % of its elements in one param: asked share of the GPU -> real one."""
    from megatron_dos.program.schedule import Placement

    flat.SHAPES, flat.KEPT_IN_FP32 = ((60, 400), (10, 400), (10, 400), (10, 400), (10, 400)), ()
    found = {}
    for share in asked:
        run = FlatRun("bfloat16", dos_subgroup_size=subgroup_size, dos_gpu_share=share)
        engine = run.inner._engine
        program = engine.program([torch.zeros(0)] * len(run.params))
        placed = zip(engine.partition.subgroups, program.placements, strict=True)
        on_gpu = sum(subgroup.numel for subgroup, placement in placed if placement is not Placement.HOST)
        found[share] = on_gpu / engine.partition.numel
    return found


def use_unchecked_adversarial_device() -> None:
    """Random orders, and nobody looks at the declared reads and writes: only the result tells."""
    from megatron_dos.adapter import setup
    from megatron_dos.device.sim import SimDevice

    setup.inject(make_device=lambda place: SimDevice(seed=torch.distributed.get_rank(), check=False))


# ---- Threads --------------------------------------------------------------------------------------------------------


def threads_of_ranks(masks: list[list[int]], machines: str, folder: str) -> dict[str, Any]:
    """Let ranks with these masks, on these machines, meet without a word of their launcher."""
    from megatron_dos.node import ranks as node
    from megatron_dos.node import threads

    rank = int(os.environ["RANK"])
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        del os.environ[name]
    boot_id = Path(folder) / f"boot_id of rank {rank} on {machines}"
    boot_id.write_text(machines[rank])
    node._BOOT_ID, node.cpu_quotas = boot_id, dict
    os.sched_getaffinity = lambda pid: set(masks[rank])
    torch.distributed.init_process_group("gloo")
    node.meet()
    torch.distributed.barrier()
    return {"threads": threads.default_threads(), "cpus": threads.cpus_of_rank()}
