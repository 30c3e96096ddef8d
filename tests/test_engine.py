"""The engine on FLAT shapes: states and params have the bits of the numpy reference, however they are cut."""

import numpy as np
import pytest
import torch

from megatron_dos.engine import StepInputs, UpdateEngine, host_bytes
from megatron_dos.kernels import AdamScalars, reference
from megatron_dos.partition import OwnedRange, partition

SHAPES = ((1,), (3, 5), (17,), (64, 64), (129, 7), (512, 64))
NUMELS = [int(np.prod(shape)) for shape in SHAPES]
DTYPES = [torch.bfloat16, torch.float32, torch.float16, torch.bfloat16, torch.float32, torch.bfloat16]


def random_params(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator).to(dtype) for n, dtype in zip(NUMELS, DTYPES, strict=True)]


def make_engine(params, subgroup_size, threads=1):
    start, ranges = 0, []
    for owner, numel in enumerate(NUMELS):
        ranges.append(OwnedRange(owner, (0, int(owner >= 3)), start, numel))
        start += numel
    engine = UpdateEngine(partition(ranges, subgroup_size), params, threads)
    for owner, param in enumerate(params):
        engine.owner_states(owner)["master"].copy_(param)
    return engine


def scalars_at(step, weight_decay, decoupled=True):
    return AdamScalars.at_step(
        step, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=weight_decay, decoupled=decoupled
    )


def reference_step(state, grad, scalars, grad_scale):
    """One step of one shard in numpy; `state` holds master, exp_avg, exp_avg_sq arrays."""
    reference.adamw(
        state["master"], state["exp_avg"], state["exp_avg_sq"], grad.float().numpy(), scalars, grad_scale=grad_scale
    )


def run_both(subgroup_size, grad_dtype, unscale, steps=5, decoupled=True):
    params = random_params()
    engine = make_engine(params, subgroup_size)
    expected = [
        {"master": p.float().numpy().copy(), "exp_avg": np.zeros(p.numel(), np.float32),
         "exp_avg_sq": np.zeros(p.numel(), np.float32)}
        for p in params
    ]  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    for step in range(1, steps + 1):
        grads = [torch.randn(n, generator=generator).to(grad_dtype) for n in NUMELS]
        scalars = [scalars_at(step, 0.1 if owner % 2 else 0.0, decoupled) for owner in range(len(NUMELS))]
        scales = {3: 0.3125, 5: 0.7}
        engine.update(StepInputs(grads, scalars, unscale, scales))
        for owner, grad in enumerate(grads):
            wide = grad.float()
            if unscale is not None and grad_dtype != torch.float32:
                wide = wide * unscale
            reference_step(expected[owner], wide, scalars[owner], scales.get(owner, 1.0))
    return engine, params, expected


def assert_same_bits(engine, params, expected):
    for owner, param in enumerate(params):
        for name, state in engine.owner_states(owner).items():
            np.testing.assert_array_equal(
                state.numpy().view(np.uint32), expected[owner][name].view(np.uint32), err_msg=f"{name} of {owner}"
            )
        rounded = torch.from_numpy(expected[owner]["master"]).to(param.dtype)
        assert torch.equal(param.view(torch.uint8), rounded.view(torch.uint8))


@pytest.mark.parametrize("subgroup_size", [1 << 20, 4096, 1000, 77])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_flat_has_the_bits_of_the_reference(subgroup_size, grad_dtype):
    unscale = torch.tensor([1 / 1024]) if grad_dtype == torch.float16 else None
    assert_same_bits(*run_both(subgroup_size, grad_dtype, unscale))


def test_an_unscale_factor_that_is_no_power_of_two_rounds_as_megatron_does():
    assert_same_bits(*run_both(1000, torch.float16, torch.tensor([1 / 1000])))


def test_l2_mode():
    assert_same_bits(*run_both(1000, torch.float32, None, decoupled=False))


def test_zero_grads_without_decay_change_no_bit():
    params = random_params()
    before = [param.clone() for param in params]
    engine = make_engine(params, 500)
    masters = engine.states.master.clone()
    grads = [torch.zeros(n) for n in NUMELS]
    engine.update(StepInputs(grads, [scalars_at(1, 0.0)] * len(NUMELS)))
    assert torch.equal(engine.states.master.view(torch.int32), masters.view(torch.int32))
    assert not engine.states.exp_avg.any()
    assert not engine.states.exp_avg_sq.any()
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(before, params, strict=True))


def test_constant_grads_move_every_element():
    params = random_params()
    engine = make_engine(params, 500)
    masters = engine.states.master.clone()
    engine.update(StepInputs([torch.ones(n) for n in NUMELS], [scalars_at(1, 0.0)] * len(NUMELS)))
    assert (engine.states.master != masters).all()


def test_a_rank_that_owns_nothing_steps():
    engine = UpdateEngine(partition([], 64), [], threads=1)
    engine.update(StepInputs([], []))
    assert host_bytes(engine.partition) == 0
