# SPDX-License-Identifier: Apache-2.0
"""The session's Megatron for the cases, whose ranks find this folder's modules beside those of tests/e2e."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Megatron

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Megatron]:
    """Runs Megatron trainings and functions of `case_ranks`. Its server starts with the first of them."""
    with Megatron(tmp_path_factory.mktemp("cases"), python_path=[HERE]) as running:
        yield running
