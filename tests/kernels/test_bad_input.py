# SPDX-License-Identifier: Apache-2.0
"""Wrong input never crashes the interpreter: an exception names the argument, and nothing is written."""

import dataclasses

import pytest
import torch

from megatron_dos import _cpp_adam
from megatron_dos.kernels import AdamScalars, cpu

GOOD = AdamScalars.at_step(3, 1e-3, (0.9, 0.95), 1e-8, 0.1, True)
N = 64


def arguments(**change) -> dict:
    """Good arguments of `cpu.adamw` with some of them replaced."""
    good = {
        "param": torch.ones(N),
        "exp_avg": torch.ones(N),
        "exp_avg_sq": torch.ones(N),
        "grad": torch.ones(N),
        "scalars": GOOD,
        "unscale": 1.0,
        "grad_scale": 1.0,
        "out": torch.ones(N, dtype=torch.bfloat16),
    }
    return {**good, **change}


STATE = ("param", "exp_avg", "exp_avg_sq")
TENSORS = (*STATE, "grad", "out")


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: [1.0] * N, id="a list"),
        pytest.param(lambda: 7, id="an address"),
        pytest.param(lambda: torch.ones(N, dtype=torch.float64), id="float64"),
        pytest.param(lambda: torch.ones(N, dtype=torch.int32), id="int32"),
        pytest.param(lambda: torch.ones(N, dtype=torch.complex64), id="complex64"),
        pytest.param(lambda: torch.ones(N - 1), id="too short"),
        pytest.param(lambda: torch.ones(N + 1), id="too long"),
        pytest.param(lambda: torch.ones(8, 8), id="2-D"),
        pytest.param(lambda: torch.tensor(1.0), id="0-D"),
        pytest.param(lambda: torch.ones(2 * N)[::2], id="not contiguous"),
        pytest.param(lambda: torch.ones(1).expand(N), id="expanded"),
        pytest.param(lambda: torch.ones(N, device="meta"), id="meta"),
        pytest.param(lambda: torch.ones(N).to_sparse(), id="sparse"),
    ],
)
def test_a_wrong_tensor_is_refused_by_name(name, make):
    wrong = make()
    given = arguments(**{name: wrong})
    # Every length is compared to that of param, so a wrong length of param is the others' fault.
    other_length = isinstance(wrong, torch.Tensor) and wrong.shape in ((N - 1,), (N + 1,))
    named = "exp_avg" if name == "param" and other_length else name
    with pytest.raises((TypeError, ValueError), match=rf"^{named}: "):
        cpu.adamw(**given)
    with pytest.raises((TypeError, ValueError), match=rf"^{named}: "):
        cpu.submit([cpu.Operands(**given)])


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("param", torch.bfloat16), ("param", torch.float16), ("exp_avg", torch.float16), ("exp_avg_sq", torch.float16)],
)
def test_a_dtype_of_another_argument_is_refused_by_name(name, dtype):
    with pytest.raises(TypeError, match=rf"^{name}: dtype"):
        cpu.adamw(**arguments(**{name: torch.ones(N, dtype=dtype)}))


@pytest.mark.parametrize("name", TENSORS)
def test_a_misaligned_float32_tensor_is_refused_by_name(name):
    memory = torch.zeros(4 * N + 8, dtype=torch.uint8)
    wrong = torch.frombuffer(memory.numpy().data, dtype=torch.float32, offset=1, count=N)
    assert wrong.data_ptr() % 4 != 0
    with pytest.raises(ValueError, match=rf"^{name}: address is not a multiple"):
        cpu.adamw(**arguments(**{name: wrong}))


@pytest.mark.parametrize("first", TENSORS)
@pytest.mark.parametrize("second", TENSORS)
@pytest.mark.parametrize("shift", [0, 1, N - 1])
def test_arrays_that_overlap_are_refused_by_name_and_nothing_is_written(first, second, shift):
    if first == second:
        return
    memory = torch.ones(2 * N)
    given = arguments(**{first: memory[:N], second: memory[shift : shift + N]})
    with pytest.raises(ValueError, match=rf"^({first}|{second}): overlaps ({first}|{second})"):
        cpu.adamw(**given)
    assert all((given[name] == 1).all() for name in TENSORS)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e39, "one", None, 1j])
def test_a_grad_scale_that_is_no_finite_float32_is_refused_by_name(value):
    with pytest.raises((TypeError, ValueError), match=r"^grad_scale: "):
        cpu.adamw(**arguments(grad_scale=value))


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(AdamScalars) if f.name != "l2_mode"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.1, 1e300, "x", None])
def test_scalars_that_are_no_finite_float32_values_are_refused_by_name(field, value):
    """0.1 is no float32 value: rounding it here would hide scalars that were not made by at_step."""
    with pytest.raises((TypeError, ValueError), match=rf"^{field}: "):
        cpu.adamw(**arguments(scalars=dataclasses.replace(GOOD, **{field: value})))


