# SPDX-License-Identifier: Apache-2.0
"""`megatron-dos doctor`: says what is there, what is missing, and the way out."""

from __future__ import annotations

import json
from types import SimpleNamespace

import megatron_trees
import pytest
import torch

import megatron_dos.kernels
from megatron_dos import __version__, cli, supported
from megatron_dos.calibration import cache as calibration
from megatron_dos.commands import doctor
from megatron_dos.patching import on_disk as patching


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
    assert "`make demo` does without" in " ".join(page.split())


def test_json_says_the_same(no_gpu, capsys):
    assert cli.main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["can_train"] is False
    missing = [finding["subject"] for finding in report["findings"] if finding["state"] == "MISSING"]
    assert missing == ["GPU"]


def test_every_line_that_is_not_well_names_a_way_out(no_gpu, monkeypatch, tmp_path):
    for finding in findings(str(tmp_path)).values():
        assert finding.state == doctor.OK or finding.way_out
    for state in (doctor.NOTE, doctor.MISSING):
        with pytest.raises(ValueError, match="needs a remedy"):
            doctor.Finding("subject", state, "text")
    monkeypatch.setattr(calibration, "cached_machine", lambda: 1 / 0)
    assert findings()["calibration"].way_out


class TestVersions:
    """What pip, install() and the patches refuse is not ok here."""

    @pytest.mark.parametrize(
        ("version", "state"),
        [("2.1.0", "MISSING"), ("2.3.1+cu121", "MISSING"), ("2.4.0", "ok"), ("2.10.0a0+git12", "ok"), ("?", "MISSING")],
    )
    def test_torch(self, a_gpu, monkeypatch, version, state):
        monkeypatch.setattr(torch, "__version__", version)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        assert findings()["torch"].state == state

    def test_old_torch_is_named_in_the_verdict(self, a_gpu, monkeypatch, capsys):
        monkeypatch.setattr(torch, "__version__", "2.1.0")
        assert cli.main(["doctor"]) == 1
        page = capsys.readouterr().out
        assert page.splitlines()[-1] == "Training cannot run here; missing: torch."
        assert "2.1.0 is not supported: 2.4 or newer is" in page

    @pytest.mark.parametrize(("version", "state"), [("3.11.9", "MISSING"), ("3.12.0", "ok"), ("3.14.0", "ok")])
    def test_python(self, a_gpu, monkeypatch, version, state):
        monkeypatch.setattr(doctor.platform, "python_version", lambda: version)
        assert findings()["python"].state == state

    @pytest.mark.parametrize(
        ("version", "state"),
        [("0.16.0", "MISSING"), ("0.18.2", "MISSING"), ("0.19.0", "ok"), ("0.19.2", "ok"), ("0.20.0", "MISSING")],
    )
    def test_megatron_core(self, a_gpu, monkeypatch, capsys, version, state):
        monkeypatch.setattr(doctor, "_version", lambda name: version)
        assert cli.main(["doctor"]) == (0 if state == "ok" else 1)
        verdict = capsys.readouterr().out.splitlines()[-1]
        assert findings()["megatron-core"].state == state
        assert ("missing: megatron-core." in verdict) == (state == "MISSING")

    def test_checkout_counts_more_than_what_pip_has(self, a_gpu, monkeypatch, tmp_path):
        tree = megatron_trees.small_tree(tmp_path / "Megatron-LM")
        patching.apply(tree)
        monkeypatch.setattr(doctor, "_version", lambda name: "0.16.0")
        found = findings(str(tree))
        assert found["megatron-core"].state == doctor.NOTE
        assert "PYTHONPATH" in found["megatron-core"].way_out
        assert found["checkout"].state == doctor.OK

    def test_no_table_no_refusal(self, a_gpu, monkeypatch):
        """The proof that the tests above would notice: without the table they fail."""
        monkeypatch.setattr(supported.Versions, "include", lambda self, version: True)
        with pytest.raises(AssertionError):
            self.test_torch(a_gpu, monkeypatch, "2.1.0", "MISSING")
        monkeypatch.setattr(doctor, "_version", lambda name: "0.16.0")
        assert findings()["megatron-core"].state == doctor.OK


@pytest.mark.parametrize("length", [20, 200])
def test_lines_are_at_most_120_columns(no_gpu, tmp_path, capsys, length):
    tree = megatron_trees.small_tree(tmp_path / ("M" * length))
    cli.main(["doctor", str(tree)])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120
    assert "".join(lines).replace(" ", "").count("M" * length) == 2  # whole, in the finding and in its way out
    cli.main(["doctor", str(tmp_path)])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 120


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
    from megatron_dos.planning.machine import preset

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
        page = "".join(capsys.readouterr().out.split())  # a long path is cut to fit the page
        assert "isnotpatched" in page
        assert f"megatron-dospatch{tree}" in page
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
