# SPDX-License-Identifier: Apache-2.0
"""The one keeper of whether the optimizer states are whole: all of one step, or all of one checkpoint.

A step or a load may fail in its middle, and a caller may catch its error and go on. From then on nothing is done with
the states, until a whole checkpoint has been loaded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from megatron_dos.checkpointing.handouts import CheckpointError
from megatron_dos.checkpointing.loads import LoadsInPlace

__all__ = ["WholeStates"]

KEPT = 16
"""State dicts that are known as this optimizer's own; a caller that has more of them loads each as from a file."""


class WholeStates:
    """Whether the states of one optimizer are whole, and which state dicts describe them as they are.

    Attributes:
        problem: why they are not whole; empty if they are.
        loads: watches what torch reads into the states.
    """

    def __init__(self) -> None:
        self.problem = ""
        self.loads = LoadsInPlace(self.failed)
        self._given: deque[Sequence[Mapping[str, Any]]] = deque(maxlen=KEPT)

    def require(self, what: str) -> None:
        """Refuse `what` if the states are not whole.

        Raises:
            CheckpointError: says why, and the way out.
        """
        if self.problem:
            raise CheckpointError(f"no {what} is possible: {self.problem}. Load a whole checkpoint first.")

    def begin(self, problem: str = "") -> None:
        """The states are about to change, so no state dict describes them any more.

        Args:
            problem: why they will not be whole until `done`; empty where the change says so itself.
        """
        self._given.clear()
        if problem:
            self.problem = problem

    def failed(self, problem: str) -> None:
        """A change has ended in its middle, or has not come to its end."""
        self.problem = problem

    def done(self) -> None:
        """All states are those of one checkpoint."""
        self.loads.end()
        self.problem = ""

    @contextmanager
    def step(self) -> Iterator[None]:
        """Within the block, a step writes to the states."""
        before = self.problem
        self.problem = before or "a step failed in the middle, and only some of the optimizer states are those after it"
        yield
        self.problem = before

    def gave(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """A state dict with these param groups has been handed out, and describes the states as they are."""
        self._given.append(groups)

    def has_given(self, state_dict: Mapping[str, Any]) -> bool:
        """Whether this very object was handed out, with no step or load since. An equal one may come from a file."""
        groups = state_dict.get("optimizer", {}).get("param_groups")
        return "param_state" not in state_dict and any(groups is given for given in self._given)
