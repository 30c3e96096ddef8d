# SPDX-License-Identifier: Apache-2.0
"""`megatron-dos simulate`: whole iterations of every program, and the files it writes."""

from __future__ import annotations

import json
import re
import sys

import pytest
from test_trace import check_schema

from megatron_dos import cli
from megatron_dos.commands import simulate
from megatron_dos.commands.text import count, short
from megatron_dos.observing import trace
from megatron_dos.planning import rivals
from megatron_dos.planning.machine import preset
from megatron_dos.planning.systems import OURS, RIVALS, Design

SMALL = ["simulate", "--parameters", "2e9", "--gpus", "4", "--machine", "h100-pcie5"]


@pytest.fixture(autouse=True)
def no_calibration(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def programs(capsys):
    """Runs the command; its programs by name."""

    def run(*arguments: str) -> dict[str, dict]:
        assert cli.main([*SMALL, *arguments, "--json"]) == 0
        return {row["program"]: row for row in json.loads(capsys.readouterr().out)["programs"]}

    return run


def test_every_program_has_a_word_of_its_own_on_the_command_line():
    words = [system.word for system in (OURS, *RIVALS.values())]
    assert len(set(words)) == len(words)
    assert all(re.fullmatch("[a-z0-9-]+", word) for word in words)


def test_all_programs_run_and_add_up(programs):
    found = programs("--programs", "all")
    assert list(found) == ["ours", *RIVALS]
    for row in found.values():
        assert row["iteration_s"] == pytest.approx(row["forward_s"] + row["backward_s"] + row["update_s"])
        assert row["parameters_per_second"] == pytest.approx(5e8 / row["update_s"])
        assert sum(row["share"].values()) == pytest.approx(1)
    assert min(row["update_s"] for row in found.values()) == found["ours"]["update_s"]
    assert found["full offload"]["share"] == {"host": 1.0}


def test_grads_sent_in_the_backward_pass_make_it_longer_only_where_they_are_not_hidden(programs):
    found = programs("--programs", "ours", "full-offload", "--share", "0")
    passes = 3 * 2 * 2e9 * 2048 / preset("h100-pcie5").matmul
    sent = 4 * 5e8 / preset("h100-pcie5").d2h_alone
    assert found["full offload"]["backward_s"] == pytest.approx(passes + sent)
    assert found["ours, GPU share 0"]["backward_s"] == pytest.approx(passes)
    early = programs("--programs", "ours", "--share", "0", "--early-grads")["ours, GPU share 0"]
    last = sent / len(range(0, 500_000_000, 33_554_432))  # the copy of the last subgroup ends after the pass
    assert passes < early["backward_s"] <= passes + 1.1 * last
    assert early["update_s"] < found["ours, GPU share 0"]["update_s"]


@pytest.mark.parametrize(
    ("arguments", "name", "host", "resident"),
    [
        (["--share", "0.75"], "ours, GPU share 0.75", 0.25, 0),
        (["--stride", "2"], "ours, k=2", 0.5, 0),
        (["--stride", "4", "--resident-share", "0.2"], "ours, k=4", 0.6, 0.2),
    ],
)
def test_share_and_stride_are_obeyed(arguments, name, host, resident, programs):
    found = programs("--programs", "ours", "--subgroup-size", "5000000", *arguments)
    assert found[name]["share"]["host"] == pytest.approx(host, abs=0.02)
    assert found[name]["share"].get("resident", 0) == pytest.approx(resident, abs=0.02)


def test_one_hardware_queue_holds_up_what_streams_and_not_what_has_one_stream(programs):
    arguments = ("--programs", "all", "--share", "0.6")
    each, one = programs(*arguments), programs(*arguments, "--connections", "1")
    for name in ("ours, GPU share 0.6", "GPU streaming", "published, k=2"):
        assert one[name]["update_s"] > 1.15 * each[name]["update_s"]
    assert one["full offload"] == each["full offload"]
    needed = programs(*arguments, "--connections", "1", "--enqueue", "when-needed")
    assert needed["GPU streaming"]["update_s"] < 1.1 * each["GPU streaming"]["update_s"]


def test_early_grads_wait_for_the_last_micro_batch(capsys):
    arguments = ["simulate", "--model", "7b", "--gpus", "4", "--machine", "a100-pcie4", "--early-grads", "--json"]
    arguments += ["--programs", "superoffload-no-speculation", "--seq-length", "128"]  # copies take longer than a pass
    exposed = []
    for batch in ("4", "64"):  # 1 and 16 micro-batches
        assert cli.main([*arguments, "--global-batch-size", batch]) == 0
        (row,) = json.loads(capsys.readouterr().out)["programs"]
        exposed.append(row["backward_s"] - 3 * row["forward_s"])
    assert exposed[1] == pytest.approx(exposed[0])
    assert exposed[0] > 0.1


@pytest.mark.parametrize(
    ("flags", "more", "name"),
    [
        ("--dos-gpu-share 0.25", [], "ours, GPU share 0.25"),
        ("--dos-update-stride 3", [], "ours, k=3"),
        ("--dos-update-stride 3", ["--share", "0.5"], "ours, GPU share 0.5"),
    ],
)
def test_share_and_stride_of_a_launch_are_obeyed(flags, more, name, tmp_path, capsys):
    path = tmp_path / "train.sh"
    path.write_text(
        "python pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --vocab-size 50000 "
        f"--max-position-embeddings 2048 --bf16 --use-distributed-optimizer --use-deep-optimizer-states {flags}"
    )
    arguments = ["simulate", "--model", str(path), "--machine", "h200", "--programs", "ours", "--json"]
    assert cli.main([*arguments, *more]) == 0
    (row,) = json.loads(capsys.readouterr().out)["programs"]
    assert row["program"] == name


def test_lanes_are_busy_for_what_they_do(programs):
    busy = programs("--programs", "gpu-streaming", "full-offload")
    assert busy["GPU streaming"]["busy_in_update"]["h2d"] > 0.9
    assert "cpu" not in busy["GPU streaming"]["busy_in_update"]
    assert busy["full offload"]["busy_in_update"]["cpu"] > 0.5


def test_spans_of_an_iteration_follow_one_another():
    options = cli._parser().parse_args([*SMALL, "--programs", "ours"])
    options.more = []
    scenario = simulate._scenario(options)
    timeline = rivals.published(scenario.machine, scenario.work)
    spans = simulate.iteration_spans(scenario, Design.PUBLISHED, timeline)
    passes = [span for span in spans if span.name in ("forward", "backward")]
    step = [span for span in spans if "slot" in span.args]
    assert passes[0].start_s == 0
    assert max(span.end_s for span in passes) <= min(span.start_s for span in step)
    assert sum(span.duration_s for span in passes) == pytest.approx(scenario.passes.forward + scenario.passes.backward)
    early = [span for span in spans if span.name == "grad_to_host"]
    assert sum(span.args["bytes"] for span in early) == pytest.approx(4 * scenario.work.parameters / 2, rel=0.15)
    moved = sum(span.args["bytes"] for span in step if span.name == "states_to_device")
    assert moved == pytest.approx(12 * scenario.work.parameters / 2, rel=0.15)


class TestFiles:
    def test_picture_and_trace_are_written(self, tmp_path, capsys):
        out = tmp_path / "new" / "folder"
        assert cli.main([*SMALL, "--out", str(out)]) == 0
        assert sorted(path.name for path in out.iterdir()) == ["iteration.png", "iteration.trace.json"]
        assert str(out / "iteration.png") in capsys.readouterr().out
        document = json.loads((out / "iteration.trace.json").read_text())
        check_schema(document)
        names = [event["args"]["name"] for event in document["traceEvents"] if event["name"] == "process_name"]
        assert names == ["ours", "full offload", "published, k=2", "GPU streaming"]
        lanes = {event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"}
        assert {"gpu", "h2d", "d2h", "cpu"} <= lanes
        assert {"forward", "backward", "update_on_host"} <= {event["name"] for event in document["traceEvents"]}
        assert (out / "iteration.png").read_bytes().startswith(b"\x89PNG")

    def test_earlier_files_stay_unless_asked_to_go(self, tmp_path, capsys):
        (tmp_path / "iteration.png").write_text("mine")
        assert cli.main([*SMALL, "--programs", "ours", "--out", str(tmp_path)]) == 2
        out, err = capsys.readouterr()
        assert "iteration.png already; name another folder, or --overwrite" in err
        assert out == ""
        assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["iteration.png"]
        assert (tmp_path / "iteration.png").read_text() == "mine"
        assert cli.main([*SMALL, "--programs", "ours", "--out", str(tmp_path), "--overwrite"]) == 0
        assert (tmp_path / "iteration.png").read_bytes().startswith(b"\x89PNG")

    def test_trace_is_written_without_matplotlib(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        arguments = [*SMALL, "--programs", "ours", "--out", str(tmp_path / "out")]
        assert cli.main(arguments) == 0
        out, err = capsys.readouterr()
        assert err == "megatron-dos: no iteration.png: the picture needs pip install matplotlib\n"
        assert "G params/s" in out
        assert str(tmp_path / "out" / "iteration.trace.json") in out
        assert "iteration.png" not in out
        check_schema(json.loads((tmp_path / "out" / "iteration.trace.json").read_text()))
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["iteration.trace.json"]
        (tmp_path / "out" / "iteration.png").write_text("of before")
        assert cli.main([*arguments, "--overwrite"]) == 0
        assert "the one that is there is of an earlier run" in capsys.readouterr().err

    def test_neither_file_is_written_where_one_cannot_be(self, tmp_path, monkeypatch, capsys):
        def fail(*_, **__):
            raise OSError("disk full")

        monkeypatch.setattr(trace, "write_chrome_trace", fail)
        assert cli.main([*SMALL, "--programs", "ours", "--out", str(tmp_path / "out")]) == 2
        assert "disk full" in capsys.readouterr().err
        assert not list((tmp_path / "out").iterdir())

    def test_folder_that_is_a_file_is_named(self, tmp_path, capsys):
        path = tmp_path / "file"
        path.write_text("")
        assert cli.main([*SMALL, "--out", str(path)]) == 2
        assert f"--out {path} is a file" in capsys.readouterr().err


def test_model_by_name_is_divided_as_asked(capsys):
    arguments = ["simulate", "--model", "7b", "--gpus", "8", "--tensor-model-parallel-size", "2", "--machine", "h200"]
    assert cli.main([*arguments, "--programs", "ours"]) == 0
    page = capsys.readouterr().out
    assert "7b on h200: one rank of 8 on its node, states of 743.6M parameters" in page
    assert "forward s" in page


def test_lines_of_all_programs_fit_into_120_columns(capsys):
    assert cli.main([*SMALL, "--programs", "all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120
    assert sum(line.startswith("HybridDeviceOptimizer ") for line in lines) == 2, "its times, and its lanes"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--share", "0.5", "--stride", "2"], "--share and --stride both say"),
        (
            ["--share", "0.5", "--programs", "full-offload"],
            "--share and --stride are of ours",
        ),
        (
            ["--stride", "2", "--programs", "full-offload"],
            "--share and --stride are of ours",
        ),
        (["--enqueue", "when-needed"], "--enqueue when-needed has no effect"),
        (["--overwrite"], "--overwrite has no effect without --out"),
        (["--share", "1.5"], "--share 1.5: give 0 to 1"),
        (["--stride", "0"], "--stride 0: give at least 1"),
        (["--tensor-parallel", "2"], "only --gpus goes with --parameters"),
        (["--parameters", "many"], "--parameters many: give a number"),
        (["--parameters", "1e99"], "--parameters 1e99: give 1 to 1e+14"),
        (["--parameters", "nan"], "--parameters nan: give a number"),
        (["--parameters", "9e13"], "each rank would own the states of 22.5T parameters"),
    ],
)
def test_what_cannot_be_is_one_clear_error(arguments, message, capsys):
    assert cli.main([*SMALL, *arguments]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert err.count("\n") == 1
    assert out == ""


@pytest.mark.parametrize("arguments", [[], ["--programs", "magic"], ["--model", "7b"]])
def test_wrong_usage_is_status_2(arguments):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["simulate", *(SMALL[1:] if arguments else []), *arguments])
    assert exit_.value.code == 2


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("13B", 13e9), ("13e9", 13e9), ("11.3b", 11.3e9), ("350M", 350e6), ("1.5T", 1.5e12), ("900", 900)),
        *(("11,315,860,480", 11_315_860_480), ("15.3e9", 15.3e9), (".5B", 5e8), ("7 B", 7e9), ("64k", 64e3)),
    ],
)
def test_numbers_of_parameters_are_read_as_people_write_them(text, number):
    assert count(text) == number


@pytest.mark.parametrize("text", ["", "B", "-3", "1,5B", "1.2.3", "nan", "inf", "1e999", "13GB", "0x10"])
def test_what_is_no_number_is_refused(text):
    with pytest.raises(ValueError, match="number"):
        count(text)


def test_what_short_writes_is_read_again():
    for number in (900, 124_400_000, 15_330_000_000, 2e12):
        assert count(short(number)) == number
