# SPDX-License-Identifier: Apache-2.0
"""What the tests of the device kernels share: cases with two factors on the grad, and cases of arbitrary bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st
from same_bits import assert_same_bits

from megatron_dos.gpu_check.cases import DTYPES, SPECIAL_BITS, Case, run_on_tensors
from megatron_dos.kernels import AdamScalars

FACTORS = (1.0, 2.0**-16, 0.37, 1e-40, 3e38)
"""Factors on the grad: none, a power of two, an ordinary one, a denormal, one that overflows."""


def expected(case: Case, unscale: float) -> Case:
    """The case after the reference's step with this first factor."""
    return dataclasses.replace(case, unscale=unscale).expected()


def check(kernel: Callable[..., None], case: Case, unscale: float = 1.0) -> None:
    """The kernel gives the reference's bits."""
    case = dataclasses.replace(case, unscale=unscale)
    assert_same_bits(run_on_tensors(case, kernel), case.expected())


def _arrays(dtype: str, numel: int) -> st.SearchStrategy[np.ndarray]:
    """Arrays of arbitrary bits, with every kind of value that rounds or compares in its own way."""
    raw = np.dtype(DTYPES[dtype][0])
    special = [int(pattern) for pattern in SPECIAL_BITS]
    if raw.itemsize == 2:
        special = sorted({pattern >> 16 for pattern in special} | {0x0001, 0x03FF, 0x0400, 0x7BFF, 0x7C00, 0x7E00})
    integers = st.one_of(st.sampled_from(special), st.integers(0, 2 ** (8 * raw.itemsize) - 1))
    as_integer = np.dtype(f"uint{8 * raw.itemsize}")
    return st.lists(integers, min_size=numel, max_size=numel).map(lambda bits: np.array(bits, as_integer).view(raw))


# No scalar of a step is -0, which Triton's interpreter takes for 0.
_SCALARS = st.one_of(
    st.sampled_from([0.0, 1.0, 0.9, 1e-3, 1e-42, 2.0**-126]).map(lambda value: float(np.float32(value))),
    st.floats(width=32, allow_nan=False, allow_infinity=False).map(lambda value: value + 0.0),
)


@st.composite
def any_bits(draw: st.DrawFn, largest: int = 24) -> tuple[Case, float]:
    """A case of arbitrary bits, dtypes and finite scalars, and a factor to unscale by."""
    numel = draw(st.integers(0, largest))
    moments = st.sampled_from(["float32", "float32", "bfloat16"])
    out = draw(st.sampled_from([None, *DTYPES]))
    scalars = AdamScalars(*(draw(_SCALARS) for _ in dataclasses.fields(AdamScalars)[:-1]), l2_mode=draw(st.booleans()))
    case = Case(
        param=draw(_arrays("float32", numel)),
        exp_avg=draw(_arrays(draw(moments), numel)),
        exp_avg_sq=draw(_arrays(draw(moments), numel)),
        grad=draw(_arrays(draw(st.sampled_from(list(DTYPES))), numel)),
        out=None if out is None else np.zeros(numel, DTYPES[out][0]),
        scalars=scalars,
        grad_scale=draw(_SCALARS),
    )
    return case, draw(_SCALARS)
