"""`megatron-dos doctor`: says what is there, what is missing, and the way out."""

from __future__ import annotations

import json
from types import SimpleNamespace

import megatron_trees
import pytest
import torch

import megatron_dos.kernels
from megatron_dos import __version__, cli, patching
from megatron_dos.commands import doctor


@pytest.fixture(autouse=True)
def no_calibration(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def a_gpu(monkeypatch):
    found = SimpleNamespace(name="NVIDIA H200", total_memory=141 << 30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def findings(*arguments: str) -> dict[str, doctor.Finding]:
    return {finding.subject: finding for finding in doctor.examine(*arguments)}


def test_machine_with_all_that_training_needs_is_status_0(a_gpu, capsys):
    assert cli.main(["doctor"]) == 0
    page = capsys.readouterr().out
    assert "Training can run here." in page
    assert "MISSING" not in page
    assert f"{__version__} in " in page
    assert "NVIDIA H200, 141.0 GiB, compute capability 9.0" in page
    for subject in ("python", "torch", "CPU kernel", "processors", "host memory", "huge pages", "locked memory"):
        assert subject in page


def test_without_a_gpu_training_cannot_run_and_the_demo_is_named(no_gpu, capsys):
    assert cli.main(["doctor"]) == 1
    page = capsys.readouterr().out
    assert "Training cannot run here; missing: GPU." in page
    assert "`make demo` does without" in page


def test_json_says_the_same(no_gpu, capsys):
    assert cli.main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["can_train"] is False
    missing = [finding["subject"] for finding in report["findings"] if finding["state"] == "MISSING"]
    assert missing == ["GPU"]


def test_every_line_that_is_not_well_names_a_way_out(no_gpu):
    for finding in findings().values():
        assert finding.state == doctor.OK or finding.way_out or finding.subject == "calibration"


def test_kernel_is_the_one_that_updates(a_gpu):
    from megatron_dos.kernels import cpu

    assert cpu.describe() == f"CPU AdamW: {findings()['CPU kernel'].text}"


def test_kernel_that_is_not_built_is_missing(a_gpu, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "megatron_dos.kernels.cpu", None)
    monkeypatch.delattr(megatron_dos.kernels, "cpu")
    found = findings()["CPU kernel"]
    assert found.state == doctor.MISSING
    assert "compiler" in found.way_out


def test_huge_pages_that_are_off_are_a_note(monkeypatch, tmp_path):
    path = tmp_path / "enabled"
    for text, state in (("always madvise [never]", doctor.NOTE), ("always [madvise] never", doctor.OK)):
        path.write_text(text)
        monkeypatch.setattr(doctor, "_HUGE_PAGES", path)
        assert findings()["huge pages"].state == state


def test_page_locked_memory_has_a_switch_for_huge_pages_of_its_own(a_gpu, monkeypatch, tmp_path):
    path = tmp_path / "shmem_enabled"
    monkeypatch.setattr(doctor, "_SHARED_HUGE_PAGES", path)
    for text, state in (
        ("always within_size advise [never] deny force", doctor.NOTE),
        ("always [advise] never", doctor.OK),
    ):
        path.write_text(text)
        assert findings()["huge locked pages"].state == state
    path.write_text("always advise [never]")
    assert f"echo advise > {path}" in findings()["huge locked pages"].way_out


def test_packages_that_are_not_there_are_notes(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    found = findings()
    assert found["apex"].state == doctor.NOTE
    assert "pip install triton" in found["triton"].way_out
    assert found["megatron-core"].state == doctor.MISSING


def test_calibration_is_looked_up(monkeypatch):
    from megatron_dos import calibration
    from megatron_dos.machine import preset

    assert findings()["calibration"].way_out == "megatron-dos calibrate"
    monkeypatch.setattr(calibration, "cached_machine", lambda: preset("h200"))
    assert findings()["calibration"].state == doctor.OK


class TestCheckout:
    @pytest.fixture
    def tree(self, tmp_path):
        return megatron_trees.small_tree(tmp_path / "Megatron-LM")

    def test_states_of_a_checkout(self, tree, a_gpu, capsys):
        before = megatron_trees.snapshot(tree)
        assert cli.main(["doctor", str(tree)]) == 1
        page = capsys.readouterr().out
        assert "is not patched" in page
        assert f"megatron-dos patch {tree}" in page
        assert megatron_trees.snapshot(tree) == before
        patching.apply(tree)
        assert cli.main(["doctor", str(tree)]) == 0
        assert "is patched" in capsys.readouterr().out

    def test_half_patched_checkout_is_told(self, tree, a_gpu):
        whole = {name: (tree / name).read_bytes() for name in megatron_trees.TARGETS}
        patching.apply(tree)
        name = megatron_trees.TARGETS[0]
        (tree / name).write_bytes(whole[name])
        found = findings(str(tree))["checkout"]
        assert found.state == doctor.MISSING
        assert f"patched in part: {len(whole) - 1} of {len(whole)} files" in found.text

    def test_folder_that_is_no_checkout_says_so(self, tmp_path, a_gpu):
        found = findings(str(tmp_path))["checkout"]
        assert found.state == doctor.MISSING
        assert "no Megatron-LM checkout" in found.text
