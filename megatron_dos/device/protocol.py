# SPDX-License-Identifier: Apache-2.0
"""What the engine asks of a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from megatron_dos.program.schedule import Op, OpKind, Program, Resource

__all__ = ["Device", "Handlers"]

Handlers = Mapping[OpKind, Callable[[Op], Any]]
"""What a device calls for each kind of operation."""


class Device(Protocol):
    """Runs programs: decides when each operation runs, within the order that the program asks for.

    Attributes:
        shares_memory: whether the tensors that the operations work on are in memory that the CPU may update in place.
    """

    shares_memory: bool

    def run(
        self,
        program: Program,
        handlers: Handlers,
        memory: Callable[[Resource], list[torch.Tensor]],
    ) -> None:
        """Run `program`, or enqueue it so that what the caller enqueues next comes after it.

        Args:
            program: what to run.
            handlers: called as `handlers[op.kind](op)`; one that returns a ticket (`wait()`, `poll()`) has started work
                on the host threads that ends with that.
            memory: resource -> the staging memory behind it, for devices that check its use.
        """

    def begin(self, op: Op, handler: Callable[[Op], Any]) -> None:
        """Start an operation of kind EARLY_GRAD_TO_HOST, before the program that holds it is known.

        The next program does not run it again. `handler` enqueues it on the current stream; what the caller has
        enqueued so far comes before it.
        """

    def join(self) -> None:
        """Let what the caller enqueues next come after everything that was begun, which no program will hold."""

    def synchronize(self) -> None:
        """Block until the host may read what all programs have written."""
