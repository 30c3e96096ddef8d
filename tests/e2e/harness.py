# SPDX-License-Identifier: Apache-2.0
"""Real Megatron trainings for the end-to-end tests, a few seconds each.

    ranks, layout = LAYOUTS["tp2"]
    run = megatron.train(TINY + layout + PRECISIONS["bf16"], ranks, optimizer="dos", iterations=20)
    reference = megatron.train(TINY + layout + PRECISIONS["bf16"], ranks, optimizer="numpy", iterations=20)
    assert_same_bits(run, reference)

`megatron` is the session's fixture (conftest.py): a `Megatron`, which owns a server process (fork_server.py) that has
torch and Megatron imported and forks the ranks of every case. Ranks run Megatron's own training loop on the CPU and
write down their exact numbers (rank_main.py).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import json
import math
import os
import select
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
START_LIMIT_S = 180
CASE_LIMIT_S = 120
PLANNED_ITERATIONS = 200
"""--train-iters of every case, which then exits earlier: schedules and data do not depend on where a case stops."""

# A GPT of two layers. The padded vocabulary is the same at every tensor-parallel size: Megatron leaves padding rows
# uninitialised. The learning rate changes at every step.
TINY = shlex.split(
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 2 "
    "--lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2 "
    "--weight-decay 0.1 --clip-grad 1.0 --adam-beta2 0.95 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 511 --split 100,0,0 --num-workers 0 "
    "--eval-iters 0 --eval-interval 1000 --log-interval 1 --distributed-timeout-minutes 1 "
    "--use-distributed-optimizer"
)

LAYOUTS: dict[str, tuple[int, list[str]]] = {
    name: (ranks, shlex.split(arguments))
    for name, (ranks, arguments) in {
        "dp1": (1, "--global-batch-size 4"),
        "dp2": (2, "--global-batch-size 4"),
        "dp4": (4, "--global-batch-size 8"),
        "tp2": (2, "--global-batch-size 4 --tensor-model-parallel-size 2"),
        "tp2-sequence-parallel": (2, "--global-batch-size 4 --tensor-model-parallel-size 2 --sequence-parallel"),
        "pp2": (2, "--global-batch-size 4 --pipeline-model-parallel-size 2"),
        "vpp2": (
            2,
            "--global-batch-size 4 --num-layers 4 --pipeline-model-parallel-size 2 "
            "--num-layers-per-virtual-pipeline-stage 1",
        ),
        "tp2-dp2": (4, "--global-batch-size 4 --tensor-model-parallel-size 2"),
        "cp2": (2, "--global-batch-size 4 --context-parallel-size 2"),
        "ep2": (2, "--global-batch-size 4 --num-experts 2 --expert-model-parallel-size 2"),
        "micro-batches": (2, "--global-batch-size 16"),
        "overlap-grad-reduce": (2, "--global-batch-size 4 --overlap-grad-reduce"),
        "overlap-buckets": (
            2,
            "--global-batch-size 8 --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000",
        ),
    }.items()
}
"""Name -> (ranks, arguments). "overlap-buckets" overlaps both ways over several buckets."""

# Main grads are FP32 unless the name says otherwise, except that Megatron keeps them in FP16 for fp16.
PRECISIONS: dict[str, list[str]] = {
    "fp32": [],
    "bf16": ["--bf16"],
    # The first loss scales overflow, so that some of the first steps are skipped.
    "fp16": shlex.split("--fp16 --initial-loss-scale 1048576 --hysteresis 1 --loss-scale-window 8"),
    "fp16-fp32-grads": shlex.split(
        "--fp16 --accumulate-allreduce-grads-in-fp32 --initial-loss-scale 1048576 --hysteresis 1 --loss-scale-window 8"
    ),
    "bf16-bf16-grads": ["--bf16", "--grad-reduce-in-bf16"],
}

OPTIMIZERS = ("stock", "numpy", "dos")


class CaseFailure(AssertionError):
    """A case did not run to its end; the message holds the traceback of the rank that failed first."""


@dataclasses.dataclass(frozen=True)
class Iteration:
    """One iteration as Megatron's log saw it; figures that were not asked for are None.

    losses: name -> value, empty on ranks without the last pipeline stage. skipped: no update because of inf or NaN.
    """

    iteration: int
    losses: dict[str, float]
    learning_rate: float | None
    loss_scale: float
    skipped: bool
    grad_norm: float | None
    params_norm: float | None
    num_zeros: float | None


@dataclasses.dataclass(frozen=True)
class RankResult:
    """What one rank has written down.

    weights: model params by name, at the end. states: by name of the model param, what the optimizer of this rank
    holds for its part: dict of start, end (the owned range of the flattened param), step, param (the master),
    exp_avg, exp_avg_sq. inspected: what the hook returned, by point. value: what the function of `call` returned.
    """

    iterations: list[Iteration]
    weights: dict[str, torch.Tensor]
    states: dict[str, dict[str, Any]]
    inspected: dict[str, list[Any]]
    value: Any


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished case. `losses`, `grad_norms` and so on are one value an iteration, the same on every rank."""

    folder: Path
    ranks: int
    seconds: float

    @functools.cached_property
    def of_rank(self) -> list[RankResult]:
        loaded = []
        for rank in range(self.ranks):
            saved = torch.load(self.folder / f"rank{rank}.pt", map_location="cpu", weights_only=False)
            if not (isinstance(saved, dict) and "iterations" in saved):
                loaded.append(RankResult([], {}, {}, {}, saved))
                continue
            iterations = [Iteration(**one) for one in saved.pop("iterations")]
            loaded.append(RankResult(iterations, value=None, **saved))
        return loaded

    def log(self, rank: int = 0) -> str:
        """What the rank printed."""
        return (self.folder / f"rank{rank}.log").read_text(errors="replace")

    @property
    def values(self) -> list[Any]:
        """What the function of `call` returned, by rank."""
        return [one.value for one in self.of_rank]

    @property
    def losses(self) -> list[float]:
        return self._agreed(lambda one: one.losses.get("lm loss"), among_those_who_know=True)

    @property
    def grad_norms(self) -> list[float | None]:
        return self._agreed(lambda one: one.grad_norm)

    @property
    def params_norms(self) -> list[float | None]:
        return self._agreed(lambda one: one.params_norm)

    @property
    def num_zeros(self) -> list[float | None]:
        return self._agreed(lambda one: one.num_zeros)

    @property
    def skipped(self) -> list[bool]:
        return self._agreed(lambda one: one.skipped)

    @property
    def loss_scales(self) -> list[float]:
        return self._agreed(lambda one: one.loss_scale)

    def _agreed(self, figure: Any, among_those_who_know: bool = False) -> list[Any]:
        columns = [[figure(one) for one in rank.iterations] for rank in self.of_rank]
        if among_those_who_know:
            columns = [column for column in columns if None not in column]
        for column in columns[1:]:
            assert _bits(column) == _bits(columns[0]), f"ranks disagree: {columns}"
        return columns[0]


