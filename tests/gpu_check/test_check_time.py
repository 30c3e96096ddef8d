# SPDX-License-Identifier: Apache-2.0
"""Required cases keep to the time left: each begins only where it fits, and what was not made is reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from repository import ROOT

from megatron_dos.gpu_check import STAGES, Stage, runner, worker
from megatron_dos.gpu_check.summary import summary_of_stage

pytest.importorskip("torch")

from megatron_dos.gpu_check import context, kernels

PATIENCE = 600


class Clock:
    """Stands for the module `time` with a clock that only `pass_by` moves."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def pass_by(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(context, "time", clock)
    return clock


def context_until(seconds, **options):
    return context.Context(True, context.Sizes.dry(), seconds, lambda result: None, **options)


def test_a_case_begins_where_as_much_time_is_left_as_the_one_before_took(clock):
    run = context_until(25)
    made = []
    for case in run.required("abcde", "letters"):
        made.append(case)
        clock.pass_by(10)
    assert made == ["a", "b"]
    assert run.result["not_made"] == ["3 of 5 letters, for lack of time"]
    assert clock.now <= 25


def test_required_cases_may_take_longer_than_the_soft_limit(clock):
    run = context_until(0, required_until=100)
    assert list(run.required("abc", "letters")) == ["a", "b", "c"]
    assert run.result["not_made"] == []
    assert worker.REQUIRED < runner.GRACE  # they end before the stage is killed


def test_the_kernels_stage_makes_what_fits(clock, monkeypatch):
    monkeypatch.setattr(kernels, "_kernels", lambda run: {"elementwise": kernels.elementwise_adam.adamw})
    monkeypatch.setattr(kernels, "_libraries", lambda *arguments: None)

    def faults(*arguments):
        clock.pass_by(10)
        return []

    monkeypatch.setattr(kernels, "_faults", faults)
    run = context_until(35)
    kernels.run(run)
    assert run.result["values"]["elementwise_cases"] == 3
    [not_made] = run.result["not_made"]
    assert not_made.endswith("required cases of the kernel elementwise, for lack of time")
    assert [check["ok"] for check in run.result["checks"]] == [True]


def without_time() -> dict[str, dict]:
    """What the stages say that begin when there is no time left. Changes this process for good."""
    worker._prepare_imports(dry=True)
    from megatron_dos import cpu_emulation
    from megatron_dos.gpu_check import engine, memory

    found = {}
    for stage in (kernels, engine, memory):
        if stage is engine:
            cpu_emulation.activate(force=True)
        run = context_until(time.monotonic())
        stage.run(run)
        found[stage.__name__.rpartition(".")[2]] = run.result
    return found


def test_without_time_no_stage_checks_anything_and_each_says_so():
    path = os.pathsep.join(map(str, (Path(__file__).parent, ROOT / "tests" / "helpers", ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", "import json, test_check_time as t; print(json.dumps(t.without_time()))"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert [result["checks"] for result in found.values()] == [[], [], []]
    for stage, count in (("kernels", 2), ("engine", 2), ("memory", 2)):
        assert len(found[stage]["not_made"]) == count, found[stage]["not_made"]
    results = {"stages": {name: {"state": "done", **result} for name, result in found.items()}}
    stages = [stage for stage in STAGES if stage.name in found]
    verdict = runner.verdict(results, stages)
    assert verdict["exit_status"] == 1
    assert verdict["checks_that_fail"] == []


def test_what_was_not_made_fails_the_run_and_is_named():
    stage = Stage("first", "a check", 1, checks=True)
    checks = [{"name": "bits", "ok": True, "detail": ""}]
    result = {"state": "done", "title": "a check", "checks": checks, "not_made": ["2 of 5 runs, for lack of time"]}
    verdict = runner.verdict({"stages": {"first": result}}, [stage])
    assert verdict["exit_status"] == 1
    assert verdict["correct"] is False
    assert verdict["checks_not_made"] == ["first: 2 of 5 runs, for lack of time"]
    assert "not made: 2 of 5 runs, for lack of time" in summary_of_stage("first", result)
