# SPDX-License-Identifier: Apache-2.0
"""Runs the CUDA path on the software GPU: unharmed, in all modes with many seeds, and with each of its faults planted.

`make software-gpu` runs it; docs/software-gpu.md says what the software GPU is. Three parts:

trainings   Real Megatron on two ranks, in several layouts, modes and seeds, beside its own optimizer around our Adam:
            every figure, weight and state has to have the same bits.
engine      Steps of the update engine in each mode of hardware queues, with other random times for each seed. Every
            step has to give the bits of the sequential update, without a pageable copy.
mutations   Each wait, record, synchronize and page-locking of the CUDA path left out or moved (the table is
            tests/software_gpu/mutations.py). Each has to show, or to have a reason why it cannot.

Exit status 0 when all hold, 1 otherwise.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import software_gpu
from harness import LAYOUTS, PRECISIONS, TINY, Result, differences
from software_gpu.mutations import MUTATIONS, OF_TRAININGS, plant, verdict
from software_gpu.server import Server
from software_gpu.trainings import train
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]

MODES = ("", "one", "engines")
TRAININGS = {  # layout -> precisions
    "overlap-buckets": ("bf16", "fp16", "bf16-bf16-grads"),
    "tp2": ("bf16",),
    "pp2": ("bf16",),
    "micro-batches": ("bf16",),
}
ITERATIONS = 5
TRIES = 3  # for a fault to show in a training


def check_trainings(libraries: Path, seeds: int) -> list[str]:
    """Megatron with ours and with its own optimizer; what differs."""
    wrong, runs = [], 0
    cases = [(layout, precision) for layout, precisions in TRAININGS.items() for precision in precisions]
    with tempfile.TemporaryDirectory() as folder:
        for layout, precision in tqdm(cases, desc="trainings", unit="case"):
            ranks, arguments = LAYOUTS[layout]
            arguments = [*TINY, *arguments, *PRECISIONS[precision]]
            # Megatron demands it with tensor parallelism on such a GPU.
            connections = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if layout == "tp2" else {}
            modes = ("one",) if connections else MODES
            place = Path(folder) / f"{layout}-{precision}"
            still = {"SOFTWARE_GPU_DELAY_US": "0", **connections}
            reference = train(libraries, place / "stock", arguments, ranks, "numpy", ITERATIONS, **still)
            ours = [*arguments, "--dos-subgroup-size", "4321", "--dos-gpu-share", "0.5"]
            for seed in range(seeds):
                mode = modes[seed % len(modes)]
                settings = {"SOFTWARE_GPU_SEED": str(seed), "SOFTWARE_GPU_QUEUES": mode, "SOFTWARE_GPU_DELAY_US": "50"}
                what = f"{layout}, {precision}, seed {seed}, queues '{mode}'"
                try:
                    settings |= connections
                    run = train(libraries, place / str(seed), ours, ranks, "dos", ITERATIONS, **settings)
                    wrong += [f"{what}: {one}" for one in differences(run, reference)]
                except AssertionError as error:
                    wrong.append(f"{what}: {error}")
                runs += 1
    print(f"trainings: {runs} runs of Megatron in {len(cases)} cases, {len(wrong)} differences")
    return wrong


def check_faults_of_trainings(libraries: Path) -> list[str]:
    """Faults that only a training can show; those that were missed in all tries."""
    ranks, arguments = LAYOUTS["overlap-buckets"]
    arguments = [*TINY, *arguments, *PRECISIONS["bf16"], "--dos-subgroup-size", "4321", "--dos-gpu-share", "0.5"]

    def run(folder: Path, mutation: str, seed: int) -> Result:
        settings = {"SOFTWARE_GPU_SEED": str(seed), "SOFTWARE_GPU_DELAY_US": "500"}
        return train(libraries, folder, arguments, ranks, "dos", ITERATIONS, mutation=mutation, **settings)

    missed = []
    with tempfile.TemporaryDirectory() as folder:
        reference = run(Path(folder) / "reference", "", 0)
        for number, name in enumerate(OF_TRAININGS):
            for seed in range(TRIES):
                try:
                    shown = differences(run(Path(folder) / f"{number}-{seed}", name, seed), reference)
                except AssertionError:
                    shown = ["an error"]
                if shown:
                    break
            else:
                missed.append(f"{name}: missed")
    print(f"mutations in trainings: {len(OF_TRAININGS) - len(missed)} of {len(OF_TRAININGS)} seen")
    return missed


def check_engine(server: Server, seeds: int) -> list[str]:
    """Steps in all modes; what was wrong."""
    wrong, steps = [], 0
    for seed in tqdm(range(seeds), desc="engine", unit="seed"):
        for mode in MODES:
            settings = {
                "SOFTWARE_GPU_SEED": str(seed),
                "SOFTWARE_GPU_QUEUES": mode,
                "SOFTWARE_GPU_DELAY_US": "50",
            }
            outcome = server.run("engine", **settings)
            found = outcome.result or {"steps": 0, "differences": [outcome.log], "pageable copies": 0}
            steps += found["steps"]
            where = f"seed {seed}, queues '{mode}'"
            wrong += [f"{where}: {difference}" for difference in found["differences"]]
            wrong += [f"{where}: {found['pageable copies']} pageable copies"] if found["pageable copies"] else []
    print(f"engine: {steps} steps with {seeds} seeds in {len(MODES)} modes, {len(wrong)} wrong")
    return wrong


def check_mutations(server: Server, names: Sequence[str], details: bool) -> list[str]:
    """Plant each fault; the score, and what was missed."""
    verdicts: dict[str, str] = {}
    for name in tqdm(names, desc="mutations", unit="fault"):
        shown = plant(server, name)
        verdicts[name] = verdict(name, shown)
        if details or verdicts[name] not in ("seen", "equivalent"):
            tqdm.write(f"{verdicts[name]:10}  {name}{f': {shown}' if shown else ''}")
    counts = {each: list(verdicts.values()).count(each) for each in ("seen", "equivalent")}
    missed = [f"{name}: {each}" for name, each in verdicts.items() if each not in counts]
    for name in names:
        if verdicts[name] == "equivalent":
            print(f"equivalent: {name}: {MUTATIONS[name].equivalent}")
    print(
        f"mutations: {counts['seen']} of {len(names) - counts['equivalent']} seen, {counts['equivalent']} more are "
        f"equivalent, {len(missed)} missed"
    )
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2, help="of the engine, in each of the three modes (default: 2)")
    parser.add_argument("--trainings", type=int, default=4, help="of Megatron in each case (default: 4)")
    parser.add_argument("--only", default="", help="mutations whose name holds this text")
    parser.add_argument("--details", action="store_true", help="say of each mutation what it has shown in")
    options = parser.parse_args()
    if not software_gpu.is_possible():
        print("the software GPU needs a torch that is built for CUDA")
        return 1
    folder = software_gpu.build(ROOT / ".cache" / "software-gpu")
    names = [name for name in MUTATIONS if options.only in name]
    wrong: list[str] = []
    if options.trainings and not options.only:
        wrong += check_trainings(folder, options.trainings)
        wrong += check_faults_of_trainings(folder)
    with Server(folder) as server:
        if options.seeds and not options.only:
            wrong += check_engine(server, options.seeds)
        wrong += check_mutations(server, names, options.details)
    for one in wrong:
        print(f"wrong: {one}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
