# SPDX-License-Identifier: Apache-2.0
"""`megatron-dos calibrate`: measures once, keeps the result, and uses it only on the machine it was measured on."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import subprocess
import threading
import time

import megatron_trees
import pytest

from megatron_dos import cli
from megatron_dos.calibration import cache as calibration
from megatron_dos.calibration.cache import cache_file, cached_machine, fingerprint, store
from megatron_dos.calibration.worker import GPU_PHASES, HOST_PHASES, Sizes
from megatron_dos.commands import CommandError, calibrate
from megatron_dos.node import memory, topology
from megatron_dos.planning.machine import Machine, Source, load, preset

TINY = Sizes(update=1 << 14, copy_bytes=1 << 16, gpu_update=1 << 14, matmul=64, threads=1)
GPU_VALUES = (
    *("gpus", "gpu_memory", "gpu_update", "copy_latency", "matmul", "h2d_pageable"),
    *(f"{way}_{how}" for way in ("h2d", "d2h") for how in ("alone", "together")),
)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "megatron-dos"


@pytest.fixture(scope="module")
def really_measured() -> Machine:
    """What two ranks measure here, with tiny arrays."""
    return calibrate.measure(2, TINY, 0.02, preset("h200"), fingerprint())


@pytest.fixture
def measured() -> Machine:
    """A machine as it would be measured here."""
    return dataclasses.replace(preset("h200"), name="here", fingerprint=fingerprint())


@pytest.fixture
def measurements(monkeypatch, measured):
    """Puts a known result in the place of measuring; the list of measurements made, with their ranks."""
    made = []

    def measure(ranks, sizes, seconds, fallback, of):
        made.append(ranks)
        time.sleep(0.05)
        return dataclasses.replace(measured, fingerprint=of)

    monkeypatch.setattr(calibrate, "measure", measure)
    return made


def run_at_once(ranks: int, *arguments: str) -> list[int]:
    """The exit statuses of the command, run by several threads: a lock of a file holds off threads, too."""
    statuses: list[int] = []
    threads = [threading.Thread(target=lambda: statuses.append(cli.main(arguments))) for _ in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses


class TestMeasuring:
    @pytest.mark.slow
    def test_host_values_are_measured_and_the_rest_says_where_it_is_from(self, really_measured):
        for name in ("cpu_update_per_core", "cpu_update_max", "dram", "cpu_latency"):
            assert getattr(really_measured, name) > 0
            assert really_measured.sources[name].words.startswith("measured")
            assert getattr(really_measured, name) != getattr(preset("h200"), name)
        assert "2 ranks at once, 1 threads each" in really_measured.sources["cpu_update_max"].words
        assert really_measured.cores == topology.physical_cores()
        assert really_measured.host_memory == topology.node_memory()
        if calibration.gpu_count() == 0:
            for name in GPU_VALUES:
                assert really_measured.sources[name].preset == "h200"
                assert getattr(really_measured, name) == getattr(preset("h200"), name)

    def test_host_memory_moves_at_least_what_the_update_moves(self, really_measured):
        assert really_measured.dram >= 30 * really_measured.cpu_update_max

    def test_rates_are_sums_and_means_over_ranks(self):
        ranks = [{"rate": 1e9, "seconds": 1e-5, "h2d": 10e9, "d2h": 20e9, "host_memory": 500e9}] * 3
        results = dict.fromkeys((*HOST_PHASES, *GPU_PHASES), ranks)
        results["one_core"] = ranks[:1]
        results["both"] = [{"h2d": 8e9, "d2h": 9e9}] * 3
        about = {"has_gpu": True, "threads": 4, "gpus": 8, "gpu_memory": 80e9}
        found = calibrate._machine(results, about, 3, preset("h200"), "x")
        assert (found.cpu_update_per_core, found.cpu_update_max) == (1e9, 3e9)
        assert (found.h2d_alone, found.d2h_alone, found.h2d_together, found.d2h_together) == (10e9, 20e9, 8e9, 9e9)
        assert (found.gpus, found.gpu_memory, found.gpu_update, found.h2d_pageable) == (8, 80e9, 1e9, 1e9)
        assert found.dram == 1500e9  # update and copies at once moved the most
        assert found.matmul == 0.5e9
        assert not any(source.preset for source in found.sources.values())

    @pytest.mark.slow
    def test_every_phase_of_a_gpu_runs_on_the_stand_in_and_gives_all_values(self):
        code = """
