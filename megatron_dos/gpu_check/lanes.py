# SPDX-License-Identifier: Apache-2.0
"""Measures when each operation of one step ran, and so how busy each lane was."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_dos.device.protocol import Handlers
from megatron_dos.gpu_check.context import Context
from megatron_dos.program.schedule import Op, Program, Resource, Stream
from megatron_dos.program.timeline import FULL_DUPLEX

__all__ = ["Lanes", "union"]


@dataclass
class _Span:
    """An operation, its start and its end in seconds from the start of the step."""

    op: Op
    start: Any = None  # a CUDA event until the step has ended
    end: Any = None


class Lanes:
    """Runs one program on `device`, with events around every operation."""

    def __init__(self, context: Context, device: Any) -> None:
        self._context = context
        self._device = device
        self._spans: list[_Span] = []
        self._seconds = 0.0

    def run(
        self,
        program: Program,
        handlers: Handlers,
        memory: Callable[[Resource], list[torch.Tensor]],
    ) -> None:
        """Run the program to its end."""
        events = iter([torch.cuda.Event(enable_timing=True) for _ in range(2 * len(program.ops) + 1)])
        base = next(events)
        base.record()
        self._context.synchronize()
        began = time.perf_counter()

        def timed(op: Op) -> Any:
            span = _Span(op)
            self._spans.append(span)
            if op.stream is Stream.CPU:
                span.start = time.perf_counter() - began
                return _Watched(handlers[op.kind](op), span, began)
            span.start, span.end = next(events), next(events)
            span.start.record()
            handlers[op.kind](op)
            span.end.record()
            return None

        self._device.run(program, dict.fromkeys(handlers, timed), memory)
        self._context.synchronize()
        self._seconds = time.perf_counter() - began
        for span in self._spans:
            if span.op.stream is not Stream.CPU:
                span.start, span.end = (base.elapsed_time(event) / 1e3 for event in (span.start, span.end))

    def busy(self) -> dict[str, float]:
        """Lane -> the part of the step in which at least one of its operations ran; and the step's seconds."""
        lanes: dict[str, list[tuple[float, float]]] = {}
        for span in self._spans:
            lanes.setdefault(FULL_DUPLEX[span.op.stream], []).append((span.start, span.end))
        lanes.pop("release", None)
        parts = {lane: union(spans) / max(self._seconds, 1e-9) for lane, spans in sorted(lanes.items())}
        return {**parts, "seconds": self._seconds}

    def timeline(self) -> list[list[Any]]:
        """[stream, kind, subgroup, start, end] of every operation, in seconds."""
        return [
            [span.op.stream.value, span.op.kind.value, span.op.subgroup, round(span.start, 6), round(span.end, 6)]
            for span in sorted(self._spans, key=lambda span: span.start)
        ]


class _Watched:
    """A ticket whose end is noted by a thread that waits for it."""

    def __init__(self, ticket: Any, span: _Span, began: float) -> None:
        self._thread = threading.Thread(target=self._watch, args=(ticket, span, began))
        self._error: BaseException | None = None
        self._thread.start()

    def _watch(self, ticket: Any, span: _Span, began: float) -> None:
        try:
            ticket.wait()
        except BaseException as error:
            self._error = error
        span.end = time.perf_counter() - began

    def wait(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error

    def poll(self) -> bool:
        return not self._thread.is_alive()


def union(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total
