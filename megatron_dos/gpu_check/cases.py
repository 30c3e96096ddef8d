# SPDX-License-Identifier: Apache-2.0
"""Inputs for the kernels: random values sown with the ones on which kernels differ, at any alignment.

The tests of the kernels use them, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_dos.kernels import AdamScalars, reference

__all__ = [
    "DTYPES",
    "SPECIAL_BITS",
    "Case",
    "as_array",
    "as_tensor",
    "bits",
    "make_case",
    "neighbours_intact",
    "random_scalars",
    "run_on_tensors",
    "to_dtype",
]

# name -> (numpy dtype of the raw data, torch dtype)
DTYPES = {
    "float32": (np.float32, torch.float32),
    "bfloat16": (np.uint16, torch.bfloat16),
    "float16": (np.float16, torch.float16),
}

# float32 bit patterns: +-0, denormals, around FLT_MIN, the float16 limits, ties of bfloat16 and float16 rounding, the
# largest finite, infinities, quiet and signalling NaNs of both signs.
SPECIAL_BITS = np.array(
    [
        *(0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00800000, 0x80800000, 0x00800001),
        *(0x00000FFF, 0x00008000, 0x00018000, 0x00007FFF, 0x80008001, 0x20000000, 0x1F800000, 0x9F800001),
        *(0x33000000, 0x33000001, 0x32FFFFFF, 0x33800000, 0x33C00000, 0x387FC000, 0x387FE000, 0x38800000, 0x387FFFFF),
        *(0x477FE000, 0x477FEFFF, 0x477FF000, 0x477FF001, 0xC77FF000, 0x3F801000, 0x3F803000, 0x3F801001, 0x3F800FFF),
        *(0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF808000, 0x7F7F8000, 0x7F7F7FFF, 0x7F7FFFFF, 0xFF7FFFFF),
        *(0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFBFFFFF, 0x7FFFFFFF),
    ],
    dtype=np.uint32,
)


def bits(array: np.ndarray) -> np.ndarray:
    """The array's bits, so that comparison tells NaNs and zeros apart."""
    return array.view(np.uint32 if array.dtype == np.float32 else np.uint16)


