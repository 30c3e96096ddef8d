"""Builds the C++ extension `megatron_dos._cpp_adam` and names the requirements; all else is in setup.cfg.

The versions of the requirements are those of megatron_dos/supported.py. setuptools takes a setting from here or from
setup.cfg, not from both, so all requirements are here.

Each instruction set is one source file compiled with its own flags (cpp_adam/flags.mk). The rest of the module is
compiled for the architecture's base, so the module loads on any CPU of it and chooses at import.
"""

from __future__ import annotations

import importlib.util
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path
from types import ModuleType

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCE = "cpp_adam/src"


def flags() -> dict[str, list[str]]:
    """The lines "NAME := words" of cpp_adam/flags.mk."""
    lines = (line.partition(":=") for line in Path("cpp_adam/flags.mk").read_text().splitlines())
    return {name.strip(): words.split() for name, sign, words in lines if sign and not name.startswith("#")}


class BuildKernels(build_ext):
    """Compiles every file with the flags of its instruction set, several at a time, then links them."""

    def build_extension(self, ext: Extension) -> None:
        of = flags()
        kernels = of.get(f"KERNELS_{platform.machine()}")
        if kernels is None:
            raise SystemExit(f"megatron-dos builds on x86_64 and aarch64; this machine is {platform.machine()}")
        common = [*of["FLAGS"], *of["OPTIMIZE"], "-fvisibility=hidden", "-g0"]

        def compile_one(name: str) -> list[str]:
            return self.compiler.compile(
                [f"{SOURCE}/{name}.cpp"],
                output_dir=self.build_temp,
                include_dirs=[pybind11.get_include()],
                extra_postargs=[*common, *of.get(f"FLAGS_{name}", [])],
            )

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as executor:
            compiled = executor.map(compile_one, [*kernels, *of["SOURCES"], "module"])  # the slow ones first
            ext.extra_objects = [each for objects in compiled for each in objects]
        super().build_extension(ext)


def table_of_versions() -> ModuleType:
    """megatron_dos/supported.py, without the package around it."""
    spec = importlib.util.spec_from_file_location("supported", "megatron_dos/supported.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


supported = table_of_versions()

setup(
    python_requires=supported.PYTHON.specifier,
    install_requires=["numpy", supported.TORCH.requirement, "psutil", "tqdm"],
    extras_require={
        "megatron": [
            f'{supported.MEGATRON.requirement}; python_version>="{supported.MEGATRON_PYTHON.least}"',
        ],
        "plots": ["matplotlib"],
        "test": ["pytest", "hypothesis", "ruff", "matplotlib", "tensorboard"],
    },
    ext_modules=[
        Extension(
            "megatron_dos._cpp_adam",
            sources=[],
            depends=["setup.py", "cpp_adam/flags.mk", *sorted(glob(f"{SOURCE}/*"))],
            extra_link_args=["-pthread"],
            language="c++",
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
