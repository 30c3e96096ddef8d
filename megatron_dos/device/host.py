# SPDX-License-Identifier: Apache-2.0
"""The inline device: runs a program's operations one after the other on the calling thread.

It needs no GPU. Where the operations touch one, they are issued on the current stream and each is waited for before
the next, so the result is the same and nothing overlaps. Only updates on the CPU that follow one another are handed to
its worker threads together: a thread that is done with its part of one goes on with the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_dos.device.protocol import Handlers
from megatron_dos.program.schedule import Op, OpKind, Program, Resource, Stream

__all__ = ["HostDevice"]


class HostDevice:
    """Runs operations in program order, each to its end; updates on the CPU up to the next other operation."""

    shares_memory = True

    def __init__(self) -> None:
        self._begun: set[int] = set()  # subgroups

    def begin(self, op: Op, handler: Callable[[Op], Any]) -> None:
        """Run an operation ahead of its program, see `Device`."""
        handler(op)
        _finish()
        self._begun.add(op.subgroup)

    def join(self) -> None:
        """Everything that was begun has ended; no program will hold it."""
        self._begun.clear()

    def synchronize(self) -> None:
        """Nothing to wait for: every operation has ended when `run` returns."""

    def run(
        self,
        program: Program,
        handlers: Handlers,
        memory: Callable[[Resource], list[torch.Tensor]],
    ) -> None:
        """Run `program`, see `Device`.

        Raises:
            RuntimeError: an operation depends on one that comes after it: the program is not in a valid order.
        """
        updates: list[Any] = []
        try:
            for op in program.ops:
                if any(dependency >= op.index for dependency in op.depends_on):
                    raise RuntimeError(f"{op.kind.value} of subgroup {op.subgroup} depends on a later operation: {op}")
                if op.kind is OpKind.EARLY_GRAD_TO_HOST and op.subgroup in self._begun:
                    continue
                if op.stream is not Stream.CPU:
                    _wait_for(updates)
                ticket = handlers[op.kind](op)
                if ticket is not None:
                    updates.append(ticket)
                else:
                    _finish()
        finally:
            _wait_for(updates)
        self._begun.clear()


def _wait_for(tickets: list[Any]) -> None:
    """Wait for all, also for those after one that fails, and forget them; raises what the first of those raised."""
    failures: list[BaseException] = []
    waited_for = list(tickets)
    tickets.clear()
    for ticket in waited_for:
        try:
            ticket.wait()
        except BaseException as error:
            failures.append(error)
    if failures:
        raise failures[0]


def _finish() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
