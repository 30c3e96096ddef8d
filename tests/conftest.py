# SPDX-License-Identifier: Apache-2.0
"""Which tests are slow: `make test-fast` leaves them out.

A test that starts something long is so by itself: everything in tests/e2e/, and what asks for a fixture that trains
Megatron or runs a program for many tests. Any other says so with `@pytest.mark.slow`. A few trainings are marked
`quick`, and stay.
"""

from __future__ import annotations

from pathlib import Path

import pytest

E2E = Path(__file__).resolve().parent / "e2e"

SLOW_FIXTURES = {"megatron", "dry", "real_counts", "training"}


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        long = item.path.is_relative_to(E2E) or not SLOW_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))
        if long and item.get_closest_marker("quick") is None:
            item.add_marker(pytest.mark.slow)
