# SPDX-License-Identifier: Apache-2.0
"""From subgroups to a program: the operations of one optimizer step, with explicit dependencies.

A program is a list of operations in an order that is valid when run one after the other. Each operation names
the stream it runs on, the resources it reads and writes and the operations it must wait for; a device may run
operations of different streams in any order, or at once, as long as it honours `depends_on` and the order within
a stream. Nothing here knows what an operation computes, or how a device runs it.

A subgroup is updated in one of two places, mixed as evenly as the shares allow:

    on the CPU      cast_grad (cast) -> grad_to_host (d2h) -> update_on_host (cpu) -> param_to_device (h2d)
    on the device   states_to_device (h2d) -> update_on_device (compute) -> states_to_host (d2h)

or with its states on the device throughout: update_on_device alone.

[Note: streams] Each copy direction has two streams, one for states and one for the grads and params of CPU
subgroups. A stream runs its operations in order: if the params of a CPU subgroup waited for the CPU on the stream
that also fetches states, the fetches behind them would wait for the CPU too.

[Note: slots] Staging memory is a small number of slots of each kind, used in turn by the subgroups of that kind. What
was read from or written to a slot before is what its next use has to wait for; the builder derives these waits from
the reads and writes alone.

[Note: early grads] Grads of CPU subgroups may be sent in the backward pass, as soon as they are reduced. Each such
subgroup has a slot of its own then, because no update may free it before the norm of all grads is known. The program of
the step holds these copies as its first operations, and a device that has begun them in the backward pass does not
begin them again. What changes after the reduction is sent once more, in its turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction

__all__ = [
    "DEVICE_SLOTS",
    "HOST_SLOTS",
    "STAGING",
    "Op",
    "OpKind",
    "Placement",
    "Program",
    "Resource",
    "Stream",
    "SubgroupShape",
    "build_program",
    "every_kth_on_device",
    "mix",
]

# Two staging slots for CPU subgroups: one is filled while the other is used. Three for streamed ones: one is
# fetched, one updated and one written back.
HOST_SLOTS = 2
DEVICE_SLOTS = 3


class Stream(Enum):
    """What an operation occupies. Operations of one stream run in program order. See [Note: streams]."""

    COMPUTE = "compute"  # updates on the device; overlaps with all copies and the CPU
    CAST = "cast"  # casts of grads bound for the CPU: a full slot must not hold up the updates
    STATES_H2D = "states_h2d"  # fetches states; overlaps with writing them back, with updates and the CPU
    STATES_D2H = "states_d2h"  # writes states back; overlaps with fetches
    GRAD_D2H = "grad_d2h"  # sends grads to the CPU; overlaps with everything else
    PARAM_H2D = "param_h2d"  # sends new params back from the CPU; overlaps with everything else
    CPU = "cpu"  # the host threads of the fused update
    RELEASE = "release"  # hands finished buckets on, while later ones are still updated


class Placement(Enum):
    """Where a subgroup is updated."""

    HOST = "host"  # by the CPU, in place
    STREAMED = "streamed"  # on the device, states fetched and written back
    RESIDENT = "resident"  # on the device, where the states stay


class OpKind(Enum):
    EARLY_GRAD_TO_HOST = "early_grad_to_host"  # grads, in their own dtype -> early slot, in the backward pass
    CAST_GRAD = "cast_grad"  # grads in the buffer's dtype -> FP32 in a device slot
    GRAD_TO_HOST = "grad_to_host"  # grads -> host slot; of early subgroups: what has changed -> early slot
    UPDATE_ON_HOST = "update_on_host"  # fused update of the host states; model-dtype params -> host slot
    PARAM_TO_DEVICE = "param_to_device"  # host slot -> param buffer
    STATES_TO_DEVICE = "states_to_device"  # master, exp_avg, exp_avg_sq -> device slot
    UPDATE_ON_DEVICE = "update_on_device"  # fused update in the slot; grad read and param written in place
    STATES_TO_HOST = "states_to_host"  # device slot -> host states
    RELEASE_BUCKET = "release_bucket"  # every param of the bucket is written: its all-gather may start


# What operations read and write: a name and the index of the subgroup, slot or bucket that is meant.
Resource = tuple[str, int]
STAGING = frozenset(("host_grad_slot", "host_param_slot", "early_grad_slot", "device_grad_slot", "states_slot"))
"""The names of staging memory, which holds nothing when a step begins; all other resources do."""


@dataclass(frozen=True)
class Op:
    """One operation on one subgroup; RELEASE_BUCKET: on one bucket, `subgroup` counting buckets in slab order.

    `slot` is the index of the staging slot that the operation uses. `depends_on` lists the indices of the
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
    """The operations of one step, in a valid sequential order.

    `host_slots` and `device_slots` are the numbers of staging slots of CPU and of device subgroups. `early` gives each
    subgroup whose grads are sent in the backward pass its early slot.
    """

    ops: tuple[Op, ...]
    placements: tuple[Placement, ...]
    host_slots: int
    device_slots: int
    early: Mapping[int, int] = field(default_factory=dict)

    def predecessors(self) -> list[frozenset[int]]:
        """For each operation, those that must end before it starts: its dependencies and its predecessor on its stream.

        Raises:
            ValueError: an operation depends on a later one.
        """
        result: list[frozenset[int]] = []
        last_on_stream: dict[Stream, int] = {}
        for op in self.ops:
            if any(dependency >= op.index for dependency in op.depends_on):
                raise ValueError(f"{op.kind.value} of subgroup {op.subgroup} depends on a later operation: {op}")
            previous = {last_on_stream[op.stream]} if op.stream in last_on_stream else set()
            result.append(frozenset(op.depends_on) | previous)
            last_on_stream[op.stream] = op.index
        return result


