# SPDX-License-Identifier: Apache-2.0
"""The device kernels give the bits of the CPU kernel; the libraries' kernels differ by a little, which is measured."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from megatron_dos.gpu_check.cases import DTYPES, Case, as_tensor, bits, make_case, random_scalars, run_on_tensors
from megatron_dos.gpu_check.context import Context
from megatron_dos.kernels import AdamScalars, cpu, device_kernel, elementwise_adam, library_adam
from megatron_dos.words import gib

__all__ = ["run"]

FACTORS = (1.0, 2.0**-16, 0.37, 1e-40, 3e38)
GUARD = 256  # bytes before and after every array, which must stay as they are
SHOWN = 5  # faults that are reported in full

Kernel = Callable[..., None]


def run(context: Context) -> None:
    place = torch.device("cpu") if context.dry else context.device
    kernels = _kernels(context)
    for name, kernel in kernels.items():
        _compare(context, name, kernel, place)
    _libraries(context, place)
    if not context.dry and "triton" in kernels:
        chosen = device_kernel.select("auto", place)
        context.check("triton: the kernel that is chosen by itself", chosen is kernels["triton"], f"{chosen} is chosen")
        _beyond_32_bits(context, kernels["triton"], place)


def _kernels(context: Context) -> dict[str, Kernel]:
    kernels: dict[str, Kernel] = {}
    try:
        from megatron_dos.kernels import triton_adam

        kernels["triton"] = triton_adam.adamw
    except ImportError as error:
        context.check("triton: the kernel loads", False, str(error))
    kernels["elementwise"] = elementwise_adam.adamw
    return kernels


def _compare(context: Context, name: str, kernel: Kernel, place: torch.device) -> None:
    """All required cases, then random ones of the kinds that have been compiled by then, as time allows."""
    rng = np.random.default_rng(1)
    faults: list[str] = []
    cases = 0
    share = context.with_limit(context.left() * (0.7 if name == "triton" else 0.5))
    required = list(_required(rng, context))
    for what, case, offset in context.required(required, f"required cases of the kernel {name}"):
        faults += _faults(what, kernel, case, place, offset)
        cases += 1
    if not cases:
        return
    numbers = itertools.count()
    while next(numbers) < context.sizes.kernel_campaign and share.left() > 2 and len(faults) < SHOWN:
        grad, out = str(rng.choice(list(DTYPES))), str(rng.choice(list(DTYPES)))
        case = _case(rng, int(rng.integers(0, context.sizes.kernel_elements)), grad, out)
        faults += _faults(f"random case {cases}, grad {grad}, out {out}", kernel, case, place, 0)
        cases += 1
    context.value(f"{name}_cases", cases)
    context.check(
        f"{name}: the bits of the CPU kernel, and nothing beside the arrays is written",
        not faults,
        f"{cases} cases of all dtypes, both modes, many lengths, special values"
        if not faults
        else "; ".join(faults[:SHOWN]),
    )


def _case(rng: np.random.Generator, numel: int, grad: str, out: str | None, **options: Any) -> Case:
    case = make_case(rng, numel, grad, out, special=float(rng.choice([0.0, 0.05, 0.3])), **options)
    return dataclasses.replace(case, unscale=float(rng.choice(FACTORS)), grad_scale=float(rng.choice(FACTORS)))


def _required(rng: np.random.Generator, context: Context) -> Iterator[tuple[str, Case, int]]:
    """(description, case, elements after an aligned address)."""
    numel = context.sizes.kernel_elements
    for grad, out in itertools.product(DTYPES, (None, *DTYPES)):
        yield f"grad {grad}, out {out}", _case(rng, numel, grad, out), 0
    for dtype in DTYPES:
        yield f"L2 mode, {dtype}", _case(rng, numel, dtype, dtype, l2_mode=True), 0
    for first, second in (("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")):
        case = _case(rng, numel, "bfloat16", "bfloat16", exp_avg=first, exp_avg_sq=second)
        yield f"moments {first}, {second}", case, 0
    # Around the 1,024 elements of a block of Triton's kernel and the vectors of the CPU's.
    for length in (0, 1, 2, 15, 16, 17, 1023, 1024, 1025, 2048, 3071):
        yield f"{length} elements", _case(rng, length, "bfloat16", "bfloat16"), 0
    for offset in (1, 3, 8):
        yield f"{offset} elements off alignment", _case(rng, numel, "bfloat16", "bfloat16"), offset
    for grad, out in (("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16")):
        yield f"arbitrary bits, {grad}", _arbitrary(rng, numel, grad, out), 0


def _arbitrary(rng: np.random.Generator, numel: int, grad: str, out: str) -> Case:
    """Every array of random bits: NaNs, infinities, denormals and negative second moments among them."""

    def random_bits(dtype: str) -> np.ndarray:
        raw = np.dtype(DTYPES[dtype][0])
        return rng.integers(0, 2 ** (8 * raw.itemsize), numel, dtype=f"uint{8 * raw.itemsize}").view(raw)

    return Case(
        param=random_bits("float32"),
        exp_avg=random_bits("float32"),
        exp_avg_sq=random_bits("float32"),
        grad=random_bits(grad),
        out=np.zeros(numel, DTYPES[out][0]),
        scalars=random_scalars(rng, l2_mode=False),
        grad_scale=0.5,
    )


def _faults(what: str, kernel: Kernel, case: Case, place: torch.device, offset: int) -> list[str]:
    """What differs from the CPU kernel, in words."""
    expected = run_on_tensors(case, cpu.adamw)
    found, damaged = _run_on(place, kernel, case, offset)
    faults = [f"{what}: memory around {name} was written" for name in damaged]
    for name, wanted in expected.arrays().items():
        got = bits(found[name])
        differ = np.flatnonzero(got != bits(wanted))
        if differ.size:
            at = differ[0]
            faults.append(
                f"{what}: {name}: {differ.size} of {got.size} differ, the first at {at}: "
                f"{got[at]:#x} instead of {bits(wanted)[at]:#x}"
            )
    return faults


def _run_on(place: torch.device, kernel: Kernel, case: Case, offset: int) -> tuple[dict[str, np.ndarray], list[str]]:
    """The arrays after the kernel's step on `place`, and the names of those around which memory was written."""
    arrays = {name: getattr(case, name) for name in ("param", "exp_avg", "exp_avg_sq", "grad", "out")}
    memory: dict[str, torch.Tensor] = {}
    tensors: dict[str, torch.Tensor | None] = {}
    for name, array in arrays.items():
        if array is None:
            tensors[name] = None
            continue
        host = as_tensor(array)
        start = GUARD + offset * array.itemsize
        memory[name] = torch.full((start + array.nbytes + GUARD,), 0x5A, dtype=torch.uint8, device=place)
        tensors[name] = memory[name][start : start + array.nbytes].view(host.dtype).copy_(host)
    out = tensors.pop("out")
    kernel(*tensors.values(), case.scalars, case.unscale, case.grad_scale, out)
    result, damaged = {}, []
    for name, whole in memory.items():
        raw = whole.cpu().numpy()
        start = GUARD + offset * arrays[name].itemsize
        inside = raw[start : start + arrays[name].nbytes]
        result[name] = inside.view(arrays[name].dtype) if inside.size else arrays[name][:0]
        if (raw[:start] != 0x5A).any() or (raw[start + inside.size :] != 0x5A).any():
            damaged.append(name)
    if (bits(result["grad"]) != bits(case.grad)).any():
        damaged.append("grad (which is only read)")
    return result, damaged


