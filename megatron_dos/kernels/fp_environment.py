# SPDX-License-Identifier: Apache-2.0
"""The floating-point mode in which this package computes on the calling thread, whatever the caller has set.

`torch.set_flush_denormal(True)` is such a mode: a float64 that is denormal as a float32 then becomes 0 where it is
rounded, and a denormal float32 where it is read. The C++ module keeps its own threads and calls out of it by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_dos import _cpp_adam

__all__ = ["ieee_environment"]


@contextmanager
def ieee_environment() -> Iterator[None]:
    """Within it, or within a function that it decorates, the running thread keeps denormals and rounds to nearest even.

    The caller's mode is put back. Threads that are started within it inherit the mode.
    """
    with _cpp_adam.IeeeEnvironment():
        yield