class _Builder:
    """Collects operations and derives each one's dependencies from what it reads and writes."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self._last_write: dict[Resource, int] = {}
        self._reads_since: dict[Resource, list[int]] = {}
        # For each operation, and each stream, the last operation of that stream that has ended by its end. Streams
        # are in order, so all earlier ones of the stream have ended, too.
        self._ended: list[dict[Stream, int]] = []
        self._last_on_stream: dict[Stream, int] = {}

    def add(
        self, kind: OpKind, stream: Stream, subgroup: int, slot: int, reads: set[Resource], writes: set[Resource]
    ) -> None:
        index = len(self.ops)
        waits = {self._last_write[r] for r in reads | writes if r in self._last_write}  # read, write after write
        for resource in writes:  # write after read
            waits.update(self._reads_since.get(resource, ()))
        depends_on = self._needed(waits, stream)
        self.ops.append(Op(index, kind, stream, subgroup, slot, frozenset(reads), frozenset(writes), depends_on))
        ended: dict[Stream, int] = {}
        previous = self._last_on_stream.get(stream)
        for earlier in depends_on if previous is None else (*depends_on, previous):
            for other, last in self._ended[earlier].items():
                ended[other] = max(last, ended.get(other, -1))
        ended[stream] = index
        self._ended.append(ended)
        self._last_on_stream[stream] = index
        for resource in writes:
            self._last_write[resource] = index
            self._reads_since[resource] = []
        for resource in reads:
            self._reads_since.setdefault(resource, []).append(index)

    def _needed(self, waits: set[int], stream: Stream) -> tuple[int, ...]:
        """The waits that neither the stream's order nor another wait implies."""
        previous = self._last_on_stream.get(stream)
        if previous is not None:
            waits = {wait for wait in waits if not self._implies(previous, wait)}
        return tuple(sorted(w for w in waits if not any(self._implies(other, w) for other in waits if other != w)))

    def _implies(self, index: int, earlier: int) -> bool:
        """Whether `earlier` has ended when the operation `index` has."""
        return self._ended[index].get(self.ops[earlier].stream, -1) >= earlier


