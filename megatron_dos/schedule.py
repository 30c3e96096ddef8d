"""From subgroups to a program: the operations of one optimizer step, with explicit dependencies.

A program is a list of operations in an order that is valid when run one after the other. Each operation names
the stream it runs on, the resources it reads and writes and the operations it must wait for; a device may run
operations of different streams in any order, or at once, as long as it honours `depends_on` and the order within
a stream. Nothing here knows what an operation computes, or how a device runs it.

Every subgroup is updated on the CPU by the programs made here:

    cast_grad (compute)  ->  grad_to_host (d2h)  ->  update_on_host (cpu)  ->  param_to_device (h2d)

Subgroup i uses staging slots i mod `slots`, so the stages of neighbouring subgroups can overlap.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

__all__ = ["Op", "OpKind", "Program", "Resource", "Stream", "cpu_update_program"]


class Stream(Enum):
    """What an operation occupies. Operations of one stream run in program order."""

    COMPUTE = "compute"  # the device's default stream: casts
    D2H = "d2h"  # copies to the host; overlaps with copies to the device and with the CPU
    H2D = "h2d"  # copies to the device
    CPU = "cpu"  # the host threads of the fused update


class OpKind(Enum):
    CAST_GRAD = "cast_grad"  # grads in the buffer's dtype -> FP32 in a device slot
    GRAD_TO_HOST = "grad_to_host"  # FP32 grads -> host slot
    UPDATE_ON_HOST = "update_on_host"  # fused update of the states; model-dtype params -> host slot
    PARAM_TO_DEVICE = "param_to_device"  # host slot -> param buffer


# What operations read and write: a name and the index of the subgroup or slot that is meant.
Resource = tuple[str, int]


@dataclass(frozen=True)
class Op:
    """One operation on one subgroup.

    `slot` is the index of the staging slots that the operation uses. `depends_on` lists the indices of the
    operations that must have ended, beyond those that precede this one on its own stream.
    """

    index: int
    kind: OpKind
    stream: Stream
    subgroup: int
    slot: int
    reads: frozenset[Resource]
    writes: frozenset[Resource]
    depends_on: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """The operations of one step, in a valid sequential order."""

    ops: tuple[Op, ...]
    slots: int

    @property
    def casts(self) -> bool:
        """Whether any operation needs an FP32 staging slot on the device."""
        return any(op.kind is OpKind.CAST_GRAD for op in self.ops)


class _Builder:
    """Collects operations and derives each one's dependencies from what it reads and writes."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self._last_write: dict[Resource, int] = {}
        self._reads_since: dict[Resource, list[int]] = {}

    def add(
        self, kind: OpKind, stream: Stream, subgroup: int, slot: int, reads: set[Resource], writes: set[Resource]
    ) -> None:
        index = len(self.ops)
        waits = {self._last_write[r] for r in reads | writes if r in self._last_write}  # read, write after write
        for resource in writes:  # write after read
            waits.update(self._reads_since.get(resource, ()))
        # What this stream has already run needs no waiting for.
        waits = {w for w in waits if self.ops[w].stream is not stream}
        self.ops.append(
            Op(index, kind, stream, subgroup, slot, frozenset(reads), frozenset(writes), tuple(sorted(waits)))
        )
        for resource in writes:
            self._last_write[resource] = index
            self._reads_since[resource] = []
        for resource in reads:
            self._reads_since.setdefault(resource, []).append(index)


def cpu_update_program(casts: Iterable[bool], slots: int) -> Program:
    """The program that updates every subgroup on the CPU.

    Args:
        casts: for each subgroup, whether its grads have to be converted to FP32 on the device first.
        slots: number of staging slots of each kind; subgroup i uses slot i mod `slots`.

    Raises:
        ValueError: `slots` is below 1.
    """
    if slots < 1:
        raise ValueError(f"slots is {slots}; a program needs at least 1 staging slot")
    build = _Builder()
    for subgroup, cast in enumerate(casts):
        slot = subgroup % slots
        grad: Resource = ("grad", subgroup)
        if cast:
            source: Resource = ("device_grad_slot", slot)
            build.add(OpKind.CAST_GRAD, Stream.COMPUTE, subgroup, slot, {grad}, {source})
        else:
            source = grad
        host_grad: Resource = ("host_grad_slot", slot)
        host_param: Resource = ("host_param_slot", slot)
        build.add(OpKind.GRAD_TO_HOST, Stream.D2H, subgroup, slot, {source}, {host_grad})
        build.add(
            OpKind.UPDATE_ON_HOST,
            Stream.CPU,
            subgroup,
            slot,
            {host_grad, ("states", subgroup)},
            {("states", subgroup), host_param},
        )
        build.add(OpKind.PARAM_TO_DEVICE, Stream.H2D, subgroup, slot, {host_param}, {("param", subgroup)})
    return Program(tuple(build.ops), slots)
