# SPDX-License-Identifier: Apache-2.0
"""What every stage is given: where it runs, how large it may be, until when, and where its results go.

Under `--dry-run` there is no GPU. The stages then run as they are, on tiny tensors, through the CPU stand-in for
torch.cuda of `megatron_dos.cpu_emulation`; what a stand-in cannot have (a sleeping stream, page-locking) is asked for
through this module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from megatron_dos.calibration.lane_rates import sleep_on_stream

__all__ = ["Context", "Sizes", "median"]

FIRST = 5.0  # seconds that the first of some cases may take: it compiles kernels

T = TypeVar("T")


@dataclass(frozen=True)
class Sizes:
    """How large the stages are.

    Attributes:
        kernel_elements: of the kernels' random cases.
        kernel_campaign: random cases after the required ones, at most.
        engine_elements: of the engine's cases.
        engine_subgroups: of the engine's cases, about.
        engine_campaign: random runs after the required ones, at most.
        memory_parameters: of the memory stage.
        memory_subgroup: parameters of a subgroup of the memory stage.
        copy_bytes: of a slab that is copied to measure a link; a multiple of 64 KiB.
        update_elements: of the arrays that are updated to measure a rate.
        parameters: that the step time is measured with, at least, memory and time allowing.
        connection_parameters: of the two stages that compare CUDA_DEVICE_MAX_CONNECTIONS.
        hidden: of the GPT layers whose shapes the step time is measured with.
        ffn: inner size of their MLPs.
        kv_channels: of their attention's keys and values.
        rounds: of the step time, at most.
        subgroup: parameters of a subgroup in the step time; 0 for the automatic size.
    """

    kernel_elements: int = 20_000
    kernel_campaign: int = 2_000
    engine_elements: int = 3_000_000
    engine_subgroups: int = 13
    engine_campaign: int = 1_000
    memory_parameters: int = 1 << 26
    memory_subgroup: int = 1 << 21
    copy_bytes: int = 1 << 30
    update_elements: int = 1 << 26
    parameters: int = 1_000_000_000
    connection_parameters: int = 200_000_000
    hidden: int = 4096
    ffn: int = 11008
    kv_channels: int = 512
    rounds: int = 9
    subgroup: int = 0

    @classmethod
    def dry(cls) -> Sizes:
        """For a run without a GPU, which is to end in seconds."""
        return cls(
            kernel_elements=100,
            kernel_campaign=3,
            engine_elements=3_000,
            engine_subgroups=5,
            engine_campaign=2,
            memory_parameters=4_000,
            memory_subgroup=500,
            copy_bytes=1 << 16,
            update_elements=1 << 12,
            parameters=8_000,
            connection_parameters=3_000,
            hidden=16,
            ffn=40,
            kv_channels=4,
            rounds=2,
            subgroup=600,
        )


@dataclass
class Context:
    """One stage's run.

    Attributes:
        dry: without a GPU.
        sizes: how large it may be.
        until: the time on `time.monotonic()` by which it should end.
        send: takes the stage's result so far; called whenever there is more.
        earlier: stage name -> the `values` of stages that have ended.
        result: `checks` (name, ok, detail), `values` (numbers, with their units in their names), `notes`, and
            `not_made`, the required cases for which there was no time.
        required_until: the time by which required cases should end; `until` where None. They may take longer than what
            is done while time remains.
    """

    dry: bool
    sizes: Sizes
    until: float
    send: Callable[[dict[str, Any]], None]
    earlier: dict[str, dict[str, Any]] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=lambda: {"checks": [], "values": {}, "notes": [], "not_made": []})
    required_until: float | None = None

    def left(self) -> float:
        """Seconds that the stage should still take at most."""
        return self.until - time.monotonic()

    def required(self, cases: Sequence[T], what: str) -> Iterator[T]:
        """Those of the cases that fit into the time left, in their order; the others are reported as not made.

        A case begins where as much time is left as the one before took.

        Args:
            cases: what has to be checked.
            what: the cases in words, for the report.
        """
        took = FIRST
        for number, case in enumerate(cases):
            began = time.monotonic()
            if (self.until if self.required_until is None else self.required_until) - began < took:
                self.not_made(f"{len(cases) - number} of {len(cases)} {what}, for lack of time")
                return
            yield case
            took = time.monotonic() - began

    # --- results

    def check(self, name: str, ok: bool, detail: str = "") -> None:
        """Something that must hold. Checked twice under one name, it must hold both times."""
        checks = self.result["checks"]
        known = next((check for check in checks if check["name"] == name), None)
        if known is None:
            checks.append({"name": name, "ok": bool(ok), "detail": detail})
        elif known["ok"]:
            known.update(ok=bool(ok), detail=detail)
        self.send(self.result)

    def value(self, name: str, value: Any) -> None:
        """A figure, or a list or dict of figures."""
        self.result["values"][name] = value
        self.send(self.result)

    def note(self, text: str) -> None:
        """A sentence that a reader of the figures should know."""
        if text not in self.result["notes"]:
            self.result["notes"].append(text)
            self.send(self.result)

    def not_made(self, what: str) -> None:
        """Something required that was not checked."""
        self.result["not_made"].append(what)
        self.send(self.result)

    # --- the device

    @property
    def device(self) -> torch.device:
        """Where params and grads are."""
        return torch.device("cuda", 0)

    def initialize(self) -> None:
        """Make the CUDA context, without which slabs are not page-locked."""
        if not self.dry and torch.cuda.is_available():
            torch.cuda.init()
            torch.zeros(1, device=self.device)
            sleep_on_stream(0.0)  # measures the clock

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def sleep_on_stream(self, milliseconds: float) -> None:
        """Keep the current stream busy for about that time."""
        if self.dry:
            return
        sleep_on_stream(milliseconds)

    @contextlib.contextmanager
    def waits_forbidden(self) -> Iterator[None]:
        """Any operation of torch in the block that waits for the GPU by itself raises RuntimeError."""
        if self.dry:
            yield
            return
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def free_device_memory(self) -> int:
        """Bytes that may still be allocated on the device."""
        return torch.cuda.mem_get_info()[0]

    @contextlib.contextmanager
    def clean(self) -> Iterator[None]:
        """Give device memory back after the block."""
        try:
            yield
        finally:
            torch.cuda.empty_cache()

    def with_limit(self, seconds: float) -> Context:
        """The same stage with less time."""
        return dataclasses.replace(self, until=min(self.until, time.monotonic() + seconds))


def median(values: list[float]) -> float:
    return statistics.median(values)
