# SPDX-License-Identifier: Apache-2.0
"""One way to hook into the classes, functions and modules of others, and to undo it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any


@contextlib.contextmanager
def _replaced(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    previous = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, previous)


def _exchange(name: str, old: Any, new: Any) -> None:
    for module in list(sys.modules.values()):
        # Not getattr, which would make lazy modules import things.
        if getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)
