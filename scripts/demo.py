# SPDX-License-Identifier: Apache-2.0
"""`make demo`: trains a small GPT with Megatron's stock distributed optimizer and with ours, and compares the losses.

The steps: make a private copy of Megatron (pip's megatron-core, or the checkout named by MEGATRON_LM) in build/demo,
patch that copy, turn real text into a dataset, train twice, write demo-output/. The last line and the exit status say
whether both trainings did what they should. Machines without a GPU train on the CPU, through
`megatron_dos.cpu_emulation`; machines with GPUs train on them.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import psutil
from demo_data import VOCABULARY_SIZE
from demo_report import Losses, draw_picture, progress_line, read_iteration, verdict, write_table

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "demo"
OUTPUT = ROOT / "demo-output"

STEPS = 60
RANKS = 2
SEQUENCE = 128
SILENCE_LIMIT_S = 300
"""A training that prints nothing for this long is taken for hung. An iteration takes about a second on two cores."""

OURS = ("--use-deep-optimizer-states",)
OPTIMIZER_SIGN = "deep optimizer states"
"""Our optimizer says so in the log when it is built: a flag that was quietly ignored must not pass for a success."""


class DemoFailure(Exception):
    """The demo cannot go on; the message says why, in one or a few lines."""


def copy_megatron(checkout: str | None, target: Path) -> Path:
    """Copies Megatron into `target` (a folder that does not exist yet) and returns the training script to run.

    `checkout` is a Megatron-LM checkout; None takes pip's package, which carries megatron/core and megatron/training
    but no pretrain_gpt.py: ours serves. Neither source is ever changed.
    """
    skipped = shutil.ignore_patterns(".git", "__pycache__", "*.pyc")
    if checkout is None:
        spec = find_spec("megatron.core")
        if spec is None or not spec.submodule_search_locations:
            raise DemoFailure("megatron-core is not installed in this Python; run `make setup`")
        package = Path(spec.submodule_search_locations[0]).parent
        for part in ("core", "training"):
            if not (package / part).is_dir():
                raise DemoFailure(f"the installed megatron-core has no {package / part}; version 0.19.2 is needed")
            shutil.copytree(package / part, target / "megatron" / part, ignore=skipped)
        return ROOT / "scripts" / "pretrain_gpt.py"
    source = Path(checkout).expanduser().resolve()
    if not (source / "pretrain_gpt.py").is_file() or not (source / "megatron" / "core").is_dir():
        raise DemoFailure(
            f"MEGATRON_LM={checkout} is no Megatron-LM checkout: it has no pretrain_gpt.py or no megatron/core"
        )
    target.mkdir(parents=True)
    shutil.copytree(source / "megatron", target / "megatron", ignore=skipped)
    for script in source.glob("*.py"):
        shutil.copy2(script, target)
    return target / "pretrain_gpt.py"


def training_arguments(dataset: Path, on_gpu: bool) -> list[str]:
    """Megatron's arguments of both trainings: a GPT of 0.9 M parameters, bf16, distributed optimizer.

    The learning rate is moderate for a reason. At 2e-3 this training amplifies rounding differences so much that two
    runs of the stock optimizer differ by 3 % if --adam-eps is changed by one part in 10,000; at 5e-4, by 0.007 %.
    """
    model = "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --max-position-embeddings 128"
    training = (
        f"--seq-length {SEQUENCE} --micro-batch-size 8 --global-batch-size 32 --train-iters {STEPS} --seed 1234 --bf16 "
        "--lr 5e-4 --min-lr 5e-5 --lr-decay-style cosine --lr-warmup-iters 10 --weight-decay 0.1 --clip-grad 1.0 "
        "--adam-beta2 0.95 --attention-dropout 0 --hidden-dropout 0 --use-distributed-optimizer"
    )
    data = (
        f"--data-path {dataset} --data-cache-path {dataset.parent / 'cache'} --split 100,0,0 --num-workers 0 "
        f"--tokenizer-type NullTokenizer --vocab-size {VOCABULARY_SIZE}"
    )
    logging = "--log-interval 1 --eval-iters 0 --eval-interval 1000"
    # Without Apex and Transformer Engine, Megatron needs to be told not to use their kernels.
    plain = (
        "--transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
        "--no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion "
        f"--distributed-backend {'nccl' if on_gpu else 'gloo'}"
    )
    return " ".join((model, training, data, logging, plain)).split()


def environment(tree: Path, ranks: int) -> dict[str, str]:
    """The environment of every child: our Megatron copy comes first, the cores are shared out over the ranks."""
    env = dict(os.environ)
    # Megatron compiles a helper with whichever python3 and python3-config come first.
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
    env["PYTHONPATH"] = os.pathsep.join([str(tree), *filter(None, [env.get("PYTHONPATH")])])
    env["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    env["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    # All ranks are here: no host name needs to resolve.
    env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return env


def torchrun_command(script: Path, arguments: list[str], ranks: int, on_gpu: bool) -> list[str]:
    """The command line that starts the ranks of one training."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    program = [str(script)] if on_gpu else ["-m", "megatron_dos.cpu_emulation", str(script)]
    return [*launcher, *program, *arguments]