@dataclass(frozen=True)
class SubgroupShape:
    """What the schedule has to know of a subgroup.

    Attributes:
        bucket: where its params lie.
        numel: its size in elements.
        casts: whether its grads are cast before they are sent to the CPU.
        changes: whether some of its grads may change between their reduction and the step.
    """

    bucket: tuple[int, int]
    numel: int
    casts: bool
    changes: bool = False


def build_program(
    subgroups: Sequence[SubgroupShape],
    placements: Sequence[Placement],
    host_slots: int = HOST_SLOTS,
    device_slots: int = DEVICE_SLOTS,
    last_bucket_first: bool = False,
    early: Mapping[int, int] | None = None,
) -> Program:
    """The program that updates `subgroups[i]` at `placements[i]`.

    Args:
        subgroups: shapes in slab order.
        placements: one for each subgroup.
        host_slots: staging slots of CPU subgroups (grad and param on the host, FP32 grad on the device). 0 where the
            CPU can read grads and write params in place.
        device_slots: staging slots of streamed subgroups; with 3, one is fetched, one updated and one written back.
        last_bucket_first: go through the buckets from the last to the first. Megatron fills buckets in the order of the
            backward pass, so this is the order in which the next forward pass needs their params.
        early: CPU subgroup whose grads are sent in the backward pass -> its early slot, in the order of sending. See
            [Note: early grads].

    Raises:
        ValueError: the sequences differ in length, there is no slot for a placement that needs one, an early subgroup
            is not updated on the CPU, or two have the same early slot.
    """
    early = dict(early or {})
    if len(subgroups) != len(placements):
        raise ValueError(f"{len(subgroups)} subgroups but {len(placements)} placements")
    if host_slots < 0 or device_slots < 1:
        raise ValueError(f"a program needs host slots, or 0, and a device slot; got {host_slots} and {device_slots}")
    if early and host_slots == 0:
        raise ValueError("early grads are for a CPU that does not read the grads where they are: give host slots")
    if any(placements[index] is not Placement.HOST for index in early):
        raise ValueError("early grads are those of subgroups that are updated on the CPU")
    if len(set(early.values())) < len(early):
        raise ValueError(f"each early subgroup has a slot of its own, got {early}")
    build = _Builder()
    for index, slot in early.items():
        reads, writes = {("grad", index)}, {("early_grad_slot", slot)}
        build.add(OpKind.EARLY_GRAD_TO_HOST, Stream.GRAD_D2H, index, slot, reads, writes)
    # The device has nothing else to do while the first states are fetched.
    for index, placement in enumerate(placements):
        if placement is Placement.RESIDENT:
            _resident_update(build, index)
    buckets = list(dict.fromkeys(shape.bucket for shape in subgroups))
    members: list[list[int]] = [[] for _ in buckets]
    numbers = {bucket: number for number, bucket in enumerate(buckets)}
    for index, shape in enumerate(subgroups):
        members[numbers[shape.bucket]].append(index)
    used = dict.fromkeys(Placement, 0)
    order = reversed(range(len(buckets))) if last_bucket_first else range(len(buckets))
    for bucket, index in [(number, index) for number in order for index in members[number]]:
        shape, placement = subgroups[index], placements[index]
        if placement is Placement.HOST and host_slots == 0:
            _host_update_in_place(build, index)
        elif placement is Placement.HOST:
            _host_update(build, index, shape, used[placement] % host_slots, early.get(index))
        elif placement is Placement.STREAMED:
            _streamed_update(build, index, used[placement] % device_slots)
        used[placement] += 1
        if index == members[bucket][-1]:
            params = {("param", member) for member in members[bucket]}
            build.add(OpKind.RELEASE_BUCKET, Stream.RELEASE, bucket, 0, params, {("bucket", bucket)})
    return Program(tuple(build.ops), tuple(placements), host_slots, device_slots, early)


