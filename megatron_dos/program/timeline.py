# SPDX-License-Identifier: Apache-2.0
"""When each operation of a program ran: what a virtual clock computes and a real step measures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_dos.program.schedule import Program, Stream

__all__ = ["FULL_DUPLEX", "Timeline"]


FULL_DUPLEX: Mapping[Stream, str] = {
    Stream.STATES_H2D: "h2d",
    Stream.PARAM_H2D: "h2d",
    Stream.STATES_D2H: "d2h",
    Stream.GRAD_D2H: "d2h",
    Stream.COMPUTE: "gpu",
    Stream.CAST: "gpu",
    Stream.CPU: "cpu",
    Stream.RELEASE: "release",
}
"""Each copy direction is a lane of its own."""


@dataclass(frozen=True)
class Timeline:
    """When the operations of a program run.

    Attributes:
        program: the program.
        starts: for each operation, in seconds from the start of the program.
        ends: likewise.
        work: for each operation, the seconds that it takes of its lane, however slowly it goes meanwhile.
        lanes: lane -> the indices of its operations, in the order in which they start.
    """

    program: Program
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    work: tuple[float, ...]
    lanes: Mapping[str, tuple[int, ...]]

    @property
    def makespan(self) -> float:
        """Seconds until the last operation ends."""
        return max(self.ends, default=0.0)

    def busy(self, lane: str) -> float:
        """Seconds for which the lane is in use."""
        return math.fsum(self.work[index] for index in self.lanes.get(lane, ()))
