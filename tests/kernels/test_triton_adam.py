# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel, without a GPU: its bits on numpy, its PTX for several kinds of GPU, and its launch."""

from __future__ import annotations

import collections
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip(
    "triton", reason="Triton comes with torch's builds for CUDA; without it there is no kernel"
)
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from megatron_dos.kernels import AdamScalars, triton_adam  # noqa: E402

SCALARS = AdamScalars.at_step(7, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, decoupled=True)
ARCHITECTURES = (80, 90, 100)
TENSORS = ("param_ptr", "exp_avg_ptr", "exp_avg_sq_ptr", "grad_ptr", "out_ptr")

# Float instructions that are exact, or rounded once to nearest even. `.f32x2` does two at a time.
EXACT = re.compile(
    r"(mul|add|sub|div|sqrt)\.rn\.f32(x2)?"
    r"|abs\.f32|selp\.f32|setp\.\w+\.f32"
    r"|cvt\.f32\.f16|cvt\.rn\.f16\.f32"
)


def instructions(ptx: str) -> collections.Counter[str]:
    """Full names of the instructions of a PTX text, counted."""
    body = re.sub(r"//.*", "", ptx)
    return collections.Counter(
        re.findall(r"^\s*(?:@!?%p\d+\s+)?([a-z]\w*(?:[.:]+\w+)*)(?:\s[^;\n]*)?;", body, re.MULTILINE)
    )


def faults(ptx: str) -> set[str]:
    """Instructions whose results might not be the reference's."""
    found = instructions(ptx)
    floats = {name for name in found if re.search(r"\.(f16|f32|f64|bf16|tf32)", name)}
    calls = {name for name in found if name.startswith("call")}
    return (
        {name for name in floats if not EXACT.fullmatch(name)} | calls | set(re.findall(r"\S*\.(?:ftz|approx)\S*", ptx))
    )


def arithmetic(ptx: str) -> dict[str, int]:
    """Kind of operation -> how many float32 results it makes."""
    totals: collections.Counter[str] = collections.Counter()
    for name, count in instructions(ptx).items():
        kind, *modifiers = name.split(".")
        if kind in ("mul", "add", "sub", "div", "sqrt") and modifiers[-1] in ("f32", "f32x2"):
            totals[kind] += count * (2 if modifiers[-1] == "f32x2" else 1)
    return dict(totals)


def compiled(kernel, architecture: int, signature: dict[str, str], constants: dict, options: dict, aligned=()) -> str:
    """The PTX of a kernel for an architecture."""
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options).asm["ptx"]


def adamw_ptx(
    architecture: int = 90,
    grad: str = "bf16",
    out: str | None = "bf16",
    moments: str = "fp32",
    numel: str = "i32",
    l2_mode: bool = False,
    aligned: bool = True,
    options: dict | None = None,
) -> str:
    """The PTX of the update."""
    kernel = triton_adam.adamw_kernel
    signature = dict.fromkeys(kernel.arg_names, "fp32")
    signature |= {"param_ptr": "*fp32", "exp_avg_ptr": f"*{moments}", "exp_avg_sq_ptr": f"*{moments}"}
    signature |= {"grad_ptr": f"*{grad}", "out_ptr": f"*{out}", "numel": numel, "L2_MODE": "constexpr"}
    signature |= {"BLOCK": "constexpr"}
    constants = {"L2_MODE": l2_mode, "BLOCK": triton_adam.BLOCK}
    if out is None:
        signature["out_ptr"], constants["out_ptr"] = "constexpr", None
    tensors = [name for name in TENSORS if signature[name] != "constexpr"]
    return compiled(
        kernel,
        architecture,
        signature,
        constants,
        triton_adam.LAUNCH_OPTIONS if options is None else options,
        tensors if aligned else (),
    )


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """Triton's cache of compiled kernels, kept for this run only."""
    folder = tmp_path_factory.getbasetemp() / "triton-cache"
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))


