"""The inline device: runs a program's operations one after the other on the calling thread.

It needs no GPU. Where the operations touch one, each of them is issued on the current stream and the copies to
the host block, so the result is the same and nothing overlaps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron_dos.schedule import Op, OpKind, Program

__all__ = ["HostDevice"]


class HostDevice:
    """Runs operations in program order."""

    def run(self, program: Program, handlers: Mapping[OpKind, Callable[[Op], None]]) -> None:
        """Run `program`, calling `handlers[op.kind](op)` for each operation.

        Raises:
            RuntimeError: an operation depends on one that comes after it: the program is not in a valid order.
        """
        for op in program.ops:
            if any(dependency >= op.index for dependency in op.depends_on):
                raise RuntimeError(f"{op.kind.value} of subgroup {op.subgroup} depends on a later operation: {op}")
            handlers[op.kind](op)