@pytest.mark.parametrize("scalars", [None, 3.0, (0.9, 0.1), object()])
def test_something_else_than_scalars_is_refused_by_name(scalars):
    with pytest.raises(TypeError, match=r"^scalars: expected a megatron_dos\.kernels\.AdamScalars"):
        cpu.adamw(**arguments(scalars=scalars))


def test_l2_mode_must_be_a_bool():
    with pytest.raises(TypeError, match=r"^l2_mode: "):
        cpu.adamw(**arguments(scalars=dataclasses.replace(GOOD, l2_mode=1)))


def test_the_piece_at_fault_is_named():
    pieces = [cpu.Operands(**arguments()) for _ in range(3)]
    pieces[1] = pieces[1]._replace(exp_avg=pieces[1].param)
    with pytest.raises(ValueError, match=r"^pieces\[1\]\.exp_avg: overlaps param"):
        cpu.adamw_pieces(pieces)


@pytest.mark.parametrize("call", [cpu.adamw_pieces, cpu.submit])
def test_pieces_that_overlap_one_another_are_refused(call):
    one, two = cpu.Operands(**arguments()), cpu.Operands(**arguments())
    with pytest.raises(ValueError, match=r"^pieces: .* two pieces overlap"):
        call([one, two._replace(exp_avg_sq=one.exp_avg)])
    with pytest.raises(ValueError, match=r"^pieces: the grad of one piece"):
        call([one, two._replace(grad=one.param)])


def test_one_grad_may_serve_two_pieces():
    one, two = cpu.Operands(**arguments()), cpu.Operands(**arguments())
    cpu.adamw_pieces([one, two._replace(grad=one.grad)])
    assert torch.equal(one.param, two.param)


def test_a_closed_pool_refuses():
    pool = _cpp_adam.Pool(2)
    pool.close()
    pool.close()
    assert pool.closed
    for call in (pool.run, pool.submit):
        with pytest.raises(RuntimeError, match=r"^pool: it is closed"):
            call([cpu._addresses(cpu.Operands(**arguments()))])


@pytest.mark.parametrize("threads", [-1, -(2**40), 2**20])
def test_a_senseless_number_of_threads_is_refused_by_name(threads):
    with pytest.raises((TypeError, ValueError), match="threads"):
        cpu.adamw(**arguments(), threads=threads)


@pytest.mark.parametrize("cpus", [[-1], [10**6], [60000], ["a"]])
def test_cpus_that_do_not_exist_are_refused_by_name(cpus):
    with pytest.raises((TypeError, ValueError, RuntimeError), match="cpus"):
        _cpp_adam.Pool(2, cpus)


# Straight calls of the C++ interface: a piece is a tuple of addresses, count, dtype codes, scalars and two factors.
FIELDS = (*("param", "exp_avg", "exp_avg_sq", "grad", "out", "count"), *("exp_avg_dtype", "exp_avg_sq_dtype"))
FIELDS += ("grad_dtype", "out_dtype", "scalars", "unscale", "grad_scale")


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        *((name, 0, name) for name in TENSORS),
        *((name, -4, name) for name in TENSORS),
        *((name, 2**64, name) for name in TENSORS),
        *((name, 2**64 - 4, name) for name in TENSORS),
        *((name, 2**63, name) for name in TENSORS),
        *((name, 2**63 - 4 * N + 4, name) for name in STATE),
        *((name, 8, name) for name in TENSORS),
        *((name, 4.0, name) for name in TENSORS),
        *((name, None, name) for name in TENSORS),
        ("count", -1, "count"),
        ("count", 2**63, "count"),
        ("count", 2**63 - 1, "param"),
        ("count", 2**62, "param"),
        ("count", 1.0, "count"),
        ("exp_avg_dtype", 2, "exp_avg"),
        ("exp_avg_sq_dtype", -1, "exp_avg_sq"),
        ("grad_dtype", -1, "grad"),
        ("grad_dtype", 3, "grad"),
        ("grad_dtype", 2**80, "grad"),
        ("grad_dtype", "float32", "grad"),
        ("out_dtype", 3, "out"),
        ("out_dtype", -1, "out"),
    ],
)
def test_wrong_fields_of_a_raw_piece_are_refused_by_name(field, value, named):
    piece = list(cpu._addresses(cpu.Operands(**arguments())))
    piece[FIELDS.index(field)] = value
    for call in (cpu.pool(1).run, cpu.pool(2).run, cpu.pool(2).submit):
        with pytest.raises((TypeError, ValueError), match=rf"^{named}: "):
            call([tuple(piece)])


@pytest.mark.parametrize("pieces", [None, 3, ((),), [()], [None], [(1, 2, 3)], [[0] * 13]])
def test_raw_pieces_that_are_no_list_of_tuples_are_refused(pieces):
    with pytest.raises(TypeError, match="pieces"):
        cpu.pool(2).run(pieces)


def test_the_limits_of_an_empty_update_are_harmless():
    empty = torch.empty(0)
    cpu.adamw(empty, empty, empty, empty, GOOD, out=empty)
    cpu.adamw_pieces([])
    cpu.submit([]).wait()
