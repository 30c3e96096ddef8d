# SPDX-License-Identifier: Apache-2.0
"""The end-to-end harness itself: runs repeat to the bit, differences are found, failures arrive with their reason."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from harness import (
    HERE,
    LAYOUTS,
    PRECISIONS,
    ROOT,
    TINY,
    CaseFailure,
    Megatron,
    Result,
    assert_same_bits,
    differences,
    largest_relative_difference,
    same_bits,
)

THIS = "test_harness"
DP2_RANKS, DP2 = LAYOUTS["dp2"]
BF16_DP2 = TINY + DP2 + PRECISIONS["bf16"]


# ---- Functions that the ranks run ------------------------------------------------------------------------------------


def rank_and_environment(word: str) -> dict[str, object]:
    names = ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "WORD")
    return {
        "rank": int(os.environ["RANK"]),
        "word": word,
        "environment": {name: os.environ.get(name) for name in names},
        "megatron": "megatron.training" in sys.modules,
        "threads": torch.get_num_threads(),
        "process": os.getpid(),
    }


def rank_1_fails() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("the shoe pinches here")
    time.sleep(60)


def rank_1_is_killed() -> None:
    if os.environ["RANK"] == "1":
        print("about to go", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def hangs_in_a_named_place() -> None:
    time.sleep(60)


def watch(point: str, model: object, optimizer: object, args: object) -> dict[str, object] | None:
    if point == "step":
        return {"iteration": args.curr_iteration + 1, "lr": optimizer.param_groups[0]["lr"]}
    return {"point": point, "weight": next(iter(model[0].parameters()))}


# ---- Trainings -------------------------------------------------------------------------------------------------------


def train(megatron: Megatron, optimizer: str, **options: object) -> Result:
    return megatron.train(BF16_DP2, DP2_RANKS, optimizer, iterations=5, **options)


def test_two_identical_runs_are_bit_equal_and_complete(megatron):
    # A different time limit makes it a different case, which runs anew.
    one, other = train(megatron, "stock"), train(megatron, "stock", timeout_s=119)
    assert one is not other
    assert_same_bits(one, other)
    assert [iteration.iteration for iteration in one.of_rank[0].iterations] == [1, 2, 3, 4, 5]
    assert len(set(one.losses)) == 5
    assert one.losses[-1] < one.losses[0]
    assert all(norm > 0 for norm in one.grad_norms)
    assert one.skipped == [False] * 5
    assert_states_cover_the_model(one)


def assert_states_cover_the_model(run: Result) -> None:
    """The ranges of the ranks of a data-parallel group tile every param, with masters that round to the weights."""
    assert len(run.of_rank[0].weights) == 28
    for name, weight in run.of_rank[0].weights.items():
        assert same_bits(weight, run.of_rank[1].weights[name])
        parts = [rank.states[name] for rank in run.of_rank if name in rank.states]
        ends = sorted((part["start"], part["end"]) for part in parts)
        assert [start for start, _ in ends] == [0] + [end for _, end in ends[:-1]]
        assert ends[-1][1] == weight.numel()
        for part in parts:
            assert part["step"] == 5
            owned = weight.view(-1)[part["start"] : part["end"]]
            assert same_bits(part["param"].to(weight.dtype), owned)
            assert part["exp_avg"].shape == part["exp_avg_sq"].shape == owned.shape


def test_equal_cases_run_once(megatron):
    assert train(megatron, "stock") is train(megatron, "stock")


def test_stock_and_numpy_adam_agree_to_rounding_but_not_to_the_bit(megatron):
    stock, numpy = train(megatron, "stock"), train(megatron, "numpy")
    assert largest_relative_difference(numpy.losses, stock.losses) < 1e-3
    assert largest_relative_difference(numpy.grad_norms, stock.grad_norms) < 1e-3
    assert {state["step"] for rank in numpy.of_rank for state in rank.states.values()} == {5}
    found = differences(numpy, stock)
    assert any("weight" in one or "param" in one for one in found), "a comparison that sees no rounding sees nothing"


def test_seeds_change_everything(megatron):
    found = differences(train(megatron, "stock"), train(megatron, "stock", seed=1235))
    assert sum("weight " in one for one in found) >= 20


def test_the_flag_is_what_makes_the_optimizer_ours(megatron):
    assert "deep optimizer states" in train(megatron, "dos").log()
    for other in ("stock", "numpy"):
        assert "deep optimizer states" not in train(megatron, other).log()


def test_a_resumed_run_equals_the_unbroken_one(megatron, tmp_path):
    train(megatron, "numpy", save=tmp_path)
    resumed = megatron.train(BF16_DP2, DP2_RANKS, "numpy", iterations=8, load=tmp_path)
    unbroken = megatron.train(BF16_DP2, DP2_RANKS, "numpy", iterations=8)
    assert [one.iteration for one in resumed.of_rank[0].iterations] == [6, 7, 8]
    assert resumed.losses == unbroken.losses[5:]
    assert not [one for one in differences(resumed, unbroken) if one.startswith("rank")]
    loaded = megatron.train(BF16_DP2, DP2_RANKS, "numpy", iterations=0, load=tmp_path)
    assert loaded.of_rank[0].iterations == []
    assert not [one for one in differences(loaded, train(megatron, "numpy")) if one.startswith("rank")]


def test_hooks_see_every_point_in_every_rank(megatron):
    run = train(megatron, "stock", inspect=f"{THIS}:watch")
    for rank in run.of_rank:
        assert [one["point"] for one in rank.inspected["start"] + rank.inspected["end"]] == ["start", "end"]
        assert [one["iteration"] for one in rank.inspected["step"]] == [1, 2, 3, 4, 5]
        assert len({one["lr"] for one in rank.inspected["step"]}) == 5
        before, after = rank.inspected["start"][0]["weight"], rank.inspected["end"][0]["weight"]
        assert not same_bits(before, after)


def test_the_command_line_trains_like_the_harness(megatron, tmp_path):
    arguments = [*BF16_DP2, "--seed", "1234", "--train-iters", "200", "--exit-interval", "5"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
         "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1",
         "-m", "megatron_dos.cpu_emulation", str(ROOT / "scripts" / "pretrain_gpt.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("cpu_emulation: added the arguments --distributed-backend gloo") == 1
    printed = [line.split("lm loss: ")[1].split(" ")[0] for line in done.stdout.splitlines() if "lm loss: " in line]
    losses = train(megatron, "stock").losses
    assert printed[0] == f"{losses[0]:.6E}"
    assert printed[2:] == [f"{loss:.6E}" for loss in losses[2:]]  # Megatron prints the mean of the first two


# ---- Calls and failures ----------------------------------------------------------------------------------------------


def test_a_function_runs_in_every_rank(megatron):
    run = megatron.call(f"{THIS}:rank_and_environment", ranks=2, environment={"WORD": "here"}, word="there")
    assert [value["rank"] for value in run.values] == [0, 1]
    for rank, value in enumerate(run.values):
        assert value["word"] == "there"
        assert value["environment"] == {
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "WORD": "here",
        }
        assert value["megatron"]
        assert value["threads"] == 1
    again = megatron.call(f"{THIS}:rank_and_environment", word="there")
    assert again.values[0]["environment"]["WORD"] is None
    assert again.values[0]["process"] not in {value["process"] for value in run.values}


def test_the_traceback_of_a_failing_rank_arrives_and_its_peers_end(megatron):
    begin = time.monotonic()
    with pytest.raises(CaseFailure, match=r"(?s)rank 1 failed.*rank_1_fails.*ValueError: the shoe pinches here"):
        megatron.call(f"{THIS}:rank_1_fails", ranks=2)
    assert time.monotonic() - begin < 30


def test_a_killed_rank_is_reported_with_its_output(megatron):
    with pytest.raises(CaseFailure, match=r"(?s)exit codes \[None, -9\].*about to go"):
        megatron.call(f"{THIS}:rank_1_is_killed", ranks=2)


def test_a_hanging_rank_is_ended_and_says_where_it_hung(megatron):
    with pytest.raises(CaseFailure, match=r"(?s)not finished after 1\.5 s.*hangs_in_a_named_place"):
        megatron.call(f"{THIS}:hangs_in_a_named_place", ranks=2, timeout_s=1.5)


def test_megatron_refusing_an_argument_is_a_failure_with_its_words(megatron):
    with pytest.raises(CaseFailure, match="unrecognized arguments: --no-such-argument"):
        megatron.train([*BF16_DP2, "--no-such-argument"], 1, "stock", iterations=1)


def test_an_unknown_optimizer_is_refused(megatron):
    with pytest.raises(ValueError, match="stock, numpy, dos"):
        megatron.train(BF16_DP2, DP2_RANKS, "adam")


def test_without_megatron_the_message_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("harness.importlib.util.find_spec", lambda name: None)
    monkeypatch.delenv("MEGATRON_LM", raising=False)
    with Megatron(tmp_path) as bare, pytest.raises(CaseFailure, match="`make test`"):
        bare.train(BF16_DP2, DP2_RANKS, "stock")


def test_ranks_and_server_end_with_their_parent(tmp_path):
    """A killed pytest must not leave processes behind."""
    code = (
        "import sys; from pathlib import Path; from harness import Megatron\n"
        "m = Megatron(Path(sys.argv[1])); m.call('test_harness:rank_and_environment', word='')\n"
        "print(m._server.pid, flush=True)\n"
        "m.call('test_harness:hangs_in_a_named_place', ranks=2)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)])},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        server = int(parent.stdout.readline())
        end = time.monotonic() + 30
        while len(list((tmp_path / "case1").glob("*.log"))) < 2 and time.monotonic() < end:
            time.sleep(0.05)
        ranks = children_of(server)
        assert len(ranks) == 2
    finally:
        parent.kill()
        parent.communicate()
    end = time.monotonic() + 30
    while any(is_running(pid) for pid in [server, *ranks]) and time.monotonic() < end:
        time.sleep(0.05)
    assert not [pid for pid in [server, *ranks] if is_running(pid)]


def children_of(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
