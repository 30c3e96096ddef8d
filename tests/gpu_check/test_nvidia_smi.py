# SPDX-License-Identifier: Apache-2.0
"""nvidia-smi is asked once, about the GPU in use."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from megatron_dos.gpu_check import environment, gpu_there

torch = pytest.importorskip("torch")

SCRIPT = """#!/bin/sh
echo "$@" >> "{calls}"
printf '{answer}\\n'
"""


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """A stand-in for nvidia-smi that notes its arguments and gives an answer; returns a function for the calls."""
    calls = tmp_path / "calls"
    script = tmp_path / "nvidia-smi"
    answer = ", ".join(f"answer {number}" for number in range(len(environment.QUERIES)))
    script.write_text(SCRIPT.format(calls=calls, answer=answer))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return lambda: [line.split() for line in calls.read_text().splitlines()]


@pytest.fixture
def properties(monkeypatch):
    """Of a GPU that torch is made to report."""
    found = SimpleNamespace(name="Fake 1", major=9, minor=0, multi_processor_count=1)
    monkeypatch.setattr(environment, "why_not", lambda: "")
    monkeypatch.setattr(torch, "zeros", lambda *arguments, **options: None)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 2))
    return found


def test_one_call_names_the_gpu_by_its_pci_address(smi, properties):
    properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id = 0, 0x3B, 0
    found = environment._gpu()
    assert found["driver_version"] == "answer 0"
    assert found["mig_mode_current"] == f"answer {len(environment.QUERIES) - 1}"
    assert len(smi()) == 1
    assert smi()[0][:2] == ["-i", "0000:3b:00.0"]


@pytest.mark.parametrize(
    ("visible", "gpu"), [("3,1", "3"), ("GPU-5f1c, GPU-7a", "GPU-5f1c"), (None, "0"), ("", "0"), ("-1", "0")]
)
def test_without_an_address_the_visible_devices_name_it(smi, properties, monkeypatch, visible, gpu):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    environment._gpu()
    assert len(smi()) == 1
    assert smi()[0][:2] == ["-i", gpu]


def test_an_answer_of_another_length_is_none(smi):
    assert gpu_there.nvidia_smi(["name", "uuid"]) == {}
