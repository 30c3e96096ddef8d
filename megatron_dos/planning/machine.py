# SPDX-License-Identifier: Apache-2.0
"""What a plan has to know of a node: the rates and sizes of its processors, links and memories.

A `Machine` is numbers and where each of them comes from: a data sheet, a measurement, an estimate. It is a JSON file:
presets of this package (`machines/*.json`), or one that `megatron-dos calibrate` wrote. What follows from the numbers
is the business of `perf_model`.

Rates of links and GPUs are per GPU, everything about CPUs and host memory is per node.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

__all__ = ["Machine", "MachineError", "Source", "load", "preset", "preset_names"]


class MachineError(ValueError):
    """A machine description that cannot be used; the message names the file and the key."""


@dataclass(frozen=True)
class Source:
    """Where a value is from, in words, and the preset that it was taken from; '' where it was taken from none."""

    words: str
    preset: str = ""

    def __str__(self) -> str:
        """The line of a machine's file."""
        return f"preset {self.preset}: {self.words}" if self.preset else self.words

    @classmethod
    def of_line(cls, line: str) -> Source:
        """What such a line says."""
        found = re.fullmatch(r"preset ([^:]+): (.*)", line, re.DOTALL)
        return cls(found[2], preset=found[1]) if found else cls(line)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One node. All values are finite and positive, latencies and overheads may be 0.

    `sources` says for each value where it comes from, by field name; a value without a source is refused.
    `fingerprint` identifies the hardware that was measured; it is empty where nothing was.
    """

    name: str

    gpus: int
    """GPUs of the node."""
    cores: int
    """Physical CPU cores of the node."""

    cpu_update_per_core: float
    """Parameters a second that one core updates with the fused kernel (FP32 grads, 16-bit params) while host memory
    keeps up."""
    cpu_update_max: float
    """Parameters a second that all cores of the node update together, nothing else running."""

    h2d_alone: float
    """Bytes a second from page-locked host memory to one GPU."""
    d2h_alone: float
    """Bytes a second from one GPU to page-locked host memory."""
    h2d_together: float
    """Bytes a second to one GPU while it also sends."""
    d2h_together: float
    """Bytes a second from one GPU while it also receives."""
    h2d_pageable: float
    """Bytes a second from pageable host memory to one GPU, which waits for each copy."""

    gpu_update: float
    """Parameters a second that one GPU updates with the fused kernel, states in its memory."""
    dram: float
    """Bytes a second of the host memory of the node, reads and writes together."""

    gpu_memory: float
    """Bytes of memory of one GPU."""
    host_memory: float
    """Bytes of memory of the node."""

    matmul: float
    """Floating-point operations a second that one GPU reaches in forward and backward passes, bf16."""

    copy_latency: float = 0.0
    """Seconds that a copy or an operation on the GPU takes besides what its size says."""
    cpu_latency: float = 0.0
    """Seconds that handing a subgroup to the CPU's threads takes."""

    sources: Mapping[str, Source] = field(default_factory=dict, hash=False)
    fingerprint: str = ""

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            _check(name, getattr(self, name), self.name)
        _check_sources(self.sources, self.name)

    @property
    def preset_of_gpu(self) -> str:
        """The preset that the GPU's values are from; '' where they were measured, and of a preset itself."""
        return self.sources["gpu_update"].preset

    def cpu_update(self, threads: int, ranks: int) -> float:
        """Parameters a second that one rank's threads update while `ranks` ranks of the node do so at once."""
        return min(threads * self.cpu_update_per_core, self.cpu_update_max / ranks)

    def as_json(self) -> str:
        """The text of a file that `load` reads."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        sources = {name: str(source) for name, source in self.sources.items()}
        return json.dumps({**values, "sources": sources}, indent=2) + "\n"


_WORDS = ("name", "fingerprint")
_NUMBERS = tuple(f.name for f in dataclasses.fields(Machine) if f.name not in (*_WORDS, "sources"))
_OPTIONAL = tuple(
    f.name
    for f in dataclasses.fields(Machine)
    if f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING
)
_COUNTS = ("gpus", "cores")
_MAY_BE_ZERO = ("copy_latency", "cpu_latency")
_LEAST, _MOST = 1e-12, 1e24  # beyond any machine, in each of the units; times stay finite


def _check(name: str, value: Any, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise MachineError(f"{where}: {name} is {value!r}; it takes a number")
    if not math.isfinite(value) or value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
        least = "at least 0" if name in _MAY_BE_ZERO else "positive"
        raise MachineError(f"{where}: {name} is {value}; it is finite and {least}")
    if value and not _LEAST <= value <= _MOST:
        raise MachineError(f"{where}: {name} is {value}; it lies between {_LEAST:g} and {_MOST:g}")
    if name in _COUNTS and value != int(value):
        raise MachineError(f"{where}: {name} is {value}; it is a whole number")


def _check_sources(sources: Any, where: str) -> None:
    if not isinstance(sources, Mapping) or not all(isinstance(each, Source) for each in sources.values()):
        raise MachineError(f"{where}: sources maps each value's name to the text of where it comes from")
    unknown = sorted(set(sources) - set(_NUMBERS))
    if unknown:
        raise MachineError(f"{where}: sources names {', '.join(unknown)}, which is no value of a machine")
    missing = [name for name in _NUMBERS if name not in sources]
    if missing:
        raise MachineError(f"{where}: sources says nothing about {', '.join(missing)}")


def _sources_of(given: Any) -> Any:
    """The sources in a file; what is none is left as it is, for `_check_sources` to refuse."""
    if not isinstance(given, dict):
        return given
    return {name: Source.of_line(text) if isinstance(text, str) and text else text for name, text in given.items()}


def preset_names() -> tuple[str, ...]:
    """The machines that come with this package, in alphabetical order."""
    files = resources.files("megatron_dos").joinpath("machines").iterdir()
    return tuple(sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json")))


def preset(name: str) -> Machine:
    """A machine that comes with this package.

    Raises:
        MachineError: there is none of that name.
    """
    if name not in preset_names():
        raise MachineError(f"no machine is called {name!r}: give one of {', '.join(preset_names())}")
    text = resources.files("megatron_dos").joinpath("machines").joinpath(f"{name}.json").read_text(encoding="utf-8")
    return parse(text, f"machines/{name}.json")


def load(name_or_path: str | Path) -> Machine:
    """A preset by name, or the machine in a JSON file.

    Raises:
        MachineError: neither a preset nor a file, or the file describes no machine; the message names file and key.
    """
    if str(name_or_path) in preset_names():
        return preset(str(name_or_path))
    path = Path(name_or_path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(preset_names())
        raise MachineError(f"{path}: neither a readable file ({error}) nor one of {known}") from error
    return parse(text, str(path))


def parse(text: str, where: str) -> Machine:
    """The machine in a JSON text; `where` names it in errors.

    Raises:
        MachineError: the text describes no machine.
    """
    try:
        given = json.loads(text)
    except ValueError as error:
        raise MachineError(f"{where}: not JSON: {error}") from error
    except RecursionError:
        raise MachineError(f"{where}: not a machine: it is nested too deeply") from None
    if not isinstance(given, dict):
        raise MachineError(f"{where}: not a JSON object of a machine's values")
    known = [f.name for f in dataclasses.fields(Machine)]
    unknown = [key for key in given if key not in known]
    if unknown:
        raise MachineError(f"{where}: unknown key {', '.join(unknown)}; known are {', '.join(known)}")
    missing = [name for name in known if name not in given and name not in _OPTIONAL]
    if missing:
        raise MachineError(f"{where}: no {', '.join(missing)}")
    for name in _WORDS:
        if not isinstance(given.get(name, ""), str):
            raise MachineError(f"{where}: {name} is {given[name]!r}; it takes a text")
    given = {**given, "sources": _sources_of(given.get("sources", {}))}
    for name in _NUMBERS:
        if name in given:
            _check(name, given[name], where)
    _check_sources(given["sources"], where)
    return Machine(**given)
