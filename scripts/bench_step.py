#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the whole optimizer step of a GPT in real Megatron: ours, the stock optimizer, and HybridDeviceOptimizer.

It runs on a machine without a GPU, in one process, under megatron_dos.cpu_emulation. All contenders are built by
Megatron from its own options, on one model, and take turns: each round times one step of each, so that a machine that
is faster one minute than the next still gives comparable ratios. The host memory of each is measured before that, in a
process of its own. What is emulated is said in docs/results/step.md, which this program writes.

Exit status 0 when ours is at least 1.3 times as fast as HybridDeviceOptimizer at its best setting and takes at most 0.8
times its host memory, 1 otherwise.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import gc
import importlib
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from bench_adam import cpu_name, quartiles
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
FASTER, SMALLER = 1.3, 0.8  # what is promised: times as fast, times the host memory
CLIP = 1.0
NORMS = {"norm below the limit": 0.5, "norm above the limit, so grads are clipped": 2.0}
COLUMNS = (
    *("date", "cpu", "torch", "load", "threads", "parameters", "tensors", "what", "kernel", "grads", "samples"),
    *("median_ms", "q1_ms", "q3_ms", "gparams_per_s", "times_ours", "times_ours_q1", "times_ours_q3"),
    *("rss_bytes_per_param", "host_bytes_per_param", "device_bytes_per_param", "made_of"),
)


@dataclass(frozen=True)
class Size:
    """Of the model: a GPT with biases, LayerNorms, learned positions and tied embeddings."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    positions: int


@dataclass(frozen=True)
class Contender:
    """One optimizer as Megatron builds it.

    options: fields of OptimizerConfig. made_fused: torch's `fused` is set afterwards. most_rounds: for one so slow that
    few samples have to do.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    made_fused: bool = False
    most_rounds: int = sys.maxsize


