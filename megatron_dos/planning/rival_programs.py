# SPDX-License-Identifier: Apache-2.0
"""The programs of other systems, for comparison on the clock: none of them is ever run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

from megatron_dos.program.schedule import (
    DEVICE_SLOTS,
    HOST_SLOTS,
    Op,
    OpKind,
    Placement,
    Program,
    Resource,
    Stream,
    SubgroupShape,
    _Builder,
    _share,
    build_program,
    every_kth_on_device,
)

__all__ = ["every_kth_with_serial_copies", "static_split", "with_blocking_params", "with_serial_copies"]


def static_split(
    subgroups: Sequence[SubgroupShape], device_share: Fraction | float, host_slots: int = HOST_SLOTS
) -> Program:
    """The first subgroups, `device_share` of the elements, stay on the device; the CPU updates the rest after them.

    Grads are sent meanwhile; no update on the CPU overlaps with one on the device.

    Raises:
        ValueError: the share is not between 0 and 1.
    """
    share = _share("device", device_share)
    wanted, placed, placements = share * sum(shape.numel for shape in subgroups), 0, []
    for shape in subgroups:
        resident = share > 0 and 2 * (wanted - placed) >= shape.numel
        placements.append(Placement.RESIDENT if resident else Placement.HOST)
        placed += shape.numel

    def take_turns(op: Op) -> Op:
        turn: Resource = ("turn", 0)
        if op.kind is OpKind.UPDATE_ON_DEVICE:
            return replace(op, writes=op.writes | {turn})
        return replace(op, reads=op.reads | {turn}) if op.kind is OpKind.UPDATE_ON_HOST else op

    return _rebuilt(build_program(subgroups, placements, host_slots=host_slots), take_turns)


def every_kth_with_serial_copies(
    subgroups: Sequence[SubgroupShape], stride: int, host_slots: int = HOST_SLOTS, device_slots: int = DEVICE_SLOTS
) -> Program:
    """The published interleaving: one subgroup in `stride` on the device, states fetched and written back by turns.

    Raises:
        ValueError: the stride is below 1.
    """
    placements = every_kth_on_device(len(subgroups), stride)
    return with_serial_copies(build_program(subgroups, placements, host_slots, device_slots))


def with_serial_copies(program: Program) -> Program:
    """The program with states fetched and written back by turns."""

    def one_stream(op: Op) -> Op:
        return replace(op, stream=Stream.STATES_H2D) if op.stream is Stream.STATES_D2H else op

    return _rebuilt(program, one_stream)


def with_blocking_params(program: Program) -> Program:
    """The program of a loop that waits for each update and for each copy of new params before it goes on."""
    waited_for = (OpKind.UPDATE_ON_HOST, OpKind.PARAM_TO_DEVICE, OpKind.UPDATE_ON_DEVICE)

    def take_turns(op: Op) -> Op:
        return replace(op, writes=op.writes | {("turn", 0)}) if op.kind in waited_for else op

    return _rebuilt(program, take_turns)


def _rebuilt(program: Program, change: Callable[[Op], Op]) -> Program:
    """The program with every operation changed, and with the dependencies that follow from that."""
    build = _Builder()
    for op in map(change, program.ops):
        build.add(op.kind, op.stream, op.subgroup, op.slot, set(op.reads), set(op.writes))
    return replace(program, ops=tuple(build.ops))
