# SPDX-License-Identifier: Apache-2.0
"""A hypothesis campaign over arguments: whatever is legal gives the reference's bits on every instruction set."""

import contextlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from same_bits import assert_same_bits

from megatron_dos import _cpp_adam
from megatron_dos.gpu_check.cases import DTYPES, Case, as_tensor, make_case, neighbours_intact, run_on_tensors, to_dtype
from megatron_dos.kernels import AdamScalars, cpu


def campaign(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


dtypes = st.sampled_from(sorted(DTYPES))
moment_dtypes = st.sampled_from(["float32", "bfloat16"])
factors = st.one_of(st.just(1.0), st.floats(-(2.0**127), 2.0**127))
betas = st.one_of(st.sampled_from([0.0, 0.9, 0.999]), st.floats(0.0, 1.0, exclude_max=True))
scalars = st.builds(
    AdamScalars.at_step,
    step=st.integers(1, 10**7),
    lr=st.one_of(st.sampled_from([0.0, 1e-3]), st.floats(0.0, 10.0)),
    betas=st.tuples(betas.filter(lambda beta: beta < 1 - 1e-9), betas.filter(lambda beta: beta < 1 - 1e-9)),
    eps=st.one_of(st.sampled_from([0.0, 1e-8]), st.floats(1e-30, 1.0)),
    weight_decay=st.floats(0.0, 1.0),
    decoupled=st.booleans(),
)
floats = st.floats(width=32)


def random_offsets(rng: np.random.Generator) -> dict[str, int]:
    """Elements by which each array starts after a cache line."""
    return dict(zip(("param", "exp_avg", "exp_avg_sq", "grad", "out"), map(int, rng.integers(0, 40, 5)), strict=True))


def check_every_instruction_set(case: Case, offsets: dict[str, int] | None = None, threads: int | None = None) -> None:
    expected = case.expected()
    before = _cpp_adam.isa()
    try:
        for isa in _cpp_adam.supported_isas():
            _cpp_adam.set_isa(isa)

            def run(*arguments):
                cpu.adamw(*arguments, threads=threads)

            assert_same_bits(run_on_tensors(case, run, offsets), expected)
    finally:
        _cpp_adam.set_isa(before)


@pytest.mark.slow
@campaign(7000)
@given(
    seed=st.integers(0, 2**32 - 1),
    numel=st.integers(0, 150),
    grad=dtypes,
    out=st.one_of(st.none(), dtypes),
    exp_avg=moment_dtypes,
    exp_avg_sq=moment_dtypes,
    l2_mode=st.booleans(),
    unscale=factors,
    grad_scale=factors,
)
def test_random_arrays_at_any_alignment(seed, numel, grad, out, exp_avg, exp_avg_sq, l2_mode, unscale, grad_scale):
    rng = np.random.default_rng(seed)
    case = make_case(rng, numel, grad, out, exp_avg, exp_avg_sq, l2_mode, 0.3, grad_scale, unscale)
    check_every_instruction_set(case, random_offsets(rng))


@pytest.mark.slow
@campaign(2000)
@given(
    elements=st.lists(st.tuples(floats, floats, floats, floats), max_size=20),
    scalars=scalars,
    unscale=factors,
    grad_scale=factors,
    grad=dtypes,
    out=dtypes,
    moment=moment_dtypes,
)
def test_chosen_elements_and_hyper_parameters(elements, scalars, unscale, grad_scale, grad, out, moment):
    columns = np.array(elements, dtype=np.float32).reshape(-1, 4).T
    case = Case(
        param=columns[0].copy(),
        exp_avg=to_dtype(columns[1], moment),
        exp_avg_sq=to_dtype(columns[2], moment),
        grad=to_dtype(columns[3], grad),
        out=np.zeros(columns.shape[1], DTYPES[out][0]),
        scalars=scalars,
        grad_scale=grad_scale,
        unscale=unscale,
    )
    check_every_instruction_set(case)


@campaign(100)
@given(
    seed=st.integers(0, 2**32 - 1),
    numel=st.integers(1, 6 * 65536),
    threads=st.integers(1, 4),
    grad=dtypes,
    out=st.one_of(st.none(), dtypes),
)
def test_large_arrays_on_any_number_of_threads(seed, numel, threads, grad, out):
    rng = np.random.default_rng(seed)
    check_every_instruction_set(make_case(rng, numel, grad, out), random_offsets(rng), threads)


# What a caller may hand over by mistake, in any place of the C++ interface.
anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, 1, 2, 3, 4, 2**31, 2**62, 2**63 - 1, 2**63, 2**64 - 4, 2**64 - 1, 2**64]),
    st.floats(),
    st.text(max_size=3),
    st.tuples(),
    st.builds(object),
)


@pytest.mark.slow
@campaign(1500)
@given(places=st.dictionaries(st.integers(0, 12), anything, min_size=1), more=st.lists(anything, max_size=2))
def test_any_nonsense_is_refused_by_an_exception_or_is_harmless(places, more):
    """Addresses stay those of real memory or are nonsense that can be told; nothing may crash or write elsewhere."""
    good = AdamScalars.at_step(1, 1e-3, (0.9, 0.95), 1e-8, 0.0, True)
    arrays = [as_tensor(np.zeros(8, np.float32)) for _ in range(5)]
    piece: list = [*(array.data_ptr() for array in arrays), 8, 0, 0, 0, 0, good, 1.0, 1.0]
    for place, value in places.items():
        if place < 5 and type(value) is int and 4096 <= value < 2**63:
            value = 4095  # might have been somebody's memory
        if place == 5 and type(value) is int and value > 8:
            value += 2**62
        piece[place] = value
    with contextlib.suppress(TypeError, ValueError):
        cpu.pool(2).run([tuple(piece), *more])
    assert all(neighbours_intact(array) for array in arrays)
