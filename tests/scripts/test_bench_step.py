# SPDX-License-Identifier: Apache-2.0
"""`make bench-step` runs, measures what it says, and its exit status is its verdict. Never how fast anything is."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import bench_step
import pytest
from bench_step import CONTENDERS, FUSED, NORMS, ONE_BY_ONE, OURS, OVERLAPPED, STOCK

TINY = ["--layers", "2", "--hidden", "64", "--heads", "4", "--vocabulary", "512", "--positions", "64", "--rounds", "4"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench-step")
    command = [
        sys.executable,
        bench_step.__file__,
        *TINY,
        "--threads",
        "1",
        "--results",
        str(folder),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False), folder


def rows_of(folder: Path) -> list[dict]:
    with (folder / "step.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_every_contender_is_measured_with_every_kind_of_grads(run):
    done, folder = run
    assert done.returncode in (0, 1), done.stderr
    rows = rows_of(folder)
    assert [(row["grads"], row["what"]) for row in rows] == [(g, c.name) for g in NORMS for c in CONTENDERS]
    for row in rows:
        assert row["samples"] == ("3" if row["what"] == STOCK else "4")
        assert 0 < float(row["q1_ms"]) <= float(row["median_ms"]) <= float(row["q3_ms"])
        assert row["times_ours"] == "1.000" if row["what"] == OURS else float(row["times_ours"]) > 0
    assert {row["parameters"] for row in rows} == {"136960"}


def test_no_contender_is_given_a_slower_kernel_than_megatron_gives_it(run):
    kernels = {row["what"]: row["kernel"] for row in rows_of(run[1])}
    assert kernels == {
        OURS: "cpp_adam",
        OVERLAPPED: "torch, fused",
        ONE_BY_ONE: "torch, fused",
        STOCK: "torch, not fused",
        FUSED: "torch, fused",
    }


def test_memory_is_what_each_optimizer_keeps(run):
    """Megatron's offloading has host grads besides the states; the stock optimizer has all on the device."""
    found = {row["what"]: (row["host_bytes_per_param"], row["device_bytes_per_param"]) for row in rows_of(run[1])}
    assert found[OURS] == ("12.00", "0.00")
    assert found[OVERLAPPED] == found[ONE_BY_ONE] == ("16.00", "0.00")
    assert found[STOCK] == ("0.00", "12.00")
    assert all(float(row["rss_bytes_per_param"]) > 10 for row in rows_of(run[1]))


def test_the_report_holds_the_verdict_and_the_exit_status_follows_it(run):
    done, folder = run
    text = (folder / "step.md").read_text()
    assert text in done.stdout
    assert (done.returncode == 1) == ("NOT KEPT" in text)
    assert text.count("promised") == len(NORMS) + 1
    assert "<svg" in (folder / "step.svg").read_text()


def rows(overlapped: float, one_by_one: float, rss: float) -> list[dict]:
    """Rows with these times over ours, and bytes of ours where both rivals take 16."""
    times = {OURS: 1.0, OVERLAPPED: overlapped, ONE_BY_ONE: one_by_one}
    return [
        {
            "grads": "some",
            "what": what,
            "median_ms": str(100 * ratio),
            **dict.fromkeys(("times_ours", "times_ours_q1", "times_ours_q3"), str(ratio)),
            "rss_bytes_per_param": str(rss if what == OURS else 16.0),
        }
        for what, ratio in times.items()
    ]


@pytest.mark.parametrize(
    ("case", "kept"),
    [
        ((1.3, 1.4, 12.8), [True, True]),
        ((1.5, 1.29, 12.8), [False, True]),  # the faster rival counts
        ((1.29, 1.5, 12.8), [False, True]),
        ((1.3, 1.4, 12.9), [True, False]),
    ],
)
def test_a_promise_is_kept_against_the_better_rival_or_not_at_all(case, kept):
    assert [each for each, _ in bench_step.verdict(rows(*case))] == kept


def test_without_a_file_there_is_no_report(tmp_path):
    with pytest.raises(SystemExit, match=r"step\.csv is not there"):
        bench_step.main(["--report-only", "--results", str(tmp_path)])
