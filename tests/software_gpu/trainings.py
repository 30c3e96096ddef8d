# SPDX-License-Identifier: Apache-2.0
"""Trains real Megatron on the software GPU, each rank on one of its own, and gives the results of tests/e2e."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fork_server import free_port
from harness import PLANNED_ITERATIONS, Result, _tail

from software_gpu.mutations import NOT_PLANTED

ROOT = Path(__file__).resolve().parents[2]
PATH = (ROOT, ROOT / "tests", ROOT / "tests" / "e2e", ROOT / "scripts")
ARGUMENTS = [
    *("--transformer-impl", "local", "--no-persist-layer-norm", "--no-gradient-accumulation-fusion"),
    *("--no-masked-softmax-fusion", "--no-bias-gelu-fusion", "--no-bias-swiglu-fusion", "--no-bias-dropout-fusion"),
    "--no-rope-fusion",
]
"""What needs Transformer Engine, Apex or compiled kernels is left out."""

__all__ = ["train"]


def train(
    libraries: Path,
    folder: Path,
    arguments: Sequence[str],
    ranks: int,
    optimizer: str,
    iterations: int,
    limit_s: float = 300,
    mutation: str = "",
    **environment: str,
) -> Result:
    """Train, as `Megatron.train` of tests/e2e/harness.py does it on the CPU.

    Args:
        libraries: what `software_gpu.build` gave.
        folder: for the results and logs; made here.
        mutation: the name of one in mutations.py, to be made before.
        environment: of the ranks.

    Raises:
        AssertionError: a rank has failed, or the time is up.
        RuntimeError: the mutation could not be made.
    """
    folder.mkdir(parents=True)
    full = [*arguments, *ARGUMENTS, "--seed", "1234", "--train-iters", str(PLANNED_ITERATIONS)]
    full += ["--exit-interval", str(iterations)]
    full += ["--use-deep-optimizer-states"] if optimizer == "dos" else []
    case = {
        **{"kind": "train", "arguments": full, "ranks": ranks, "optimizer": optimizer, "iterations": iterations},
        **{"inspect": "software_gpu.observed:counts", "prepare": ["software_gpu.observed:count"]},
        **{"keep_state": True, "python_path": []},
        **{"folder": str(folder), "libraries": str(libraries), "mutation": mutation},
    }
    (folder / "case.json").write_text(json.dumps(case))
    launched = {
        **{"PYTHONPATH": os.pathsep.join(map(str, PATH)), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        **{"PYTHONWARNINGS": "ignore", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
        **{"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)},
    }
    running, began = [], time.monotonic()
    for rank in range(ranks):
        with (folder / f"rank{rank}.log").open("w") as log:
            env = {**os.environ, **launched, "RANK": str(rank), **environment}
            command = [sys.executable, "-P", "-m", "software_gpu.megatron_rank", str(folder / "case.json")]
            running.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
    try:
        while any(one.poll() is None for one in running) and not any(one.poll() for one in running):
            if time.monotonic() > began + limit_s:
                for one in running:
                    one.send_signal(10)  # SIGUSR1: each says where it is
                time.sleep(1)
                break
            time.sleep(0.1)
    finally:
        for one in running:
            one.kill()
            one.wait()
    codes = [one.returncode for one in running]
    if any(codes):
        logs = "\n".join(f"-- rank {rank}:\n{_tail(folder / f'rank{rank}.log')}" for rank in range(ranks))
        if NOT_PLANTED in codes:
            raise RuntimeError(logs)
        raise AssertionError(f"exit codes {codes}\n{logs}")
    return Result(folder, ranks, time.monotonic() - began)
