# SPDX-License-Identifier: Apache-2.0
"""What the package's files import of one another, read from their source: for the import contract and its picture."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "megatron_dos"


def imported_modules(path: Path) -> Iterator[str]:
    """Full names of all modules that the file imports, also inside functions and for types only.

    `from megatron_dos.update import engine` imports the module `megatron_dos.update.engine`, and needs nothing else of
    its package; `from megatron_dos.update.engine import UpdateEngine` gives both names, of which the second is no
    module.

    Raises:
        ValueError: it imports relatively.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"{path}:{node.lineno} imports relatively")
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from names
            if not all(map(_is_module, names)):
                yield node.module or ""


def _is_module(name: str) -> bool:
    place = PACKAGE.parent.joinpath(*name.split("."))
    return place.with_suffix(".py").exists() or place.is_dir() or name == "megatron_dos._cpp_adam"


def module_name(path: Path) -> str:
    """'megatron_dos.kernels' for megatron_dos/kernels/__init__.py."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(path: Path) -> str:
    """'kernels' for megatron_dos/kernels/cpu.py, 'files' for megatron_dos/files.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def files_between() -> dict[str, set[str]]:
    """Module -> the modules of the package that it imports."""
    files = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
    return {name: (set(imported_modules(path)) & files.keys()) - {name} for name, path in files.items()}


def rooms_between() -> dict[str, set[str]]:
    """Folder or file on top of the package -> the others that it imports."""
    rooms = {room_of(path) for path in PACKAGE.rglob("*.py")} - {"__init__"}
    found: dict[str, set[str]] = {room: set() for room in sorted(rooms)}
    for path in sorted(PACKAGE.rglob("*.py")):
        ours = {name.split(".")[1] for name in imported_modules(path) if name.startswith("megatron_dos.")}
        if room_of(path) in found:
            found[room_of(path)] |= (ours & rooms) - {room_of(path)}
    return found


def circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Modules that import one another, directly or through others: the groups of more than one, in order."""
    reached = {name: _reached(imports, name) for name in imports}
    groups = {tuple(sorted(other for other in imports if other in reached[name] and name in reached[other]))
              for name in imports}  # fmt: skip
    return [list(group) for group in sorted(groups) if len(group) > 1]


def _reached(imports: Mapping[str, set[str]], start: str) -> set[str]:
    found, waiting = set(), [start]
    while waiting:
        for name in imports.get(waiting.pop(), ()):
            if name not in found:
                found.add(name)
                waiting.append(name)
    return found