# --- the libraries


def _libraries(context: Context, place: torch.device) -> None:
    """The largest differences of the libraries' kernels after ten steps from the CPU kernel, on ordinary values."""
    for name, library in library_adam.LIBRARIES.items():
        if context.dry and name != "torch":
            continue
        try:
            kernel = library_adam.load(name)
        except RuntimeError as error:
            context.value(
                f"library_{name}", {"installed": False, "why": str(error).partition("(")[2].partition(")")[0]}
            )
            continue
        context.value(f"library_{name}", {"name": library, "installed": True, **_difference(kernel, place)})


def _difference(kernel: Kernel, place: torch.device, numel: int = 10_000, steps: int = 10) -> dict[str, float]:
    lr = 1e-3
    generator = torch.Generator(device="cpu").manual_seed(1)
    ours = torch.zeros((3, numel))
    ours[0].normal_(generator=generator)
    theirs = ours.to(place, copy=True)
    for step in range(1, steps + 1):
        grad = torch.randn(numel, generator=generator)
        scalars = AdamScalars.at_step(step, lr, (0.9, 0.999), 1e-8, 0.1, decoupled=True)
        cpu.adamw(*ours, grad, scalars)
        kernel(*theirs, grad.to(place), scalars)
    difference = (theirs.cpu().double() - ours.double()).abs()
    return {
        "steps": steps,
        "largest_difference_of_params_over_lr": (difference[0].max() / lr).item(),
        "largest_relative_difference_of_exp_avg_sq": (difference[2] / ours[2].double()).max().item(),
        "largest_difference_of_exp_avg": difference[1].max().item(),
        "params_that_differ": (difference[0] > 0).double().mean().item(),
    }


# --- sizes


def _beyond_32_bits(context: Context, kernel: Kernel, place: torch.device) -> None:
    """One update of more than 2^31 elements against the same in three parts."""
    numel = 2**31 + 3 * 1024 + 5
    needed = numel * 33  # two copies of 3 states and a param, one grad, and the mask of a comparison
    if context.free_device_memory() < needed or context.left() < 5:
        context.note(f"An update of more than 2^31 elements was left out: it takes {gib(needed, 0)} of GPU memory.")
        return
    scalars = AdamScalars.at_step(3, 1e-3, (0.9, 0.999), 1e-8, 0.1, decoupled=True)
    with context.clean():
        grad = torch.empty(numel, dtype=torch.bfloat16, device=place).normal_()
        states = [torch.empty(numel, device=place).normal_() for _ in range(3)]
        states[2].abs_()
        whole = [*(state.clone() for state in states), torch.zeros_like(grad)]
        parts = [*states, torch.zeros_like(grad)]
        kernel(*whole[:3], grad, scalars, out=whole[3])
        for start in range(0, numel, 2**30):
            span = slice(start, start + 2**30)
            kernel(*(state[span] for state in states), grad[span], scalars, out=parts[3][span])
        integers = (torch.int32, torch.int32, torch.int32, torch.int16)
        same = all(
            torch.equal(one.view(integer), other.view(integer))
            for one, other, integer in zip(whole, parts, integers, strict=True)
        )
        context.check("triton: more than 2^31 elements at once", same, f"{numel} elements, as a whole and in parts")
        del grad, states, whole, parts
