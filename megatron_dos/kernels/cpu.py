"""The update on host tensors: checks them and hands their addresses to the C++ module.

`adamw` returns when the update is done; `submit` returns a ticket at once. Both release the GIL. Large updates are
shared by a pool of worker threads, which is made at the first use and belongs to the process.
"""

from __future__ import annotations

import atexit

import torch

from megatron_dos import _cpp_adam
from megatron_dos.kernels import AdamScalars, DType
from megatron_dos.kernels.threads import cpus_of_rank, default_threads

__all__ = ["Ticket", "adamw", "pool", "submit"]

Ticket = _cpp_adam.Ticket

_STATE_DTYPES = {torch.float32: int(DType.FLOAT32), torch.bfloat16: int(DType.BFLOAT16)}
_ALL_DTYPES = {**_STATE_DTYPES, torch.float16: int(DType.FLOAT16)}
_PARAM_DTYPES = {torch.float32: int(DType.FLOAT32)}
_NO_OUTPUT = int(DType.NONE)

_pools: dict[int, _cpp_adam.Pool] = {}


def pool(threads: int | None = None) -> _cpp_adam.Pool:
    """The process's pool of `threads` workers; None or 0 means this rank's share of the allowed CPUs."""
    count = threads or default_threads()
    found = _pools.get(count)
    if found is None:
        cpus = cpus_of_rank() if count > 1 else []
        found = _pools[count] = _cpp_adam.Pool(count, cpus)
    return found


@atexit.register
def _close_pools() -> None:
    """Finish what is in flight while its memory still exists."""
    for each in _pools.values():
        each.close()


def _code(name: str, tensor: torch.Tensor, numel: int, dtypes: dict[torch.dtype, int]) -> int:
    """The tensor's dtype code, after every check that addresses do not allow."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    code = dtypes.get(tensor.dtype)
    if code is None:
        allowed = ", ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{name}: dtype {tensor.dtype} is not one of {allowed}")
    if tensor.device.type != "cpu":
        raise ValueError(f"{name}: is on device {tensor.device}, expected host memory")
    if tensor.dim() != 1:
        raise ValueError(f"{name}: expected a 1-D tensor, got shape {tuple(tensor.shape)}")
    if tensor.numel() != numel:
        raise ValueError(f"{name}: has {tensor.numel()} elements, but param has {numel}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: is not contiguous (stride {tensor.stride(0)})")
    return code


def _arguments(
    param: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    scalars: AdamScalars,
    grad_scale: float,
    out: torch.Tensor | None,
) -> tuple:
    """Checked arguments of the C++ calls."""
    numel = param.numel() if isinstance(param, torch.Tensor) else 0
    _code("param", param, numel, _PARAM_DTYPES)
    exp_avg_dtype = _code("exp_avg", exp_avg, numel, _STATE_DTYPES)
    exp_avg_sq_dtype = _code("exp_avg_sq", exp_avg_sq, numel, _STATE_DTYPES)
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
        grad_scale,
    )


def adamw(
    param: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    scalars: AdamScalars,
    grad_scale: float = 1.0,
    out: torch.Tensor | None = None,
    threads: int | None = None,
) -> None:
    """One AdamW step, in place, on 1-D contiguous host tensors of one length that do not overlap.

    Args:
        param: float32 master params.
        exp_avg: float32 or bfloat16.
        exp_avg_sq: float32 or bfloat16.
        grad: float32, bfloat16 or float16; only read.
        scalars: the step's scalars.
        grad_scale: finite factor on the grad, rounded to float32.
        out: receives the new params, rounded to its dtype: float32, bfloat16 or float16.
        threads: size of the pool; None or 0 means this rank's share of the allowed CPUs.

    Raises:
        TypeError: wrong type or dtype; the argument is named, as below.
        ValueError: wrong device, shape, layout or alignment, overlap, or a value that is not finite.
    """
    pool(threads).run(*_arguments(param, exp_avg, exp_avg_sq, grad, scalars, grad_scale, out))


def submit(
    param: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    scalars: AdamScalars,
    grad_scale: float = 1.0,
    out: torch.Tensor | None = None,
    threads: int | None = None,
) -> Ticket:
    """Start the same update in the background.

    The ticket's `wait()` blocks until it is done, `done()` tells. It keeps the tensors alive; dropping it waits. Updates
    of one pool run in order of submission where they touch the same memory.
    """
    arguments = _arguments(param, exp_avg, exp_avg_sq, grad, scalars, grad_scale, out)
    return pool(threads).submit(*arguments, keep_alive=(param, exp_avg, exp_avg_sq, grad, out))
