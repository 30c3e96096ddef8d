# SPDX-License-Identifier: Apache-2.0
"""What one rank of an end-to-end case does: train with Megatron and write down everything that tests compare."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

running: Recorder
"""The one of the training that goes on, for hooks that need more of it than they are given."""


class SetUpOnly(Exception):
    """Raised in the place of training, for cases of 0 iterations."""


def run(case: dict[str, Any], rank: int) -> None:
    """Run the case and leave its results in rank{rank}.pt of the case's folder.

    Raises: whatever the case raises.
    """
    torch.set_num_threads(1)
    sys.path[:0] = [path for path in case["python_path"] if path not in sys.path]
    results = _call(case) if case["kind"] == "call" else _train(case)
    torch.save(results, Path(case["folder"]) / f"rank{rank}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # nobody leaves while another may still need it


def _function(name: str) -> Callable[..., Any]:
    """The function of 'module:function'."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _call(case: dict[str, Any]) -> Any:
    return _function(case["function"])(**case["arguments"])


def _choose_optimizer(name: str) -> None:
    if name == "dos":
        return  # its flag is among the arguments, and the server has hooked it in
    from megatron_dos.patching.in_memory import uninstall

    uninstall()  # the reference is Megatron as it comes
    if name == "numpy":
        from numpy_adam import use_numpy_adam

        use_numpy_adam()


def _train(case: dict[str, Any]) -> dict[str, Any]:
    _choose_optimizer(case["optimizer"])
    if "--save" in case["arguments"]:
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        # Megatron's queue lives in a process that it spawns, which takes seconds to import torch: fork it instead.
        filesystem_async.get_write_results_queue("fork")
    for prepare in case["prepare"]:
        _function(prepare)()
    global running
    recorder = running = Recorder(case)
    recorder.attach()
    sys.argv = ["pretrain_gpt.py", *case["arguments"]]
    try:
        sys.modules["pretrain_gpt"].main()
    except SetUpOnly:
        pass
    except SystemExit as stop:  # --exit-interval and its like
        if stop.code not in (0, None):
            raise
    return recorder.results


class Recorder:
    """Sits in Megatron's training loop and notes its exact numbers.

    `results` afterwards: iterations (list of dicts), weights and states at the end, and what the hook returned, by
    point. All tensors are copies.
    """

    def __init__(self, case: dict[str, Any]) -> None:
        self._set_up_only = case["iterations"] == 0
        self._keep_state = case["keep_state"]
        self._hook = _function(case["inspect"]) if case["inspect"] else None
        self.results: dict[str, Any] = {"iterations": [], "weights": {}, "states": {}, "inspected": {}}
        self._model: Any = None
        self._optimizer: Any = None
        self.scheduler: Any = None

    def attach(self) -> None:
        from megatron.training import training

        train, log = training.train, training.training_log

        def recorded_log(loss_dict, total_loss_dict, learning_rate, iteration, loss_scale, report_memory_flag,
                         skipped_iter, grad_norm, params_norm, num_zeros_in_grad, *args, **kwargs):  # fmt: skip
            self.results["iterations"].append(
                {
                    "iteration": iteration,
                    "losses": {name: float(value) for name, value in loss_dict.items()},
                    "learning_rate": learning_rate,
                    "loss_scale": float(loss_scale),
                    "skipped": bool(skipped_iter),
                    "grad_norm": _number(grad_norm),
                    "params_norm": _number(params_norm),
                    "num_zeros": _number(num_zeros_in_grad),
                }
            )
            result = log(loss_dict, total_loss_dict, learning_rate, iteration, loss_scale, report_memory_flag,
                         skipped_iter, grad_norm, params_norm, num_zeros_in_grad, *args, **kwargs)  # fmt: skip
            self._inspect("step")
            return result

        def recorded_train(forward_step_func, model, optimizer, opt_param_scheduler, *args, **kwargs):
            self._model, self._optimizer, self.scheduler = model, optimizer, opt_param_scheduler
            self._inspect("start")
            if self._set_up_only:
                self._finish()
                raise SetUpOnly
            try:
                result = train(forward_step_func, model, optimizer, opt_param_scheduler, *args, **kwargs)
            except SystemExit as stop:
                if stop.code in (0, None):
                    self._finish()
                raise
            self._finish()
            return result

        training.train, training.training_log = recorded_train, recorded_log

    def _inspect(self, point: str) -> None:
        if self._hook is None:
            return
        from megatron.training import get_args

        value = self._hook(point, self._model, self._optimizer, get_args())
        if value is not None:
            self.results["inspected"].setdefault(point, []).append(_copies(value))

    def _finish(self) -> None:
        self._inspect("end")
        if self._keep_state:
            self.results["weights"] = weights_of(self._model)
            self.results["states"] = states_of(self._model, self._optimizer)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _copies(value: Any) -> Any:
    """The same with tensors copied to the host: later steps must not change them."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: _copies(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copies(item) for item in value)
    return value


def named_params(model: list[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """The parameters of all model chunks of this rank by name; chunks after the first have a prefix."""
    from megatron.core.utils import unwrap_model

    named = {}
    for index, chunk in enumerate(unwrap_model(model)):
        prefix = f"chunk{index}." if index else ""
        named.update((prefix + name, param) for name, param in chunk.named_parameters())
    return named


def weights_of(model: list[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Copies of the model params by name."""
    return {name: _copies(param) for name, param in named_params(model).items()}


def distributed_optimizers(optimizer: Any) -> list[Any]:
    """The distributed optimizers inside Megatron's (chained) optimizer."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [one for one in chained if isinstance(one, DistributedOptimizer) and not one.is_stub_optimizer]


def states_of(model: list[torch.nn.Module], optimizer: Any) -> dict[str, dict[str, Any]]:
    """What this rank's optimizer holds for each model param that it owns a part of, by the name of the param.

    Each: start and end (the owned range of the flattened param), step, and param, exp_avg and exp_avg_sq, copied.
    Read through the distributed optimizer's own accessor, so that every optimizer is read alike.
    """
    names = {id(param): name for name, param in named_params(model).items()}
    states: dict[str, dict[str, Any]] = {}
    for one in distributed_optimizers(optimizer):
        step = step_of(one)
        for param in one.model_param_gbuf_map:
            owned = one._get_model_param_range_map(param)["param"]
            tensors = one._get_main_param_and_optimizer_states(param)
            kept = {
                key: _copies(tensors[key]).reshape(-1) for key in ("param", "exp_avg", "exp_avg_sq") if key in tensors
            }
            states[names[id(param)]] = {"start": owned.start, "end": owned.end, "step": step, **kept}
    return states


def step_of(optimizer: Any) -> int | None:
    """The one step of a distributed optimizer, wherever its inner optimizer keeps it; None before the first."""
    inner = optimizer.optimizer.state_dict()
    steps = {group["step"] for group in inner["param_groups"] if group.get("step") is not None}
    steps |= {state["step"] for state in inner["state"].values() if "step" in state}
    steps = {int(step) for step in steps}
    assert len(steps) <= 1, f"more than one step in one optimizer: {sorted(steps)}"
    return steps.pop() if steps else None
