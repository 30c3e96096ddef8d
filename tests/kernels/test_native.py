# SPDX-License-Identifier: Apache-2.0
"""The C++ test program: plain, under sanitizers, and as AArch64 code under an emulator; and what the compiler made."""

import os
import re
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from same_bits import assert_same_bits

from megatron_dos.gpu_check.cases import DTYPES, make_case
from megatron_dos.kernels import DType

CPP_ADAM = Path(__file__).parents[2] / "cpp_adam"
CODES = {None: DType.NONE, "float32": DType.FLOAT32, "bfloat16": DType.BFLOAT16, "float16": DType.FLOAT16}


def make(target: str) -> str:
    done = subprocess.run(["make", "-C", str(CPP_ADAM), "-j2", target], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("target", ["test", "asan", "tsan"])
def test_cpp_program_runs_clean(target):
    assert "all good" in make(target)


MUTATIONS = {
    "workers keep the mode in which they were started": (
        *("pool.cpp", "  void work() {\n    const IeeeEnvironment environment;\n", "  void work() {\n"),
        "on a worker flushes a denormal param",
    ),
    "a job may write what an earlier one reads": (
        *("footprint.cpp", " || overlap(read_, other.written_);", ";"),
        "a job on unfinished memory waits",
    ),
}
"""What is taken away -> file, code, what takes its place, and what the C++ program then finds."""


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_cpp_program_fails_without(mutation, tmp_path):
    file, code, instead, symptom = MUTATIONS[mutation]
    make("test")
    copy = shutil.copytree(CPP_ADAM, tmp_path / "cpp_adam")  # with what has been compiled
    source = copy / "src" / file
    text = source.read_text()
    assert text.count(code) == 1
    source.write_text(text.replace(code, instead))
    done = subprocess.run(["make", "-C", str(copy), "test"], capture_output=True, text=True)
    assert done.returncode != 0
    assert symptom in done.stdout + done.stderr


NEEDS_CROSS = pytest.mark.skipif(
    not (shutil.which("aarch64-linux-gnu-g++") and shutil.which("qemu-aarch64")),
    reason="needs g++-aarch64-linux-gnu and qemu-user (apt-get install)",
)


@NEEDS_CROSS
def test_neon_program_runs_clean_under_qemu():
    assert re.search("all good: neon scalar", make("neon"))


def replay(command: list[str], cases: list, isa: str, folder: Path) -> None:
    """Run cases through `test_adam replay` and compare the bits with numpy's."""
    inputs, outputs = folder / f"in-{isa}", folder / f"out-{isa}"
    with inputs.open("wb") as file:
        for case, (grad, out, exp_avg, exp_avg_sq) in cases:
            s = case.scalars
            floats = (s.beta1, s.one_minus_beta1, s.beta2, s.one_minus_beta2, s.eps, s.decay, s.step_size)
            floats += (s.rsqrt_bias_correction2, s.weight_decay, case.unscale, case.grad_scale)
            codes = (CODES[exp_avg], CODES[exp_avg_sq], CODES[grad], CODES[out])
            file.write(struct.pack("=q4i2i11f4x", case.param.size, *codes, s.l2_mode, True, *floats))
            for array in (case.param, case.exp_avg, case.exp_avg_sq, case.grad):
                file.write(array.tobytes())
    subprocess.run([*command, "replay", str(inputs), str(outputs), isa], check=True)
    with outputs.open("rb") as file:
        for case, dtypes in cases:
            expected = case.expected()
            for name, array in expected.arrays().items():
                raw = file.read(array.nbytes)
                setattr(case, name, np.frombuffer(raw, array.dtype))
            try:
                assert_same_bits(case, expected)
            except AssertionError as error:
                raise AssertionError(f"{isa}, {dtypes}: {error}") from None
        assert file.read() == b""


@NEEDS_CROSS
@pytest.mark.parametrize("isa", ["neon", "scalar"])
def test_neon_gives_the_bits_of_the_reference_under_qemu(isa, tmp_path):
    make("neon")
    rng = np.random.default_rng(17)
    cases = []
    for grad in DTYPES:
        for out in (None, *DTYPES):
            for exp_avg in ("float32", "bfloat16"):
                for exp_avg_sq in ("float32", "bfloat16"):
                    for l2_mode in (False, True):
                        numel = int(rng.integers(0, 600))
                        case = make_case(rng, numel, grad, out, exp_avg, exp_avg_sq, l2_mode, grad_scale=0.7)
                        case.grad_scale = float(np.float32(case.grad_scale))
                        case.unscale = float(np.float32(1 / 3))
                        cases.append((case, (grad, out, exp_avg, exp_avg_sq)))
    replay(["qemu-aarch64", str(CPP_ADAM / "build/neon/test_adam")], cases, isa, tmp_path)


def objects(flavour: str) -> dict[str, Path]:
    folder = CPP_ADAM / "build" / flavour
    return {path.stem: path for path in folder.glob("kernel_*.o")}


def test_code_for_newer_cpus_cannot_leak_into_the_rest_of_the_module():
    """An inline function compiled for AVX-512 could be the copy that the linker keeps for all: none may be shared."""
    make("test")
    found = objects("plain")
    assert {"kernel_scalar", "kernel_avx2", "kernel_avx512"} <= found.keys() or os.uname().machine != "x86_64"
    for name, path in found.items():
        symbols = subprocess.run(["nm", "--defined-only", path], check=True, capture_output=True, text=True).stdout
        exported = [line for line in symbols.splitlines() if line.split()[-2] not in "tbdr"]
        assert len(exported) == 1, exported
        assert f"update_range_{name.removeprefix('kernel_')}" in exported[0]


def test_compiler_fused_no_multiply_and_add():
    make("test")
    found = objects("plain")
    assert found
    for path in found.values():
        code = subprocess.run(["objdump", "-d", path], check=True, capture_output=True, text=True).stdout
        assert not re.search(r"\b(vfn?m(add|sub)|fn?m(add|sub|la|ls))", code), path.name


def test_the_rest_of_the_module_needs_nothing_beyond_the_base_architecture():
    make("test")
    if os.uname().machine != "x86_64":
        return
    base = [path for path in (CPP_ADAM / "build/plain").glob("*.o") if "avx" not in path.name]
    assert {"kernel_scalar.o", "kernels.o", "pool.o"} <= {path.name for path in base}
    code = subprocess.run(["objdump", "-d", *base], check=True, capture_output=True, text=True).stdout
    assert "sqrtps" in code
    assert not re.search(r"%[yz]mm\d|\bv(add|mul|div|sqrt|mov)\w*\b", code)
