# SPDX-License-Identifier: Apache-2.0
"""What is noted of which step, and where the figures go: Megatron's writers and log, traces, NVTX ranges."""

from __future__ import annotations

import json
import sys
import warnings
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from test_engine import NUMELS, make_engine, random_params, scalars_at
from virtual_cuda import VirtualCuda

from megatron_dos.device import CudaDevice
from megatron_dos.observing import monitor
from megatron_dos.observing.figures import LaneUse, StepFigures
from megatron_dos.observing.monitor import EVERY, FIRST, StepMonitor
from megatron_dos.observing.reporting import Training, line, report, scalars, training
from megatron_dos.options.options import DosOptions, UnsupportedOptionError, parse_steps
from megatron_dos.update.operations import StepInputs

CPU = torch.device("cpu")
FIGURES = StepFigures(
    step=3,
    numel=4_000_000_000,
    seconds=2.0,
    device_share=0.75,
    lanes={
        "cpu": LaneUse(busy=1.5),
        "h2d": LaneUse(busy=1.9, nbytes=80_000_000_000),
        "d2h": LaneUse(busy=1.0, nbytes=40_000_000_000),
        "gpu": LaneUse(busy=0.25),
    },
    slot_stalls={"states_slot": 0.125, "host_grad_slot": 0.25},
    costs={},
)


class Writer:
    """Notes what is written, with the interface of a SummaryWriter and of the wandb module."""

    def __init__(self):
        self.scalars, self.logs = {}, []

    def add_scalar(self, name, value, iteration):
        self.scalars[name, iteration] = value

    def log(self, values, iteration):
        self.logs.append((values, iteration))


def make_training(rank=1, world_size=2, curr_iteration=9, log_interval=10, **more) -> Training:
    args = SimpleNamespace(
        rank=rank, world_size=world_size, curr_iteration=curr_iteration, log_interval=log_interval, **more
    )
    return Training(args, Writer(), Writer())


def make_monitor(share=0.5, **settings) -> StepMonitor:
    options = settings.pop("options", DosOptions(use_deep_optimizer_states=True))
    engine = make_engine(random_params(), 1000, host_share=Fraction(share))
    watching = StepMonitor(engine, CPU, options, **settings)
    watching.engine = engine
    return watching


def step(watching: StepMonitor, number: int) -> None:
    watching.begin(number)
    with watching.phase("update"):
        watching.engine.update(StepInputs([torch.ones(n) for n in NUMELS], [scalars_at(number, 0.1)] * len(NUMELS)))
    watching.collect()


@pytest.fixture
def reports(monkeypatch):
    """The (step, iteration) of everything that is reported."""
    seen = []
    monkeypatch.setattr(
        monitor, "report", lambda figures, iteration, here, label: seen.append((figures.step, iteration))
    )
    return seen


class TestReports:
    def test_scalars_are_the_figures(self):
        values = scalars(FIGURES)
        assert values["dos/update-seconds"] == 2.0
        assert values["dos/update-gparams-per-second"] == 2.0
        assert values["dos/gpu-share"] == 0.75
        assert values["dos/slot-stall-seconds"] == 0.375
        assert values["dos/gbytes-per-second/h2d"] == 40.0
        assert values["dos/gbytes-per-second/d2h"] == 20.0
        assert [values[f"dos/busy-seconds/{lane}"] for lane in ("cpu", "h2d", "d2h", "gpu")] == [1.5, 1.9, 1.0, 0.25]
        assert values["dos/wait-seconds/cpu"] == 0.5
        assert all(name.startswith("dos-experts/") for name in scalars(FIGURES, "experts"))

    def test_both_writers_get_all_of_them_at_the_iteration(self, capsys):
        here = make_training()
        report(FIGURES, 10, here, "experts")
        expected = scalars(FIGURES, "experts")
        assert here.tensorboard.scalars == {(name, 10): value for name, value in expected.items()}
        assert here.wandb.logs == [(expected, 10)]
        printed = capsys.readouterr().out
        assert "deep optimizer states (experts), iteration 10: " in printed
        assert line(FIGURES) in printed

    @pytest.mark.parametrize(("rank", "iteration"), [(0, 10), (1, 9)])
    def test_the_line_is_where_and_when_megatron_prints_its_own(self, capsys, rank, iteration):
        report(FIGURES, iteration, Training(make_training(rank=rank).args))
        assert capsys.readouterr().out == ""

    def test_the_line_tells_rates_lanes_and_stalls(self):
        text = line(FIGURES)
        parts = ("2000.0 ms", "2.000 G params/s", "75% on", "cpu 1500.0/500.0", "h2d 40.0 d2h 20.0", "stalls 375.0 ms")
        for part in parts:
            assert part in text

    def test_there_is_no_training_where_megatron_has_set_none_up(self, monkeypatch):
        monkeypatch.delitem(sys.modules, "megatron.training.global_vars", raising=False)
        assert training() is None

        def not_set_up():
            raise AssertionError("args is not initialized.")

        variables = SimpleNamespace(get_args=not_set_up)
        monkeypatch.setitem(sys.modules, "megatron.training.global_vars", variables)
        assert training() is None
        writer = Writer()
        variables.get_args = lambda: SimpleNamespace(curr_iteration=4)
        variables.get_tensorboard_writer, variables.get_wandb_writer = lambda: writer, lambda: None
        found = training()
        assert (found.tensorboard, found.wandb, found.iteration) == (writer, None, 5)

    def test_steps_outside_of_megatrons_loop_are_not_reported(self, monkeypatch, reports):
        monkeypatch.setattr(monitor, "training", lambda: Training(SimpleNamespace()))
        step(make_monitor(), 1)
        assert reports == []