def test_the_interpreted_kernel_gives_the_bits_of_the_reference():
    here = Path(__file__).resolve().parent
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "triton_interpreted.py"],
        cwd=here,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"^\d+ passed in", result.stdout, re.MULTILINE), result.stdout


class TestPTX:
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    @pytest.mark.parametrize(
        "variant",
        [
            {},
            {"grad": "fp16", "out": "fp16", "l2_mode": True},
            {"grad": "fp32", "out": "fp32", "moments": "bf16", "numel": "i64", "aligned": False},
        ],
        ids=["bf16", "fp16-l2", "fp32-unaligned"],
    )
    def test_every_operation_of_the_update_is_rounded_once_to_nearest_even(self, architecture, variant):
        ptx = adamw_ptx(architecture, **variant)
        assert not faults(ptx)
        # Nothing is fused, folded or left out: the operations of the specification, for whole blocks and for the last.
        per_thread = 2 * triton_adam.BLOCK // (32 * triton_adam.LAUNCH_OPTIONS["num_warps"])
        l2 = int(variant.get("l2_mode", False))
        wanted = {"mul": 10 + l2, "add": 3 + l2, "sub": 1, "div": 1, "sqrt": 1}
        assert arithmetic(ptx) == {kind: count * per_thread for kind, count in wanted.items()}

    @pytest.mark.parametrize("out", ["bf16", "fp32", None])
    def test_whole_blocks_move_four_elements_at_a_time_straight_between_memory_and_registers(self, out):
        found = instructions(adamw_ptx(out=out))
        stores = {"bf16": 3, "fp32": 4, None: 3}[out]
        assert found["ld.global.v4.b32"] == 3, "param, exp_avg, exp_avg_sq"
        assert found["ld.global.v2.b32"] == 1, "grad"
        assert found["st.global.v4.b32"] == stores
        assert found["st.global.v2.b32"] == (1 if out == "bf16" else 0)
        assert not [name for name in found if ".shared" in name or name.startswith("bar")]


# Kernels with one fault each, which the check must see.


@triton.jit
def approximate_sqrt(pointer):
    tl.store(pointer, tl.sqrt(tl.load(pointer)))


@triton.jit
def approximate_division(pointer):
    tl.store(pointer, tl.load(pointer) / tl.load(pointer + 1))


@triton.jit
def double_precision(pointer):
    tl.store(pointer, (tl.load(pointer).to(tl.float64) * 3.0 + 1.0).to(tl.float32))


class TestTheCheckOfPTX:
    def test_it_sees_fused_operations(self):
        found = faults(adamw_ptx(options={"num_warps": triton_adam.LAUNCH_OPTIONS["num_warps"]}))
        assert any(name.startswith("fma") for name in found)

    @pytest.mark.parametrize("kernel", [approximate_sqrt, approximate_division, double_precision])
    def test_it_sees_other_roundings(self, kernel):
        assert faults(compiled(kernel, 90, {"pointer": "*fp32"}, {}, triton_adam.LAUNCH_OPTIONS))

    @pytest.mark.parametrize(
        "line",
        [
            "mul.f32 %f1, %f2, %f3;",
            "@%p1 add.rz.f32 %f1, %f2, %f3;",
            "mad.rn.f32 %f1, %f2, %f3, %f4;",
            "mul.rn.ftz.f32 %f1, %f2, %f3;",
            "cvt.rz.f16.f32 %h1, %f1;",
            "rcp.rn.f32 %f1, %f2;",
            "call.uni (%f1), __nv_sqrtf, (%f2);",
            "fma.rn.f32x2 %rd1, %rd2, %rd3, %rd4;",
            "fma.rn.bf16x2 %r1, %r2, %r3, %r4;",
        ],
    )
    def test_it_sees_a_single_instruction(self, line):
        assert faults(f"\t{line}\n")


