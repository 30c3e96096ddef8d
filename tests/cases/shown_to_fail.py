# SPDX-License-Identifier: Apache-2.0
"""A test of a fault, and the proof that it would notice: the same check with the protection taken away has to fail.

    @fails_under(masters_ignore_loads="weights changed")
    def test_case_01_weights_loaded_after_construction(megatron, mutation):
        ...

runs the check twice: as it is, where it has to pass; and with the function `masters_ignore_loads` of `mutations`
applied, where it has to fail with a message that matches "weights changed". A check with a parameter `mutation` hands
that name to the ranks it starts; for one without, the mutation is applied in the test's own process.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import mutations
import pytest
from harness import CaseFailure

__all__ = ["Crash", "fails_under"]


class Crash(str):
    """The message with which a rank has to end where a protection is missing, when the fault is a crash."""


def fails_under(**symptoms: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a test: see the module. The arguments are the mutations and the symptom of each, a regex."""

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(check).parameters
        in_ranks = "mutation" in parameters

        @functools.wraps(check)
        def test(*, mutation: str | None, monkeypatch: pytest.MonkeyPatch, **fixtures: Any) -> None:
            if in_ranks:
                fixtures["mutation"] = mutation
            elif mutation is not None:
                mutations.apply(mutation, monkeypatch.setattr)
            if "monkeypatch" in parameters:
                fixtures["monkeypatch"] = monkeypatch
            if mutation is None:
                check(**fixtures)
            else:
                _must_fail(functools.partial(check, **fixtures), symptoms[mutation])

        # pytest reads the names of fixtures from here.
        names = [*parameters.values(), *(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
            for name in ("mutation", "monkeypatch") if name not in parameters
        )]  # fmt: skip
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in names]
        )
        unchanged = pytest.param(None, id="as it is")
        return pytest.mark.parametrize("mutation", [unchanged, *symptoms])(test)

    return decorate


def _must_fail(check: Callable[[], None], symptom: str) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception), match=symptom) as caught:
        check()
    # A rank that merely breaks down proves nothing, unless breaking down is the fault.
    assert isinstance(caught.value, CaseFailure) == isinstance(symptom, Crash), caught.value
