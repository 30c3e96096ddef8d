# SPDX-License-Identifier: Apache-2.0
"""Scalars that are denormal in float32 count, whatever floating-point mode the caller is in."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from same_bits import assert_same_bits

from megatron_dos import _cpp_adam
from megatron_dos.adapter.deferred_grads import DeferredGrads
from megatron_dos.gpu_check.cases import make_case, run_on_tensors
from megatron_dos.kernels import AdamScalars, cpu, elementwise_adam, fp_environment, library_adam, operands, reference

DENORMAL = 1e-40
ROUNDED = float(np.float32(DENORMAL))
BITS = int(np.float32(DENORMAL).view(np.int32))
GOOD = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "decoupled": True}
SCALARS = AdamScalars.at_step(1, **GOOD)


@contextlib.contextmanager
def flushing():
    """The calling thread flushes denormals, and still does in the end."""
    assert torch.set_flush_denormal(True), "this CPU cannot flush denormals: the test shows nothing"
    try:
        yield
        assert torch.tensor([DENORMAL]) * 1 == 0, "the caller's mode was not put back"
    finally:
        torch.set_flush_denormal(False)


@pytest.fixture
def unprotected(monkeypatch):
    """Python computes in the caller's mode. The C++ module protects its own calls."""
    monkeypatch.setattr(fp_environment, "_cpp_adam", SimpleNamespace(IeeeEnvironment=contextlib.nullcontext))


def updated(kernel, unscale: float, grad_scale: float) -> torch.Tensor:
    """A parameter of ones, with huge grads that a denormal factor brings back to earth."""
    param, exp_avg, exp_avg_sq, grad = (torch.full((64,), value) for value in (1.0, 0.0, 0.0, 3e38))
    kernel(param, exp_avg, exp_avg_sq, grad, SCALARS, unscale, grad_scale)
    return param


def fused_by_torch(*arguments):
    library_adam.adamw(library_adam._torch(), *arguments)


def in_numpy(*arguments):
    reference.adamw(*(each.numpy() if isinstance(each, torch.Tensor) else each for each in arguments))


KERNELS = {"cpp": cpu.adamw, "elementwise": elementwise_adam.adamw, "torch": fused_by_torch, "numpy": in_numpy}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("factors", [(DENORMAL, 1.0), (1.0, DENORMAL)], ids=["unscale", "grad_scale"])
def test_a_denormal_factor_is_not_zero(kernel, factors):
    expected = updated(KERNELS[kernel], *factors)
    assert (expected < 0.9991).all()
    with flushing():
        actual = updated(KERNELS[kernel], *factors)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("kernel", ["elementwise", "torch", "numpy"])
@pytest.mark.usefixtures("unprotected")
def test_it_would_be_without_the_protection(kernel):
    with flushing():
        assert (updated(KERNELS[kernel], DENORMAL, 1.0) > 0.9998).all(), "only the decay moved it"


@pytest.mark.parametrize(
    ("name", "attribute", "decoupled"),
    [("eps", "eps", True), ("lr", "step_size", True), ("weight_decay", "weight_decay", False)],
)
@pytest.mark.parametrize("make", [float, torch.tensor, np.float64], ids=["float", "tensor", "float64"])
def test_denormal_hyper_parameters_are_what_they_are(name, attribute, decoupled, make):
    given = {**GOOD, name: make(DENORMAL), "betas": (0.0, 0.0), "decoupled": decoupled}
    with flushing():
        scalars = AdamScalars.at_step(1, **given)
    assert getattr(scalars, attribute) == ROUNDED


@pytest.mark.usefixtures("unprotected")
def test_a_denormal_eps_would_be_refused_with_an_untrue_message():
    with flushing(), pytest.raises(ValueError, match="1e-40 is zero in float32"):
        AdamScalars.at_step(1, **{**GOOD, "eps": DENORMAL})


@pytest.mark.parametrize("kernel", KERNELS)
def test_denormal_scalars_reach_the_kernel(kernel):
    """eps keeps 0 / 0 away: where it is flushed, the parameter becomes NaN."""
    scalars = AdamScalars.at_step(1, **{**GOOD, "eps": DENORMAL})
    states = [torch.full((64,), value) for value in (1.0, 0.0, 0.0, 0.0)]
    with flushing():
        KERNELS[kernel](*states, scalars)
    assert not states[0].isnan().any()


def test_a_factor_that_another_kernel_is_handed():
    with flushing():
        assert operands.factor("unscale", DENORMAL) == ROUNDED


def factors_of_deferred_grads() -> dict[int, tuple[float, float]]:
    """With a denormal inverse loss scale and a denormal clip factor, as tensors."""
    deferred, shard = DeferredGrads(fp32_too=True), torch.ones(4)
    shard.decoupled_grad = torch.ones(4)
    bits = torch.tensor(BITS, dtype=torch.int32)  # no conversion of floats
    deferred.collect([shard], bits.view(torch.float32), count_zeros=False)
    shard.decoupled_grad.view(torch.int32).copy_(bits)
    return deferred.factors()


def test_factors_of_deferred_grads():
    with flushing():
        assert factors_of_deferred_grads() == {0: (ROUNDED, ROUNDED)}


@pytest.mark.usefixtures("unprotected")
def test_factors_of_deferred_grads_would_be_zero():
    with flushing():
        assert factors_of_deferred_grads() == {0: (0.0, 0.0)}


@pytest.mark.parametrize("numel", [1000, 100_000])
@pytest.mark.parametrize("kernel", [elementwise_adam.adamw, cpu.adamw], ids=["elementwise", "cpp"])
def test_denormals_everywhere_in_arrays_of_any_size(kernel, numel):
    case = make_case(np.random.default_rng(numel), numel, "float32", "bfloat16", special=0.5)
    expected = case.expected()
    with flushing():
        actual, in_this_mode = run_on_tensors(case, kernel), case.expected()
    assert_same_bits(actual, expected)
    assert_same_bits(in_this_mode, expected)


def test_workers_of_a_pool_that_is_first_made_while_flushing_is_on():
    states = [torch.full((4 * 65536,), value) for value in (DENORMAL, 0.0, 0.0, 0.0)]
    expected = [state.clone() for state in states]
    cpu.adamw(*expected, SCALARS, threads=1)
    with flushing():
        pool = _cpp_adam.Pool(2)
        pool.submit([cpu._addresses(cpu.Operands(*states, SCALARS))]).wait()
    pool.close()
    assert torch.equal(states[0].view(torch.int32), expected[0].view(torch.int32))
    assert states[0].view(torch.int32).bool().all()


def test_an_environment_is_entered_once():
    environment = _cpp_adam.IeeeEnvironment()
    with environment, pytest.raises(RuntimeError, match="entered already"):
        environment.__enter__()
