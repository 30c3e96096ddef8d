# SPDX-License-Identifier: Apache-2.0
"""How much memory a rank takes while it saves and loads: measured by ranks, for the tests of checkpoints."""

from __future__ import annotations

import ctypes
import functools
import gc
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flat
import torch
from numpy_adam import use_numpy_adam

from megatron_dos.kernels import reference

SHAPES = ((512, 1024),) * 20
"""Ten million parameters, 120 MiB of states: far more than a save or load takes besides, and twenty times one
parameter, which is what torch reads at a time.
"""


def peak_of(what: Callable[[], Any]) -> int:
    """By how many bytes the resident memory of this process exceeded its start, at most, while `what` ran."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that was freed but kept would hide what is taken
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status("VmRSS")
    what()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


def peaks(folder: str, deep: bool) -> dict[str, Any]:
    """Peaks of one rank that owns all states: per layout of the file, of a save and of a load; and how large the states
    are. The load is checked to bring the states back.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    flat.SHAPES, flat.KEPT_IN_FP32 = SHAPES, ()
    if not deep:
        use_numpy_adam()
        reference.adamw = lambda *operands: None  # slow, and of no matter here: the states only have to exist
    filesystem_async.get_write_results_queue("fork")
    run = flat.FlatRun("bfloat16", deep=deep, **({"dos_subgroup_size": 1 << 20} if deep else {}))
    run.step([torch.ones(shape) for shape in SHAPES])
    expected = _sums(run)
    outcome: dict[str, Any] = {"states": 12 * sum(param.numel() for param in run.params)}

    file = Path(folder) / "distrib_optim.pt"
    cases: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        layout: tuple(
            functools.partial(what, run, Path(folder) / layout, layout) for what in (flat.save_states, flat.load_states)
        )
        for layout in ("dp_reshardable", "fully_reshardable")
    }
    cases["torch"] = (
        lambda: run.inner.save_parameter_state(str(file)),
        lambda: run.inner.load_parameter_state(str(file)),
    )
    for name, (save, load) in cases.items():
        (Path(folder) / name).mkdir()
        saved = peak_of(save)
        _forget(run)
        outcome[name] = {"save": saved, "load": peak_of(load), "loaded": _sums(run) == expected}
        shutil.rmtree(Path(folder) / name)
    return outcome


def _tensors(run: flat.FlatRun) -> list[torch.Tensor]:
    return [
        tensor
        for param in run.params
        for key, tensor in run.inner._get_main_param_and_optimizer_states(param).items()
        if key in ("param", "exp_avg", "exp_avg_sq")
    ]


def _sums(run: flat.FlatRun) -> list[int]:
    """Of the bits of each state, as a check that takes no copy."""
    return [int(tensor.detach().view(torch.int32).sum()) for tensor in _tensors(run)]


def _forget(run: flat.FlatRun) -> None:
    with torch.no_grad():
        for tensor in _tensors(run):
            tensor.zero_()