def end_processes(process: subprocess.Popen[str]) -> None:
    """Ends `process` and everything it has started; returns when all are gone."""
    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    for stop in ("terminate", "kill"):
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                getattr(member, stop)()
        family = psutil.wait_procs(family, timeout=5)[1]
    process.wait()


def lines_of(command: list[str], env: dict[str, str], log: Path) -> Generator[str | None, None, None]:
    """Runs `command`, yields its output line by line (None about once a second while it is silent), keeps it in `log`.

    Raises DemoFailure with the end of the log when the command fails or hangs. However the iteration ends, nothing
    that the command has started is left running.
    """
    tail: deque[str] = deque(maxlen=30)
    shown = " ".join(command[:4]) + (" ..." if len(command) > 4 else "")

    def failure(what: str) -> DemoFailure:
        return DemoFailure(f"{what}\nthe end of its log ({log}):\n" + "".join(f"  {line}" for line in tail))

    arrived: queue.Queue[str | None] = queue.Queue()
    # Its own session: Ctrl-C reaches only this process, which then ends the children in an orderly way.
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True, cwd=WORK,
    )  # fmt: skip

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            arrived.put(line)
        arrived.put(None)

    threading.Thread(target=read, daemon=True).start()
    last_sign = time.monotonic()
    report = False
    try:
        with log.open("w") as file:
            while True:
                try:
                    line = arrived.get(timeout=1)
                except queue.Empty:
                    if time.monotonic() - last_sign > SILENCE_LIMIT_S:
                        raise failure(f"nothing was printed for {SILENCE_LIMIT_S} s by: {shown}") from None
                    yield None
                    continue
                if line is None:
                    break
                last_sign = time.monotonic()
                file.write(line)
                file.flush()
                # torchrun's long report about failed ranks would push their own messages out of sight.
                report = report or ("torch/distributed/elastic" in line and "failed (exitcode" in line)
                if not report:
                    tail.append(line)
                yield line
        if process.wait() != 0:
            raise failure(f"exit status {process.returncode} from: {shown}")
    finally:
        end_processes(process)


def run(command: list[str], env: dict[str, str], log: Path) -> list[str]:
    """Runs `command` to its end and returns its output; raises DemoFailure with the end of the log when it fails."""
    with contextlib.closing(lines_of(command, env, log)) as lines:
        return [line for line in lines if line is not None]


