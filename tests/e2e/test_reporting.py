# SPDX-License-Identifier: Apache-2.0
"""What a user sees of the steps: lines in the log, scalars in TensorBoard, traces; and that seeing changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import LAYOUTS, PRECISIONS, TINY, assert_same_bits

STEPS = 6
COMMON = [*TINY, *PRECISIONS["bf16"], "--dos-subgroup-size", "3000"]
DP2 = COMMON + LAYOUTS["dp2"][1]
HALF = ["--dos-gpu-share", "0.5"]


@pytest.fixture(scope="module")
def plain(megatron):
    return megatron.train(DP2 + HALF, 2, "dos", STEPS)


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Tag -> step -> value of the TensorBoard files in a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: {one.step: one.value for one in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_tensorboard_shows_every_lane_of_every_measured_step(megatron, plain, tmp_path):
    run = megatron.train(
        [*DP2, *HALF, "--tensorboard-dir", str(tmp_path), "--log-timers-to-tensorboard", "--log-interval", "2"],
        *(2, "dos", STEPS),
    )
    assert_same_bits(run, plain)
    found = scalars(tmp_path)
    ours = {tag.removeprefix("dos/"): values for tag, values in found.items() if tag.startswith("dos/")}
    lanes = [f"{what}-seconds/{lane}" for what in ("busy", "wait") for lane in ("cpu", "h2d", "d2h", "gpu")]
    rates = ["gbytes-per-second/h2d", "gbytes-per-second/d2h"]
    whole = ["update-seconds", "update-gparams-per-second", "gpu-share", "slot-stall-seconds"]
    assert set(ours) == {*lanes, *rates, *whole}
    for tag, values in ours.items():
        assert list(values) == [1, 2, 3, 4, 5, 6], tag
    for step in ours["update-seconds"]:
        assert ours["update-seconds"][step] > 0
        assert ours["update-gparams-per-second"][step] > 0
        assert ours["gpu-share"][step] == pytest.approx(0.5, abs=0.1)
        for lane in ("cpu", "h2d", "d2h", "gpu"):
            both = ours[f"busy-seconds/{lane}"][step] + ours[f"wait-seconds/{lane}"][step]
            assert both == pytest.approx(ours["update-seconds"][step], rel=1e-4)
    assert found["lm loss"], "Megatron's own scalars are there, too"
    lines = [line for line in run.log(1).splitlines() if "deep optimizer states, iteration" in line]
    assert [line.split("iteration ")[1].split(":")[0] for line in lines] == ["2", "4", "6"]
    assert "deep optimizer states, iteration" not in run.log(0)


def test_a_trace_holds_the_operations_of_its_step_on_every_rank(megatron, plain, tmp_path):
    run = megatron.train(
        [*DP2, *HALF, "--dos-trace-dir", str(tmp_path / "traces"), "--dos-trace-steps", "2,5-6"], 2, "dos", STEPS
    )
    assert_same_bits(run, plain)
    names = sorted(path.name for path in (tmp_path / "traces").iterdir())
    assert names == [f"rank0000{rank}-step000000{step}.json" for rank in (0, 1) for step in (2, 5, 6)]
    for name in names:
        trace = json.loads((tmp_path / "traces" / name).read_text())
        rank, step = int(name[4:9]), int(name[14:21])
        assert (trace["otherData"]["rank"], trace["otherData"]["step"]) == (rank, step)
        assert trace["otherData"]["iteration"] == step
        spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        assert {event["pid"] for event in spans} == {rank}
        phases = {event["name"]: event for event in spans if event["cat"] == "host"}
        assert set(phases) == {"prepare grads", "update"}
        operations = [event for event in spans if event["cat"] != "host"]
        kinds = {event["name"] for event in operations}
        assert {"update_on_host", "update_on_device", "states_to_device", "states_to_host"} <= kinds
        begin = phases["update"]["ts"]
        for event in operations:  # one clock for the step's phases and its operations
            assert begin <= event["ts"]
            assert event["ts"] + event["dur"] <= begin + phases["update"]["dur"] + 1


def test_experts_are_reported_apart(megatron, tmp_path):
    layout = ["--global-batch-size", "4", "--num-experts", "2", "--expert-model-parallel-size", "2"]
    megatron.train(
        [*COMMON, *layout, "--tensorboard-dir", str(tmp_path), "--dos-trace-dir", str(tmp_path / "traces")],
        *(2, "dos", 5),
    )
    assert {"dos/update-seconds", "dos-experts/update-seconds"} <= set(scalars(tmp_path))
    names = {path.name for path in (tmp_path / "traces").iterdir()}
    assert {"rank00000-step0000005.json", "rank00000-step0000005-experts.json"} <= names


def test_a_training_that_looks_at_nothing_gets_nothing(megatron):
    run = megatron.train([*DP2, *HALF, "--log-interval", "100"], 2, "dos", STEPS)
    assert "deep optimizer states, iteration" not in run.log(0) + run.log(1)


def test_a_share_that_is_tuned_in_mid_run_changes_no_bit(megatron):
    tuned = megatron.train(DP2, 2, "dos", 12, prepare="virtual_gpu:tune")
    fixed = megatron.train(DP2 + HALF, 2, "dos", 12)
    assert_same_bits(tuned, fixed)
    moves = [line for line in tuned.log(0).splitlines() if "GPU share" in line and "->" in line]
    assert moves
    assert "a gain of" in moves[0]
    assert "GPU share" not in tuned.log(1), "one rank a node tells"