class RecordingDriver:
    """Stands where Triton's CUDA driver would be: kernels are compiled as for an H100, launches are noted."""

    def __init__(self) -> None:
        self.launches: list[SimpleNamespace] = []
        self.utils = self
        self.launcher_cls = self.launcher

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def load_binary(self, *arguments) -> tuple:
        return None, 0, 32, 0, 1024

    def launcher(self, source, metadata):
        def launch(x, y, z, stream, function, packed, launch_metadata, on_enter, on_exit, *arguments):
            by_name = dict(zip(source.fn.arg_names, arguments, strict=True))
            self.launches.append(SimpleNamespace(grid=(x, y, z), types=source.signature, arguments=by_name))

        return launch


class TestLaunch:
    @pytest.fixture
    def driver(self, monkeypatch):
        driver = RecordingDriver()
        kernel = triton_adam.adamw_kernel
        monkeypatch.setattr(triton.runtime.driver, "_active", driver)
        # Kernels compiled for this driver must not outlive it.
        monkeypatch.setattr(kernel, "device_caches", collections.defaultdict(kernel.create_binder))
        monkeypatch.setattr(triton_adam, "_INTERPRETED", True)  # lets host tensors through
        return driver

    @staticmethod
    def update(numel: int, scalars: AdamScalars = SCALARS, unscale: float = 1.0, grad_scale: float = 1.0) -> None:
        states = torch.zeros((3, 4 * triton_adam.BLOCK))[:, :numel]
        half = torch.zeros((2, 4 * triton_adam.BLOCK), dtype=torch.bfloat16)[:, :numel]
        triton_adam.adamw(*states, half[0], scalars, unscale, grad_scale, half[1])

    @staticmethod
    def compiled_kernels() -> list:
        return list(triton_adam.adamw_kernel.device_caches[0][0].values())

    def test_what_is_launched_was_compiled_without_fusion(self, driver):
        self.update(16)
        (kernel,) = self.compiled_kernels()
        assert not faults(kernel.asm["ptx"])

    def test_scalars_are_run_time_arguments_of_32_bits_whatever_their_value(self, driver):
        self.update(1024)
        still = AdamScalars.at_step(1, lr=0.0, betas=(0.0, 0.0), eps=1e-42, weight_decay=1e-42, decoupled=False)
        l2_mode_alone = {**vars(still), "l2_mode": False}
        self.update(1024, AdamScalars(**l2_mode_alone), unscale=1e-42, grad_scale=0.0)
        assert len(self.compiled_kernels()) == 1
        floats = [name for name, kind in driver.launches[0].types.items() if kind == "fp32"]
        assert len(floats) == 2 + 9  # both factors, and the scalars but the mode
        first, second = (launch.arguments for launch in driver.launches)
        assert {name: first[name] for name in floats[2:]} == {name: getattr(SCALARS, name) for name in floats[2:]}
        assert {name: second[name] for name in floats[2:]} == {name: getattr(still, name) for name in floats[2:]}
        assert (first["unscale"], first["grad_scale"]) == (1.0, 1.0)
        assert second["unscale"] == pytest.approx(1e-42, rel=1e-3, abs=0)
        assert second["unscale"] == torch.tensor(1e-42, dtype=torch.float32).item()

    def test_one_kernel_serves_every_length(self, driver):
        block = triton_adam.BLOCK
        lengths = (0, 1, 16, 17, block - 1, block, block + 1, 4 * block)
        for numel in lengths:
            self.update(numel)
        assert len(self.compiled_kernels()) == 1
        assert [launch.grid for launch in driver.launches] == [(-(-n // block), 1, 1) for n in lengths if n]


def test_host_tensors_are_refused():
    states, half = torch.zeros((3, 4)), torch.zeros((2, 4), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="param: is on device cpu, expected a CUDA device"):
        triton_adam.adamw(*states, half[0], SCALARS, out=half[1])
