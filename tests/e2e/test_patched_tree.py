# SPDX-License-Identifier: Apache-2.0
"""What a user does: patch a Megatron tree, launch its training script with the flag, unpatch.

With MEGATRON_LM set to a checkout, a copy of that checkout is used, and its own pretrain_gpt.py; otherwise a tree made
of pip's package, which comes without one, with scripts/pretrain_gpt.py.
"""

import os
import subprocess
import sys

import megatron_trees
import pytest
from harness import LAYOUTS, PRECISIONS, TINY
from repository import ROOT

from megatron_dos.cli import main as megatron_dos

CHECKOUT = os.environ.get("MEGATRON_LM")


def git(tree, *arguments):
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.invalid", "-c", "commit.gpgsign=false"]
    finished = subprocess.run(["git", *identity, *arguments], cwd=tree, capture_output=True, text=True, check=True)
    return finished.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A Megatron tree under git, everything committed."""
    # users have spaces in their paths
    target = megatron_trees.trainable_tree(tmp_path_factory.mktemp("tree") / "Megatron LM")
    (target / ".gitignore").write_text("__pycache__/\n*.so\nbuild/\n")
    git(target, "init", "-q")
    git(target, "add", "-A")
    git(target, "commit", "-q", "-m", "the tree as it comes")
    return target


def launch(tree, layout, port):
    ranks, arguments = LAYOUTS[layout]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--master-port", str(port), "-m", "megatron_dos.cpu_emulation", str(tree / "pretrain_gpt.py")]
    command += TINY + arguments + PRECISIONS["bf16"] + ["--train-iters", "3", "--use-deep-optimizer-states"]
    paths = os.pathsep.join([str(tree), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


# One launch in CI: the layouts themselves are tested through the fork server, at a tenth of the time.
@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2"] if CHECKOUT else ["tp2"])
def test_a_patched_tree_trains_and_unpatching_leaves_no_trace(tree, layout):
    assert megatron_dos(["patch", str(tree)]) == 0
    changed = git(tree, "diff", "--stat").strip().splitlines()[:-1]
    assert 1 <= len(changed) <= 4
    finished = launch(tree, layout, 29500 + os.getpid() % 500)
    assert finished.returncode == 0, (finished.stdout + finished.stderr)[-4000:]
    assert "deep optimizer states: rank 0 owns" in finished.stdout
    assert finished.stdout.count("lm loss:") == 3
    assert megatron_dos(["unpatch", str(tree)]) == 0
    assert git(tree, "status", "--porcelain") == ""


def test_an_unpatched_tree_does_not_know_the_flag(tree):
    code = "import sys; from megatron.training.arguments import parse_args; parse_args()"
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, "--use-deep-optimizer-states"],
        env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "unrecognized arguments: --use-deep-optimizer-states" in finished.stderr
