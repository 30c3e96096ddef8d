# SPDX-License-Identifier: Apache-2.0
"""The versions of Python, PyTorch and Megatron core that this package works with: the one table of them.

`doctor` and `install` compare with it, setup.py makes the requirements of the package from it, and tests hold the
patches to it. setup.py runs this file alone, before anything is installed: it imports nothing but the standard library.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["MEGATRON", "MEGATRON_PYTHON", "PYTHON", "TORCH", "Versions"]


class Versions(NamedTuple):
    """The versions of a package from `least` on, and below `end` where there is one."""

    package: str
    least: str
    end: str = ""

    def include(self, version: str) -> bool:
        """Whether a version is one of them; pre-releases and local builds count as their release."""
        return _numbers(self.least) <= _numbers(version) and (not self.end or _numbers(version) < _numbers(self.end))

    @property
    def requirement(self) -> str:
        """As pip spells it: 'torch>=2.4'."""
        return f"{self.package}{self.specifier}"

    @property
    def specifier(self) -> str:
        return f">={self.least}" + (f",<{self.end}" if self.end else "")

    def __str__(self) -> str:
        return f"{self.least} or newer" + (f", below {self.end}" if self.end else "")


def _numbers(version: str) -> tuple[int, ...]:
    """(2, 4, 1) for '2.4.1+cu121', (2,) for '2.0'; () for what is no version."""
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(number) for number in found[0].split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


PYTHON = Versions("python", "3.10")
"""For this package alone."""
MEGATRON_PYTHON = Versions("python", "3.12")
"""For Megatron core of the versions below."""
TORCH = Versions("torch", "2.4")
MEGATRON = Versions("megatron-core", "0.19", "0.20")
"""Those that `install` hooks into. The patches name the releases whose files they fit."""
