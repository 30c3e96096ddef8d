# SPDX-License-Identifier: Apache-2.0
"""The reference is what design and docs say, and rounds like torch where torch is right."""

import numpy as np
import pytest
import torch

from megatron_dos.gpu_check.cases import SPECIAL_BITS, bits
from megatron_dos.kernels import AdamScalars, reference


def interesting_floats() -> np.ndarray:
    """Special values, and every bf16 and fp16 number with its neighbours and the midpoints above it."""
    rng = np.random.default_rng(0)
    halves = np.arange(65536, dtype=np.uint16)
    high = halves.astype(np.uint32) << 16
    middle = [high + np.uint32(add) for add in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    exact = bits(halves.view(np.float16).astype(np.float32))
    around = [exact + np.uint32(add) for add in (0, 1, 0xFFF, 0x1000, 0x1001)]
    return np.concatenate([SPECIAL_BITS, *middle, *around, rng.integers(0, 2**32, 10**6, np.uint32)]).view(np.float32)


def test_bfloat16_rounding_is_that_of_torch_and_every_nan_is_the_quiet_one():
    values = interesting_floats()
    nan = np.isnan(values)
    of_torch = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    ours = reference.float32_to_bfloat16(values)
    assert (ours[~nan] == of_torch[~nan]).all()
    assert (ours[nan] == 0x7FC0).all()
    # torch's bits of a NaN depend on the CPU and on the length of the loop (0x7FC0 or 0xFFFF), so only that it is one.
    assert torch.from_numpy(values[nan]).bfloat16().isnan().all()


def test_float16_rounding_is_that_of_torch_and_every_nan_is_the_quiet_one():
    values = interesting_floats()
    nan = np.isnan(values)
    of_torch = torch.from_numpy(values).half().numpy()
    ours = reference.float32_to_float16(values)
    assert (bits(ours)[~nan] == bits(of_torch)[~nan]).all()
    assert (bits(ours)[nan] == 0x7E00).all()
    assert bits(torch.tensor([float(reference.NAN)]).half().numpy())[0] == 0x7E00


def test_up_cast_from_bfloat16_is_that_of_torch():
    every = np.arange(65536, dtype=np.uint16)
    assert (bits(reference.bfloat16_to_float32(every)) == every.astype(np.uint32) << 16).all()


def test_result_is_near_an_exact_float64_adamw():
    """Against an independent formula in float64, over steps that grow and shrink the moments."""
    rng = np.random.default_rng(1)
    n, lr, betas, eps, decay = 1000, 1e-3, (0.9, 0.95), 1e-8, 0.1
    param = rng.standard_normal(n).astype(np.float32)
    exp_avg, exp_avg_sq = np.zeros(n, np.float32), np.zeros(n, np.float32)
    p, m, v = param.astype(np.float64), np.zeros(n), np.zeros(n)
    for step in range(1, 21):
        grad = (rng.standard_normal(n) * 10.0 ** rng.integers(-3, 3)).astype(np.float32)
        reference.adamw(param, exp_avg, exp_avg_sq, grad, AdamScalars.at_step(step, lr, betas, eps, decay, True))
        m = betas[0] * m + (1 - betas[0]) * grad
        v = betas[1] * v + (1 - betas[1]) * grad.astype(np.float64) ** 2
        p -= lr * decay * p
        p -= lr * (m / (1 - betas[0] ** step)) / (np.sqrt(v / (1 - betas[1] ** step)) + eps)
    np.testing.assert_allclose(param, p, rtol=0, atol=20 * 1e-3 * lr + 1e-6)
    np.testing.assert_allclose(exp_avg, m, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(exp_avg_sq, v, rtol=1e-5)


@pytest.mark.parametrize("decoupled", [True, False])
def test_result_is_near_torch(decoupled):
    torch.manual_seed(0)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    theirs = torch.randn(1000, requires_grad=True)
    ours = [theirs.detach().clone().numpy(), np.zeros(1000, np.float32), np.zeros(1000, np.float32)]
    optimizer = kind([theirs], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(1, 11):
        theirs.grad = torch.randn(1000)
        optimizer.step()
        scalars = AdamScalars.at_step(step, 1e-3, (0.9, 0.95), 1e-8, 0.1, decoupled)
        reference.adamw(*ours, theirs.grad.numpy(), scalars)
    np.testing.assert_allclose(ours[0], theirs.detach().numpy(), rtol=1e-6, atol=1e-6)


def test_scalars_are_float32_values_rounded_once_from_float64():
    scalars = AdamScalars.at_step(7, 3e-4, (0.9, 0.95), 1e-8, 0.1, True)
    wanted = {
        "beta1": 0.9,
        "one_minus_beta1": 1 - 0.9,
        "beta2": 0.95,
        "one_minus_beta2": 1 - 0.95,
        "eps": 1e-8,
        "decay": 1 - 3e-4 * 0.1,
        "step_size": 3e-4 / (1 - 0.9**7),
        "rsqrt_bias_correction2": 1 / np.sqrt(1 - 0.95**7),
        "weight_decay": 0.1,
    }
    for name, value in wanted.items():
        assert getattr(scalars, name) == float(np.float32(value)), name
    assert not scalars.l2_mode
    assert AdamScalars.at_step(7, 3e-4, (0.9, 0.95), 1e-8, 0.1, False).decay == 1.0


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"step": 0}, ValueError, "step"),
        ({"step": -3}, ValueError, "step"),
        ({"step": 1.0}, TypeError, "step"),
        ({"step": True}, TypeError, "step"),
        ({"lr": float("nan")}, ValueError, "lr"),
        ({"lr": float("inf")}, ValueError, "lr"),
        ({"lr": -1e-3}, ValueError, "lr"),
        ({"lr": 1e39}, ValueError, "lr"),
        ({"lr": None}, TypeError, "lr"),
        ({"lr": "1e-3 or so"}, TypeError, "lr"),
        ({"betas": (1.0, 0.9)}, ValueError, r"betas\[0\]"),
        ({"betas": (0.9, 1.5)}, ValueError, r"betas\[1\]"),
        ({"betas": (-0.1, 0.9)}, ValueError, r"betas\[0\]"),
        ({"betas": (0.9, float("nan"))}, ValueError, r"betas\[1\]"),
        ({"betas": (0.9,)}, ValueError, "betas"),
        ({"eps": -1e-8}, ValueError, "eps"),
        ({"eps": 1e-60}, ValueError, "eps"),
        ({"eps": float("inf")}, ValueError, "eps"),
        ({"weight_decay": float("nan")}, ValueError, "weight_decay"),
        ({"weight_decay": 1e39}, ValueError, "weight_decay"),
    ],
)
def test_bad_hyper_parameters_are_refused_by_name(change, error, named):
    good = {"step": 1, "lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, "decoupled": True}
    with pytest.raises(error, match=named):
        AdamScalars.at_step(**{**good, **change})