OFFLOAD = {"use_precision_aware_optimizer": True, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
OURS, OVERLAPPED, ONE_BY_ONE = "ours", "HybridDeviceOptimizer, overlapping", "HybridDeviceOptimizer"
STOCK, FUSED = "stock, torch AdamW", "stock, torch AdamW made fused"
RIVALS = (OVERLAPPED, ONE_BY_ONE)
CONTENDERS = (
    Contender(OURS, {"use_deep_optimizer_states": True}),
    Contender(OVERLAPPED, {**OFFLOAD, "overlap_cpu_optimizer_d2h_h2d": True}),
    Contender(ONE_BY_ONE, {**OFFLOAD, "overlap_cpu_optimizer_d2h_h2d": False}),
    Contender(STOCK, most_rounds=3),
    Contender(FUSED, made_fused=True),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--positions", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of every contender")
    parser.add_argument("--rounds", type=int, default=15, help="samples of each row")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of step.csv, step.md and step.svg")
    parser.add_argument("--report-only", action="store_true", help="write step.md and step.svg anew from step.csv")
    args = parser.parse_args(argv)
    args.results.mkdir(parents=True, exist_ok=True)
    if not args.report_only:
        size = Size(args.layers, args.hidden, args.heads, args.vocabulary, args.positions)
        write_csv(args.results / "step.csv", measure_all(size, args.threads, args.rounds))
    return report(args.results)


# --- Running ---------------------------------------------------------------------------------------------------------


def measure_all(size: Size, threads: int, rounds: int) -> list[dict]:
    """The rows of step.csv."""
    if sys.platform != "linux":
        raise SystemExit("bench_step.py measures on Linux only")
    load = os.getloadavg()[0]
    if load > 0.3:
        print(f"note: load average {load:.1f}: other programs are running, figures will be noisy", file=sys.stderr)
    import_megatron()
    print("measuring memory ...", file=sys.stderr, flush=True)
    memory = {each.name: in_a_process(memory_of, size, threads, each) for each in CONTENDERS if not each.made_fused}
    memory[FUSED] = memory[STOCK]
    print("measuring time ...", file=sys.stderr, flush=True)
    measured = in_a_process(seconds_of_all, size, threads, rounds)
    common = {"date": datetime.date.today().isoformat(), "cpu": cpu_name(), "load": f"{load:.1f}", "threads": threads}
    common |= {"torch": torch.__version__, "parameters": measured["parameters"], "tensors": measured["tensors"]}
    rows = []
    for grads, seconds in measured["seconds"].items():
        for name, each in seconds.items():
            rows.append(
                {**common, "what": name, "kernel": measured["kernels"][name], "grads": grads}
                | time_columns(each, seconds[OURS], measured["parameters"])
                | memory_columns(memory[name], measured["parameters"])
            )
    return rows


def time_columns(seconds: Sequence[float], ours: Sequence[float], parameters: int) -> dict:
    low, middle, high = (1e3 * value for value in quartiles(seconds))
    # Of each round, so that what slows the machine down for both leaves the ratio alone.
    ratios = quartiles([theirs / mine for theirs, mine in zip(seconds, ours, strict=False)])
    return {
        "samples": len(seconds),
        **dict(zip(("q1_ms", "median_ms", "q3_ms"), (f"{value:.3f}" for value in (low, middle, high)), strict=True)),
        "gparams_per_s": f"{parameters / middle / 1e6:.4f}",
        **dict(
            zip(("times_ours_q1", "times_ours", "times_ours_q3"), (f"{value:.3f}" for value in ratios), strict=True)
        ),
    }


def memory_columns(memory: dict, parameters: int) -> dict:
    return {
        "rss_bytes_per_param": f"{memory['rss'] / parameters:.2f}",
        "host_bytes_per_param": f"{sum(memory['host'].values()) / parameters:.2f}",
        "device_bytes_per_param": f"{sum(memory['device'].values()) / parameters:.2f}",
        "made_of": "; ".join(
            f"{nbytes / parameters:.2f} {what}{' (device)' if where == 'device' else ''}"
            for where in ("host", "device")
            for what, nbytes in memory[where].items()
            if nbytes
        ),
    }


def in_a_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function returns, called in a fork of this process, which has imported Megatron and computed nothing."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function, arguments)


# --- Megatron (imported once, used in the forks) ---------------------------------------------------------------------


def import_megatron() -> None:
    from megatron_dos import cpu_emulation

    cpu_emulation.activate()
    cpu_emulation.adapt_megatron()
    import megatron_dos

    megatron_dos.install()
    for name in ("megatron.core.models.gpt", "megatron_dos.optimizer"):
        importlib.import_module(name)
    do_as_a_gpu_would()


def do_as_a_gpu_would() -> None:
    """Replace what costs much more here than its counterpart on a GPU, for all contenders alike; the bits are the same.

    The params of one rank are not gathered: NCCL does nothing then, gloo copies them all through buffers of its own.
    And grads are clipped in place, as by the kernels of Transformer Engine and Apex; without these, Megatron makes a
    copy of each grad and copies that back.
    """
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.optimizer import clip_grads

    gather = param_and_grad_buffer.dist_all_gather_func

    def gather_among_ranks(whole: torch.Tensor, own: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        in_place = whole.data_ptr() == own.data_ptr() and whole.numel() == own.numel()
        return None if in_place else gather(whole, own, *args, **kwargs)

    def scale(chunk_size: int, overflow: Any, tensors: Sequence[Sequence[torch.Tensor]], factor: float) -> None:
        for source, target in zip(*tensors, strict=True):
            torch.mul(source, factor, out=target)

    param_and_grad_buffer.dist_all_gather_func = gather_among_ranks
    clip_grads.multi_tensor_scale_impl = scale


class Model:
    """The GPT in Megatron's DistributedDataParallel, grads in place of a backward pass, and optimizers for it."""

    def __init__(self, size: Size, threads: int) -> None:
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.module import Float16Module

        torch.set_num_threads(threads)
        self._threads = threads
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        torch.distributed.init_process_group("gloo")
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        config = TransformerConfig(
            num_layers=size.layers,
            hidden_size=size.hidden,
            num_attention_heads=size.heads,
            bf16=True,
            params_dtype=torch.bfloat16,
        )
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=size.vocabulary,
            max_sequence_length=size.positions,
            share_embeddings_and_output_weights=True,
        )
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        self.ddp = DistributedDataParallel(config, ddp_config, Float16Module(config, model))
        self._grads = [buffer.grad_data for buffer in self.ddp.buffers]
        for grad in self._grads:
            grad.normal_()
        self.parameters = sum(param.numel() for param in self.ddp.parameters())
        self.tensors = len(list(self.ddp.parameters()))

    def optimizer(self, contender: Contender) -> Any:
        """What Megatron makes for these options."""
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        options = dict(contender.options)
        if "use_deep_optimizer_states" in options:
            options["dos_cpu_threads"] = self._threads
        config = OptimizerConfig(
            optimizer="adam",
            lr=1e-4,
            weight_decay=0.1,
            adam_beta2=0.95,
            clip_grad=CLIP,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            **options,
        )
        return get_megatron_optimizer(config, [self.ddp])

    def scale_grads(self, norm: float) -> None:
        """Multiply the grads so that their norm is this one."""
        # In parts: over a long array in one go torch's norm is a few percent off.
        now = sum(part.norm().item() ** 2 for grad in self._grads for part in grad.split(1 << 20)) ** 0.5
        for grad in self._grads:
            grad.mul_(norm / now)


def step(optimizer: Any) -> float:
    """Seconds of Megatron's whole optimizer step.

    Emulation watches every operation on a host tensor, which takes microseconds that no real run pays: off meanwhile.
    """
    with torch._C.DisableTorchFunctionSubclass():
        start = time.perf_counter()
        success, _, _ = optimizer.step()
        taken = time.perf_counter() - start
    if not success:
        raise RuntimeError("the optimizer skipped the step")
    return taken


def seconds_of_all(size: Size, threads: int, rounds: int) -> dict:
    """Seconds of each round by kind of grads and contender, and the size of the model."""
    model = Model(size, threads)
    optimizers = {each.name: model.optimizer(each) for each in CONTENDERS if not each.made_fused}
    optimizers[FUSED] = optimizers[STOCK]  # the same states, updated by another of torch's kernels
    chosen = optimizers[STOCK].param_groups[0]["fused"]
    kernels = {}
    seconds: dict[str, dict[str, list[float]]] = {
        grads: {contender.name: [] for contender in CONTENDERS} for grads in NORMS
    }
    for number in tqdm(range(-1, rounds), desc="rounds", file=sys.stderr, disable=None):  # round -1 warms up
        for grads, norm in NORMS.items():
            for contender in CONTENDERS:
                if number >= contender.most_rounds:
                    continue
                optimizer = optimizers[contender.name]
                if contender.name in (STOCK, FUSED):
                    for group in optimizer.param_groups:
                        group["fused"] = True if contender.made_fused else chosen
                optimizer.zero_grad()
                model.scale_grads(norm)
                taken = step(optimizer)
                kernels[contender.name] = kernel_of(optimizer)
                if number >= 0:
                    seconds[grads][contender.name].append(taken)
    return {"seconds": seconds, "kernels": kernels, "parameters": model.parameters, "tensors": model.tensors}


def kernel_of(optimizer: Any) -> str:
    """The code that updates: as torch's optimizers were told in their last step."""
    (of_megatron,) = optimizer.chained_optimizers
    if hasattr(of_megatron, "_engine"):
        return "cpp_adam"
    inner = getattr(of_megatron.optimizer, "cpu_optimizers", [of_megatron.optimizer])
    fused = {bool(group["fused"]) for each in inner for group in each.param_groups}
    return {frozenset({True}): "torch, fused", frozenset({False}): "torch, not fused"}[frozenset(fused)]


def memory_of(size: Size, threads: int, contender: Contender) -> dict:
    """Bytes that the optimizer adds to the process: by the kernel's count, and by what its tensors are."""
    model = Model(size, threads)
    model.scale_grads(min(NORMS.values()))
    before = resident()
    optimizer = model.optimizer(contender)
    for _ in range(2):
        optimizer.zero_grad()
        step(optimizer)
    optimizer.zero_grad()
    return {"rss": resident() - before, **made_of(optimizer)}


def resident() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def made_of(optimizer: Any) -> dict[str, dict[str, int]]:
    """Bytes of the states and buffers that the optimizer keeps, by place and purpose."""
    (of_megatron,) = optimizer.chained_optimizers
    inner = of_megatron.optimizer
    engine = getattr(of_megatron, "_engine", None)
    if engine is not None:
        states = {name: [getattr(engine.memory.states, name)] for name in ("master", "exp_avg", "exp_avg_sq")}
        found = {**states, "staging": [*engine.memory.host_grads, *engine.memory.host_params]}
    elif hasattr(inner, "cpu_optimizers"):
        of_each = [state for each in inner.cpu_optimizers for state in each.state.values()]
        found = {
            "master": list(inner.param_to_fp32_param.values()),
            "exp_avg": [state["exp_avg"] for state in of_each],
            "exp_avg_sq": [state["exp_avg_sq"] for state in of_each],
            "grads": list(inner.cpu_copy_map_grad.values()),
        }
    else:
        found = {
            "master": [param for group in inner.param_groups for param in group["params"]],
            "exp_avg": [state["exp_avg"] for state in inner.state.values()],
            "exp_avg_sq": [state["exp_avg_sq"] for state in inner.state.values()],
        }
    places: dict[str, dict[str, int]] = {"host": {}, "device": {}}
    for what, tensors in found.items():
        for tensor in tensors:
            place = places["device" if tensor.is_cuda else "host"]
            place[what] = place.get(what, 0) + tensor.numel() * tensor.element_size()
    return places


# --- Results ---------------------------------------------------------------------------------------------------------


def write_csv(path: Path, rows: list[dict]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def report(folder: Path) -> int:
    """step.md and step.svg from step.csv; the text is printed too. The exit status."""
    path = folder / "step.csv"
    if not path.exists():
        raise SystemExit(f"{path} is not there: run without --report-only first")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    promises = verdict(rows)
    text = tables(rows, [line for _, line in promises])
    (folder / "step.md").write_text(text)
    print(text)
    plot(rows, folder / "step.svg")
    return 0 if all(kept for kept, _ in promises) else 1


def verdict(rows: list[dict]) -> list[tuple[bool, str]]:
    """For each promise whether it is kept, and in words."""
    found = []
    for grads in dict.fromkeys(row["grads"] for row in rows):
        rivals = [row for row in rows if row["grads"] == grads and row["what"] in RIVALS]
        best = min(rivals, key=lambda row: float(row["median_ms"]))
        ratio = float(best["times_ours"])
        found.append(
            (
                ratio >= FASTER,
                f"{grads}: the step of {best['what']} takes {ratio:.2f} [{float(best['times_ours_q1']):.2f}, "
                f"{float(best['times_ours_q3']):.2f}] times as long as ours; promised {FASTER}",
            )
        )
    best = min((row for row in rows if row["what"] in RIVALS), key=lambda row: float(row["rss_bytes_per_param"]))
    ours = next(float(row["rss_bytes_per_param"]) for row in rows if row["what"] == OURS)
    ratio = ours / float(best["rss_bytes_per_param"])
    found.append(
        (
            ratio <= SMALLER,
            f"host memory: ours takes {ours:.2f} bytes a parameter, {ratio:.2f} times those of {best['what']}; "
            f"promised {SMALLER}",
        )
    )
    return [(kept, f"{'kept' if kept else 'NOT KEPT'}: {line}") for kept, line in found]


METHOD = """Written by `make bench-step` from step.csv. One sample is one call of Megatron's `optimizer.step()`: taking
over the grads, their norm, clipping, the update, writing the model params. bf16 params, FP32 grads, one process; every
contender takes its turn in each round and uses the same threads. "Times ours" is the median over the rounds of its time
over ours, with quartiles in brackets.

What is what:

- *ours*: `--use-deep-optimizer-states` with its defaults, which without a GPU update everything on the CPU.
- *HybridDeviceOptimizer*: `--optimizer-cpu-offload --optimizer-offload-fraction 1.0 --use-precision-aware-optimizer`;
  *overlapping* with `--overlap-cpu-optimizer-d2h-h2d` as well, which makes one optimizer of each parameter. Megatron
  gives both torch's AdamW with `fused=True`.
- *stock, torch AdamW*: the distributed optimizer without offloading. On GPUs Megatron takes the fused Adam of
  Transformer Engine or Apex; neither exists here, and Megatron falls back to torch's AdamW without `fused`, which on a
  CPU is a loop over tensors. *Made fused* is the same with `fused` set afterwards, which Megatron itself would not do.

What is emulated (`megatron_dos.cpu_emulation`, see docs/cpu-emulation.md): there is no GPU, so "device" memory is host
memory, a copy between the two is a copy in memory, streams and events order nothing because everything runs at once,
and page-locking marks a tensor and does nothing. All code of Megatron and torch beyond that is their own. The
emulation's watch over operations on host tensors is off while a step is timed. So neither side can hide copies behind
anything here: what is compared is the work itself. Two things are done for all contenders as a GPU does them: the
params of one rank are not gathered, where gloo would copy them all, and grads are clipped in place, as by the kernels
of Transformer Engine and Apex, where Megatron's fallback would copy each grad twice. Grads are random numbers in
Megatron's grad buffers.
"""

MEMORY = """Growth of the resident memory of a process of its own, from before the optimizer is built to after two
steps, and what the tensors in it are for, in bytes a parameter. The states of the stock optimizer would be on the GPU.

On a GPU both take more host memory than here. Ours has staging slots: 1.0 byte a parameter, and 1.0 more where grads
are sent in the backward pass; less from 512M parameters a rank on, which make more than 16 subgroups. The grads of
HybridDeviceOptimizer are page-locked there, by an allocator that rounds each tensor up to a power of two.
"""


def tables(rows: list[dict], promises: list[str]) -> str:
    first = rows[0]
    threads = f"{first['threads']} thread{'' if int(first['threads']) == 1 else 's'}"
    parts = [
        "# The optimizer step measured\n",
        METHOD,
        f"{int(first['parameters']):,} parameters in {first['tensors']} tensors, {threads}, "
        f"{first['cpu']}, {first['date']}, load before {first['load']}, torch "
        f"{first['torch']}.\n",
        "![step time and memory](step.svg)\n",
        *(f"- {line}" for line in promises),
        "",
    ]
    for grads in dict.fromkeys(row["grads"] for row in rows):
        parts.append(f"## Step time, {grads}\n")
        parts += ["| who | kernel | samples | ms | G P/s | times ours |", "|---|---|---|---|---|---|"]
        for row in (row for row in rows if row["grads"] == grads):
            parts.append(
                f"| {row['what']} | {row['kernel']} | {row['samples']} | {row['median_ms']} [{row['q1_ms']}, "
                f"{row['q3_ms']}] | {row['gparams_per_s']} | {row['times_ours']} [{row['times_ours_q1']}, "
                f"{row['times_ours_q3']}] |"
            )
        parts.append("")
    parts += ["## Memory\n", MEMORY]
    parts += ["| who | resident | host tensors | device tensors | made of |", "|---|---|---|---|---|"]
    for row in rows:
        if row["grads"] == first["grads"]:
            parts.append(
                f"| {row['what']} | {row['rss_bytes_per_param']} | {row['host_bytes_per_param']} | "
                f"{row['device_bytes_per_param']} | {row['made_of']} |"
            )
    return "\n".join(parts) + "\n"


def plot(rows: list[dict], path: Path) -> None:
    """Bars of step time for each kind of grads, and of resident memory."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed", file=sys.stderr)
        return
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "megatron-dos"
    import matplotlib.pyplot as plt

    kinds = list(dict.fromkeys(row["grads"] for row in rows))
    figure, axes = plt.subplots(len(kinds) + 1, 1, figsize=(8, 1.8 * len(kinds) + 2.2))
    for axis, grads in zip(axes, kinds, strict=False):
        each = [row for row in rows if row["grads"] == grads]
        times = [float(row["median_ms"]) for row in each]
        spread = [
            [time - float(row["q1_ms"]) for time, row in zip(times, each, strict=True)],
            [float(row["q3_ms"]) - time for time, row in zip(times, each, strict=True)],
        ]
        axis.barh([row["what"] for row in each], times, xerr=spread, color=colors(each), height=0.7)
        limit = 1.3 * max(time for time, row in zip(times, each, strict=True) if row["what"] != STOCK)
        axis.set_xlim(0, limit)
        for index, time_ms in enumerate(times):  # where the bar leaves the picture, its length
            if time_ms > limit:
                axis.text(0.98 * limit, index, f"{time_ms:.0f}", ha="right", va="center", fontsize=8, color="white")
        axis.set_title(f"step, ms; {grads}", fontsize=9, loc="left")
    each = [row for row in rows if row["grads"] == kinds[0] and row["what"] != FUSED]
    axes[-1].barh(
        [row["what"] for row in each],
        [float(row["rss_bytes_per_param"]) for row in each],
        color=colors(each),
        height=0.7,
    )
    axes[-1].set_title(
        "resident memory of the optimizer, bytes per parameter (stock: on the GPU)", fontsize=9, loc="left"
    )
    for axis in axes:
        axis.invert_yaxis()
        axis.tick_params(labelsize=8)
    figure.suptitle(f"{int(rows[0]['parameters']) / 1e6:.0f}M parameters, {rows[0]['threads']} threads", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def colors(rows: Sequence[dict]) -> list[str]:
    return [
        "tab:blue" if row["what"] == OURS else "tab:orange" if row["what"] in RIVALS else "tab:gray" for row in rows
    ]


if __name__ == "__main__":
    sys.exit(main())