class TestWhichStepsAreMeasured:
    def test_the_first_ones_then_some_and_those_that_megatron_logs(self, monkeypatch, reports):
        here = make_training(log_interval=7)
        monkeypatch.setattr(monitor, "training", lambda: here)
        watching = make_monitor()
        last = FIRST + 2 * EVERY
        for number in range(1, last + 1):
            here.args.curr_iteration = number - 1
            step(watching, number)
        expected = [n for n in range(1, last + 1) if n <= FIRST or n % EVERY == 0 or n % 7 == 0]
        assert reports == [(n, n) for n in expected]

    def test_a_step_that_megatron_skips_is_none(self, monkeypatch, reports):
        here = make_training()
        monkeypatch.setattr(monitor, "training", lambda: here)
        watching = make_monitor()
        watching.begin(1)  # found inf: no update follows
        watching.collect()
        assert reports == []
        here.args.curr_iteration += 1
        step(watching, 1)
        assert reports == [(1, 11)]

    def test_steps_that_megatron_skips_do_not_use_up_the_first_ones(self, monkeypatch, reports):
        """As in fp16, while the loss scale is still too large."""
        here = make_training(curr_iteration=8)
        monkeypatch.setattr(monitor, "training", lambda: here)
        watching = make_monitor()
        for _ in range(FIRST):
            watching.begin(1)
        step(watching, 1)
        assert len(reports) == 1

    def test_other_steps_run_the_engines_own_handlers(self):
        watching = make_monitor()
        watching._seen = FIRST + 1
        watching.begin(FIRST + 2)
        handlers = {}
        with watching._observed(watching.engine.program([torch.zeros(n) for n in NUMELS]), handlers, []) as given:
            assert given is handlers