def _host_update(build: _Builder, subgroup: int, shape: SubgroupShape, slot: int, early_slot: int | None) -> None:
    grad: Resource = ("grad", subgroup)
    host_grad: Resource = ("host_grad_slot", slot)
    host_param: Resource = ("host_param_slot", slot)
    states: Resource = ("states", subgroup)
    if early_slot is not None:
        host_grad = ("early_grad_slot", early_slot)
        if shape.changes:
            # Both copies are on one stream, and what the first has brought must stay where the second brings nothing.
            build.add(OpKind.GRAD_TO_HOST, Stream.GRAD_D2H, subgroup, early_slot, {grad, host_grad}, {host_grad})
    else:
        source = grad
        if shape.casts:
            source = ("device_grad_slot", slot)
            build.add(OpKind.CAST_GRAD, Stream.CAST, subgroup, slot, {grad}, {source})
        build.add(OpKind.GRAD_TO_HOST, Stream.GRAD_D2H, subgroup, slot, {source}, {host_grad})
    build.add(OpKind.UPDATE_ON_HOST, Stream.CPU, subgroup, slot, {host_grad, states}, {states, host_param})
    build.add(OpKind.PARAM_TO_DEVICE, Stream.PARAM_H2D, subgroup, slot, {host_param}, {("param", subgroup)})


def _host_update_in_place(build: _Builder, subgroup: int) -> None:
    states: Resource = ("states", subgroup)
    reads, writes = {("grad", subgroup), states}, {states, ("param", subgroup)}
    build.add(OpKind.UPDATE_ON_HOST, Stream.CPU, subgroup, 0, reads, writes)


def _streamed_update(build: _Builder, subgroup: int, slot: int) -> None:
    states: Resource = ("states", subgroup)
    staged: Resource = ("states_slot", slot)
    build.add(OpKind.STATES_TO_DEVICE, Stream.STATES_H2D, subgroup, slot, {states}, {staged})
    build.add(
        OpKind.UPDATE_ON_DEVICE,
        Stream.COMPUTE,
        subgroup,
        slot,
        {("grad", subgroup), staged},
        {staged, ("param", subgroup)},
    )
    build.add(OpKind.STATES_TO_HOST, Stream.STATES_D2H, subgroup, slot, {staged}, {states})


def _resident_update(build: _Builder, subgroup: int) -> None:
    states: Resource = ("states", subgroup)
    reads, writes = {("grad", subgroup), states}, {states, ("param", subgroup)}
    build.add(OpKind.UPDATE_ON_DEVICE, Stream.COMPUTE, subgroup, 0, reads, writes)


def mix(numels: Sequence[int], host_share: Fraction | float) -> tuple[Placement, ...]:
    """Place subgroups so that `host_share` of the elements is updated on the CPU, spread evenly over the step.

    Each subgroup goes where the share is furthest behind, so after every subgroup the CPU's part of the elements so
    far differs from its share by at most one subgroup.

    Raises:
        ValueError: the share is not between 0 and 1.
    """
    share = _share("CPU", host_share)
    placements, seen, on_host = [], 0, 0
    for numel in numels:
        seen += numel
        # To the CPU if that leaves its part nearer to the share than leaving it out does.
        if share > 0 and 2 * (share * seen - on_host) >= numel:
            placements.append(Placement.HOST)
            on_host += numel
        else:
            placements.append(Placement.STREAMED)
    return tuple(placements)


def _share(whose: str, given: Fraction | float) -> Fraction:
    share = Fraction(given)
    if not 0 <= share <= 1:
        raise ValueError(f"the {whose}'s share is {given}; it lies between 0 and 1")
    return share


def every_kth_on_device(count: int, stride: int) -> tuple[Placement, ...]:
    """The published placement: one subgroup in `stride` on the device, the others on the CPU.

    Raises:
        ValueError: the stride is below 1.
    """
    if stride < 1:
        raise ValueError(f"the update stride is {stride}; it is at least 1")
    return tuple(Placement.STREAMED if index % stride == stride - 1 else Placement.HOST for index in range(count))


# --- the programs of other systems, for comparison on the virtual clock