class Megatron:
    """Runs cases in a server process with the running interpreter; use `with` or close() to end it.

    Args:
        folder: for the cases' results and logs.
        python_path: more folders with modules whose functions the ranks are to call, beside this one.
    """

    def __init__(self, folder: Path, python_path: Sequence[Path] = ()) -> None:
        self._folder = folder
        self._python_path = [str(HERE), *map(str, python_path)]
        self._server: subprocess.Popen[str] | None = None
        self._numbers = itertools.count()
        self._known: dict[str, Result] = {}

    def __enter__(self) -> Megatron:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None

    def train(
        self,
        arguments: Sequence[str],
        ranks: int,
        optimizer: str,
        iterations: int = 20,
        seed: int = 1234,
        load: Path | None = None,
        save: Path | None = None,
        inspect: str | None = None,
        prepare: str | Sequence[str] | None = None,
        keep_state: bool = True,
        save_interval: int | None = None,
        planned_iterations: int = PLANNED_ITERATIONS,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = CASE_LIMIT_S,
    ) -> Result:
        """Train with Megatron and return its numbers; equal calls run once a session.

        Args:
            arguments: Megatron's, such as TINY + LAYOUTS["dp2"][1] + PRECISIONS["bf16"]; what a CPU needs is added.
            ranks: number of processes.
            optimizer: "stock": Megatron's distributed optimizer as it comes, with torch's AdamW. "numpy": the same
                around numpy_adam.NumpyAdamW. "dos": deep optimizer states.
            iterations: up to which to train, counted from the start of the run that a checkpoint continues; 0 sets
                up, and loads, but does not train.
            load, save: folders for checkpoints; a checkpoint is saved at the last iteration.
            save_interval: save at every that many iterations as well.
            planned_iterations: --train-iters, at least `iterations`.
            inspect: "module:function", called in each rank with (point, model, optimizer, args) at the points
                "start" (set up and loaded, before the first iteration), "step" (after each) and "end". What it returns,
                if not None, is kept in RankResult.inspected[point]; tensors are copied.
            prepare: "module:function", or several, called without arguments in each rank before Megatron sets up.
            keep_state: keep the weights and states at the end.
            environment: environment variables of the ranks.
            timeout_s: after which the ranks are killed.

        Raises:
            CaseFailure: a rank failed or the time was up.
        """
        if optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer={optimizer!r}: must be one of {', '.join(OPTIMIZERS)}")
        if not 0 <= iterations <= planned_iterations:
            raise ValueError(f"iterations={iterations}: must be 0 to {planned_iterations}")
        full = [*arguments, "--seed", str(seed), "--train-iters", str(planned_iterations)]
        full += ["--exit-interval", str(iterations)] if iterations else []
        full += ["--use-deep-optimizer-states"] if optimizer == "dos" else []
        full += ["--load", str(load)] if load else []
        full += ["--save", str(save), "--save-interval", str(save_interval or max(iterations, 1))] if save else []
        case = {
            "kind": "train",
            "arguments": full + _emulation().missing_arguments(full),
            "ranks": ranks,
            "optimizer": optimizer,
            "iterations": iterations,
            "inspect": inspect,
            "prepare": [prepare] if isinstance(prepare, str) else list(prepare or ()),
            "keep_state": keep_state,
        }
        return self._run(case, environment, timeout_s, reuse=not (load or save or inspect))

    def call(
        self,
        function: str,
        ranks: int = 1,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = CASE_LIMIT_S,
        **arguments: Any,
    ) -> Result:
        """Call "module:function" with keyword arguments (plain values) in each rank, with Megatron imported and the
        hooks of deep optimizer states installed. torch.distributed is not initialised, but its environment is set.
        The returned values, by rank, are in Result.values.
        """
        case = {"kind": "call", "function": function, "arguments": arguments, "ranks": ranks}
        return self._run(case, environment, timeout_s, reuse=False)

    def _run(
        self, case: dict[str, Any], environment: Mapping[str, str] | None, timeout_s: float, reuse: bool
    ) -> Result:
        case |= {"environment": dict(environment or {}), "timeout_s": timeout_s, "python_path": self._python_path}
        key = json.dumps(case, sort_keys=True)
        if reuse and key in self._known:
            return self._known[key]
        folder = self._folder / f"case{next(self._numbers)}"
        folder.mkdir(parents=True)
        outcome = self._ask({**case, "folder": str(folder)}, timeout_s)
        if outcome["timed_out"] or any(code != 0 for code in outcome["codes"]):
            raise CaseFailure(_explain(case, folder, outcome))
        result = Result(folder, case["ranks"], outcome["seconds"])
        if reuse:
            self._known[key] = result
        return result

    def _ask(self, case: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        if self._server is None:
            self._start()
        self._server.stdin.write(json.dumps(case) + "\n")
        self._server.stdin.flush()
        return self._answer(timeout_s + 30)

    def _start(self) -> None:
        if importlib.util.find_spec("megatron") is None and not os.environ.get("MEGATRON_LM"):
            raise CaseFailure(
                f"the end-to-end tests need Python 3.12 with megatron-core; {sys.executable} has none. "
                "`make test` sets both up."
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        path = [str(ROOT), str(HERE)]
        if checkout := os.environ.get("MEGATRON_LM"):
            # A copy: Megatron compiles its dataset helpers into its own folder.
            copied = self._folder / "megatron-lm"
            shutil.copytree(Path(checkout).expanduser() / "megatron", copied / "megatron")
            path.insert(0, str(copied))
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        }
        log = self._folder / "server.log"
        with log.open("w") as stream:
            self._server = subprocess.Popen(
                [sys.executable, str(HERE / "fork_server.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                env=variables,
                text=True,
            )
        answer = self._answer(START_LIMIT_S)
        if "error" in answer:
            self.close()
            raise CaseFailure(f"the server of the end-to-end tests does not start:\n{answer['error']}")

    def _answer(self, limit_s: float) -> dict[str, Any]:
        end = time.monotonic() + limit_s
        while not select.select([self._server.stdout], [], [], 1.0)[0]:
            if time.monotonic() > end:
                self.close()
                raise CaseFailure(f"the server of the end-to-end tests has not answered within {limit_s:.0f} s")
        line = self._server.stdout.readline()
        if not line:
            self.close()
            raise CaseFailure(f"the server of the end-to-end tests ended:\n{_tail(self._folder / 'server.log')}")
        return json.loads(line)


@functools.cache
def _emulation() -> Any:
    from megatron_dos import cpu_emulation

    return cpu_emulation


def _tail(log: Path, lines: int = 40) -> str:
    if not log.is_file():
        return "(no output)"
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _explain(case: dict[str, Any], folder: Path, outcome: dict[str, Any]) -> str:
    """The reason first: the traceback of the rank that failed first, since the others often fail of its absence."""
    errors = []
    for rank in range(case["ranks"]):
        file = folder / f"rank{rank}.error"
        if file.is_file():
            moment, _, text = file.read_text().partition("\n")
            errors.append((float(moment), rank, text))
    errors.sort()
    what = f"{case['kind']} of {case['ranks']} rank{'' if case['ranks'] == 1 else 's'}, logs in {folder}"
    if errors:
        _, rank, text = errors[0]
        if text.strip().splitlines()[-1].startswith("SystemExit"):  # argparse has said why, and then exited
            text += _tail(folder / f"rank{rank}.log", lines=60)
        others = "".join(f"\nthen rank {other}: {more.strip().splitlines()[-1]}" for _, other, more in errors[1:])
        return f"{what}: rank {rank} failed:\n{text}{others}"
    logs = "\n".join(f"-- the end of rank {rank}'s log:\n{_tail(folder / f'rank{rank}.log')}"
                     for rank in range(case["ranks"]) if outcome["codes"][rank] != 0)  # fmt: skip
    if outcome["timed_out"]:
        return f"{what}: not finished after {case['timeout_s']} s. Where the ranks were:\n{logs}"
    return f"{what}: exit codes {outcome['codes']} (negative: the signal that ended it):\n{logs}"


# ---- Comparison -----------------------------------------------------------------------------------------------------


def _bits(values: Sequence[Any]) -> list[str]:
    """Floats as text that tells every bit of a number; NaN equals NaN."""
    return [value.hex() if isinstance(value, float) else repr(value) for value in values]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits (NaN payloads and the sign of zero included)."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def _describe(name: str, one: torch.Tensor, other: torch.Tensor) -> str:
    if one.dtype != other.dtype or one.shape != other.shape:
        return f"{name}: {one.dtype} {tuple(one.shape)} against {other.dtype} {tuple(other.shape)}"
    differs = one.view(-1) != other.view(-1)
    largest = (one.double() - other.double()).abs().max().item()
    return f"{name}: {int(differs.sum())} of {one.numel()} elements differ, by up to {largest:.3e}"


def differences(run: Result, reference: Result) -> list[str]:
    """Everything in which two runs of the same layout differ by a bit: figures of the log, weights, states."""
    found = []
    for figure in ("losses", "grad_norms", "skipped", "loss_scales", "num_zeros", "params_norms"):
        one, other = getattr(run, figure), getattr(reference, figure)
        if _bits(one) != _bits(other):
            first = next((i for i, pair in enumerate(zip(_bits(one), _bits(other), strict=False))
                          if pair[0] != pair[1]), min(len(one), len(other)))  # fmt: skip
            found.append(f"{figure} from iteration index {first}: {one[first:][:3]} against {other[first:][:3]}")
    for rank, (mine, theirs) in enumerate(zip(run.of_rank, reference.of_rank, strict=True)):
        if mine.weights.keys() != theirs.weights.keys() or mine.states.keys() != theirs.states.keys():
            found.append(f"rank {rank}: the names of params or states differ")
            continue
        for name, weight in mine.weights.items():
            if not same_bits(weight, theirs.weights[name]):
                found.append(_describe(f"rank {rank} weight {name}", weight, theirs.weights[name]))
        for name, state in mine.states.items():
            expected = theirs.states[name]
            for key in ("start", "end", "step"):
                if state[key] != expected[key]:
                    found.append(f"rank {rank} {key} of {name}: {state[key]} against {expected[key]}")
            for key in ("param", "exp_avg", "exp_avg_sq"):
                if (key in state) != (key in expected):
                    found.append(f"rank {rank} {key} of {name}: only one of the runs has it")
                elif key in state and not same_bits(state[key], expected[key]):
                    found.append(_describe(f"rank {rank} {key} of {name}", state[key], expected[key]))
    return found


def assert_same_bits(run: Result, reference: Result) -> None:
    """Losses, grad norms, other figures, weights, masters, moments and steps are equal to the last bit."""
    found = differences(run, reference)
    shown = "\n".join(found[:20])
    assert not found, f"{len(found)} differences (logs in {run.folder} and {reference.folder}):\n{shown}"


def largest_relative_difference(values: Sequence[float], reference: Sequence[float]) -> float:
    """max |a - b| / |b| over two lists of one length."""
    assert len(values) == len(reference), f"{len(values)} values against {len(reference)}"
    return max(
        (abs(a - b) / abs(b) if b else math.inf if a else 0.0 for a, b in zip(values, reference, strict=True)),
        default=0.0,
    )