class TestTraces:
    def options(self, tmp_path, steps="5-7"):
        return DosOptions(use_deep_optimizer_states=True, dos_trace_dir=str(tmp_path / "t"), dos_trace_steps=steps)

    def test_a_file_a_step_for_perfetto(self, tmp_path):
        watching = make_monitor(options=self.options(tmp_path, "2,4-5"), rank=3, label="experts")
        for number in range(1, 7):
            step(watching, number)
        names = sorted(path.name for path in (tmp_path / "t").iterdir())
        assert names == [f"rank00003-step000000{n}-experts.json" for n in (2, 4, 5)]
        trace = json.loads((tmp_path / "t" / names[0]).read_text())
        spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        moved = {event["name"]: event["args"]["bytes"] for event in spans if "bytes" in event["args"]}
        assert set(moved) == {"states_to_device", "states_to_host", "grad_to_host", "param_to_device"}
        program = watching.engine.program([torch.zeros(n) for n in NUMELS])
        assert len([event for event in trace["traceEvents"] if event["ph"] in "Xi"]) == len(program.ops) + 1
        for event in spans:
            if event["name"] == "states_to_device":
                numel = watching.engine.partition.subgroups[event["args"]["subgroup"]].numel
                assert event["args"]["bytes"] == 12 * numel
        assert 0 < trace["otherData"]["gpu_share"] < 1

    def test_a_step_that_ends_after_its_collection_is_written_at_exit(self, tmp_path):
        watching = make_monitor(options=self.options(tmp_path, "1"))
        late = watching._watch.finished
        watching._watch.finished = lambda wait=False: late(wait) if wait else []
        step(watching, 1)
        assert not list((tmp_path / "t").iterdir())
        monitor._finish(lambda: watching)
        assert len(list((tmp_path / "t").iterdir())) == 1
        monitor._finish(lambda: None)  # the optimizer is gone

    def test_a_disk_that_fails_ends_no_training(self, tmp_path):
        watching = make_monitor(options=self.options(tmp_path, "1"))
        (tmp_path / "t").rmdir()
        with pytest.warns(RuntimeWarning, match="was not written"):
            step(watching, 1)

    def test_a_folder_that_cannot_be_made_is_refused_at_once(self, tmp_path):
        (tmp_path / "t").touch()
        with pytest.raises(UnsupportedOptionError, match=r"--dos-trace-dir .* cannot be written to"):
            make_monitor(options=self.options(tmp_path))

    def test_without_the_flag_nothing_is_written(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for number in range(1, 8):
                watching = make_monitor()
                step(watching, number)
        assert list(tmp_path.iterdir()) == []


def test_the_whole_way_on_the_cuda_device(monkeypatch, tmp_path, reports, capsys):
    machine = VirtualCuda(lambda op: 0.0)
    machine.install(monkeypatch)
    ranges = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", ranges.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: None)
    here = make_training()
    monkeypatch.setattr(monitor, "training", lambda: here)
    inline, params = make_monitor(), random_params()
    engine = make_engine(params, 1000, host_share=Fraction(1, 2))
    engine._device = CudaDevice(torch.device("cuda"))
    options = DosOptions(use_deep_optimizer_states=True, dos_trace_dir=str(tmp_path), dos_trace_steps="2,9")
    watching = StepMonitor(engine, torch.device("cuda"), options, tunes=True)
    watching.engine = engine
    for number in range(1, 10):
        step(inline, number)
        step(watching, number)
    monitor._finish(lambda: watching)
    assert all(
        torch.equal(state, inline.engine.owner_states(owner)[name])
        for owner in range(len(NUMELS))
        for name, state in engine.owner_states(owner).items()
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"rank00000-step000000{n}.json" for n in (2, 9)]
    assert [seen[0] for seen in reports].count(9) == 2
    assert ranges.count("dos update") == 2, "traced steps have ranges, others none"
    assert "GPU share" in capsys.readouterr().out


class TestTraceFlags:
    @pytest.mark.parametrize(
        ("text", "expected"), [("5-7", [5, 6, 7]), ("3,10", [3, 10]), ("1, 4-4 ,9-10", [1, 4, 9, 10])]
    )
    def test_steps(self, text, expected):
        assert [number for steps in parse_steps(text) for number in steps] == expected

    @pytest.mark.parametrize("text", ["", "a", "5-", "-5", "7-5", "0", "0-3", "1,,2", "1.5", "²", "9" * 5000, "1-2-3"])
    def test_what_names_no_steps_is_refused(self, text):
        with pytest.raises(UnsupportedOptionError, match="--dos-trace-steps"):
            DosOptions(use_deep_optimizer_states=True, dos_trace_dir="d", dos_trace_steps=text)

    def test_steps_without_a_folder_are_refused(self):
        with pytest.raises(UnsupportedOptionError, match="no effect without --dos-trace-dir"):
            DosOptions(use_deep_optimizer_states=True, dos_trace_steps="3")


class TestRanges:
    @pytest.fixture
    def nvtx(self, monkeypatch):
        """What is pushed, with its depth; pops are checked."""
        pushed, depth = [], [0]

        def push(name):
            pushed.append((depth[0], name))
            depth[0] += 1

        def pop():
            depth[0] -= 1
            assert depth[0] >= 0

        monkeypatch.setattr(torch.cuda.nvtx, "range_push", push)
        monkeypatch.setattr(torch.cuda.nvtx, "range_pop", pop)
        yield pushed
        assert depth[0] == 0

    def profiled(self, monkeypatch, on_cuda=True, iteration=5, **args):
        profile = {"profile": True, "profile_step_start": 4, "profile_step_end": 6, "profile_ranks": [1]} | args
        here = make_training(curr_iteration=iteration - 1, **profile)
        monkeypatch.setattr(monitor, "training", lambda: here)
        watching = make_monitor()
        watching._on_cuda = on_cuda
        watching._step = None
        watching.begin(1)
        watching._step = None  # no timing: there is no GPU
        with watching.phase("update"):
            inputs = StepInputs([torch.ones(n) for n in NUMELS], [scalars_at(1, 0.1)] * len(NUMELS))
            watching.engine.update(inputs)
        return watching

    def test_a_profiled_step_has_a_range_for_each_phase_and_operation(self, nvtx, monkeypatch):
        watching = self.profiled(monkeypatch)
        program = watching.engine.program([torch.zeros(n) for n in NUMELS])
        assert nvtx[0] == (0, "dos update")
        assert nvtx[1:] == [(1, f"dos {op.kind.value} {op.subgroup}") for op in program.ops]

    @pytest.mark.parametrize(
        "settings",
        [
            {"profile": False},
            {"iteration": 4},
            {"iteration": 7},
            {"profile_ranks": [0]},
            {"on_cuda": False},
        ],
    )
    def test_no_other_step_has(self, nvtx, monkeypatch, settings):
        self.profiled(monkeypatch, **settings)
        assert nvtx == []

    def test_profile_ranks_may_be_all(self, nvtx, monkeypatch):
        self.profiled(monkeypatch, profile_ranks=[], iteration=6)
        assert nvtx
