# SPDX-License-Identifier: Apache-2.0
"""The adversarial device: runs a program in a random order that only its streams and dependencies limit.

It needs no GPU. What a real device may do in some rare timing, this one does on purpose, and it fails loudly when the
program let it do harm: by the operations' declared reads and writes, and by filling every staging slot with NaN as
soon as its contents have had their last declared reader, so that an undeclared read shows in the result.

[Note: effects] An operation has a start and an end, and between them operations of other streams start and end. What it
does to memory happens at one moment, at its start or at its end by chance; work on the host threads may also happen at
any moment between the two. So of two operations that overlap, either can come first.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import torch

from megatron_dos.device.protocol import Handlers
from megatron_dos.program.schedule import STAGING, Op, OpKind, Program, Resource

__all__ = ["RaceError", "SimDevice", "describe"]

_NAN_BYTE = 0xFF  # four of them are a NaN in FP32, two are one in bf16 and fp16


class RaceError(RuntimeError):
    """An operation ran before one that has to end first: the program lacks a dependency."""


class SimDevice:
    """Runs operations in random orders, each order given by the seed.

    Attributes:
        hold_back: index of one operation whose start, and then whose end, is delayed for as long as anything else can
            happen; None for no such operation. Every dependency that is missing shows in one run that holds back
            the operation that should have been waited for.
        check: raise at an operation that ran too early. Without, only the result tells.

    Args:
        seed: of all orders that this device makes, one after the other.
    """

    shares_memory = False  # programs have to be those of a GPU

    def __init__(self, seed: int, hold_back: int | None = None, check: bool = True) -> None:
        self.hold_back = hold_back
        self.check = check
        self._random = random.Random(seed)
        self._begun: set[int] = set()
        self._stream_waits = False

    def begin(self, op: Op, handler: Callable[[Op], Any]) -> None:
        """Run an operation ahead of its program, see `Device`, or by chance it and all after it in the program."""
        self._stream_waits = self._stream_waits or op.index == self.hold_back or self._random.random() < 0.3
        if not self._stream_waits:
            handler(op)
            self._begun.add(op.subgroup)

    def join(self) -> None:
        """Nothing to wait for: what has not run yet is of no use."""
        self._forget()

    def _forget(self) -> None:
        self._begun = set()
        self._stream_waits = False

    def synchronize(self) -> None:
        """Nothing to wait for: every operation has ended when `run` returns."""

    def run(
        self,
        program: Program,
        handlers: Handlers,
        memory: Callable[[Resource], list[torch.Tensor]],
    ) -> None:
        """Run `program`, see `Device`; `memory` is filled with NaN while it holds nothing.

        Raises:
            RaceError: see `check`; both operations are named.
            ValueError: the program itself is not in a valid order, or reads a slot that nothing has written.
        """
        run = _Run(program, handlers, memory, self, self._begun)
        self._forget()
        try:
            run.to_the_end(self._random)
        finally:
            run.wait_for_tickets()  # the memory of what was started must not go before it has ended


class _Effect(Enum):
    """When an operation acts on memory. See [Note: effects]."""

    AT_START = "at its start"
    AT_END = "at its end"
    BETWEEN = "between"  # for work that a ticket stands for; as AT_START for all other


class _Conflict(NamedTuple):
    """Why an operation must not start before `earlier` has ended."""

    earlier: int
    reason: str


class _Run:
    """One pass over a program."""

    def __init__(
        self,
        program: Program,
        handlers: Handlers,
        memory: Callable[[Resource], list[torch.Tensor]],
        device: SimDevice,
        begun: set[int],
    ) -> None:
        self._ops = program.ops
        self._handlers = handlers
        self._memory = memory
        self._device = device
        self._contents = _Contents(program)
        self._waits_for = [set(waits) for waits in program.predecessors()]
        self._unblocks: list[list[int]] = [[] for _ in self._ops]
        for op in self._ops:
            for earlier in self._waits_for[op.index]:
                self._unblocks[earlier].append(op.index)
        self._running: dict[int, _Effect] = {}
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self._tickets: dict[int, Any] = {}
        early = [op for op in self._ops if op.kind is OpKind.EARLY_GRAD_TO_HOST and op.subgroup in begun]
        for resource in set(self._contents.slots).difference(*(op.writes for op in early)):
            self._fill_with_nan(resource)
        self._startable = [op.index for op in self._ops if not self._waits_for[op.index] and op not in early]
        self._begun.update(op.index for op in early)
        for op in early:
            self._has_ended(op.index)

    def to_the_end(self, rng: random.Random) -> None:
        while self._startable or self._running:
            index, starts = self._choose(rng)
            if starts:
                self._start(index, rng.choice(list(_Effect)))
            else:
                self._end(index)

    def wait_for_tickets(self) -> None:
        while self._tickets:
            self._tickets.popitem()[1].wait()

    def _choose(self, rng: random.Random) -> tuple[int, bool]:
        """The next event: the operation, and whether it starts or ends."""
        events = [(index, True) for index in self._startable] + [(index, False) for index in self._running]
        others = [event for event in events if event[0] != self._device.hold_back]
        return rng.choice(others or events)

    def _start(self, index: int, effect: _Effect) -> None:
        op = self._ops[index]
        if self._device.check:
            self._check(op)
        self._startable.remove(index)
        self._running[index] = _Effect.AT_END if index == self._device.hold_back else effect
        self._begun.add(index)
        if self._running[index] is not _Effect.AT_END:
            self._act(op)
        if self._running[index] is not _Effect.BETWEEN:
            self._wait(index)

    def _end(self, index: int) -> None:
        op = self._ops[index]
        if self._running.pop(index) is _Effect.AT_END:
            self._act(op)
        self._wait(index)
        self._has_ended(index)
        for resource in self._contents.freed_by(op, self._begun, self._ended):
            self._fill_with_nan(resource)

    def _has_ended(self, index: int) -> None:
        self._ended.add(index)
        for later in self._unblocks[index]:
            self._waits_for[later].remove(index)
            if not self._waits_for[later] and later not in self._begun:
                self._startable.append(later)

    def _act(self, op: Op) -> None:
        ticket = self._handlers[op.kind](op)
        if ticket is not None:
            self._tickets[op.index] = ticket

    def _wait(self, index: int) -> None:
        if index in self._tickets:
            self._tickets.pop(index).wait()

    def _check(self, op: Op) -> None:
        for earlier, reason in self._contents.conflicts[op.index]:
            if earlier not in self._ended:
                state = "is still running" if earlier in self._running else "has not started"
                raise RaceError(f"{describe(op)} {reason.format(describe(self._ops[earlier]))}, which {state}")

    def _fill_with_nan(self, resource: Resource) -> None:
        for tensor in self._memory(resource):
            tensor.view(torch.uint8).fill_(_NAN_BYTE)


def describe(op: Op) -> str:
    """An operation in words, for messages."""
    whose = "bucket" if op.kind is OpKind.RELEASE_BUCKET else "subgroup"
    return f"{op.kind.value} of {whose} {op.subgroup} (operation {op.index})"


class _Contents:
    """Which contents of each resource an operation reads and replaces, when operations run in program order.

    Attributes:
        conflicts: for each operation, those that must have ended before it starts. Writers of a resource and readers
            of what they wrote are compared with their neighbours in program order only; the rest follows.
        slots: the staging resources.
    """

    def __init__(self, program: Program) -> None:
        self.conflicts: list[list[_Conflict]] = []
        writer: dict[Resource, int] = {}
        readers: dict[Resource, list[int]] = {}
        self._next_writer: dict[tuple[Resource, int | None], int] = {}  # of contents, which are named by their writer
        self._readers: dict[tuple[Resource, int | None], list[int]] = {}
        self._reads: list[list[tuple[Resource, int | None]]] = []
        self._writes: list[list[tuple[Resource, int | None]]] = []
        for op in program.ops:
            conflicts = []
            for name, number in sorted(op.reads):
                resource = (name, number)
                if resource in writer:
                    conflicts.append(_Conflict(writer[resource], f"reads {name} {number} as written by {{}}"))
                elif name in STAGING:
                    raise ValueError(f"{describe(op)} reads {name} {number}, which no operation before it writes")
            for name, number in sorted(op.writes):
                resource = (name, number)
                for reader in readers.get(resource, ()):
                    conflicts.append(_Conflict(reader, f"overwrites {name} {number}, which is read by {{}}"))
                if resource in writer:
                    conflicts.append(_Conflict(writer[resource], f"overwrites {name} {number}, written by {{}}"))
            self.conflicts.append(conflicts)
            self._reads.append([(resource, writer.get(resource)) for resource in op.reads])
            self._writes.append([(resource, op.index) for resource in op.writes])
            for contents in self._reads[-1]:
                self._readers.setdefault(contents, []).append(op.index)
                readers.setdefault(contents[0], []).append(op.index)
            for resource in op.writes:
                self._next_writer[resource, writer.get(resource)] = op.index
                writer[resource] = op.index
                readers[resource] = []
        self.slots = sorted(resource for resource in writer if resource[0] in STAGING)

    def freed_by(self, op: Op, begun: set[int], ended: set[int]) -> list[Resource]:
        """Slots whose contents `op` was the last to read, or wrote for nobody, and which nothing has overwritten."""
        return [
            contents[0]
            for contents in self._reads[op.index] + self._writes[op.index]
            if contents[0][0] in STAGING
            and all(reader in ended for reader in self._readers.get(contents, ()))
            and self._next_writer.get(contents) not in begun
        ]