import dataclasses, json, sys
from megatron_dos import cpu_emulation
cpu_emulation.activate()
from megatron_dos.calibration import lane_rates, worker
lane_rates.sleep_on_stream = lambda milliseconds: None
rank = worker._Rank(worker.Sizes(**json.loads(sys.argv[1])), has_gpu=True)
phases = (*worker.HOST_PHASES, *worker.GPU_PHASES)
results = {phase: worker._measure(rank.sampler(phase), 0.0, 0.0) for phase in phases}
print(json.dumps([rank.about(), results]))
"""
        done = megatron_trees.run_python(code, json.dumps(dataclasses.asdict(TINY)))
        assert done.returncode == 0, done.stderr
        about, results = json.loads(done.stdout.splitlines()[-1])
        assert min(value for figures in results.values() for value in figures.values()) > 0
        found = calibrate._machine(
            {phase: [figures] for phase, figures in results.items()}, about, 1, preset("h200"), "x"
        )
        assert not any(source.preset for source in found.sources.values())

    @pytest.mark.slow
    def test_rank_that_cannot_measure_says_why(self, monkeypatch):
        monkeypatch.setenv("MEGATRON_DOS_ISA", "abacus")
        with pytest.raises(CommandError, match=r"rank 0 cannot measure: .*abacus"):
            calibrate.Ranks(1, TINY)

    def test_rank_that_dies_is_told_with_its_last_words(self, monkeypatch):
        def dying(rank, ranks, errors):
            code = "import sys; sys.stdin.readline(); sys.exit('out of order')"
            pipe = subprocess.PIPE
            return subprocess.Popen(
                [calibrate.sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=errors, text=True
            )

        monkeypatch.setattr(calibrate, "_start", dying)
        with pytest.raises(CommandError, match="rank 0 cannot measure: it ended with status 1; out of order"):
            calibrate.Ranks(1, TINY)

    def test_sizes_leave_half_of_the_free_memory(self, monkeypatch):
        monkeypatch.setattr(memory, "available_host_memory", lambda: 8 << 30)
        sizes = calibrate.sizes_for(8, threads=3)
        assert sizes.threads == 3
        assert 8 * (48 * sizes.update) <= 4 << 30
        assert sizes.copy_bytes % 2**16 == 0
        assert calibrate.sizes_for(1).update == Sizes().update
        with pytest.raises(CommandError, match=r"8.00 GiB of free host memory are too little for 1,000 ranks"):
            calibrate.sizes_for(1000)


class TestKeeping:
    def test_machine_is_found_again_where_it_was_measured(self, measured, cache):
        assert cached_machine() is None
        path = store(measured)
        assert path.parent == cache
        assert cached_machine() == load(path) == measured
        assert [file.name for file in cache.iterdir()] == [path.name]

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("cpu_model", lambda: "another"),
            ("node_memory", lambda: 1 << 50),
            ("driver_version", lambda: "999.9"),
            ("_gpu_names", lambda: ["NVIDIA H100"]),
            ("RELEASE", "99.0"),
        ],
    )
    def test_another_machine_or_version_does_not_use_it(self, name, value, measured, monkeypatch):
        store(measured)
        monkeypatch.setattr(calibration, name, value)
        assert cached_machine() is None

    def test_other_allowed_cpus_do_not_use_it(self, measured, monkeypatch):
        store(measured)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(77)))
        assert cached_machine() is None

    def test_file_of_another_machine_under_this_name_is_not_used(self, measured):
        path = store(measured)
        path.write_text(dataclasses.replace(measured, fingerprint="other").as_json())
        assert cached_machine() is None

    def test_damaged_file_is_reported_and_not_used(self, measured, caplog):
        path = store(measured)
        path.write_text(path.read_text()[:100])
        with caplog.at_level(logging.WARNING):
            assert cached_machine() is None
        assert "megatron-dos calibrate --again" in caplog.text

    def test_relative_cache_folder_is_ignored(self, monkeypatch, tmp_path):
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert cache_file("x").parent == tmp_path / ".cache" / "megatron-dos"


class TestCommand:
    def test_second_run_measures_nothing_and_again_does(self, measurements, capsys):
        assert cli.main(["calibrate", "--ranks", "3"]) == 0
        first = capsys.readouterr().out
        assert "cpu_update_max" in first
        assert "kept in " in first
        assert max(map(len, first.splitlines()[2:])) <= 120
        assert cli.main(["calibrate"]) == 0
        assert "measured before, whatever the options; --again" in capsys.readouterr().err
        assert measurements == [3]
        assert cli.main(["calibrate", "--again"]) == 0
        assert measurements == [3, max(calibration.gpu_count(), 1)]

    def test_of_eight_ranks_that_start_at_once_one_measures(self, measurements, measured):
        assert run_at_once(8, "calibrate") == [0] * 8
        assert len(measurements) == 1
        assert cached_machine() == measured

    def test_of_eight_ranks_that_measure_again_one_measures(self, measured, monkeypatch):
        store(measured)
        waiting, lock, made = threading.Semaphore(0), fcntl.flock, []

        def flock(*arguments):
            waiting.release()
            lock(*arguments)

        def measure(*_):
            for _ in range(8):  # until all have asked for the lock
                assert waiting.acquire(timeout=60)
            made.append(dataclasses.replace(measured, gpus=len(made) + 1))
            return made[-1]

        monkeypatch.setattr(fcntl, "flock", flock)
        monkeypatch.setattr(calibrate, "measure", measure)
        assert run_at_once(8, "calibrate", "--again") == [0] * 8
        assert len(made) == 1
        assert cached_machine() == made[0]

    def test_result_is_json_that_machine_takes(self, measurements, measured, tmp_path, capsys):
        path = tmp_path / "node.json"
        assert cli.main(["calibrate", "--json", "--output", str(path)]) == 0
        assert json.loads(capsys.readouterr().out) == json.loads(path.read_text())
        assert load(path) == measured
        assert cli.main(["simulate", "--parameters", "1e9", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["machine"] == measured.name
        assert "no --machine: this machine, as it was measured" in found["notes"]

    @pytest.mark.parametrize("command", [["simulate", "--parameters", "1e9"], ["plan", "--model", "7b", "--gpus", "8"]])
    def test_machine_of_which_the_host_alone_was_measured_is_taken_only_where_it_is_named(
        self, command, measurements, measured, monkeypatch, capsys
    ):
        sources = {name: Source(str(measured.sources[name]), "rtx4090") for name in GPU_VALUES}
        half = dataclasses.replace(measured, cores=2, sources={**measured.sources, **sources})
        monkeypatch.setattr(calibrate, "measure", lambda *_: half)
        assert cli.main(["calibrate"]) == 0
        about = "host measured, GPU values of preset rtx4090"
        assert about in capsys.readouterr().out
        assert cli.main([*command, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        name = found["machine"] if command[0] == "simulate" else found["machine"]["name"]
        assert name == "h100-pcie5"
        kept = str(cache_file(fingerprint()))
        assert any("of this one the host alone was measured" in note and kept in note for note in found["notes"])
        assert cli.main([*command, "--machine", kept]) == 0
        assert f"here ({about})" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--ranks", "0"], "--ranks 0: give 1 to 1024"),
            (["--threads", "100000"], "--threads 100000: give 1 to"),
            (["--seconds", "0"], "--seconds 0: give more than 0"),
            (["--seconds", "nan"], "--seconds nan: give more than 0"),
            (["--preset", "abacus"], "--preset: no machine is called 'abacus'"),
            (["--output", "/nowhere/x.json"], "there is no folder /nowhere"),
            (["--output", "/proc/x.json"], "--output /proc/x.json: cannot write to /proc"),
        ],
    )
    def test_wrong_options_are_refused_before_anything_is_measured(self, arguments, message, measurements, capsys):
        assert cli.main(["calibrate", *arguments]) == 2
        err = capsys.readouterr().err
        assert message in err
        assert err.count("\n") == 1
        assert not measurements

    def test_output_that_is_there_stays(self, measurements, tmp_path, capsys):
        path = tmp_path / "node.json"
        path.write_text("mine")
        assert cli.main(["calibrate", "--output", str(path)]) == 2
        assert "is there already; name another file" in capsys.readouterr().err
        assert path.read_text() == "mine"
        assert not measurements

    def test_output_that_fails_in_the_end_is_one_clear_error(self, measurements, monkeypatch, tmp_path, capsys):
        def full(*_, **__):
            raise OSError("disk full")

        monkeypatch.setattr(calibrate, "new_file", full)
        assert cli.main(["calibrate", "--output", str(tmp_path / "node.json")]) == 2
        assert capsys.readouterr().err == f"megatron-dos: --output {tmp_path / 'node.json'}: disk full\n"
        assert measurements, "the result is in the cache"
        assert cached_machine() is not None

    def test_cache_that_cannot_be_written_is_one_clear_error(self, measurements, monkeypatch, tmp_path, capsys):
        blocked = tmp_path / "file"
        blocked.write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
        assert cli.main(["calibrate"]) == 2
        assert "Set XDG_CACHE_HOME to a folder that can be written" in capsys.readouterr().err
        assert not measurements

    def test_lock_is_free_again_after_a_failure(self, measurements):
        with contextlib.suppress(RuntimeError), calibration.locked(fingerprint()):
            raise RuntimeError
        assert cli.main(["calibrate"]) == 0
