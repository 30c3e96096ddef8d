"""Builds the C++ extension `megatron_dos._cpp_adam`; everything else about the package is in setup.cfg.

Each instruction set is one source file compiled with its own flags. The rest of the module is compiled for the
architecture's base, so the module loads on any CPU of it and chooses at import.
"""

from __future__ import annotations

import os
import platform
from concurrent.futures import ThreadPoolExecutor
from glob import glob

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCE = "cpp_adam/src"

# The results must be the same bits on every CPU: no contraction into fused multiply-adds, no -ffast-math. The two
# -fno flags change no value, only errno and exception flags, which nobody reads.
FLAGS = [
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-g0",
]

# Flags of each instruction set's file. GCC's own AVX-512 header sets off the "uninitialized" warnings.
ISA_FLAGS = {
    "x86_64": {
        "kernel_avx2.cpp": ["-mavx2", "-mf16c"],
        "kernel_avx512.cpp": [
            "-mavx512f",
            "-mavx512bw",
            "-mavx512dq",
            "-mavx512vl",
            "-Wno-uninitialized",
            "-Wno-maybe-uninitialized",
        ],
    },
    "aarch64": {"kernel_neon.cpp": []},
}

BASE_SOURCES = ["footprint.cpp", "kernel_scalar.cpp", "kernels.cpp", "module.cpp", "pool.cpp", "slab.cpp"]


class BuildKernels(build_ext):
    """Compiles every file with the flags of its instruction set, several at a time, then links them."""

    def build_extension(self, ext: Extension) -> None:
        machine = platform.machine()
        if machine not in ISA_FLAGS:
            raise SystemExit(f"megatron-dos builds on {' and '.join(ISA_FLAGS)}; this machine is {machine}")
        jobs = [*ISA_FLAGS[machine].items(), *((name, []) for name in BASE_SOURCES)]

        def compile_one(job: tuple[str, list[str]]) -> list[str]:
            name, flags = job
            return self.compiler.compile(
                [f"{SOURCE}/{name}"],
                output_dir=self.build_temp,
                include_dirs=[pybind11.get_include()],
                extra_postargs=[*FLAGS, *flags],
            )

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as executor:
            ext.extra_objects = [each for objects in executor.map(compile_one, jobs) for each in objects]
        super().build_extension(ext)


setup(
    ext_modules=[
        Extension(
            "megatron_dos._cpp_adam",
            sources=[],
            depends=["setup.py", *sorted(glob(f"{SOURCE}/*"))],
            extra_link_args=["-pthread"],
            language="c++",
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
