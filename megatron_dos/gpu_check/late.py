# SPDX-License-Identifier: Apache-2.0
"""Devices that run a program on another device with delays: what a real machine does in some rare timing, on purpose.

Device operations are delayed by keeping their stream busy before them, updates on the CPU by handing them to the worker
threads late. Before each step all staging memory is filled with NaN, so that nothing can be right by chance.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_dos.device.protocol import Handlers
from megatron_dos.gpu_check.context import Context
from megatron_dos.program.schedule import Op, Program, Resource, Stream

__all__ = ["Delays", "LateTicket", "Without", "poison"]

Memory = Callable[[Resource], list[torch.Tensor]]


class Delays:
    """Runs programs on `device` with random delays, or with one operation late.

    Args:
        context: whose streams are kept busy.
        device: runs the programs.
        seed: of the delays.
        longest: milliseconds of the longest random delay; 0 for none.
        late: index of one operation that starts `lateness` milliseconds late.
        lateness: of that operation.
        poisons: whether staging memory is filled with NaN before each program. Nothing may be in flight then.
    """

    def __init__(
        self,
        context: Context,
        device: Any,
        seed: int,
        longest: float = 1.0,
        late: int | None = None,
        lateness: float = 30.0,
        poisons: bool = True,
    ) -> None:
        self._context = context
        self._device = device
        self._random = random.Random(seed)
        self._longest = longest
        self._late = late
        self._lateness = lateness
        self._poisons = poisons

    def begin(self, op: Op, handler: Callable[[Op], Any]) -> None:
        def delayed(op: Op) -> None:
            self._context.sleep_on_stream(self._delay(op))
            handler(op)

        self._device.begin(op, delayed)

    def join(self) -> None:
        self._device.join()

    def synchronize(self) -> None:
        self._device.synchronize()

    def run(self, program: Program, handlers: Handlers, memory: Memory) -> None:
        if self._poisons:
            poison(program, memory)
        # One thread submits the CPU updates, so that they stay in the order of their stream.
        with ThreadPoolExecutor(1) as submitter:

            def delayed(op: Op) -> Any:
                handler = handlers[op.kind]
                if op.stream is Stream.CPU:
                    return LateTicket(submitter.submit(_submit_late, self._delay(op), handler, op))
                time.sleep(self._host_delay())
                self._context.sleep_on_stream(self._delay(op))
                handler(op)
                return None

            self._device.run(program, dict.fromkeys(handlers, delayed), memory)

    def _delay(self, op: Op) -> float:
        """Milliseconds by which the operation starts late."""
        if self._late is not None:
            return self._lateness if op.index == self._late else 0.0
        return self._random.uniform(0, self._longest) if self._random.random() < 0.5 else 0.0

    def _host_delay(self) -> float:
        """Seconds for which the thread that enqueues stops."""
        if self._late is not None or self._random.random() < 0.8:
            return 0.0
        return self._random.uniform(0, self._longest / 1e3)


def _submit_late(milliseconds: float, handler: Callable[[Op], Any], op: Op) -> Any:
    time.sleep(milliseconds / 1e3)
    return handler(op)


class LateTicket:
    """Stands for an update on the CPU that is handed to the worker threads late."""

    def __init__(self, submitted: Future[Any]) -> None:
        self._submitted = submitted

    def wait(self) -> None:
        self._submitted.result().wait()

    def poll(self) -> bool:
        return self._submitted.done() and self._submitted.result().poll()


@dataclass
class Without:
    """Runs programs on `device` with operation `op` not waiting for `dependency`."""

    op: int
    dependency: int
    device: Any

    def synchronize(self) -> None:
        self.device.synchronize()

    def run(self, program: Program, handlers: Handlers, memory: Memory) -> None:
        op = program.ops[self.op]
        kept = tuple(dependency for dependency in op.depends_on if dependency != self.dependency)
        ops = (*program.ops[: self.op], replace(op, depends_on=kept), *program.ops[self.op + 1 :])
        self.device.run(replace(program, ops=ops), handlers, memory)


def poison(program: Program, memory: Memory) -> None:
    """Fill the program's staging memory with NaN, but for what was written before it.

    `memory` gives nothing for what is not staging.
    """
    resources = {resource for op in program.ops for resource in op.reads | op.writes}
    for resource in resources - {("early_grad_slot", slot) for slot in program.early.values()}:
        for tensor in memory(resource):
            tensor.view(torch.uint8).fill_(0xFF)
