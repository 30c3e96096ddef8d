# SPDX-License-Identifier: Apache-2.0
"""The update on host tensors: checks them and hands their addresses to the C++ module.

`adamw` updates one flat array, `adamw_pieces` many at once, as a subgroup of many parameters needs; both return when
the update is done. `submit` takes pieces and returns a ticket at once. The GIL is released meanwhile. Large jobs are
shared by a pool of worker threads, which is made at its first use and belongs to the process.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable
from typing import Any

import torch

from megatron_dos import _cpp_adam
from megatron_dos.kernels import DType
from megatron_dos.kernels.operands import Operands
from megatron_dos.node.threads import cpus_for, default_threads

__all__ = ["Operands", "Ticket", "adamw", "adamw_pieces", "describe", "pool", "submit", "summary"]

# `wait()` blocks until the job is done, `poll()` says whether it is. A ticket keeps the job's tensors alive; dropping
# it waits for the job.
Ticket = _cpp_adam.Ticket

_PARAM_DTYPES = {torch.float32: int(DType.FLOAT32)}
_MOMENT_DTYPES = {**_PARAM_DTYPES, torch.bfloat16: int(DType.BFLOAT16)}
_ALL_DTYPES = {**_MOMENT_DTYPES, torch.float16: int(DType.FLOAT16)}
_NO_OUTPUT = int(DType.NONE)

_pools: dict[int, _cpp_adam.Pool] = {}
_default_pool: _cpp_adam.Pool | None = None


def pool(threads: int | None = None) -> _cpp_adam.Pool:
    """The process's pool of `threads` workers; None or 0 means this rank's share of the allowed CPUs."""
    global _default_pool
    if not threads:
        if _default_pool is None:
            _default_pool = pool(default_threads())
        return _default_pool
    found = _pools.get(threads)
    if found is None:
        found = _pools[threads] = _cpp_adam.Pool(threads, cpus_for(threads))
    return found


def describe(threads: int | None = None) -> str:
    """One line on how updates run here, for the log: `summary`, and what it is of."""
    return f"CPU AdamW: {summary(threads)}"


def summary(threads: int | None = None) -> str:
    """How updates run here: instruction set, threads and their CPUs."""
    of = pool(threads)
    where = f" on CPUs {_ranges(of.cpus)}" if of.cpus else ""
    return f"{_cpp_adam.isa()}, {of.threads} thread{'s' if of.threads > 1 else ''}{where}"


def adamw(*operands: Any, threads: int | None = None, **by_name: Any) -> None:
    """One AdamW step, in place, on host tensors.

    Args:
        operands: see `Operands`; moments are float32 or bfloat16.
        threads: size of the pool; None or 0 means this rank's share of the allowed CPUs.

    Raises:
        TypeError: wrong type or dtype; the operand is named, as below.
        ValueError: wrong device, shape, layout or alignment, overlap, or a value that is not finite.
    """
    pool(threads).run([_addresses(Operands(*operands, **by_name))])


def adamw_pieces(pieces: Iterable[Operands], threads: int | None = None) -> None:
    """The same for many pieces, shared by the workers as if they were one array. No two may overlap in memory."""
    pool(threads).run([_addresses(piece) for piece in pieces])


def submit(pieces: Iterable[Operands], threads: int | None = None) -> Ticket:
    """Start the update of pieces in the background and return its ticket.

    Jobs of one pool run in order of submission where they touch the same memory, and side by side otherwise.
    """
    kept = list(pieces)
    return pool(threads).submit([_addresses(piece) for piece in kept], keep_alive=kept)


def _forget_pools() -> None:
    """A forked child may be another rank, with other CPUs."""
    global _default_pool
    _default_pool = None
    _pools.clear()


os.register_at_fork(after_in_child=_forget_pools)


@atexit.register
def _close_pools() -> None:
    """Finish what is in flight while its memory still exists."""
    for each in _pools.values():
        each.close()


def _addresses(operands: Operands) -> tuple[Any, ...]:
    """A piece as the C++ module takes it, after every check that addresses do not allow."""
    param, exp_avg, exp_avg_sq, grad, scalars, unscale, grad_scale, out = operands
    numel = param.numel() if isinstance(param, torch.Tensor) else 0
    _code("param", param, numel, _PARAM_DTYPES)
    exp_avg_dtype = _code("exp_avg", exp_avg, numel, _MOMENT_DTYPES)
    exp_avg_sq_dtype = _code("exp_avg_sq", exp_avg_sq, numel, _MOMENT_DTYPES)
    grad_dtype = _code("grad", grad, numel, _ALL_DTYPES)
    out_dtype, out_address = _NO_OUTPUT, 0
    if out is not None:
        out_dtype, out_address = _code("out", out, numel, _ALL_DTYPES), out.data_ptr()
    return (
        param.data_ptr(),
        exp_avg.data_ptr(),
        exp_avg_sq.data_ptr(),
        grad.data_ptr(),
        out_address,
        numel,
        exp_avg_dtype,
        exp_avg_sq_dtype,
        grad_dtype,
        out_dtype,
        scalars,
        unscale,
        grad_scale,
    )


def _code(name: str, tensor: torch.Tensor, numel: int, dtypes: dict[torch.dtype, int]) -> int:
    """The tensor's dtype code."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    code = dtypes.get(tensor.dtype)
    if code is None:
        allowed = ", ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{name}: dtype {tensor.dtype} is not one of {allowed}")
    if not tensor.is_cpu and tensor.device.type != "cpu":  # the second alone would do, and takes six times as long
        raise ValueError(f"{name}: is on device {tensor.device}, expected host memory")
    if tensor.shape != (numel,):
        if tensor.dim() != 1:
            raise ValueError(f"{name}: expected a 1-D tensor, got shape {tuple(tensor.shape)}")
        raise ValueError(f"{name}: has {tensor.numel()} elements, but param has {numel}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: is not contiguous (stride {tensor.stride(0)})")
    return code


def _ranges(numbers: list[int]) -> str:
    """Sorted numbers as text, runs joined: 0-3,8."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
