# SPDX-License-Identifier: Apache-2.0
"""More than 2^31 elements in one array: the last ones are updated too.

There is no memory for 30 GB of arrays here, and no need: every page of an array but the last one is the same page of
memory, mapped again and again.
"""

import ctypes
import mmap
import os

import numpy as np
import pytest
from same_bits import assert_same_bits

from megatron_dos.gpu_check.cases import make_case
from megatron_dos.kernels import AdamScalars, DType, cpu

NUMEL = 2**31 + 3
WINDOW = 64 * 2**20  # bytes mapped at a time
TAIL = 1024  # elements at the end that have memory of their own

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000


def map_memory(address: int | None, size: int, flags: int, descriptor: int = -1) -> int:
    mapped = libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
    if mapped == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    return mapped


class LongArray:
    """NUMEL elements of which the first are one window of zeroed memory over and over, and the last TAIL are real."""

    def __init__(self, item: int) -> None:
        self.item = item
        self.size = (NUMEL * item + WINDOW) // WINDOW * WINDOW + WINDOW
        self.address = map_memory(None, self.size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        descriptor = os.memfd_create("window")
        os.ftruncate(descriptor, WINDOW)
        for at in range(0, (NUMEL - TAIL) * item // WINDOW * WINDOW, WINDOW):
            map_memory(self.address + at, WINDOW, mmap.MAP_SHARED | MAP_FIXED, descriptor)
        os.close(descriptor)

    def last(self, dtype) -> np.ndarray:
        """The last TAIL elements, as a view."""
        start = self.address + (NUMEL - TAIL) * self.item
        return np.frombuffer((ctypes.c_char * (TAIL * self.item)).from_address(start), dtype=dtype)

    def close(self) -> None:
        libc.munmap(self.address, self.size)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_elements_beyond_two_to_the_31_are_updated(threads):
    """One thread takes the calling thread's way, two the pool's; bf16 moments and grads keep the page tables small."""
    case = make_case(np.random.default_rng(0), TAIL, "bfloat16", "bfloat16", "bfloat16", "bfloat16")
    case.scalars = AdamScalars.at_step(3, 1e-3, (0.9, 0.95), 1e-8, 0.1, True)  # which leave zeros zero
    expected = case.expected()
    arrays = {"param": LongArray(4), **{name: LongArray(2) for name in ("exp_avg", "exp_avg_sq", "grad", "out")}}
    try:
        for name, array in arrays.items():
            array.last(getattr(case, name).dtype)[:] = getattr(case, name)
        half = int(DType.BFLOAT16)
        addresses = [array.address for array in arrays.values()]
        cpu.pool(threads).run(
            [(*addresses, NUMEL, half, half, half, half, case.scalars, case.unscale, case.grad_scale)]
        )
        for name in expected.arrays():
            getattr(case, name)[:] = arrays[name].last(getattr(case, name).dtype)
    finally:
        for array in arrays.values():
            array.close()
    assert_same_bits(case, expected)