def to_dtype(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 -> the numpy form of a dtype by name."""
    if dtype == "bfloat16":
        return reference.float32_to_bfloat16(values)
    if dtype == "float16":
        return reference.float32_to_float16(values)
    return values.copy()


@dataclass
class Case:
    """Arrays of one update; `expected()` and the kernels work on copies."""

    param: np.ndarray
    exp_avg: np.ndarray
    exp_avg_sq: np.ndarray
    grad: np.ndarray
    out: np.ndarray | None
    scalars: AdamScalars
    grad_scale: float
    unscale: float = 1.0

    def expected(self) -> Case:
        """The same case after the reference's step."""
        done = copy.deepcopy(self)
        reference.adamw(
            done.param,
            done.exp_avg,
            done.exp_avg_sq,
            done.grad,
            done.scalars,
            done.unscale,
            done.grad_scale,
            done.out,
        )
        return done

    def arrays(self) -> dict[str, np.ndarray]:
        """The written arrays by name."""
        names = ("param", "exp_avg", "exp_avg_sq", "out")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def sow(values: np.ndarray, rng: np.random.Generator, share: float, *, sign: bool = True) -> np.ndarray:
    """Replace about `share` of float32 values by special ones."""
    special = SPECIAL_BITS.view(np.float32)
    if not sign:
        special = np.abs(special)
    chosen = rng.random(values.size) < share
    return np.where(chosen, rng.choice(special, values.size), values).astype(np.float32)


def random_scalars(rng: np.random.Generator, l2_mode: bool) -> AdamScalars:
    """Scalars as training uses them, and the odd corner."""
    return AdamScalars.at_step(
        int(rng.choice([1, 2, 5, 1000, 123456])),
        lr=float(rng.choice([1e-3, 3e-4, 1.0, 0.0])),
        betas=(float(rng.choice([0.9, 0.0, 0.95])), float(rng.choice([0.999, 0.95, 0.0]))),
        eps=float(rng.choice([1e-8, 1e-15, 0.0, 1e-3])),
        weight_decay=float(rng.choice([0.0, 0.01, 0.1])),
        decoupled=not l2_mode,
    )


def make_case(
    rng: np.random.Generator,
    numel: int,
    grad: str = "float32",
    out: str | None = "bfloat16",
    exp_avg: str = "float32",
    exp_avg_sq: str = "float32",
    l2_mode: bool = False,
    special: float = 0.2,
    grad_scale: float = 1.0,
    unscale: float = 1.0,
) -> Case:
    """A case of `numel` elements; about `special` of the inputs are special values."""
    magnitude = np.exp2(rng.integers(-130, 20, numel)).astype(np.float32)
    normal = rng.standard_normal((4, numel)).astype(np.float32)
    with np.errstate(all="ignore"):
        first = np.where(rng.random(numel) < 0.3, normal[1] * magnitude, normal[1] * np.float32(1e-3))
        second = np.where(rng.random(numel) < 0.3, normal[2] ** 2 * magnitude, normal[2] ** 2 * np.float32(1e-6))
    return Case(
        param=sow(normal[0], rng, special),
        exp_avg=to_dtype(sow(first, rng, special), exp_avg),
        exp_avg_sq=to_dtype(sow(second, rng, special, sign=False), exp_avg_sq),
        grad=to_dtype(sow(normal[3], rng, special), grad),
        out=None if out is None else np.full(numel, 0x5A5A, np.uint16).astype(DTYPES[out][0]),
        scalars=random_scalars(rng, l2_mode),
        grad_scale=grad_scale,
        unscale=unscale,
    )


def as_tensor(array: np.ndarray, offset: int = 0) -> torch.Tensor:
    """A copy of the array as a tensor that starts `offset` elements after a 64-byte boundary.

    uint16 becomes bfloat16. The tensor's neighbours in memory are 0x5A bytes, which `neighbours_intact` checks.
    """
    guard = 64
    item = array.itemsize
    memory = np.full(array.nbytes + item * offset + 3 * guard, 0x5A, dtype=np.uint8)
    start = -memory.ctypes.data % guard + guard + offset * item
    memory[start : start + array.nbytes] = array.view(np.uint8)
    whole = torch.from_numpy(memory)
    dtype = torch.bfloat16 if array.dtype == np.uint16 else DTYPES[array.dtype.name][1]
    tensor = whole[start : start + array.nbytes].view(dtype)
    tensor.guarded = (memory, start, start + array.nbytes)  # type: ignore[attr-defined]
    return tensor


def neighbours_intact(tensor: torch.Tensor) -> bool:
    """Whether the bytes around an `as_tensor` tensor are untouched."""
    memory, start, end = tensor.guarded  # type: ignore[attr-defined]
    return bool((memory[:start] == 0x5A).all() and (memory[end:] == 0x5A).all())


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """The numpy form of a tensor (bfloat16 as uint16)."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def run_on_tensors(case: Case, run: Callable[..., Any], offsets: dict[str, int] | None = None) -> Case:
    """A kernel with the arguments of `kernels.device_kernel.DeviceKernel` on tensor copies; checks their neighbours."""
    offsets = offsets or {}
    names = ("param", "exp_avg", "exp_avg_sq", "grad")
    tensors = {name: as_tensor(getattr(case, name), offsets.get(name, 0)) for name in names}
    out = None if case.out is None else as_tensor(case.out, offsets.get("out", 0))
    run(*tensors.values(), case.scalars, case.unscale, case.grad_scale, out)
    for name, tensor in {**tensors, "out": out}.items():
        if tensor is not None and not neighbours_intact(tensor):
            raise AssertionError(f"memory around {name} was written")
    result = {name: as_array(tensor) for name, tensor in tensors.items()}
    if (bits(result["grad"]) != bits(case.grad)).any():
        raise AssertionError("grad was written")
    new_params = None if out is None else as_array(out)
    return Case(**result, out=new_params, scalars=case.scalars, grad_scale=case.grad_scale, unscale=case.unscale)
