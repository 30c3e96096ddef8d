# SPDX-License-Identifier: Apache-2.0
"""Host memory for optimizer states: large zeroed arrays on huge pages, page-locked when a GPU is in use.

A slab takes the bytes asked for, rounded up to one page; torch's own page-locked allocator rounds up to a power of two.
Pages are touched lazily without a GPU, and locked at once with one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from typing import Any

import torch

from megatron_dos import _cpp_adam
from megatron_dos.node import gpu
from megatron_dos.node.threads import memory_node, on_node

__all__ = ["zeros"]


def zeros(numel: int, dtype: torch.dtype = torch.float32, pin: bool | None = None) -> torch.Tensor:
    """A flat host tensor of `numel` zeros in a slab of its own, which lives as long as the tensor's storage.

    Args:
        numel: elements; 0 gives an ordinary empty tensor.
        dtype: any torch dtype.
        pin: page-lock the memory for copies to and from a GPU; None means when a GPU is in use.

    Raises:
        ValueError: numel is negative.
        RuntimeError: the memory could not be page-locked, or pin is asked for and there is no GPU.
        OSError: the kernel refused the mapping.
    """
    if numel < 0:
        raise ValueError(f"numel: must not be negative, got {numel}")
    if numel == 0:
        return torch.zeros(0, dtype=dtype, device="cpu")
    with_gpu = gpu.in_use()
    if pin and not with_gpu:
        raise RuntimeError("pin: page-locking needs a GPU that CUDA was initialised for, and there is none")
    if pin is None:
        pin = with_gpu
    node = memory_node()
    # Locked pages are shared, because training forks (data loaders, checkpoint writers, which read the states): of
    # private ones a new kernel copies all at every fork, and an old one may move the parent to a copy that the GPU does
    # not see. Otherwise private: a child keeps the values as they were, and huge pages are easier to get.
    slab = _cpp_adam.Slab(numel * dtype.itemsize, -1 if node is None else node, shared=pin)
    if pin:
        # Locking touches the pages. Containers refuse the preference (mbind), and then they lie where this thread runs.
        with on_node(node):
            _page_lock(slab)
    return torch.frombuffer(slab, dtype=dtype, count=numel)


def _page_lock(slab: _cpp_adam.Slab) -> None:
    """Register the slab with CUDA, and have that undone before its memory goes."""
    cudart = torch.cuda.cudart()
    portable = 1  # cudaHostRegisterPortable: for every CUDA context
    error = int(cudart.cudaHostRegister(slab.address, slab.nbytes, portable))
    if error != 0:
        _clear_pending_error()
        raise RuntimeError(
            f"could not page-lock {slab.nbytes / 2**30:.2f} GiB of host memory (CUDA error {error}): free host memory, "
            "or raise the limit on locked memory (ulimit -l, or the container's memlock setting)"
        )
    slab.before_release = functools.partial(_unlock, cudart, slab.address, os.getpid())


def _clear_pending_error() -> None:
    """Launch a kernel: CUDA keeps the error of a failed call, and torch raises it at the next launch, whosever that is.

    torch gives Python no cudaGetLastError.
    """
    with contextlib.suppress(Exception):  # the caller has the error that counts
        torch.empty(1, device="cuda").fill_(0)


def _unlock(cudart: Any, address: int, owner: int) -> None:
    # At the end of the process CUDA may be gone, and a forked child has no CUDA; its copy of the memory just goes.
    if os.getpid() == owner and not sys.is_finalizing():
        cudart.cudaHostUnregister(address)
