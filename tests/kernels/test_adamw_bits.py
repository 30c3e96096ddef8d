# SPDX-License-Identifier: Apache-2.0
"""The C++ update gives the reference's bits: every instruction set, dtype, length, alignment, split and order."""

import itertools

import numpy as np
import pytest
import torch
from same_bits import assert_same_bits

from megatron_dos.gpu_check.cases import as_array, as_tensor, bits, make_case, run_on_tensors
from megatron_dos.kernels import cpu, reference

GRADS = ("float32", "bfloat16", "float16")
OUTS = (None, "float32", "bfloat16", "float16")
MOMENTS = ("float32", "bfloat16")


@pytest.mark.parametrize("l2_mode", [False, True], ids=["adamw", "l2"])
@pytest.mark.parametrize("out", OUTS)
@pytest.mark.parametrize("grad", GRADS)
def test_every_dtype_gives_the_bits_of_the_reference(isa, grad, out, l2_mode):
    rng = np.random.default_rng(len(grad) + 7 * l2_mode)
    for exp_avg, exp_avg_sq in itertools.product(MOMENTS, MOMENTS):
        case = make_case(rng, 1237, grad, out, exp_avg, exp_avg_sq, l2_mode)
        assert_same_bits(run_on_tensors(case, cpu.adamw), case.expected())


def test_every_length_and_alignment_gives_the_bits_of_the_reference(isa):
    rng = np.random.default_rng(3)
    for numel in range(100):
        offsets = {name: int(rng.integers(0, 40)) for name in ("param", "exp_avg", "exp_avg_sq", "grad", "out")}
        case = make_case(rng, numel, GRADS[numel % 3], OUTS[numel % 4])
        assert_same_bits(run_on_tensors(case, cpu.adamw, offsets), case.expected())


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("out", ["bfloat16", "float16", "float32"])
def test_any_number_of_threads_gives_the_bits_of_the_reference(isa, threads, out):
    """Large enough to be cut into parts and to write the output past the caches."""
    rng = np.random.default_rng(threads)
    case = make_case(rng, 7 * 65536 + 5, "bfloat16", out, grad_scale=0.37, unscale=1 / 1000)

    def run(*arguments):
        cpu.adamw(*arguments, threads=threads)

    assert_same_bits(run_on_tensors(case, run, {"out": 3, "param": 1}), case.expected())


@pytest.mark.parametrize("threads", [1, 3])
def test_any_split_into_pieces_and_any_order_gives_the_same_bits(isa, threads):
    rng = np.random.default_rng(threads)
    numel = 3 * 65536 + 11
    case = make_case(rng, numel, "float16", "bfloat16", grad_scale=1.5)
    cuts = [0, *sorted(int(cut) for cut in rng.integers(0, numel, 40)), numel]

    def run_as_one_job(param, exp_avg, exp_avg_sq, grad, scalars, unscale, grad_scale, out):
        pieces = [
            cpu.Operands(
                *(t[low:high] for t in (param, exp_avg, exp_avg_sq, grad)), scalars, unscale, grad_scale, out[low:high]
            )
            for low, high in itertools.pairwise(cuts)
        ]
        rng.shuffle(pieces)
        cpu.adamw_pieces((cpu.Operands(*piece) for piece in pieces), threads=threads)

    def run_one_by_one(param, exp_avg, exp_avg_sq, grad, scalars, unscale, grad_scale, out):
        for low, high in rng.permutation(list(itertools.pairwise(cuts))):
            tensors = (t[low:high] for t in (param, exp_avg, exp_avg_sq, grad))
            cpu.adamw(*tensors, scalars, unscale, grad_scale, out[low:high], threads=threads)

    expected = case.expected()
    assert_same_bits(run_on_tensors(case, run_as_one_job), expected)
    assert_same_bits(run_on_tensors(case, run_one_by_one), expected)


def test_pieces_of_one_job_have_their_own_scalars_and_dtypes(isa):
    rng = np.random.default_rng(5)
    combinations = list(itertools.product(GRADS, OUTS, MOMENTS, (False, True)))
    cases = [
        make_case(rng, int(rng.integers(0, 200)), grad, out, moment, moment, l2, grad_scale=float(rng.random()))
        for grad, out, moment, l2 in combinations
    ]
    tensors = [[as_tensor(a) for a in (c.param, c.exp_avg, c.exp_avg_sq, c.grad)] for c in cases]
    outs = [None if case.out is None else as_tensor(case.out) for case in cases]
    cpu.adamw_pieces(
        cpu.Operands(*arrays, case.scalars, case.unscale, case.grad_scale, out)
        for arrays, case, out in zip(tensors, cases, outs, strict=True)
    )
    for arrays, case, out in zip(tensors, cases, outs, strict=True):
        expected = case.expected()
        for name, tensor in zip(("param", "exp_avg", "exp_avg_sq", "out"), [*arrays[:3], out], strict=True):
            if tensor is not None:
                assert (bits(as_array(tensor)) == bits(getattr(expected, name))).all(), name


def test_flush_denormal_mode_of_the_calling_thread_changes_nothing(isa):
    rng = np.random.default_rng(11)
    small = make_case(rng, 5000, "float16", "float16", special=0.5)
    large = make_case(rng, 4 * 65536, "bfloat16", "bfloat16", special=0.5)
    expected = [small.expected(), large.expected()]
    assert torch.set_flush_denormal(True), "this CPU cannot flush denormals: the test shows nothing"
    try:
        actual = [run_on_tensors(case, cpu.adamw) for case in (small, large)]
        still_on = torch.tensor([1e-40]) * 1 == 0
    finally:
        torch.set_flush_denormal(False)
    assert still_on, "the caller's mode was not put back"
    for got, wanted in zip(actual, expected, strict=True):
        assert_same_bits(got, wanted)


def test_moments_never_hold_denormals(isa):
    """They would slow some CPUs down a hundredfold, as grads that stay zero let the moments decay."""
    from megatron_dos.kernels import AdamScalars

    param, exp_avg, exp_avg_sq = torch.ones(64), torch.zeros(64), torch.zeros(64)
    grad = torch.logspace(-22, 0, 64)
    tiny = torch.finfo(torch.float32).tiny
    for step in range(1, 2001):
        scalars = AdamScalars.at_step(step, 1e-3, (0.9, 0.95), 1e-8, 0.0, True)
        cpu.adamw(param, exp_avg, exp_avg_sq, grad, scalars)
        grad.zero_()
        for moment in (exp_avg, exp_avg_sq):
            assert ((moment == 0) | (moment.abs() >= tiny)).all(), f"step {step}"
    assert (exp_avg == 0).all()
    assert (exp_avg_sq == 0).all()


def test_every_bfloat16_and_float16_grad_is_converted_exactly(isa):
    """All 65,536 of each, by way of exp_avg = 1 * grad."""
    from megatron_dos.kernels import AdamScalars

    scalars = AdamScalars.at_step(1, 0.0, (0.0, 0.0), 1.0, 0.0, True)
    every = np.arange(65536, dtype=np.uint16)
    for grad in (every, every.view(np.float16)):
        zeros = np.zeros(65536, np.float32)
        expected = [zeros.copy() for _ in range(3)]
        reference.adamw(*expected, grad, scalars)
        tensors = [torch.zeros(65536) for _ in range(3)]
        cpu.adamw(*tensors, as_tensor(grad), scalars)
        for tensor, wanted in zip(tensors, expected, strict=True):
            assert (bits(tensor.numpy()) == bits(wanted)).all()
