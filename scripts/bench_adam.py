#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the fused CPU AdamW against a bare memory loop (the limit), torch's fused AdamW and DeepSpeedCPUAdam.

Everything runs interleaved in one process per thread count, on the same slabs: each sample is one step, with a sample
of the limit before and after it, so that a machine whose memory is faster one minute than the next still gives
comparable ratios. Medians and quartiles go to docs/results/adam.csv; a plot and tables beside it are made from that.

DeepSpeed is installed from pip into .cache/bench-adam at the first run and builds its kernel there; where that fails,
its rows are left out and the reason is printed.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RIVALS = ROOT / ".cache" / "bench-adam"
RESULTS = ROOT / "docs" / "results"
PIECES = 4096
PIECES_NUMEL = 16 * 2**20
SCALE = 0.73  # what unscaling and clipping multiply the grad by
COLUMNS = (
    *("date", "cpu", "isa", "load", "threads", "numel", "group", "what", "bytes_per_param", "samples"),
    *("median_ms", "q1_ms", "q3_ms", "gparams_per_s", "gbytes_per_s", "of_limit", "of_limit_q1", "of_limit_q3"),
    "times_ours",
)

# Rows of a group do the same job; the first is ours, which the others are compared to.
FP32, BF16, ALONE = "fp32 grads, bf16 params out", "bf16 grads, scaled, bf16 params out", "step alone, fp32 grads"
DENORMAL, SMALL = "denormal-heavy grads and moments", f"16M parameters in {PIECES:,} pieces"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 64], metavar="M", help="2^20 parameters each")
    parser.add_argument("--threads", type=int, nargs="+", help="default: 1 and all allowed CPUs")
    parser.add_argument("--rounds", type=int, default=21, help="samples of each row")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of adam.csv")
    parser.add_argument("--no-deepspeed", action="store_true", help="leave DeepSpeed out")
    parser.add_argument("--tables-only", action="store_true", help="plot and tables from the file, no measuring")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(measure(**json.loads(args.worker))))
        return
    args.results.mkdir(parents=True, exist_ok=True)
    if not args.tables_only:
        rows = measure_all(args)
        write_csv(args.results / "adam.csv", rows)
    report(args.results)


# --- Running ---------------------------------------------------------------------------------------------------------


