# SPDX-License-Identifier: Apache-2.0
"""The GPU check without a GPU: a dry run of every stage, the supervision of workers, and checks that can fail."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from repository import ROOT, SCRIPTS

from megatron_dos import cli
from megatron_dos.gpu_check import STAGES, Stage, gpu_there, runner, worker
from megatron_dos.gpu_check.summary import summary, summary_of_stage
from megatron_dos.node import reservations

# One run of each kernel, of each engine case and of each row in seconds; a loaded machine may take minutes.
PATIENCE = 600


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("OUT", "CUDA_DEVICE_MAX_CONNECTIONS")}
    return {**kept, "PYTHON": sys.executable, **variables}


def command(*arguments: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(SCRIPTS / "gpu_check"), *arguments],
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


# --- the dry run


class DryRun:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "result.json"
        # The budget is that of a GPU; it is not what is tested here.
        self.done = command("--dry-run", str(self.path), "--budget", str(PATIENCE))
        self.results = json.loads(self.path.read_text())
        self.stages = self.results["stages"]

    def values(self, stage: str) -> dict:
        return self.stages[stage]["values"]


@pytest.fixture(scope="module")
def dry(tmp_path_factory):
    run = DryRun(tmp_path_factory.mktemp("gpu-check"))
    assert run.done.returncode == 0, run.done.stdout + run.done.stderr
    return run


def test_a_dry_run_runs_every_stage_and_says_that_it_is_one(dry):
    assert {name: stage["state"] for name, stage in dry.stages.items()} == {stage.name: "done" for stage in STAGES}
    assert dry.results["dry_run"] is True
    assert "DRY RUN WITHOUT A GPU" in dry.results["warning"]
    assert "DRY RUN WITHOUT A GPU" in dry.done.stdout
    assert dry.stages["environment"]["values"]["gpu"]["name"] == "none: dry run"
    assert dry.results["verdict"]["correct"] is True
    assert "correctness checks hold" in dry.done.stdout


def test_every_correctness_stage_makes_its_checks(dry):
    for stage in STAGES:
        checks = dry.stages[stage.name].get("checks", [])
        assert all(check["ok"] for check in checks)
        assert bool(checks) or not stage.checks
    assert len(dry.stages["memory"]["checks"]) >= 6


def test_the_engine_stage_covers_every_kind_of_step(dry):
    counts = dry.values("engine")["counts"]
    # 5 combinations of dtypes, 5 schedules of shares, 2 grad transfers; and a run without waiting of each; of 4 steps.
    assert counts["runs"] >= 5 * (5 * 2 + 1) + 1
    assert counts["steps"] == 4 * counts["runs"]
    removed = dry.values("engine")["removed_dependencies"]
    assert removed["kinds"] == removed["seen"] >= 10


def test_rates_have_every_figure_that_the_model_needs(dry):
    rates = dry.values("rates")
    for which in ("alone", "together"):
        assert min(rates["links_bytes_per_second"][which].values()) > 0
    assert set(rates["two_streams_of_one_direction"]) == {"h2d", "d2h"}
    assert rates["device_update"]["chosen"]["parameters_per_second"] > 0
    assert {"parameters_per_second_alone", "parameters_per_second_beside_copies"} < rates["host_update"].keys()
    assert min(rates["host_update"].values()) > 0
    assert rates["page_locking"]["seconds_per_gib"] > 0


def test_every_way_to_update_is_timed_and_compared(dry):
    rows = {row["name"]: row for row in dry.values("step_time")["rows"]}
    expected = {"CPU only", "GPU streaming only", "static split", "k=2, serial copies", "ours, GPU share 0.50"}
    assert expected <= set(rows)
    for name, row in rows.items():
        assert len(row["seconds"]) == 2
        assert row["parameters_per_second"] > 0
        assert (row["predicted_seconds"] or 0) > 0 or name not in expected
    assert 1.0 in [row["times_ours"] for row in rows.values()]
    assert sum("bf16 grads" in name for name in rows) == 2
    lanes = dry.values("step_time")["busy_fraction_of_lanes"]["k=2, serial copies"]
    assert set(lanes) == {"cpu", "d2h", "gpu", "h2d", "seconds"}


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
def test_megatrons_optimizer_is_a_row_where_megatron_is_installed(dry):
    assert "HybridDeviceOptimizer" in [row["name"] for row in dry.values("step_time")["rows"]]
    assert dry.values("step_time")["hybrid"]["offload_fraction"] == 1.0


def test_one_connection_has_a_process_of_its_own(dry):
    assert dry.values("one_connection")["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert set(dry.values("one_connection")["median_seconds_of_gpu_share"]) == {"0.0", "0.5", "1.0"}


def test_the_summary_holds_the_figures(dry):
    for text in ("H2D:", "update on the CPU:", "k=2, serial copies", "lanes in use", "CUDA_DEVICE_MAX_CONNECTIONS=1"):
        assert text in dry.done.stdout


def test_without_a_gpu_there_is_nothing_to_check_and_no_file(tmp_path):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = command(OUT=str(tmp_path))
    assert done.returncode == 2
    assert re.fullmatch(r"gpu_check: [^\n]+needs a GPU: [^\n]+--dry-run[^\n]+\n", done.stderr)
    assert list(tmp_path.iterdir()) == []


class TestLook:
    """The GPU is looked for before minutes go into building."""

    @pytest.fixture
    def looks(self, monkeypatch):
        """What is built, and a function that sets what the process that looks for a GPU answers."""
        built = []
        monkeypatch.setattr(runner.Supervisor, "build", lambda self: built.append(self))
        monkeypatch.setattr(runner.Supervisor, "run", lambda self: None)
        monkeypatch.setattr(runner.Supervisor, "finish", lambda self: 0)
        monkeypatch.setattr(runner.signal, "signal", lambda *arguments: None)  # this process keeps its handlers

        def answers(stdout="", stderr="", status=0):
            done = subprocess.CompletedProcess([], status, stdout, stderr)
            monkeypatch.setattr(runner.subprocess, "run", lambda *arguments, **options: done)
            return built

        return answers

    def test_nothing_is_built_without_a_gpu(self, looks, capsys):
        built = looks("a library's banner\ntorch 2.9 sees no CUDA GPU; nvidia-smi: no answer\n")
        assert runner.main([]) == 2
        assert built == []
        error = capsys.readouterr().err
        assert error.startswith("gpu_check: torch 2.9 sees no CUDA GPU; nvidia-smi: no answer. This check needs a GPU")
        assert error.count("\n") == 1

    def test_a_look_that_crashes_is_no_gpu(self, looks, capsys):
        looks("", "Fatal: driver\n", -11)
        assert runner.main([]) == 2
        assert "ended with status -11: Fatal: driver" in capsys.readouterr().err

    def test_a_gpu_is_built_for(self, looks):
        built = looks("a library's banner\n\n")
        assert runner.main([]) == 0
        assert len(built) == 1

    def test_a_dry_run_does_not_look(self, looks):
        built = looks("there is none\n")
        assert runner.main(["--dry-run"]) == 0
        assert len(built) == 1

    def test_without_the_look_it_builds_in_vain(self, looks, monkeypatch):
        """The proof that the first of these tests would notice."""
        built = looks("there is none\n")
        monkeypatch.setattr(runner, "look_for_gpu", lambda: None)
        runner.main([])
        assert len(built) == 1

    def test_torch_that_is_missing_is_told_with_the_way_out(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "torch", None)
        assert "PYTHON=... names another interpreter" in gpu_there.why_not()


def test_unknown_stages_are_refused(tmp_path, capsys):
    assert runner.main(["--stages", "kernels,nothing"]) == 2
    assert "nothing: the stages are environment, kernels" in capsys.readouterr().out


def test_the_command_line_reports_errors_under_its_own_name(monkeypatch, capsys):
    def look():
        raise runner.NothingToCheckError("there is none")

    monkeypatch.setattr(runner, "look_for_gpu", look)
    monkeypatch.setattr(runner.signal, "signal", lambda *arguments: None)
    assert cli.main(["check"]) == 2
    assert capsys.readouterr().err == "megatron-dos: there is none\n"
    assert cli.main(["check", "--stages", "kernels,nothing"]) == 2
    assert "nothing: the stages are environment, kernels" in capsys.readouterr().out


def test_no_module_is_taken_from_the_current_folder(tmp_path):
    for name in ("torch", "megatron_dos", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('from the current folder')\n")
    done = command("result.json", "--dry-run", "--stages", "environment", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "result.json").read_text())
    assert results["stages"]["environment"]["state"] == "done"
    assert results["arguments"] == ["result.json", "--dry-run", "--stages", "environment"]


class TestInstalledCopy:
    """Without a checkout around it, the package builds nothing, asks no git, and writes to the current folder."""

    @pytest.fixture(autouse=True)
    def no_checkout(self, monkeypatch, tmp_path):
        monkeypatch.setattr(runner, "CHECKOUT", None)
        monkeypatch.delenv("OUT", raising=False)
        monkeypatch.chdir(tmp_path)

    @pytest.mark.parametrize("dry", [False, True])
    def test_the_result_is_in_the_current_folder(self, tmp_path, dry):
        assert runner._default_path("NVIDIA H200", dry).parent == tmp_path

    def test_a_module_that_does_not_load_is_not_built(self, monkeypatch):
        monkeypatch.setattr(runner, "_module_loads", lambda: False)
        supervisor = runner.Supervisor(STAGES, True, None, time.monotonic() + 60)
        with pytest.raises(runner.NothingToCheckError, match="install megatron-dos again"):
            supervisor.build()

    @pytest.mark.parametrize(
        ("version", "commit"),
        [("0.1.0", None), ("0.1.0.dev0+g0123456789ab", "0123456789ab"), ("0.1.0.dev0+g01234.dirty", "01234+")],
    )
    def test_the_commit_is_the_one_in_the_version(self, monkeypatch, version, commit):
        monkeypatch.setattr(runner, "__version__", version)
        assert runner._commit() == commit


class TestDefaultPath:
    def test_a_dry_run_is_never_put_among_the_results(self, monkeypatch):
        monkeypatch.delenv("OUT", raising=False)
        path = runner._default_path("none", dry=True)
        assert ROOT / "docs" not in path.parents
        assert "dry-run" in path.name

    def test_results_are_named_for_gpu_and_date_and_never_overwritten(self, monkeypatch, tmp_path):
        monkeypatch.delenv("OUT", raising=False)
        assert runner._default_path("NVIDIA H200", dry=False).parent == ROOT / "docs" / "results"
        monkeypatch.setenv("OUT", str(tmp_path))
        first = runner._default_path("NVIDIA H200", dry=False)
        assert first.name.startswith("gpu-check-nvidia-h200-20")
        first.write_text("{}")
        second = runner._default_path("NVIDIA H200", dry=False)
        assert second != first
        assert second.parent == tmp_path


def test_psutil_is_not_needed():
    """The environment stage and the package itself on a machine without it."""
    code = (
        "import sys; sys.modules['psutil'] = None; from megatron_dos.gpu_check import worker; "
        "worker.main(['--stages', 'environment', '--dry-run', '--until', '1e12'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["event"] == "end", last
    assert "psutil is not installed" in last["notes"][-1]
    assert last["values"]["host_memory"]["available_bytes"] > 0


def test_memory_can_be_promised_without_psutil(monkeypatch, tmp_path):
    """On a real GPU a promise comes before states are page-locked; it counts for as long as its process runs."""
    stand_in = worker._psutil()
    monkeypatch.setattr(reservations, "psutil", stand_in)
    monkeypatch.setattr(reservations, "_path", lambda: tmp_path / "promised")
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = stand_in.Process(other.pid).create_time()
    assert started >= stand_in.Process().create_time()
    (tmp_path / "promised").write_text(json.dumps({str(other.pid): (started, 60)}))
    assert reservations.reserve(50, lambda: 100) == 40
    other.communicate()
    assert reservations.reserve(50, lambda: 100) == 100
    reservations.release()


def test_streams_and_events_are_counted_whoever_makes_them():
    torch = pytest.importorskip("torch")
    if torch.version.cuda is None:
        pytest.skip("torch's events need a CUDA build")
    from megatron_dos.gpu_check.memory import _counted

    with _counted() as made:
        torch.cuda.Event()
        torch.cuda.Event(enable_timing=True)
    torch.cuda.Event()
    assert made == {"streams": 0, "events": 2}


# --- supervision, with a worker that does as it is told

FAKE_WORKER = """
import json, os, sys, time
actions = json.loads(os.environ["ACTIONS"])
names = sys.argv[sys.argv.index("--stages") + 1].split(",")
import faulthandler, signal
faulthandler.register(signal.SIGUSR1, all_threads=True)

