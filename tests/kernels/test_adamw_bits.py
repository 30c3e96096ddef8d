"""The C++ update gives the reference's bits: every instruction set, dtype, length, alignment, split and order."""

import itertools

import numpy as np
import pytest
from adam_cases import assert_same_bits, make_case, run_on_tensors

from megatron_dos.kernels import cpu

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
    rng = np.random.default_rng(threads)
    case = make_case(rng, 7 * 65536 + 5, "bfloat16", out, grad_scale=0.37)

    def run(*arguments):
        cpu.adamw(*arguments, threads=threads)

    assert_same_bits(run_on_tensors(case, run, {"out": 3, "param": 1}), case.expected())
