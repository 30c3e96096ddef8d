# SPDX-License-Identifier: Apache-2.0
"""Tests of the Triton kernel that run it on numpy. test_triton_adam.py starts them, with TRITON_INTERPRET=1 set."""

import itertools
import mmap

import numpy as np
import pytest
import torch
import triton
from device_cases import FACTORS, any_bits, check
from hypothesis import given, settings

from megatron_dos.gpu_check.cases import DTYPES, Case, make_case
from megatron_dos.kernels import AdamScalars, reference, triton_adam

BLOCK = triton_adam.BLOCK
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python 3.13 has it; Linux
KEEPS_PARAMS = AdamScalars.at_step(1, lr=0.0, betas=(0.9, 0.999), eps=1.0, weight_decay=0.0, decoupled=True)


@pytest.fixture(autouse=True)
def silent_numpy():
    with np.errstate(all="ignore"):
        yield


def test_the_kernel_is_interpreted():
    assert not isinstance(triton_adam.adamw_kernel, triton.JITFunction)


MOMENTS = itertools.cycle(itertools.product(("float32", "bfloat16"), repeat=2))
EVERY_DTYPE = list(itertools.product((False, True), (None, *DTYPES), DTYPES))


@pytest.mark.parametrize(("combination", "moments"), list(zip(EVERY_DTYPE, MOMENTS, strict=False)))
def test_every_dtype_gives_the_bits_of_the_reference(combination, moments):
    l2_mode, out, grad = combination
    rng = np.random.default_rng(len(grad) + 7 * l2_mode)
    case = make_case(rng, BLOCK + 300, grad, out, *moments, l2_mode, grad_scale=0.37)
    check(triton_adam.adamw, case, unscale=float(rng.choice(FACTORS)))


@pytest.mark.parametrize("numel", [0, 1, 15, 16, 17, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK - 1])
def test_every_length_gives_the_bits_of_the_reference_and_touches_nothing_else(numel):
    check(triton_adam.adamw, make_case(np.random.default_rng(numel), numel, "float16", "bfloat16"))


@pytest.mark.parametrize(("unscale", "grad_scale"), [*itertools.product(FACTORS, FACTORS)])
def test_both_factors_round_in_their_order(unscale, grad_scale):
    case = make_case(np.random.default_rng(5), 500, "bfloat16", None, grad_scale=grad_scale)
    check(triton_adam.adamw, case, unscale)


@settings(max_examples=60, deadline=None)
@given(any_bits())
def test_arbitrary_bits_and_scalars_give_the_bits_of_the_reference(given_case):
    check(triton_adam.adamw, *given_case)


def ties(dtype: str) -> np.ndarray:
    """Every float32 halfway between two neighbours of a dtype, of both signs."""
    if dtype == "bfloat16":
        return ((np.arange(1 << 16, dtype=np.uint32) << 16) | 0x8000).view(np.float32)
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = np.append((halves[1:] + halves[:-1]) / 2, np.float32(65520.0))
    return np.concatenate([middles, -middles])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_tie_is_rounded_to_even(dtype):
    param = ties(dtype)
    zeros = np.zeros_like(param)
    case = Case(param, zeros, zeros, zeros, np.zeros(param.size, DTYPES[dtype][0]), KEEPS_PARAMS, 1.0)
    check(triton_adam.adamw, case)


def test_elements_beyond_32_bits_are_found(monkeypatch):
    """Two blocks on either side of element 2^31, in arrays of which no other page is ever touched."""
    numel = 2**31 + BLOCK

    def untouched(dtype: torch.dtype) -> torch.Tensor:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        return torch.frombuffer(mmap.mmap(-1, numel * dtype.itemsize, flags=flags), dtype=dtype)

    param, exp_avg, exp_avg_sq = (untouched(torch.float32) for _ in range(3))
    grad = untouched(torch.bfloat16)
    here = slice(2**31 - BLOCK, numel)
    param[here] = torch.linspace(-1.0, 1.0, 2 * BLOCK)
    grad[here] = torch.linspace(1.0, -2.0, 2 * BLOCK)
    before = [tensor[here].clone() for tensor in (param, exp_avg, exp_avg_sq)]
    scalars = AdamScalars.at_step(3, lr=0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, decoupled=True)

    interpreter = pytest.importorskip("triton.runtime.interpreter")
    first = 2**31 // BLOCK - 1

    def set_grid_idx(x, y, z):
        interpreter.interpreter_builder.grid_idx = (first + x, y, z)

    monkeypatch.setattr(interpreter.interpreter_builder, "set_grid_idx", set_grid_idx)
    # The interpreter's copies of host tensors are those tensors, and copying them back would touch every page.
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *arguments: None)
    monkeypatch.setattr(triton, "cdiv", lambda *arguments: 2)
    triton_adam.adamw(param, exp_avg, exp_avg_sq, grad, scalars)

    arrays = [tensor.numpy() for tensor in before]
    reference.adamw(*arrays, grad[here].view(torch.uint16).numpy(), scalars)
    for got, wanted in zip((param, exp_avg, exp_avg_sq), arrays, strict=True):
        assert (got[here].numpy().view(np.uint32) == wanted.view(np.uint32)).all()
