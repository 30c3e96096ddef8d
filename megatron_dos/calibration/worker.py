# SPDX-License-Identifier: Apache-2.0
"""One rank of a calibration: a process that prepares memory once and measures what it is asked to.

`python -m megatron_dos.calibration.worker`, with the environment of a rank (LOCAL_RANK, LOCAL_WORLD_SIZE). Requests
come on stdin and answers go to stdout, a JSON object a line. The first request is the `Sizes`. Then, for each phase,
one request names it, and is answered when this rank is ready for it; another says when it begins and how long it lasts,
on the clock that all processes of a node share, so that all ranks measure at once. The process ends when stdin does.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from megatron_dos.node.gpu import gpu_count

__all__ = ["GPU_PHASES", "HOST_PHASES", "Sizes", "main"]

HOST_PHASES = ("one_core", "host_update", "host_copy", "submit")
GPU_PHASES = ("h2d", "d2h", "both", "all", "pageable", "gpu_update", "launch", "matmul")
"""What can be asked for: of any rank, and of one with a GPU."""


@dataclass(frozen=True)
class Sizes:
    """How large the arrays of one rank are, and how many threads it has.

    Attributes:
        update: parameters of the host update; 30 bytes each.
        copy_bytes: of a slab that is copied over a link, a multiple of 64 KiB.
        gpu_update: parameters of the update on the GPU.
        matmul: rows and columns of the square matrices.
        threads: of the host update; 0 for the rank's share of the CPUs.
    """

    update: int = 1 << 25
    copy_bytes: int = 1 << 28
    gpu_update: int = 1 << 25
    matmul: int = 8192
    threads: int = 0


class _Rank:
    """The memory of this rank, and a function for each phase: one sample, as a rate."""

    def __init__(self, sizes: Sizes, has_gpu: bool) -> None:
        import torch

        from megatron_dos.calibration.lane_rates import HostUpdate, Links, sleep_on_stream
        from megatron_dos.kernels import cpu
        from megatron_dos.node import ranks as node
        from megatron_dos.node import threads

        self.torch, self.sizes, self.has_gpu = torch, sizes, has_gpu
        device = torch.device("cpu")
        if self.has_gpu:
            device = torch.device("cuda", node.local_rank() % torch.cuda.device_count())
            torch.cuda.set_device(device)
            torch.zeros(1, device=device)  # makes the context, without which slabs are not page-locked
        self.device = device
        torch.set_num_threads(sizes.threads or threads.default_threads())
        self.update = HostUpdate(sizes.update, device, sizes.threads or None)
        self.threads = cpu.pool(sizes.threads or None).threads
        # Phases that copy are asked for only where there is a GPU.
        self.links: Any = Links(sizes.copy_bytes, device, sleep_on_stream) if self.has_gpu else None

    def about(self) -> dict[str, Any]:
        found = {"threads": self.threads, "has_gpu": self.has_gpu}
        if self.has_gpu:
            properties = self.torch.cuda.get_device_properties(self.device)
            found.update(gpu_memory=properties.total_memory, gpus=self.torch.cuda.device_count())
        return found

    def sampler(self, phase: str) -> Callable[[], dict[str, float]]:
        return getattr(self, f"_{phase}")()

    def _one_core(self) -> Callable[[], dict[str, float]]:
        from megatron_dos.calibration.lane_rates import HostUpdate

        update = HostUpdate(max(self.sizes.update // 8, 1), self.device, threads=1)
        return lambda: {"rate": update.numel / update()}

    def _host_update(self) -> Callable[[], dict[str, float]]:
        return lambda: {"rate": self.update.numel / self.update()}

    def _host_copy(self) -> Callable[[], dict[str, float]]:
        """Bytes read and written by a plain copy."""
        source, target = self.update.states[1], self.update.states[2]

        def sample() -> dict[str, float]:
            began = time.perf_counter()
            target.copy_(source)
            return {"rate": 2 * target.nbytes / (time.perf_counter() - began)}

        return sample

    def _submit(self) -> Callable[[], dict[str, float]]:
        """Seconds of an update so small that only handing it over counts."""
        return lambda: {"seconds": statistics.median(self.update(0, 64) for _ in range(100))}

    def _h2d(self) -> Callable[[], dict[str, float]]:
        return lambda: self._copied("h2d")

    def _d2h(self) -> Callable[[], dict[str, float]]:
        return lambda: self._copied("d2h")

    def _both(self) -> Callable[[], dict[str, float]]:
        return lambda: self._copied("h2d", "d2h")

    def _copied(self, *directions: str) -> dict[str, float]:
        jobs = {direction: self.links.job(direction, times=4) for direction in directions}
        self.links.time(*jobs.values())
        return {direction: job.nbytes / job.seconds for direction, job in jobs.items()}

    def _all(self) -> Callable[[], dict[str, float]]:
        """Host update and both directions at once."""
        from megatron_dos.calibration.lane_rates import rates_beside_copies

        def sample() -> dict[str, float]:
            rates = rates_beside_copies(self.links, self.update, parts=8, seconds=0.5)
            return {**asdict(rates), "host_memory": rates.host_memory}

        return sample

    def _pageable(self) -> Callable[[], dict[str, float]]:
        """Bytes a second to the GPU from ordinary memory, which the driver copies through memory of its own."""
        torch, target = self.torch, self.links.device[0]
        source = torch.ones_like(target, device="cpu")

        def sample() -> dict[str, float]:
            began = time.perf_counter()
            target.copy_(source)
            torch.cuda.synchronize()
            return {"rate": target.nbytes / (time.perf_counter() - began)}

        return sample

    def _gpu_update(self) -> Callable[[], dict[str, float]]:
        from megatron_dos.calibration.lane_rates import device_update_rate
        from megatron_dos.kernels import device_kernel

        kernel = device_kernel.select("auto", self.links.device[0].device)
        return lambda: {"rate": device_update_rate(kernel, self.sizes.gpu_update, self.device, samples=5)}

    def _launch(self) -> Callable[[], dict[str, float]]:
        """Seconds of a copy so small that only its launch and its event count."""
        torch = self.torch
        target, source = self.links.device[0][:64], self.links.host[0][:64]

        def sample() -> dict[str, float]:
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(200):
                target.copy_(source, non_blocking=True)
                torch.cuda.Event().record()
            torch.cuda.synchronize()
            return {"seconds": (time.perf_counter() - began) / 200}

        return sample

    def _matmul(self) -> Callable[[], dict[str, float]]:
        """Floating-point operations a second of products of bf16 matrices."""
        torch, size = self.torch, self.sizes.matmul
        left, right = (torch.randn(size, size, device=self.device, dtype=torch.bfloat16) for _ in range(2))

        def sample() -> dict[str, float]:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.mm(left, right)
            start.record()
            for _ in range(5):
                torch.mm(left, right)
            end.record()
            torch.cuda.synchronize()
            return {"rate": 5 * 2 * size**3 / (start.elapsed_time(end) / 1e3)}

        return sample


def _measure(sample: Callable[[], dict[str, float]], begin: float, seconds: float) -> dict[str, float]:
    """Medians of the samples that end within the time, at least of one."""
    time.sleep(max(begin - time.monotonic(), 0.0))
    samples = [sample()]
    while time.monotonic() < begin + seconds:
        samples.append(sample())
    if len(samples) > 2:
        samples.pop()  # the others may have ended before it did
    return {name: statistics.median(each[name] for each in samples) for name in samples[0]}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    try:
        sizes = Sizes(**json.loads(sys.stdin.readline()))
        rank = _Rank(sizes, has_gpu=gpu_count() > 0)
        answer(**rank.about())
        for line in sys.stdin:
            sample = rank.sampler(json.loads(line)["phase"])
            sample()  # touches memory, compiles kernels, wakes clocks
            answer(ready=True)
            answer(**_measure(sample, **json.loads(sys.stdin.readline())))
    except Exception as error:  # the parent reports it
        answer(error=f"{type(error).__name__}: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