def say(name, event, **result):
    print(json.dumps({"stage": name, "event": event, "seconds": 0.1, **result}), flush=True)

for name in names:
    action = actions.get(name, "pass")
    say(name, "start")
    values = {"gpu": {"name": "Fake 1"}} if name == "environment" else {"pid": os.getpid()}
    if action == "no_gpu":
        say(name, "no_gpu", reason="no GPU at all")
        break
    say(name, "update", checks=[], values=values, notes=[])
    if action == "hang":
        def waiting_for_godot():
            time.sleep(1000)
        waiting_for_godot()
    if action == "crash":
        print("an illegal memory access", file=sys.stderr, flush=True)
        os._exit(9)
    if action == "fail":
        say(name, "failed", checks=[], values=values, notes=[], error="RuntimeError: boom", trace="where it was")
        break
    checks = [{"name": "all is well", "ok": action != "wrong", "detail": "it is not"}]
    values["variable"] = os.environ.get("MARK")
    say(name, "end", checks=checks, values=values, notes=[])
"""

FAKE_STAGES = (
    Stage("environment", "the machine", 5),
    Stage("first", "a check", 0.5, checks=True),
    Stage("second", "a figure", 0.5),
    Stage("third", "another check", 0.5, checks=True),
    Stage("apart", "another process", 0.5, environment={"MARK": "set"}),
)


@pytest.fixture
def supervise(tmp_path, monkeypatch):
    worker = tmp_path / "worker.py"
    worker.write_text(FAKE_WORKER)
    monkeypatch.setattr(runner, "GRACE", 1.0)
    monkeypatch.setattr(runner, "STACKS", 0.3)

    def supervise(seconds=60.0, **actions):
        monkeypatch.setenv("ACTIONS", json.dumps(actions))
        supervisor = runner.Supervisor(
            FAKE_STAGES, False, tmp_path / "out.json", time.monotonic() + seconds, 0, [sys.executable, str(worker)]
        )
        supervisor.run()
        status = supervisor.finish()
        results = json.loads((tmp_path / "out.json").read_text())
        assert results["verdict"]["exit_status"] == status
        return status, results["stages"]

    return supervise


def states(stages):
    return {name: stage["state"] for name, stage in stages.items()}


def test_all_stages_of_one_environment_share_a_worker(supervise):
    status, stages = supervise()
    assert status == 0
    assert set(states(stages).values()) == {"done"}
    pids = {name: stages[name]["values"]["pid"] for name in ("first", "second", "third", "apart")}
    assert pids["first"] == pids["second"] == pids["third"] != pids["apart"]
    assert stages["third"]["values"]["variable"] is None
    assert stages["apart"]["values"]["variable"] == "set"


def test_a_check_that_fails_fails_the_run(supervise, capsys):
    status, stages = supervise(third="wrong")
    assert status == 1
    assert states(stages)["third"] == "done"
    assert "FAIL all is well" in capsys.readouterr().out


def test_a_hanging_stage_is_killed_with_its_stacks_and_the_others_go_on(supervise, capsys):
    status, stages = supervise(second="hang")
    assert status == 3  # only a measurement is missing
    assert states(stages) == {**dict.fromkeys(states(stages), "done"), "second": "killed"}
    assert "waiting_for_godot" in stages["second"]["trace"]
    assert stages["second"]["values"]["pid"] != stages["third"]["values"]["pid"]
    assert "stage that failed: second" in capsys.readouterr().out


def test_a_check_that_was_not_made_fails_the_run(supervise, capsys):
    assert supervise(first="hang")[0] == 1
    assert "NOT CHECKED: first" in capsys.readouterr().out


def test_a_crashing_stage_leaves_what_it_said_and_the_others_go_on(supervise):
    status, stages = supervise(first="crash")
    assert status == 1
    assert states(stages) == {**dict.fromkeys(states(stages), "done"), "first": "crashed"}
    assert "an illegal memory access" in stages["first"]["trace"]
    assert "status 9" in stages["first"]["reason"]


def test_a_fresh_worker_follows_a_failed_stage(supervise):
    status, stages = supervise(second="fail")
    assert status == 3
    assert states(stages) == {**dict.fromkeys(states(stages), "done"), "second": "failed"}
    assert stages["second"]["error"] == "RuntimeError: boom"
    assert stages["first"]["values"]["pid"] != stages["third"]["values"]["pid"]


def test_no_stage_starts_when_time_is_up(supervise):
    status, stages = supervise(seconds=-1)
    assert status == 1
    assert set(states(stages).values()) == {"skipped"}


def test_without_a_gpu_nothing_is_written(supervise, tmp_path):
    with pytest.raises(runner.NothingToCheckError, match="no GPU at all"):
        supervise(environment="no_gpu")


def test_a_killed_run_leaves_what_it_had(tmp_path):
    worker, result = tmp_path / "worker.py", tmp_path / "out.json"
    worker.write_text(FAKE_WORKER)
    code = (
        "import sys, time; from megatron_dos.gpu_check import STAGES, runner; from pathlib import Path; "
        "until = time.monotonic() + 60; worker = [sys.executable, sys.argv[1]]; "
        "runner.Supervisor(STAGES[:3], False, Path(sys.argv[2]), until, 0, worker).run()"
    )
    arguments = [sys.executable, "-c", code, str(worker), str(result)]
    variables = environment(ACTIONS='{"engine": "hang"}', PYTHONPATH=str(ROOT))
    process = subprocess.Popen(arguments, env=variables, stdout=subprocess.DEVNULL)

    def engine_runs() -> bool:
        return result.exists() and json.loads(result.read_text())["stages"]["engine"]["state"] == "running"

    deadline = time.monotonic() + PATIENCE
    while not engine_runs():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait()
    stages = json.loads(result.read_text())["stages"]
    assert states(stages) == {"environment": "done", "kernels": "done", "engine": "running"}
    os.kill(stages["engine"]["values"]["pid"], 9)


class TestBuild:
    def supervisor(self, tmp_path):
        return runner.Supervisor(STAGES, True, tmp_path / "out.json", time.monotonic() + 60)

    def test_a_module_that_loads_is_left_alone(self, tmp_path):
        supervisor = self.supervisor(tmp_path)
        supervisor.build()
        assert supervisor.results["build"] == {"built": False}

    def test_what_the_compiler_said_is_told(self, tmp_path, monkeypatch):
        monkeypatch.setattr(runner, "_module_loads", lambda: False)
        failed = subprocess.CompletedProcess([], 1, stdout="", stderr="fatal error: Python.h: no such file")
        monkeypatch.setattr(runner.subprocess, "run", lambda *arguments, **options: failed)
        with pytest.raises(runner.NothingToCheckError, match=r"(?s)compiler.*Python\.h: no such file"):
            self.supervisor(tmp_path).build()

    def test_torchs_headers_stand_in_for_pybind11(self, tmp_path):
        folder = runner._bundled_pybind11(tmp_path)
        code = "import pybind11; print(pybind11.get_include(), end='')"
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment(PYTHONPATH=folder), capture_output=True, text=True, check=True
        )
        assert (Path(done.stdout) / "pybind11" / "pybind11.h").exists()


class TestVerdict:
    STAGES = FAKE_STAGES[1:3]

    def verdict(self, first, second="done", ok=True):
        checks = [{"name": "bits", "ok": ok, "detail": ""}]
        results = {"stages": {"first": {"state": first, "checks": checks}, "second": {"state": second}}}
        return runner.verdict(results, self.STAGES)["exit_status"]

    @pytest.mark.parametrize("state", ["not run", "running", "failed", "killed", "crashed", "skipped"])
    def test_checks_must_be_made(self, state):
        assert self.verdict(state) == 1

    def test_checks_must_hold(self):
        assert self.verdict("done", ok=False) == 1

    @pytest.mark.parametrize(("state", "status"), [("done", 0), ("skipped", 0), ("failed", 3), ("killed", 3)])
    def test_figures_may_be_missing_but_not_silently(self, state, status):
        assert self.verdict("done", state) == status

    def test_a_check_in_a_stage_of_figures_counts_too(self):
        results = {
            "stages": {
                "first": {"state": "done", "checks": [{"name": "bits", "ok": True, "detail": ""}]},
                "second": {"state": "done", "checks": [{"name": "more bits", "ok": False, "detail": ""}]},
            }
        }
        verdict = runner.verdict(results, self.STAGES)
        assert verdict["checks_that_fail"] == ["second: more bits"]
        assert verdict["exit_status"] == 1


def test_a_summary_is_made_of_whatever_there_is():
    results = {
        "dry_run": False,
        "seconds": 3.0,
        "stages": {stage.name: {"state": "not run", "title": stage.title} for stage in STAGES},
    }
    results["verdict"] = runner.verdict(results, STAGES)
    text = summary(results)
    assert "NOT CHECKED: kernels" in text
    assert "exit status 1" in text
    for name, stage in results["stages"].items():
        assert "not run" in summary_of_stage(name, stage)


# --- the checks can fail: stages with a planted fault, run in one process, which the stand-in for CUDA changes for good

FAULTS = {
    "elementwise stores another NaN": ("kernels", "elementwise: the bits of the CPU kernel"),
    "triton writes beside the arrays": ("kernels", "triton: the bits of the CPU kernel"),
    "states are not written back": ("engine", "the engine with random delays"),
    "a bucket is released too early": ("engine", "the engine with random delays"),
    "no dependency is removed": ("engine", "a removed dependency shows"),
    "an event is made for every operation": ("memory", "no stream and no event is made"),
    "the GPU's kernel has other bits": ("step_time", "a step at full size has the same bits"),
}
"""Fault -> the stage that has to see it, and the beginning of the name of the check that fails."""


def run_with_faults() -> dict[str, list[str]]:
    """Fault -> the names of the checks that fail. Changes this process for good."""
    worker._prepare_imports(dry=True)
    import torch

    from megatron_dos import cpu_emulation
    from megatron_dos.device import CudaDevice
    from megatron_dos.gpu_check import context, engine, kernels, late, memory, step_time
    from megatron_dos.kernels import elementwise_adam, triton_adam
    from megatron_dos.program.schedule import OpKind
    from megatron_dos.update.operations import StepOperations

    modules = {"kernels": kernels, "engine": engine, "memory": memory, "step_time": step_time}
    engine.DTYPES = {name: engine.DTYPES[name] for name in ("bf16 params and grads", "mixed")}
    engine.SCHEDULES = {name: engine.SCHEDULES[name] for name in ("share 0.5", "share changed between steps")}
    step_time._hybrid = lambda *arguments: None  # Megatron takes long to import, and is another test's

    def store_any_nan(target, values):
        target.copy_(values)

    def write_beside(param, *arguments, run=triton_adam.adamw):
        run(param, *arguments)
        if param.numel():
            param.as_strided((1,), (1,), param.storage_offset() + param.numel()).fill_(1.0)

    def forget_the_last(self, op, run=StepOperations.states_to_host):
        if op.subgroup + 1 < len(self._memory.partition.subgroups):
            run(self, op)

    def release_and_write(self, op, run=StepOperations.release_bucket):
        run(self, op)
        for piece in self._memory.partition.subgroups[-1].pieces:
            self._param(piece).neg_()

    def run_as_it_is(self, program, handlers, memory_of):
        self.device.run(program, handlers, memory_of)

    def one_bit_off(self, op, run=StepOperations.update_on_device):
        run(self, op)
        slot = self._states_slots[op.slot]
        slot[0][0] = torch.nextafter(slot[0][0].cpu(), torch.tensor(9.0, device="cpu")).to(slot.device)

    patches = {
        "elementwise stores another NaN": (elementwise_adam, "_store", store_any_nan),
        "triton writes beside the arrays": (triton_adam, "adamw", write_beside),
        "states are not written back": (StepOperations, OpKind.STATES_TO_HOST.value, forget_the_last),
        "a bucket is released too early": (StepOperations, OpKind.RELEASE_BUCKET.value, release_and_write),
        "no dependency is removed": (late.Without, "run", run_as_it_is),
        "an event is made for every operation": (CudaDevice, "_take_event", lambda self: torch.cuda.Event()),
        "the GPU's kernel has other bits": (StepOperations, OpKind.UPDATE_ON_DEVICE.value, one_bit_off),
    }
    failed = {}
    for fault, (stage, _) in FAULTS.items():
        if stage != "kernels":
            cpu_emulation.activate(force=True)
        where, name, faulty = patches[fault]
        sound = getattr(where, name)
        setattr(where, name, faulty)
        run = context.Context(True, context.Sizes.dry(), time.monotonic() + PATIENCE, lambda result: None)
        try:
            modules[stage].run(run)
        finally:
            setattr(where, name, sound)
        failed[fault] = [check["name"] for check in run.result["checks"] if not check["ok"]]
    return failed


@pytest.mark.slow
def test_every_planted_fault_fails_its_check():
    code = "import json, test_gpu_check as t; print(json.dumps(t.run_with_faults()))"
    path = os.pathsep.join(map(str, (Path(__file__).parent, ROOT / "tests" / "helpers", ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(PYTHONPATH=path),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    failed = json.loads(done.stdout.splitlines()[-1])
    for fault, (_, check) in FAULTS.items():
        assert len(failed[fault]) == 1, (fault, failed[fault])
        assert failed[fault][0].startswith(check)
