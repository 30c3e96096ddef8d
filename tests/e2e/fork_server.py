# SPDX-License-Identifier: Apache-2.0
"""The server process of the end-to-end tests: imports torch and Megatron once, forks the ranks of each case.

A rank that starts from scratch spends most of its time on imports; a fork of this process has them. The harness talks
to the server in lines of JSON: a case on stdin, its outcome on stdout. The server itself must stay free of threads and
of anything that a fork cannot inherit, so it computes nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import importlib.util
import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PR_SET_PDEATHSIG = 1
POLL_S = 0.02
GRACE_S = 0.5  # for ranks to write where they hang


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def import_megatron() -> None:
    """Everything that ranks need, on the CPU."""
    from megatron_dos import cpu_emulation

    cpu_emulation.activate()
    cpu_emulation.adapt_megatron()
    spec = importlib.util.spec_from_file_location("pretrain_gpt", ROOT / "scripts" / "pretrain_gpt.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["pretrain_gpt"] = module
    spec.loader.exec_module(module)
    from megatron.core.datasets import utils

    utils.compile_helpers()
    for name in ("megatron_dos.optimizer", "numpy_adam", "rank_main"):
        importlib.import_module(name)


def free_port() -> int:
    """A port that nobody has, from below the range in which the kernel gives ports to outgoing connections."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def start_rank(case: dict[str, Any], rank: int, port: int) -> int:
    """Fork one rank; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()  # its own process group, which includes the workers of its DataLoaders
        die_with_parent()
        folder = Path(case["folder"])
        log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (1, 2):
            os.dup2(log, stream)
        faulthandler.register(signal.SIGUSR1)
        launched = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(case["ranks"]),
            "LOCAL_WORLD_SIZE": str(case["ranks"]),
        }
        os.environ.update(launched | case["environment"])
        try:
            sys.modules["rank_main"].run(case, rank)
            code = 0
        except BaseException:
            text = traceback.format_exc()
            print(text, file=sys.stderr, flush=True)
            # Whole or not at all: this rank may be ended at any moment, as another has failed.
            unfinished = folder / f"rank{rank}.error.unfinished"
            unfinished.write_text(f"{time.monotonic()}\n{text}")
            unfinished.replace(folder / f"rank{rank}.error")
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def signal_groups(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number)


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """Run the ranks to their end, or to the end of the first that fails, or to the time limit."""
    start = time.monotonic()
    port = free_port()
    pids = {start_rank(case, rank, port): rank for rank in range(case["ranks"])}
    running, codes, timed_out = set(pids), {}, False
    while running:
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.discard(pid)
                codes[pids[pid]] = os.waitstatus_to_exitcode(status)
        timed_out = time.monotonic() - start > case["timeout_s"]
        if running and timed_out:
            signal_groups(running, signal.SIGUSR1)  # faulthandler: each rank writes where it is
            time.sleep(GRACE_S)
        if running and (timed_out or any(codes.values())):
            signal_groups(running, signal.SIGKILL)
            for pid in running:
                os.waitpid(pid, 0)
            break
        time.sleep(POLL_S)
    signal_groups(set(pids), signal.SIGKILL)  # what ranks have left behind
    codes |= {pids[pid]: None for pid in running}
    return {
        "codes": [codes[rank] for rank in range(case["ranks"])],
        "timed_out": bool(running) and timed_out,
        "seconds": time.monotonic() - start,
    }


def main() -> None:
    die_with_parent()
    # Answers go to the real stdout; whatever else prints must not be taken for one.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    try:
        import_megatron()
    except BaseException:
        answer(error=traceback.format_exc())
        return
    answer(ready=True)
    for line in sys.stdin:
        answer(**run_case(json.loads(line)))


if __name__ == "__main__":
    main()
