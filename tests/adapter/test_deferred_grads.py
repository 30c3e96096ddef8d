# SPDX-License-Identifier: Apache-2.0
"""16-bit grads: the stand-ins answer Megatron's grad code as FP32 copies of all grads would."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_dos.adapter.deferred_grads import DeferredGrads

SHAPES = (1, 7, 4096, 100_003)


def shards_with_grads(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shards = []
    for numel in SHAPES:
        shard = torch.zeros(numel, dtype=dtype)
        shard.decoupled_grad = torch.randn(numel, generator=generator).to(dtype)
        shards.append(shard)
    fp32 = torch.zeros(5)
    fp32.decoupled_grad = torch.randn(5, generator=generator)
    return [*shards, fp32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inv_scale", [None, 2.0**-16, 1 / 1000])
def test_norm_and_clip_have_the_bits_of_the_upcasting_path(dtype, inv_scale):
    shards = shards_with_grads(dtype)
    copies = [shard.decoupled_grad.clone() for shard in shards]
    inv = None if inv_scale is None else torch.tensor([inv_scale])

    # Megatron's own path: up-cast, unscale in place, take norms, clip in place.
    upcast = [grad.float() for grad in copies]
    if inv is not None:
        for grad in upcast:
            grad.mul_(inv)
    norms = [torch.norm(grad) for grad in upcast]
    factor = 0.1234567

    low = DeferredGrads()
    low.collect(shards, inv, count_zeros=False)
    if inv is not None:
        shards[-1].decoupled_grad.mul_(inv)  # FP32 grads are unscaled in place by Megatron
    stand_ins = low.for_norm([shard.decoupled_grad for shard in shards])
    assert [torch.norm(g).item() for g in stand_ins] == [n.item() for n in norms]

    for shard in shards:  # as Megatron's clip does
        shard.decoupled_grad.copy_(shard.decoupled_grad * factor)
    factors = low.factors()
    assert set(factors) == set(range(len(SHAPES)))
    for index, numel in enumerate(SHAPES):
        grad = low.grad(index).float()
        unscale, clip = factors[index]
        assert torch.equal(grad * unscale * clip, upcast[index] * factor)
        assert grad.numel() == numel
        assert torch.equal(low.grad(index), copies[index])  # the buffer is left as it was
    assert low.grad(len(SHAPES)) is None


@pytest.mark.parametrize("inv_scale", [None, 2.0**-16, 1 / 1000])
def test_fp32_grads_that_stay_as_they_are_give_the_bits_of_scaling_in_place(inv_scale):
    shards = shards_with_grads(torch.float32)
    grads = [shard.decoupled_grad for shard in shards]
    copies = [grad.clone() for grad in grads]
    inv = None if inv_scale is None else torch.tensor([inv_scale])
    scaled = [grad if inv is None else grad * inv for grad in copies]

    low = DeferredGrads(fp32_too=True)
    low.collect(shards, inv, count_zeros=False)
    assert all(stand_in.numel() == 1 for stand_in in low.magnitudes())
    stand_ins = low.for_norm([shard.decoupled_grad for shard in shards])
    assert [torch.norm(g).item() for g in stand_ins] == [torch.norm(g).item() for g in scaled]
    if inv is None:
        assert all(stand_in is grad for stand_in, grad in zip(stand_ins, grads, strict=True))
    for shard in shards:
        shard.decoupled_grad.mul_(0.7)
    for index, (unscale, clip) in low.factors().items():
        assert torch.equal(low.grad(index) * unscale * clip, scaled[index] * torch.tensor(0.7))
    assert all(torch.equal(low.grad(index), copy) for index, copy in enumerate(copies))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_non_finite_element_shows_in_the_magnitudes(bad):
    shards = shards_with_grads(torch.bfloat16)
    low = DeferredGrads()
    low.collect(shards, None, count_zeros=False)
    assert all(torch.isfinite(m).all() for m in low.magnitudes())
    shards = shards_with_grads(torch.bfloat16)
    shards[3].decoupled_grad[-1] = bad
    low.collect(shards, None, count_zeros=False)
    assert [bool(torch.isfinite(m).all()) for m in low.magnitudes()] == [True, True, True, False]


def test_zeros_are_counted_after_clipping():
    shards = shards_with_grads(torch.bfloat16)
    shards[2].decoupled_grad[::3] = 0
    expected = [int((shard.decoupled_grad == 0).sum()) for shard in shards]
    low = DeferredGrads()
    low.collect(shards, None, count_zeros=True)
    for shard in shards:
        shard.decoupled_grad.mul_(0.5)
    counted = [s.decoupled_grad.numel() - int(torch.count_nonzero(s.decoupled_grad)) for s in shards]
    assert counted == expected
    assert expected[2] >= SHAPES[2] // 3


def test_the_inverse_scale_is_that_of_the_collected_step():
    low = DeferredGrads()
    inv = torch.tensor([0.25])
    low.collect(shards_with_grads(torch.float16), inv, count_zeros=False)
    assert low.factors()[0] == (0.25, 1.0)
    low.clear()
    assert low.factors() == {}
    assert low.grad(0) is None


class NewElements(TorchDispatchMode):
    """How many elements the operations have put into memory of their own."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        given = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in given:
            self.count += result.numel()
        return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("inv_scale", [None, torch.tensor([1 / 1024])])
def test_the_norm_takes_one_fp32_copy_of_a_shard_and_no_second(dtype, inv_scale):
    shard = torch.zeros(10_000, dtype=dtype)
    shard.decoupled_grad = torch.randn(10_000).to(dtype)
    deferred = DeferredGrads(fp32_too=True)
    deferred.collect([shard], inv_scale, count_zeros=False)
    with NewElements() as new:
        deferred.for_norm([shard.decoupled_grad])
    copies = 0 if dtype == torch.float32 and inv_scale is None else 1
    assert new.count // 10_000 == copies
