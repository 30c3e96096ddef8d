# SPDX-License-Identifier: Apache-2.0
"""A refused training: one message on one rank, no traceback of Python's, status 2 on every rank, through torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import LAYOUTS, PRECISIONS, TINY
from repository import ROOT

PRETRAIN = """
import runpy, sys
{preparation}
sys.argv = ["pretrain_gpt.py", *sys.argv[1:]]
from megatron_dos import cpu_emulation
sys.exit(cpu_emulation.main(["{script}", *sys.argv[1:]]))
"""
TOO_LITTLE = """
import megatron_dos.node.memory
megatron_dos.node.memory.available_host_memory = lambda: 1000
"""
UNSAFE = """
import megatron_dos.arguments
megatron_dos.arguments.end_in_one_message = lambda: None
"""


def launch(tmp_path: Path, arguments: list[str], preparation: str = "") -> subprocess.CompletedProcess[str]:
    program = tmp_path / "pretrain.py"
    program.write_text(PRETRAIN.format(preparation=preparation, script=ROOT / "scripts" / "pretrain_gpt.py"))
    ranks, layout = LAYOUTS["dp2"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(program), *TINY, *layout, *PRECISIONS["bf16"], "--train-iters", "3", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def assert_one_message(finished: subprocess.CompletedProcess[str], words: str) -> None:
    assert finished.stderr.count("megatron-dos: ") == 1, finished.stderr[-6000:]
    assert re.search(rf"^megatron-dos: [^\n]*{words}", finished.stderr, re.MULTILINE), finished.stderr[-6000:]
    # torchrun's own report stays, with the status of each rank; its own traceback is of its own files.
    assert finished.returncode == 1
    assert not re.search(r"File [^\n]*megatron_dos/", finished.stderr), "a traceback of ours"
    statuses = re.findall(r"exitcode *: *(-?\d+)", finished.stderr)
    assert len(statuses) >= 2  # of both ranks, and of the first of them once more
    assert set(statuses) == {"2"}


def test_refused_arguments_end_in_one_message(tmp_path):
    finished = launch(tmp_path, ["--use-deep-optimizer-states", "--dos-gpu-share", "7"])
    assert_one_message(finished, "--dos-gpu-share 7")


def test_states_without_memory_end_in_one_message(tmp_path):
    finished = launch(tmp_path, ["--use-deep-optimizer-states"], TOO_LITTLE)
    assert_one_message(finished, "needs .* GiB of host memory")


def test_without_the_hook_every_rank_ends_in_a_traceback(tmp_path):
    """The proof that the tests above would notice."""
    finished = launch(tmp_path, ["--use-deep-optimizer-states", "--dos-gpu-share", "7"], UNSAFE)
    with pytest.raises(AssertionError):
        assert_one_message(finished, "--dos-gpu-share 7")
    assert finished.stderr.count("Traceback") >= 2
