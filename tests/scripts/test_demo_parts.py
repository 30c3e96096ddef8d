# SPDX-License-Identifier: Apache-2.0
"""The parts of the demo that need no training: dataset, log, verdict, outputs, child processes, set-up script."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import demo
import demo_data
import demo_report
import numpy as np
import psutil
import pytest
from repository import SCRIPTS

LOG_LINE = (
    " [2026-01-02 03:04:05.678901] iteration       17/      60 | consumed samples:          544 | elapsed time per "
    "iteration (ms): 512.3 | learning rate: 1.900000E-03 | global batch size:    32 | lm loss: 3.214567E+00 | "
    "loss scale: 1.0 | grad norm: 0.812 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)


def falling(steps: int = 60) -> dict[int, float]:
    return {step: 5.5 - 0.04 * step for step in range(1, steps + 1)}


class TestDataset:
    def test_tokens_are_the_bytes_and_the_end_of_document(self):
        tokens = demo_data.tokens_of("é1")
        assert tokens.dtype == np.uint16
        assert tokens.tolist() == [0xC3, 0xA9, 0x31, demo_data.END_OF_DOCUMENT]

    @pytest.mark.slow
    def test_megatron_reads_back_what_was_written(self, tmp_path):
        # In a process of its own: other tests need to be the first to import Megatron in theirs.
        code = """
