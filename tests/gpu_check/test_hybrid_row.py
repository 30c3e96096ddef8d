# SPDX-License-Identifier: Apache-2.0
"""Without a HybridDeviceOptimizer that can be built, the step time loses that row alone, and the result says why."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from megatron_dos.gpu_check import context, rivals, step_time  # noqa: E402


class Adam:
    """Stands for the optimizers that Megatron passes on."""


class Changed:
    """A constructor with other arguments."""

    def __init__(self, params, fraction):
        raise AssertionError("never reached")


class Failing:
    def __init__(self, *arguments, **options):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def core(**names):
    return SimpleNamespace(__name__="megatron.core.optimizer", Adam=Adam, CPUAdam=Adam, **names)


@pytest.fixture
def hybrid(monkeypatch):
    """The function of the stage on two small params, and what a Megatron stands in for the real one."""

    def hybrid(megatron):
        def import_module(name):
            if isinstance(megatron, Exception):
                raise megatron
            return megatron

        monkeypatch.setattr(rivals, "importlib", SimpleNamespace(import_module=import_module))
        monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
        params = [torch.zeros(4, dtype=torch.bfloat16) for _ in range(2)]
        bench = SimpleNamespace(numel=8, params=params, grads=[torch.zeros(4)] * 2, seconds=lambda step: step() or 0.1)
        run = context.Context(True, context.Sizes.dry(), time.monotonic() + 60, lambda result: None)
        rows = ["ours"]
        step_time._hybrid(run, bench, rows)
        return rows, run.result

    return hybrid


@pytest.mark.parametrize(
    ("megatron", "reason"),
    [
        (ImportError("cannot import name 'HybridDeviceOptimizer'"), "not importable: ImportError: cannot import name"),
        (core(), "this Megatron is without it: "),
        (core(HybridDeviceOptimizer=Changed), "its constructor has changed: TypeError: "),
    ],
    ids=["import", "attribute", "constructor"],
)
def test_what_cannot_be_built_loses_its_row_alone(hybrid, megatron, reason):
    rows, result = hybrid(megatron)
    assert rows == ["ours"]
    assert "hybrid" not in result["values"]
    assert len(result["notes"]) == 1
    assert result["notes"][0].startswith("HybridDeviceOptimizer not measured: ")
    assert reason in result["notes"][0]


def test_an_error_of_the_gpu_is_not_taken_for_a_changed_constructor(hybrid):
    with pytest.raises(RuntimeError, match="illegal memory access"):
        hybrid(core(HybridDeviceOptimizer=Failing))