def measure_all(args: argparse.Namespace) -> list[dict]:
    """Rows of every thread count, each in a process of its own: OpenMP reads its thread count once."""
    if sys.platform != "linux":
        raise SystemExit("bench_adam.py measures on Linux only")
    every = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    if load > 0.3:
        print(f"note: load average {load:.1f}: other programs are running, figures will be noisy", file=sys.stderr)
    subprocess.run(["make", "-s", "-C", str(ROOT / "cpp_adam"), "bench"], check=True)
    rivals = None if args.no_deepspeed else install_deepspeed()
    rows: list[dict] = []
    for threads in args.threads or sorted({1, every}):
        sizes = [size * 2**20 for size in args.sizes]
        task = {"threads": threads, "sizes": sizes, "rounds": args.rounds, "rivals": rivals}
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "DS_ACCELERATOR": "cpu",
            "TORCH_EXTENSIONS_DIR": str(RIVALS / "build"),
            "PATH": f"{RIVALS / 'site' / 'bin'}:{os.environ['PATH']}",
        }
        print(f"measuring with {threads} thread{'' if threads == 1 else 's'} ...", file=sys.stderr, flush=True)
        done = subprocess.run(
            [sys.executable, __file__, "--worker", json.dumps(task)],
            env=environment,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        common = {"date": datetime.date.today().isoformat(), "cpu": cpu_name(), "load": f"{load:.1f}"}
        rows += [{**common, **row} for row in json.loads(done.stdout.splitlines()[-1])]
    return rows


def install_deepspeed() -> str | None:
    """The folder with pip's deepspeed, which uses the torch of this interpreter; None where it cannot be had."""
    site = RIVALS / "site"
    if (site / "deepspeed").is_dir():
        return str(site)
    print("installing DeepSpeed into .cache/bench-adam ...", file=sys.stderr, flush=True)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--target", str(site)]
    needs = ["einops", "hjson", "msgpack", "ninja", "packaging", "psutil", "py-cpuinfo", "pydantic", "tqdm"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    for command in ([*pip, *needs], [*pip, "--no-deps", "--no-build-isolation", "deepspeed"]):
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            print(f"without DeepSpeed, pip could not install it:\n{done.stderr[-1000:]}", file=sys.stderr)
            return None
    return str(site)


def cpu_name() -> str:
    """The CPU's name, and its family and model, which hypervisors hide less often."""
    fields = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    if "model name" not in fields:
        return platform.machine()
    count = len(os.sched_getaffinity(0))
    return f"{fields['model name']} (family {fields['cpu family']} model {fields['model']}), {count} CPUs"


# --- Measuring (in the worker process) -------------------------------------------------------------------------------


@dataclass
class Contender:
    """One row: what is timed, what comes before it untimed, and the bytes that it must move per parameter."""

    group: str
    what: str
    bytes_per_param: int
    run: Callable[[], None]
    before: Callable[[], None] = lambda: None


class Memory:
    """The arrays of one step, on slabs: FP32 p, m, v and grad, bf16 grad and params out."""

    def __init__(self, numel: int) -> None:
        import torch

        from megatron_dos.node import slab

        self.numel = numel
        self.param, self.exp_avg, self.exp_avg_sq, self.grad = (slab.zeros(numel) for _ in range(4))
        self.grad16, self.out = (slab.zeros(numel, torch.bfloat16) for _ in range(2))
        self.param.normal_()
        self.grad.normal_().mul_(1e-2)
        self.grad16.copy_(self.grad)
        self.settle()

    def settle(self) -> None:
        """Moments as they are in the midst of training."""
        self.exp_avg.copy_(self.grad).mul_(0.3)
        self.exp_avg_sq.copy_(self.grad).square_().mul_(0.5)


def measure(threads: int, sizes: Sequence[int], rounds: int, rivals: str | None) -> list[dict]:
    """Rows for one thread count."""
    import torch

    torch.set_num_threads(threads)
    optimizers = {"torch fused": torch_fused}
    deepspeed = load_deepspeed(rivals) if rivals else None
    if deepspeed is not None:
        optimizers["DeepSpeedCPUAdam"] = deepspeed
    rows: list[dict] = []
    for numel in sizes:
        memory = Memory(numel)
        contenders = flat_contenders(memory, threads, optimizers)
        rows += sample(contenders, memory, threads, rounds)
        del contenders
        if numel == PIECES_NUMEL:
            rows += sample(pieces_contenders(memory, threads), memory, threads, max(3, rounds // 3))
    return rows


def sample(contenders: list[Contender], memory: Memory, threads: int, rounds: int) -> list[dict]:
    """Time every contender in turn, `rounds` times over, each between two samples of its limit."""
    from megatron_dos import _cpp_adam

    limit = Limit(memory.numel, threads)
    times: dict[int, list[float]] = {index: [] for index in range(len(contenders))}
    shares: dict[int, list[float]] = {index: [] for index in range(len(contenders))}
    limits: dict[str, list[float]] = {}
    for number in range(-1, rounds):  # round -1 warms up
        for index, contender in enumerate(contenders):
            contender.before()
            narrow = contender.group == BF16
            before = limit.seconds(narrow)
            taken = timed(contender.run)
            after = limit.seconds(narrow)
            if number < 0:
                continue
            times[index].append(taken)
            shares[index].append((before + after) / 2 / taken)
            limits.setdefault(contender.group, []).append((before + after) / 2)
    rows = []
    for group, each in limits.items():
        narrow = group == BF16
        row = row_of(each, memory.numel, 28 if narrow else 30)
        rows.append({"group": group, "what": f"limit: bare loop ({limit.name(narrow)})", **row})
    for index, contender in enumerate(contenders):
        ours = next(other for other, each in enumerate(contenders) if each.group == contender.group)
        row = row_of(times[index], memory.numel, contender.bytes_per_param)
        low, middle, high = quartiles(shares[index])
        row |= {"of_limit": f"{middle:.3f}", "of_limit_q1": f"{low:.3f}", "of_limit_q3": f"{high:.3f}"}
        slower = [mine / base for mine, base in zip(times[index], times[ours], strict=True)]
        row["times_ours"] = f"{statistics.median(slower):.3f}"
        rows.append({"group": contender.group, "what": contender.what, **row})
    common = {"isa": _cpp_adam.isa(), "threads": threads, "numel": memory.numel}
    return [{**common, **row} for row in rows]


class Limit:
    """The fastest bare loop over a layout like ours: the best way to store the output and to split the work."""

    def __init__(self, numel: int, threads: int) -> None:
        self._library = ctypes.CDLL(str(ROOT / "cpp_adam" / "build" / "bench" / "libbare_loop.so"))
        self._library.bare_loop.argtypes = [*[ctypes.c_void_p] * 5, ctypes.c_int64, *[ctypes.c_int] * 4]
        self._memory = Memory(numel)
        self._threads = threads
        self._best = {narrow: self._choose(narrow) for narrow in (False, True)}

    def _choose(self, narrow: bool) -> tuple[int, int]:
        ways = [(stream, pooled) for stream in (0, 1) for pooled in (0, 1)]
        seconds: dict[tuple[int, int], list[float]] = {way: [] for way in ways}
        for _ in range(6):
            for way in ways:
                seconds[way].append(timed(lambda way=way: self._run(narrow, *way)))
        return min(ways, key=lambda way: statistics.median(seconds[way][1:]))

    def _run(self, narrow: bool, stream: int, pooled: int) -> None:
        m = self._memory
        grad = m.grad16 if narrow else m.grad
        addresses = (each.data_ptr() for each in (m.param, m.exp_avg, m.exp_avg_sq, grad, m.out))
        self._library.bare_loop(*addresses, m.numel, 2 if narrow else 4, stream, pooled, self._threads)

    def seconds(self, narrow: bool) -> float:
        return timed(lambda: self._run(narrow, *self._best[narrow]))

    def name(self, narrow: bool) -> str:
        stream, pooled = self._best[narrow]
        return f"{'streamed' if stream else 'plain'} output, {'parts' if pooled else 'one stretch a thread'}"


def timed(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def row_of(seconds: Sequence[float], numel: int, bytes_per_param: int) -> dict:
    low, middle, high = quartiles(seconds)
    return {
        "bytes_per_param": bytes_per_param,
        "samples": len(seconds),
        "median_ms": f"{middle * 1e3:.3f}",
        "q1_ms": f"{low * 1e3:.3f}",
        "q3_ms": f"{high * 1e3:.3f}",
        "gparams_per_s": f"{numel / middle / 1e9:.4f}",
        "gbytes_per_s": f"{numel * bytes_per_param / middle / 1e9:.2f}",
    }


# --- Contenders ------------------------------------------------------------------------------------------------------

Optimizer = Callable[[Memory], Callable[[], None]]  # its step over the memory's p, m, v and FP32 grad


def ours(memory: Memory, threads: int, narrow: bool = False, out: bool = True) -> Callable[[], None]:
    from megatron_dos.kernels import AdamScalars, cpu

    scalars = AdamScalars.at_step(1000, 1e-4, (0.9, 0.95), 1e-8, 0.1, True)
    m = memory
    grad, scale = (m.grad16, SCALE) if narrow else (m.grad, 1.0)
    target = m.out if out else None
    return lambda: cpu.adamw(
        m.param, m.exp_avg, m.exp_avg_sq, grad, scalars, grad_scale=scale, out=target, threads=threads
    )


def stepper(make: Callable[[list], object], memory: Memory) -> Callable[[], None]:
    """The step of a torch-like optimizer, made to work on the memory's arrays."""
    import torch

    parameter = torch.nn.Parameter(memory.param)
    parameter.grad = memory.grad
    optimizer = make([parameter])
    optimizer.step()
    state = optimizer.state[parameter]
    state["exp_avg"], state["exp_avg_sq"] = memory.exp_avg, memory.exp_avg_sq
    return optimizer.step


def torch_fused(memory: Memory) -> Callable[[], None]:
    import torch

    return stepper(
        lambda parameters: torch.optim.AdamW(
            parameters, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True
        ),
        memory,
    )


def load_deepspeed(site: str) -> Optimizer | None:
    """DeepSpeed's CPU Adam, its kernel built; None where that fails."""
    sys.path.append(site)
    try:
        with stdout_to_stderr():
            from deepspeed.ops.adam import DeepSpeedCPUAdam
            from deepspeed.ops.op_builder import CPUAdamBuilder

            CPUAdamBuilder().load()
    except Exception as error:  # whatever a foreign build may raise: its rows are left out
        print(f"without DeepSpeed: {type(error).__name__}: {error}", file=sys.stderr)
        return None

    def make(parameters: list) -> object:
        return DeepSpeedCPUAdam(parameters, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, adamw_mode=True)

    return lambda memory: stepper(make, memory)


class stdout_to_stderr:
    """Sends what compilers and libraries print to stderr: stdout carries the rows."""

    def __enter__(self) -> None:
        sys.stdout.flush()
        self._saved = os.dup(1)
        os.dup2(2, 1)

    def __exit__(self, *_: object) -> None:
        sys.stdout.flush()
        os.dup2(self._saved, 1)
        os.close(self._saved)


def flat_contenders(memory: Memory, threads: int, optimizers: dict[str, Optimizer]) -> list[Contender]:
    m = memory
    steps = {name: make(m) for name, make in optimizers.items()}
    rows = [
        Contender(FP32, "ours", 30, ours(m, threads)),
        Contender(BF16, "ours", 28, ours(m, threads, narrow=True)),
        Contender(ALONE, "ours", 28, ours(m, threads, out=False)),
        Contender(DENORMAL, "ours", 30, ours(m, threads), lambda: make_denormal(m)),
    ]
    for name, step in steps.items():
        rows += [
            Contender(FP32, f"{name} + copy", 34, in_turn(step, lambda: m.out.copy_(m.param))),
            Contender(BF16, f"up-cast + {name} + copy", 40, in_turn(upcast(m), step, lambda: m.out.copy_(m.param))),
            Contender(
                BF16,
                f"up-cast + scale + {name} + copy",
                48,
                in_turn(upcast(m), lambda: m.grad.mul_(SCALE), step, lambda: m.out.copy_(m.param)),
            ),
            Contender(ALONE, name, 28, step),
            Contender(
                DENORMAL, f"{name} + copy", 34, in_turn(step, lambda: m.out.copy_(m.param)), lambda: make_denormal(m)
            ),
        ]
    # Grads are put right again after the denormal rows: those come last, and the normal ones start from good grads.
    rows.sort(key=lambda row: row.group == DENORMAL)
    rows[0].before = lambda: make_normal(m)
    return rows


def upcast(memory: Memory) -> Callable[[], None]:
    return lambda: memory.grad.copy_(memory.grad16)


def in_turn(*calls: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        for call in calls:
            call()

    return run


def make_denormal(memory: Memory) -> None:
    """Denormal moments and grads everywhere: half of the grads are so themselves, the others have denormal squares."""
    memory.grad.fill_(1e-39)
    memory.grad[::2] = 1e-21
    memory.exp_avg.fill_(1e-39)
    memory.exp_avg_sq.fill_(1e-40)


def make_normal(memory: Memory) -> None:
    memory.grad.copy_(memory.grad16)
    memory.settle()


def pieces_contenders(memory: Memory, threads: int) -> list[Contender]:
    """Many small parameters: ours as they lie in a slab, as one job of pieces, and one torch optimizer for each."""
    import torch

    from megatron_dos.kernels import AdamScalars, cpu

    make_normal(memory)
    scalars = AdamScalars.at_step(1000, 1e-4, (0.9, 0.95), 1e-8, 0.1, True)
    size = memory.numel // PIECES
    pieces = []
    optimizers = []
    for start in range(0, memory.numel, size):
        span = slice(start, start + size)
        tensors = (memory.param[span], memory.exp_avg[span], memory.exp_avg_sq[span], memory.grad[span])
        pieces.append(cpu.Operands(*tensors, scalars, out=memory.out[span]))
        parameter = torch.nn.Parameter(memory.param[span])
        parameter.grad = memory.grad[span]
        optimizers.append(torch.optim.AdamW([parameter], lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True))

    def step_each() -> None:
        for optimizer in optimizers:
            optimizer.step()

    return [
        Contender(SMALL, "ours, one flat array", 30, ours(memory, threads)),
        Contender(SMALL, f"ours, one job of {PIECES:,} pieces", 30, lambda: cpu.adamw_pieces(pieces, threads)),
        Contender(SMALL, "one torch fused optimizer a piece", 28, step_each),
    ]


# --- Results ---------------------------------------------------------------------------------------------------------


def read_csv(path: Path) -> list[dict]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_csv(path: Path, rows: list[dict]) -> None:
    """Rows replace those of the same CPU, thread count and size; others stay."""
    new = {(row["cpu"], str(row["threads"]), str(row["numel"])) for row in rows}
    kept = [row for row in read_csv(path) if (row["cpu"], row["threads"], row["numel"]) not in new]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept + rows)


def report(folder: Path) -> None:
    """adam.md and adam.svg from adam.csv; the tables are printed too."""
    rows = read_csv(folder / "adam.csv")
    if not rows:
        raise SystemExit(f"{folder / 'adam.csv'} holds no rows: run without --tables-only first")
    text = tables(rows)
    (folder / "adam.md").write_text(text)
    print(text)
    plot(rows, folder / "adam.svg")


def runs(rows: list[dict]) -> dict[tuple[str, int, int], list[dict]]:
    """Rows by CPU, size and threads."""
    found: dict[tuple[str, int, int], list[dict]] = {}
    for row in rows:
        found.setdefault((row["cpu"], int(row["numel"]), int(row["threads"])), []).append(row)
    return dict(sorted(found.items()))


def tables(rows: list[dict]) -> str:
    parts = [
        "# The CPU AdamW measured\n",
        "Written by `make bench-adam` from adam.csv. One step over FP32 master params and moments; G P/s is 1e9 "
        'parameters a second; quartiles in brackets. "Of limit" is the time of a bare loop with our loads and stores '
        '(16-bit params out included), measured before and after each sample, over the time of the row; "times ours" '
        "is the time of the row over that of ours in the same round.\n",
        "![G P/s](adam.svg)\n",
    ]
    for (cpu, numel, threads), each in runs(rows).items():
        first = each[0]
        parts.append(
            f"## {numel // 2**20}M parameters, {threads} thread{'s' if threads > 1 else ''}, {cpu}\n\n"
            f"{first['date']}, {first['isa']}, {first['samples']} samples or more, load before {first['load']}.\n"
        )
        parts.append("| job | who | bytes/param | ms | G P/s | GB/s | of limit | times ours |")
        parts.append("|---|---|---|---|---|---|---|---|")
        groups = list(dict.fromkeys(row["group"] for row in each))
        for group in groups:
            for row in (row for row in each if row["group"] == group):
                of_limit = f"{row['of_limit']} [{row['of_limit_q1']}, {row['of_limit_q3']}]" if row["of_limit"] else ""
                parts.append(
                    f"| {group} | {row['what']} | {row['bytes_per_param']} | {row['median_ms']} [{row['q1_ms']}, "
                    f"{row['q3_ms']}] | {row['gparams_per_s']} | {row['gbytes_per_s']} | {of_limit} | "
                    f"{row['times_ours']} |"
                )
        parts.append("")
    return "\n".join(parts)


def plot(rows: list[dict], path: Path) -> None:
    """Bars of the largest size with most threads of the CPU measured last, with the limit as a line."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed", file=sys.stderr)
        return
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "megatron-dos"
    import matplotlib.pyplot as plt

    cpu = rows[-1]["cpu"]
    (_, numel, threads), chosen = max(
        (item for item in runs(rows).items() if item[0][0] == cpu), key=lambda item: item[0][1:]
    )
    groups = [group for group in (FP32, BF16, ALONE, DENORMAL) if any(row["group"] == group for row in chosen)]
    figure, axes = plt.subplots(len(groups), 1, figsize=(8, 1.7 * len(groups) + 0.6), sharex=True, squeeze=False)
    for axis, group in zip(axes[:, 0], groups, strict=True):
        each = [row for row in chosen if row["group"] == group]
        bars = [row for row in each if not row["what"].startswith("limit")]
        limit = next(float(row["gparams_per_s"]) for row in each if row["what"].startswith("limit"))
        rates = [float(row["gparams_per_s"]) for row in bars]
        spread = [
            [rate - numel / float(row["q3_ms"]) / 1e6 for rate, row in zip(rates, bars, strict=True)],
            [numel / float(row["q1_ms"]) / 1e6 - rate for rate, row in zip(rates, bars, strict=True)],
        ]
        spread = [[max(0.0, value) for value in side] for side in spread]
        colors = ["tab:blue" if row["what"].startswith("ours") else "tab:gray" for row in bars]
        axis.barh([row["what"] for row in bars], rates, xerr=spread, color=colors, height=0.7)
        axis.axvline(limit, color="tab:red", linewidth=1)
        axis.invert_yaxis()
        axis.set_title(f"{group} (red: bare loop)", fontsize=9, loc="left")
        axis.tick_params(labelsize=8)
    axes[-1, 0].set_xlabel("1e9 parameters per second")
    figure.suptitle(f"{numel // 2**20}M parameters, {threads} threads, {cpu}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
