# SPDX-License-Identifier: Apache-2.0
"""Runs checks, each in a process of its own, without each of them importing torch.

    with Server(folder) as server:
        outcome = server.run("events", SOFTWARE_GPU_DELAY_US="0")

A process imports torch on the software GPU, which it does not use, and forks for each check.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
LIMIT_S = 300


@dataclass(frozen=True)
class Outcome:
    """How a check ended.

    Attributes:
        code: 0; of a check that raised, 1; of one that was killed, by a crash or at the time limit, minus the signal.
        result: what it returned.
        log: what it wrote.
    """

    code: int
    result: Any
    log: str


class Server:
    """Use `with`, or `close`.

    Args:
        folder: with the libraries, see `software_gpu.build`.
    """

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-P", "-m", "software_gpu.server", str(folder)]
        path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def run(
        self, check: str, mutation: str = "", limit_s: float = LIMIT_S, **environment: str
    ) -> Outcome:
        """Run one check of checks.py.

        Args:
            check: its name, or with arguments as "name:one:two".
            mutation: the name of one in mutations.py, to be made before.
            limit_s: after which it is killed.
            environment: of its process.
        """
        asked = {"check": check, "mutation": mutation, "limit_s": limit_s, "environment": environment}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the server of the software GPU has ended")
        return Outcome(**json.loads(answer))


def _serve(folder: Path) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import software_gpu

    library = software_gpu.activate(folder)
    from software_gpu import checks, mutations

    for line in sys.stdin:
        asked = json.loads(line)
        with tempfile.TemporaryFile() as log, tempfile.TemporaryFile() as result:
            child = os.fork()
            if child == 0:
                _run(asked, checks, mutations, library, log.fileno(), result.fileno())
            code = _wait(child, asked["limit_s"])
            texts = []
            for file in (log, result):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        found = {"code": code, "result": json.loads(texts[1]) if code == 0 else None, "log": texts[0]}
        answers.write(json.dumps(found) + "\n")
        answers.flush()


def _run(asked: Mapping[str, Any], checks: Any, mutations: Any, library: Any, log: int, result: int) -> None:
    code = 1
    try:
        for stream in (1, 2):
            os.dup2(log, stream)
        faulthandler.enable()
        os.environ.update(asked["environment"])
        if asked["mutation"]:
            code = mutations.NOT_PLANTED
            mutations.make(asked["mutation"])
            code = 1
        name, *arguments = asked["check"].split(":")
        os.write(result, json.dumps(checks.CHECKS[name](library, *arguments)).encode())
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _wait(child: int, limit_s: float) -> int:
    end = time.monotonic() + limit_s
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            end += 1e9
        time.sleep(0.01)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
