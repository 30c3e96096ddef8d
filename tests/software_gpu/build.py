# SPDX-License-Identifier: Apache-2.0
"""Builds the software GPU: replacements of libcudart and libcuda for the torch of this environment.

The calls that torch's libraries import and the sources here do not define become stubs that say their name and fail.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import tempfile
from pathlib import Path

__all__ = ["build", "is_possible"]

SOURCES = Path(__file__).resolve().parent / "runtime"
_FLAGS = ("-std=c++17", "-O1", "-g", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra", "-Werror=return-type")
_DRIVER = "libcuda.so.1"


def _folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


def _torch_libraries() -> list[Path]:
    return sorted((_folder("torch") / "lib").glob("lib*.so"))


def is_possible() -> bool:
    """Whether torch is a build for CUDA, whose runtime comes in a library of its own."""
    return bool(_folder("torch")) and any(path.name == "libtorch_cuda.so" for path in _torch_libraries())


def _imported() -> set[tuple[str, str]]:
    """(symbol, version) of all that torch's libraries import from the CUDA runtime or the driver."""
    found = set()
    for path in _torch_libraries():
        listed = subprocess.run(["nm", "-D", "--undefined-only", path], capture_output=True, text=True, check=True)
        for line in listed.stdout.splitlines():
            symbol, _, version = line.split()[-1].partition("@")
            if version.startswith("libcudart") or (path.name == "libcaffe2_nvrtc.so" and symbol.startswith("cu")):
                found.add((symbol, version.lstrip("@")))
    return found


def _stubs(symbols: set[str]) -> str:
    lines = ["#include <stdio.h>", 'extern "C" {']
    lines += [
        f'int {name}() {{ fprintf(stderr, "software GPU: {name} is not part of it\\n"); return 801; }}'
        for name in sorted(symbols)
    ]
    return "\n".join([*lines, "}"])


def _defined(library: Path) -> set[str]:
    listed = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True)
    return {line.split()[-1].partition("@")[0] for line in listed.stdout.splitlines()}


def _compile(out: Path, sources: list[Path], wanted: set[str], version: str, scratch: Path) -> None:
    includes = [str(folder) for folder in (_folder("nvidia.cu13"), _folder("triton.backends.nvidia")) if folder]
    flags = [*_FLAGS, *(f"-I{folder}/include" for folder in includes), f"-Wl,-soname,{out.name}"]
    if version:
        script = scratch / "versions"
        script.write_text(f"{version} {{ global: *; }};\n")
        flags.append(f"-Wl,--version-script={script}")
    compiler = os.environ.get("CXX", "g++")
    objects = []
    for source in sources:
        objects.append(scratch / f"{source.stem}.o")
        subprocess.run([compiler, *flags[:-1], "-c", source, "-o", objects[-1]], check=True)
    first = scratch / f"first-{out.name}"
    subprocess.run([compiler, *flags, *objects, "-o", first], check=True)
    stubs = scratch / "stubs.cpp"
    stubs.write_text(_stubs(wanted - _defined(first)))
    subprocess.run([compiler, *flags, *objects, stubs, "-o", scratch / out.name], check=True)
    os.replace(scratch / out.name, out)


def build(folder: Path) -> Path:
    """Build both libraries into a folder of `folder`, if these sources and this torch have not been built there yet.

    Returns:
        The folder with libcudart.so.* and libcuda.so.1.
    """
    imported = _imported()
    version = next(version for _, version in imported if version)
    key = hashlib.sha256(repr(sorted(imported)).encode())
    for path in [*sorted(SOURCES.iterdir()), Path(__file__)]:
        key.update(path.read_bytes())
    target = folder / key.hexdigest()[:16]
    if (target / version).exists() and (target / _DRIVER).exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target) as scratch:
        runtime = [SOURCES / f"{name}.cpp" for name in ("memory", "queues", "control", "runtime")]
        of_runtime = {symbol for symbol, of in imported if of}
        of_driver = {symbol for symbol, of in imported if not of}
        _compile(target / _DRIVER, [SOURCES / "driver.cpp"], of_driver, "", Path(scratch))
        _compile(target / version, runtime, of_runtime, version, Path(scratch))
    return target
