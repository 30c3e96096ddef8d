# SPDX-License-Identifier: Apache-2.0
"""The session's Megatron for the end-to-end tests; see harness.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import Megatron


@pytest.fixture(scope="session")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Megatron]:
    """Runs Megatron trainings. Its server starts with the first of them."""
    with Megatron(tmp_path_factory.mktemp("megatron")) as running:
        yield running
