"""Builds the C++ extension `megatron_dos._cpp_adam`; everything else about the package is in setup.cfg.

Each instruction set is one source file compiled with its own flags. The rest of the module is compiled for the
architecture's base, so the module loads on any CPU of it and chooses at import.
"""

import platform

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


class BuildKernels(build_ext):
    """Compiles the files of the instruction sets with their flags, then the rest as usual."""

    def build_extension(self, ext: Extension) -> None:
        machine = platform.machine()
        if machine not in ISA_FLAGS:
            raise SystemExit(f"megatron-dos builds on {' and '.join(ISA_FLAGS)}; this machine is {machine}")
        extra_objects = []
        for source, flags in ISA_FLAGS[machine].items():
            extra_objects += self.compiler.compile(
                [f"{SOURCE}/{source}"],
                output_dir=self.build_temp,
                include_dirs=ext.include_dirs,
                extra_postargs=[*FLAGS, *flags],
                depends=ext.depends,
            )
        ext.extra_objects = extra_objects
        super().build_extension(ext)


setup(
    ext_modules=[
        Extension(
            "megatron_dos._cpp_adam",
            sources=[f"{SOURCE}/{name}" for name in ("kernel_scalar.cpp", "kernels.cpp", "module.cpp", "pool.cpp")],
            depends=[
                f"{SOURCE}/{name}"
                for name in ("adam.h", "fp_environment.h", "kernels.h", "pool.h", "scalar_lane.h", "update_range.h")
            ],
            include_dirs=[pybind11.get_include()],
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
            language="c++",
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
