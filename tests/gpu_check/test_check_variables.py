# SPDX-License-Identifier: Apache-2.0
"""The check's workers have environment variables of their own, and the result says which."""

from __future__ import annotations

import json
import sys
import time
from types import MappingProxyType

import pytest

from megatron_dos.gpu_check import Stage, runner, variables
from megatron_dos.node import ranks

WORKER = """
import json, os, sys
for name in sys.argv[sys.argv.index("--stages") + 1].split(","):
    for event in ("start", "end"):
        values = {"gpu": {"name": "Fake 1"}, "has": dict(os.environ)}
        print(json.dumps({"stage": name, "event": event, "values": values, "checks": [], "notes": []}), flush=True)
"""
STAGES = (
    Stage("environment", "the machine", 5),
    Stage("usual", "as usual", 5),
    Stage("one", "one", 5, environment=MappingProxyType({"CUDA_DEVICE_MAX_CONNECTIONS": "1"})),
)
GIVEN = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "CUDA_LAUNCH_BLOCKING": "1",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "host",
    "SLURM_LOCALID": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
    "PMI_RANK": "3",
    "CUDA_VISIBLE_DEVICES": "3",
}


@pytest.fixture
def results(tmp_path, monkeypatch):
    for name in (*variables.REMOVED, *variables.INHERITED):
        monkeypatch.delenv(name, raising=False)
    for name, value in GIVEN.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "worker.py").write_text(WORKER)
    worker = [sys.executable, str(tmp_path / "worker.py")]
    path = tmp_path / "out.json"
    supervisor = runner.Supervisor(STAGES, False, path, time.monotonic() + 60, 0, worker)
    supervisor.run()
    supervisor.finish()
    return json.loads(path.read_text())


def test_a_stage_has_its_own_variables_whoever_starts_the_check(results):
    for stage, wanted in (("environment", {}), ("usual", {}), ("one", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})):
        has = results["stages"][stage]["values"]["has"]
        expected = {"CUDA_VISIBLE_DEVICES": "3", **wanted}
        assert {name: has[name] for name in GIVEN if name in has} == expected
        assert "PATH" in has


def test_the_result_says_what_was_given_and_what_was_used(results):
    environment = results["environment"]
    assert environment["given"] == GIVEN
    usual = {"CUDA_VISIBLE_DEVICES": "3"}
    one = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **usual}
    assert environment["used"] == {"environment": usual, "usual": usual, "one": one}


def test_no_variable_from_which_ranks_are_read_is_left():
    assert {*ranks._SIZES, *ranks._RANKS} <= set(variables.LAUNCHER)