import json, sys
import demo_data
from megatron.core.datasets.indexed_dataset import IndexedDataset
total = demo_data.write_dataset(sys.argv[1], {"b": "second", "a": "first"})
dataset = IndexedDataset(sys.argv[1])
print(json.dumps([total, [dataset[i].tolist() for i in range(len(dataset))], dataset.document_indices.tolist()]))
"""
        command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "sub" / "text")]
        result = subprocess.run(command, cwd=SCRIPTS, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        end = demo_data.END_OF_DOCUMENT
        assert json.loads(result.stdout.splitlines()[-1]) == [13, [[*b"first", end], [*b"second", end]], [0, 1, 2]]

    def test_text_is_real_and_large_enough_for_all_steps(self):
        text = demo_data.help_topics()
        assert sum(len(demo_data.tokens_of(topic)) for topic in text.values()) > 60 * 32 * 128

    def test_no_text_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match="empty"):
            demo_data.write_dataset(str(tmp_path / "text"), {"a": ""})


class TestLog:
    def test_iteration_line_gives_step_and_loss(self):
        assert demo_report.read_iteration(LOG_LINE) == (17, 3.214567)

    @pytest.mark.parametrize("line", ["", "iteration 3/60 |", "validation loss at iteration 5 | lm loss value: 3.0 |"])
    def test_other_lines_give_nothing(self, line):
        assert demo_report.read_iteration(line) is None

    def test_nan_loss_is_read_not_skipped(self):
        step, loss = demo_report.read_iteration(LOG_LINE.replace("3.214567E+00", "NAN"))
        assert step == 17
        assert np.isnan(loss)


class TestVerdict:
    def test_success_names_both_losses_and_the_difference(self):
        stock, ours = falling(), falling()
        ours[30] *= 1 + 2e-4
        ok, line = demo_report.verdict(stock, ours, 60)
        assert ok
        assert line == (
            "demo ok: loss 5.4600 -> 3.1000 over 60 steps; "
            "largest relative loss difference to the stock optimizer 2.0e-04"
        )

    def test_equal_runs_have_difference_zero(self):
        ok, line = demo_report.verdict(falling(), falling(), 60)
        assert ok
        assert line.endswith(" 0.0e+00")

    @pytest.mark.parametrize("missing", [1, 30, 60])
    def test_missing_step_fails(self, missing):
        ours = falling()
        del ours[missing]
        ok, line = demo_report.verdict(falling(), ours, 60)
        assert not ok
        assert "59 of 60 steps" in line

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
    @pytest.mark.parametrize("whose", ["stock", "ours"])
    def test_unusable_loss_fails(self, bad, whose):
        runs = {"stock": falling(), "ours": falling()}
        runs[whose][7] = bad
        ok, line = demo_report.verdict(runs["stock"], runs["ours"], 60)
        assert not ok
        assert "step 7" in line

    def test_loss_that_does_not_fall_enough_fails(self):
        flat = {step: 5.5 - 0.5 * (step == 60) for step in range(1, 61)}
        ok, line = demo_report.verdict(flat, flat, 60)
        assert not ok
        assert "drop" in line

    def test_difference_above_the_bound_fails(self):
        ours = falling()
        ours[60] *= 1.006
        ok, line = demo_report.verdict(falling(), ours, 60)
        assert not ok
        assert "6.0e-03" in line

    def test_failing_lines_say_failed(self):
        ok, line = demo_report.verdict({}, {}, 60)
        assert not ok
        assert line.startswith("demo failed: ")


class TestOutputs:
    def test_table_holds_every_step_with_all_digits(self, tmp_path):
        stock, ours = {1: 5.123456, 2: 4.5}, {1: 5.123457, 2: 4.5}
        demo_report.write_table(tmp_path / "losses.csv", stock, ours)
        with (tmp_path / "losses.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [float(row["loss_stock"]) for row in rows] == list(stock.values())
        assert [float(row["loss_deep_optimizer_states"]) for row in rows] == list(ours.values())
        assert float(rows[1]["relative_difference"]) == 0

    @pytest.mark.parametrize("factor", [1.0, 1.0001])
    def test_picture_is_drawn_with_and_without_differences(self, tmp_path, factor):
        ours = {step: loss * factor for step, loss in falling().items()}
        demo_report.draw_picture(tmp_path / "loss.png", falling(), ours)
        assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")

    def test_progress_line_shows_step_and_loss(self):
        line = demo_report.progress_line("stock", 30, 60, 4.25, 12.0)
        assert "30/60" in line
        assert "4.2500" in line
        assert line.count("#") == line.count(".") - 1 == 15  # the loss has a point of its own


class TestMegatronCopy:
    def test_copy_of_the_package_is_complete_and_leaves_the_source_alone(self, tmp_path):
        package = Path(find_spec("megatron.core").submodule_search_locations[0]).parent
        files = {path.relative_to(package) for part in ("core", "training") for path in (package / part).rglob("*.py")}
        before = {path: (package / path).stat().st_mtime_ns for path in files}
        script = demo.copy_megatron(None, tmp_path / "tree")
        copied = {path.relative_to(tmp_path / "tree" / "megatron") for path in (tmp_path / "tree").rglob("*.py")}
        assert copied == files
        assert {path: (package / path).stat().st_mtime_ns for path in files} == before
        assert list((tmp_path / "tree").rglob("helpers_cpp*.so")), "the compiled dataset helper must come along"
        assert script == SCRIPTS / "pretrain_gpt.py"

    def test_checkout_is_copied_with_its_own_script(self, tmp_path):
        checkout = tmp_path / "checkout"
        (checkout / "megatron" / "core").mkdir(parents=True)
        (checkout / ".git").mkdir()
        for name in ("pretrain_gpt.py", "gpt_builders.py", "megatron/core/package_info.py"):
            (checkout / name).write_text(name)
        script = demo.copy_megatron(str(checkout), tmp_path / "tree")
        assert script == tmp_path / "tree" / "pretrain_gpt.py"
        assert script.read_text() == "pretrain_gpt.py"
        assert (tmp_path / "tree" / "megatron" / "core" / "package_info.py").is_file()
        assert not (tmp_path / "tree" / ".git").exists()

    def test_a_folder_that_is_no_checkout_is_refused(self, tmp_path):
        with pytest.raises(demo.DemoFailure, match="MEGATRON_LM"):
            demo.copy_megatron(str(tmp_path), tmp_path / "tree")
        assert not (tmp_path / "tree").exists()


class TestCommands:
    def test_emulation_is_used_exactly_where_there_is_no_gpu(self):
        script = Path("pretrain_gpt.py")
        on_cpu = demo.torchrun_command(script, ["--bf16"], 2, on_gpu=False)
        on_gpu = demo.torchrun_command(script, ["--bf16"], 2, on_gpu=True)
        assert on_cpu[-4:] == ["-m", "megatron_dos.cpu_emulation", "pretrain_gpt.py", "--bf16"]
        assert on_gpu[-2:] == ["pretrain_gpt.py", "--bf16"]
        assert "megatron_dos.cpu_emulation" not in on_gpu

    def test_arguments_choose_the_backend(self):
        for on_gpu, backend in ((False, "gloo"), (True, "nccl")):
            arguments = demo.training_arguments(Path("/data/text"), on_gpu)
            assert arguments[arguments.index("--distributed-backend") + 1] == backend

    def test_our_copy_of_megatron_comes_first(self, monkeypatch, tmp_path):
        monkeypatch.setenv("PYTHONPATH", "/elsewhere")
        env = demo.environment(tmp_path, ranks=2)
        assert env["PYTHONPATH"].split(os.pathsep) == [str(tmp_path), "/elsewhere"]
        assert env["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
        assert int(env["OMP_NUM_THREADS"]) >= 1


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "WORK", tmp_path)
    return tmp_path


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


class TestChildren:
    def test_output_arrives_and_is_kept(self, work):
        assert demo.run(python("print('one'); print('two')"), dict(os.environ), work / "log") == ["one\n", "two\n"]
        assert (work / "log").read_text() == "one\ntwo\n"

    def test_failure_shows_the_last_lines_and_the_log(self, work):
        command = python("[print('line', i) for i in range(100)]; raise SystemExit(3)")
        with pytest.raises(demo.DemoFailure) as failure:
            demo.run(command, dict(os.environ), work / "log")
        message = str(failure.value)
        assert message.startswith("exit status 3")
        assert str(work / "log") in message
        assert "line 99" in message
        assert message.count("line ") == 30
        assert len((work / "log").read_text().splitlines()) == 100

    def test_what_the_rank_said_is_shown_not_the_launchers_report(self, work):
        launcher = "E1 42 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 0"
        code = f"print('the cause'); print({launcher!r}); [print('report') for _ in range(50)]; raise SystemExit(1)"
        with pytest.raises(demo.DemoFailure) as failure:
            demo.run(python(code), dict(os.environ), work / "log")
        assert str(failure.value).endswith("  the cause\n")

    def test_hung_child_is_ended(self, work, monkeypatch):
        monkeypatch.setattr(demo, "SILENCE_LIMIT_S", 1)
        start = time.monotonic()
        with pytest.raises(demo.DemoFailure, match="nothing was printed for 1 s"):
            demo.run(python("import time; time.sleep(600)"), dict(os.environ), work / "log")
        assert time.monotonic() - start < 30

    def test_interrupt_leaves_no_process_behind(self, work):
        # Like torchrun, the child starts a worker in a session of its own.
        worker = "import time; time.sleep(600)"
        launcher = (
            "import subprocess, sys, time; "
            f"worker = subprocess.Popen([sys.executable, '-c', {worker!r}], start_new_session=True); "
            "print(worker.pid, flush=True); time.sleep(600)"
        )
        pids = []

        def interrupted() -> None:
            with contextlib.closing(demo.lines_of(python(launcher), dict(os.environ), work / "log")) as lines:
                for line in lines:
                    if line is not None:
                        pids.append(int(line))
                        raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert len(pids) == 1
        assert not psutil.pid_exists(pids[0]) or psutil.Process(pids[0]).status() == psutil.STATUS_ZOMBIE


class TestMain:
    @pytest.mark.parametrize(
        ("raised", "status", "last"),
        [
            (demo.DemoFailure("no luck\n  detail"), 1, "demo failed: no luck"),
            (OSError("disk full"), 1, "demo failed: OSError: disk full"),
            (KeyboardInterrupt(), 130, "demo failed: interrupted"),
        ],
    )
    def test_every_end_but_success_says_failed_last(self, monkeypatch, capsys, raised, status, last):
        def fails() -> str:
            raise raised

        monkeypatch.setattr(demo, "demo", fails)
        monkeypatch.setattr(demo.signal, "signal", lambda *_: None)
        assert demo.main() == status
        assert capsys.readouterr().out.splitlines()[-1] == last

    def test_a_flag_without_effect_is_a_failure(self, work, monkeypatch, tmp_path):
        """Two equal runs would agree perfectly: the log must show that our optimizer was built, and only once."""
        monkeypatch.setattr(demo, "OUTPUT", tmp_path / "out")
        monkeypatch.setattr(demo, "ROOT", tmp_path)
        monkeypatch.setattr(demo, "WORK", tmp_path / "work")
        monkeypatch.setattr(demo, "accelerators", lambda: 0)
        monkeypatch.setattr(demo, "copy_megatron", lambda *_: Path("script.py"))
        monkeypatch.setattr(demo, "run", lambda *_: ["ok\n"])
        monkeypatch.setattr(demo, "train", lambda *_: (falling(), False))
        with pytest.raises(demo.DemoFailure, match="the stock optimizer was built"):
            demo.demo()


class TestSetup:
    """The set-up script, run on a copy without a package: nothing is installed here."""

    @pytest.fixture
    def script(self, tmp_path):
        (tmp_path / "scripts").mkdir()
        return shutil.copy(SCRIPTS / "setup.sh", tmp_path / "scripts")

    def run(self, script: str, python: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", script], env={**os.environ, "PYTHON": python}, capture_output=True, text=True, check=False
        )

    def test_missing_interpreter_is_named(self, script, tmp_path):
        result = self.run(script, "/nowhere/python3.12")
        assert result.returncode == 1
        assert "PYTHON=/nowhere/python3.12 is not a program" in result.stderr
        assert not (tmp_path / ".venv").exists()

    @pytest.mark.parametrize("fault", ["is Python 3.9", "has no Python.h to build the C++ extension with"])
    def test_unusable_interpreter_is_refused_with_its_fault(self, script, tmp_path, fault):
        fake = tmp_path / "python"
        fake.write_text(f"#!/bin/sh\necho '{fault}'\n")
        fake.chmod(0o755)
        result = self.run(script, str(fake))
        assert result.returncode == 1
        assert f"PYTHON={fake} {fault}" in result.stderr
        assert not (tmp_path / ".venv").exists()

    def test_interpreter_that_does_not_run_is_refused(self, script, tmp_path):
        broken = tmp_path / "python"
        broken.write_text("#!/bin/sh\nexit 127\n")
        broken.chmod(0o755)
        result = self.run(script, str(broken))
        assert result.returncode == 1
        assert "does not run" in result.stderr
