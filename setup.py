# SPDX-License-Identifier: Apache-2.0
"""Builds megatron-dos: the C++ extension `megatron_dos._cpp_adam`, the version, the requirements, the long description.

Everything else about the package is in setup.cfg. Each instruction set is one source file compiled with its own flags
(cpp_adam/flags.mk). The rest of the module is compiled for the architecture's base, so the module loads on any CPU of
it and chooses at import.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from email.parser import Parser
from glob import glob
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
SOURCE = "cpp_adam/src"

WEB: str | None = None
"""Address of this repository's files on the web, with a slash at its end; None as long as it has no public one."""


# ---- The version -----------------------------------------------------------------------------------------------------


def version() -> str:
    """The version of this tree; megatron_dos/version.py says what its forms mean.

    A source distribution keeps the one it was made with. Where git cannot tell the commit, it ends with `.dev0`.
    """
    if (ROOT / "PKG-INFO").exists():
        return Parser().parsestr((ROOT / "PKG-INFO").read_text(encoding="utf-8"), headersonly=True)["Version"]
    release = re.search(r'^RELEASE = "(.+)"$', (ROOT / "megatron_dos/version.py").read_text(), re.MULTILINE)[1]
    commit = git("rev-parse", "--short=12", "HEAD")
    if not commit or Path(git("rev-parse", "--show-toplevel")).resolve() != ROOT:
        return f"{release}.dev0"
    changed = git("status", "--porcelain", "--untracked-files=no")
    if not changed and f"v{release}" in git("tag", "--points-at", "HEAD").split():
        return release
    return f"{release}.dev0+g{commit}" + (".dirty" if changed else "")


def git(*arguments: str) -> str:
    """What git prints in this tree; nothing where git, or a repository that it may read, is missing."""
    # Under a hook of another repository, variables lead git there.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


class BuildPython(build_py):
    """Writes the version down beside the modules, in the source tree where that is what is installed (`pip -e`)."""

    def run(self) -> None:
        super().run()
        target = Path(ROOT if self.editable_mode else self.build_lib, "megatron_dos", "_version.py")
        text = f"# SPDX-License-Identifier: Apache-2.0\nversion = {self.distribution.get_version()!r}\n"
        target.write_text(text, encoding="utf-8")


# ---- The long description --------------------------------------------------------------------------------------------


def long_description(web: str | None = WEB) -> str:
    """README.md without relative links, which lead nowhere on a package index: they get the address `web` before them,
    or lose their target and keep their text where there is none."""

    def absolute(link: re.Match[str]) -> str:
        text, target = link[1], link[2]
        return f"[{text}]({web}{'README.md' if target.startswith('#') else ''}{target})" if web else text

    return re.sub(r"\[([^\]]+)\]\((?!\w+:)([^)]+)\)", absolute, (ROOT / "README.md").read_text(encoding="utf-8"))


# ---- The C++ extension -----------------------------------------------------------------------------------------------


def flags() -> dict[str, list[str]]:
    """The lines "NAME := words" of cpp_adam/flags.mk."""
    lines = (line.partition(":=") for line in Path("cpp_adam/flags.mk").read_text().splitlines())
    return {name.strip(): words.split() for name, sign, words in lines if sign and not name.startswith("#")}


def refuse(fault: str, way_out: str) -> NoReturn:
    """End the build with one message."""
    raise SystemExit(f"megatron-dos cannot be built: {fault}\n{way_out}")


def check_compiler(command: list[str], standard: list[str]) -> None:
    """End the build unless `command` compiles C++ with the flags `standard`."""
    way_out = (
        "Install one (Debian, Ubuntu: apt-get install g++; Fedora, RHEL: dnf install gcc-c++), or name another with "
        "CXX=/path/to/compiler."
    )
    if shutil.which(command[0]) is None:
        refuse(f"there is no C++ compiler: '{command[0]}' is not on PATH.", way_out)
    probe = [*command, *standard, "-x", "c++", "-fsyntax-only", "-"]
    done = subprocess.run(probe, input="#include <thread>\n", capture_output=True, text=True)
    if done.returncode != 0:
        fault = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip())
        refuse(f"'{' '.join(command[:1])}' does not compile C++: {fault}", way_out)


def check_headers(folders: list[str]) -> None:
    """End the build unless Python.h is in one of the folders."""
    if not any(Path(folder, "Python.h").exists() for folder in folders):
        name = "python{}.{}".format(*sys.version_info)
        refuse(
            f"there is no Python.h for {sys.executable}, in {' or '.join(dict.fromkeys(folders))}.",
            f"Install Python's headers (Debian, Ubuntu: apt-get install {name}-dev; Fedora, RHEL: dnf install "
            f"{name}-devel), or build with a Python that has them.",
        )


def pybind11_headers() -> str:
    """The folder of pybind11's headers. Ends the build where it is not installed."""
    try:
        import pybind11
    except ModuleNotFoundError:
        refuse("pybind11 is not installed.", "pip install 'pybind11>=2.12', or build without --no-build-isolation.")
    return pybind11.get_include()


class BuildKernels(build_ext):
    """Compiles every file with the flags of its instruction set, several at a time, then links them."""

    def build_extension(self, ext: Extension) -> None:
        of = flags()
        kernels = of.get(f"KERNELS_{platform.machine()}")
        if kernels is None:
            raise SystemExit(f"megatron-dos builds on x86_64 and aarch64; this machine is {platform.machine()}")
        common = [*of["FLAGS"], *of["OPTIMIZE"], "-fvisibility=hidden", "-g0"]
        # Before setuptools 72, C++ was compiled with the C compiler's command, too.
        check_compiler(getattr(self.compiler, "compiler_so_cxx", self.compiler.compiler_so), of["FLAGS"])
        check_headers([*self.include_dirs, sysconfig.get_path("include"), sysconfig.get_path("platinclude")])
        include = [pybind11_headers()]

        def compile_one(name: str) -> list[str]:
            return self.compiler.compile(
                [f"{SOURCE}/{name}.cpp"],
                output_dir=self.build_temp,
                include_dirs=include,
                extra_postargs=[*common, *of.get(f"FLAGS_{name}", [])],
            )

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as executor:
            compiled = executor.map(compile_one, [*kernels, *of["SOURCES"], "module"])  # the slow ones first
            ext.extra_objects = [each for objects in compiled for each in objects]
        super().build_extension(ext)


def table_of_versions() -> ModuleType:
    """megatron_dos/supported.py, without the package around it."""
    spec = importlib.util.spec_from_file_location("supported", ROOT / "megatron_dos/supported.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    supported = table_of_versions()
    setup(
        version=version(),
        long_description=long_description(),
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
        cmdclass={"build_ext": BuildKernels, "build_py": BuildPython},
    )