def train(name: str, command: list[str], env: dict[str, str]) -> tuple[Losses, bool]:
    """Trains once, showing progress; returns the losses and whether our optimizer announced itself in the log."""
    losses: Losses = {}
    announced = False
    start = time.monotonic()
    on_terminal = sys.stdout.isatty()
    shown = f"{name:<6} starting"
    print(shown, end="" if on_terminal else "\n", flush=True)
    with contextlib.closing(lines_of(command, env, OUTPUT / f"{name}.log")) as lines:
        for line in lines:
            seconds = time.monotonic() - start
            if line is not None:
                announced = announced or OPTIMIZER_SIGN in line.lower()
                seen = read_iteration(line)
                if seen:
                    iteration, loss = seen
                    losses[iteration] = loss
                    shown = progress_line(name, iteration, STEPS, loss, seconds)
                    if not on_terminal:
                        print(shown, flush=True)
            if on_terminal:
                waiting = "" if losses else f"  {seconds:.0f} s"
                print(f"\r\033[K{shown}{waiting}", end="", flush=True)
    if on_terminal:
        print()
    return losses, announced


def accelerators() -> int:
    """The number of GPUs that torch can use here."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def demo() -> str:
    """Runs the whole demo and returns its last line; raises DemoFailure."""
    for folder in (WORK, OUTPUT):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    gpus = accelerators()
    ranks = min(RANKS, gpus) if gpus else RANKS
    tree = WORK / "megatron-lm"
    env = environment(tree, ranks)

    checkout = os.environ.get("MEGATRON_LM") or None
    print(f"Megatron: a copy of {checkout or 'the installed megatron-core'} in {tree.relative_to(ROOT)}", flush=True)
    script = copy_megatron(checkout, tree)
    for line in run([sys.executable, "-m", "megatron_dos.cli", "patch", str(tree)], env, OUTPUT / "patch.log"):
        print(f"  {line}", end="", flush=True)
    helpers = tree / "megatron" / "core" / "datasets"
    if (helpers / "Makefile").is_file() and not list(helpers.glob("helpers_cpp*.so")):
        print("compiling Megatron's dataset helper", flush=True)
        run(["make", "-C", str(helpers)], env, OUTPUT / "helpers.log")

    dataset = WORK / "data" / "help-topics"
    made = run([sys.executable, str(ROOT / "scripts" / "demo_data.py"), str(dataset)], env, OUTPUT / "data.log")
    print(f"text: CPython's help topics as bytes, {made[-1].strip()}", flush=True)

    where = f"{ranks} of the {gpus} GPUs" if gpus else "the CPU (no GPU was found), through megatron_dos.cpu_emulation"
    print(f"training {STEPS} steps twice, {ranks} ranks, on {where}", flush=True)
    arguments = training_arguments(dataset, on_gpu=bool(gpus))
    stock, wrong = train("stock", torchrun_command(script, arguments, ranks, bool(gpus)), env)
    ours, right = train("deep", torchrun_command(script, [*arguments, *OURS], ranks, bool(gpus)), env)

    write_table(OUTPUT / "losses.csv", stock, ours)
    draw_picture(OUTPUT / "loss.png", stock, ours)
    print(f"written: {OUTPUT.relative_to(ROOT)}/loss.png, losses.csv, stock.log, deep.log", flush=True)
    if wrong or not right:
        raise DemoFailure(
            f"the log of the run with{'out' if wrong else ''} {OURS[0]} shows that "
            f"{'our' if wrong else 'the stock'} optimizer was built"
        )
    ok, line = verdict(stock, ours, STEPS)
    if not ok:
        raise DemoFailure(line.removeprefix("demo failed: "))
    return line


def main() -> int:
    """Entry point: 0 when the demo has shown what it promises, 1 when not, 130 when it was interrupted."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        print(demo(), flush=True)
    except DemoFailure as failure:
        reason, *details = str(failure).split("\n")
        if details:
            print("\n".join(details), flush=True)
        print(f"demo failed: {reason}", flush=True)
        return 1
    except KeyboardInterrupt:
        print("\ndemo failed: interrupted", flush=True)
        return 130
    except Exception as fault:
        # A full disk, a missing permission: whatever it is, the last line says that the demo has not succeeded.
        traceback.print_exc()
        print(f"demo failed: {type(fault).__name__}: {fault}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
