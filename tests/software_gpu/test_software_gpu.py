# SPDX-License-Identifier: Apache-2.0
"""The software GPU: stock torch for CUDA takes it for a GPU, it orders what CUDA orders and nothing else, and the
engine has the bits of the sequential update on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

import software_gpu

pytestmark = [
    pytest.mark.skipif(not software_gpu.is_possible(), reason="torch is no CUDA build; the sim device covers programs"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def folder() -> Path:
    return software_gpu.build(ROOT / ".cache" / "software-gpu")


def run(folder: Path, check: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tests" / "software_gpu" / "checks.py"), str(folder), check]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)


def result(folder: Path, check: str, **environment: str) -> Any:
    done = run(folder, check, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_torch_finds_a_gpu(folder):
    found = result(folder, "torch_believes", SOFTWARE_GPU_MEMORY=str(1 << 30))
    assert found == {"available": True, "name": "Software GPU", "pinned": [True, False], "memory": 1 << 30}


def test_a_network_trains_on_it_as_on_the_cpu(folder):
    found = result(folder, "training")
    assert found["cuda"] == pytest.approx(found["cpu"], rel=1e-5)
    assert found["drawn"][0] == found["drawn"][1]


def test_a_missing_wait_shows_and_a_wait_holds(folder):
    found = result(folder, "missing_waits", SOFTWARE_GPU_DELAY_US="2000")
    assert found["with"] == 0
    assert found["without"] > 0


def test_an_event_that_is_recorded_again_holds_up_nobody_who_waits_for_the_first(folder):
    found = result(folder, "events", SOFTWARE_GPU_DELAY_US="0")
    assert found["first only"]
    assert found["milliseconds between"] > 100


def test_pageable_copies_are_counted(folder):
    assert result(folder, "pageable_copies") == [[1, 0, 1, 0], [0, 1, 0, 1]]


def test_a_touch_of_device_memory_by_the_host_is_a_crash_that_names_the_place(folder):
    done = run(folder, "host_touch")
    assert done.returncode < 0
    assert "host_touch" in done.stderr


def test_calls_fail_on_demand(folder):
    found = result(folder, "failures")
    assert found["register"] == [2, 0]
    assert found["pending"] == 2
    assert "illegal memory access" in found["copy"]
    assert found["malloc"] == "taken after a second try"


def test_a_forked_child_cannot_use_it(folder):
    assert result(folder, "fork") == 0


@pytest.mark.parametrize(("queues", "waited"), [("", False), ("engines", True), ("one", True)])
def test_queues_of_the_hardware_hold_up_what_comes_behind(folder, queues, waited):
    assert result(folder, "one_queue", SOFTWARE_GPU_QUEUES=queues, SOFTWARE_GPU_DELAY_US="0") == waited


@pytest.mark.parametrize(("seed", "queues"), [(1, ""), (2, "one"), (3, "engines")])
def test_the_engine_has_the_bits_of_the_sequential_update(folder, seed, queues):
    settings = {"SOFTWARE_GPU_SEED": str(seed), "SOFTWARE_GPU_QUEUES": queues, "SOFTWARE_GPU_DELAY_US": "50"}
    found = result(folder, "engine", **settings)
    assert found == {"steps": 80, "differences": [], "pageable copies": 0}
