#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Write patches/NAME for one Megatron tree: the diff of its hooks and the manifest of its checksums.

    .venv/bin/python scripts/make_patch.py CHECKOUT NAME [--version X.Y.Z ...]

CHECKOUT is an unpatched tree and is only read. NAME is the folder under patches/. The tree's own version is listed
in the manifest; --version adds others whose three files are the same (the script cannot know: compare them first).
Run it again after a change of `DosOptions`, whose fields the patch carries.

The places are found in the syntax tree, by the names of functions and classes, so that a new Megatron version needs
a new run rather than a new script. A version without one of these places stops the script with its name.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import hashlib
import io
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path

from megatron_dos.arguments import field_docs
from megatron_dos.options.options import DosOptions
from megatron_dos.patching.diffs import parse_diff
from megatron_dos.patching.on_disk import FORMAT, read_version

REPOSITORY = Path(__file__).resolve().parent.parent
ARGUMENTS = "megatron/training/arguments.py"
CONFIG = "megatron/core/optimizer/optimizer_config.py"
OPTIMIZER = "megatron/core/optimizer/__init__.py"
WIDTH = 100  # Megatron's own line length

# A diff with one line of context: enough for `git apply` and for the eye, and as little of Megatron as can be.
CONTEXT = 1


def function(tree: ast.Module, name: str) -> ast.FunctionDef:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise SystemExit(f"make_patch: no function {name}() in this tree")


def split(text: str) -> list[str]:
    """Lines with their ends. Not str.splitlines, which also breaks at form feeds and the like."""
    return list(io.StringIO(text, newline="\n"))


def start_of_body(node: ast.FunctionDef, lines: list[str]) -> int:
    """Index of the line where the body of `node` starts: its first statement, or the comment above that."""
    has_docstring = isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
    index = node.body[int(has_docstring)].lineno - 1
    while lines[index - 1].lstrip().startswith("#"):
        index -= 1
    return index


def hook_arguments(lines: list[str]) -> None:
    """The argument group and the check of its combinations."""
    tree = ast.parse("".join(lines))
    add, check = function(tree, "add_megatron_arguments"), function(tree, "validate_args")
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    edits = {
        start_of_body(check, lines): ["    validate_dos_args(args)\n", "\n"],
        add.body[-2].end_lineno: ["    parser = add_dos_arguments(parser)\n"],
        imports[-1].end_lineno: [
            "from megatron_dos.arguments import add_arguments as add_dos_arguments, "
            "validate_args as validate_dos_args\n"
        ],
    }
    # From the bottom up, so that the indices above stay true.
    for index in sorted(edits, reverse=True):
        lines[index:index] = edits[index]


def config_fields() -> Iterator[str]:
    """The fields of DosOptions as OptimizerConfig spells its own."""
    kinds, docs = DosOptions.types(), field_docs()
    for option in dataclasses.fields(DosOptions):
        yield f"    {option.name}: {kinds[option.name].__name__} = {option.default!r}\n"
        doc = textwrap.wrap(f'"""{docs[option.name]}', width=WIDTH - 7, break_on_hyphens=False)
        if len(doc) == 1:
            yield f'    {doc[0]}"""\n'
        else:
            yield f"    {doc[0]}\n"
            yield from (f"       {line}\n" for line in doc[1:])
            yield '    """\n'
        yield "\n"


def hook_config(lines: list[str]) -> None:
    """The fields of OptimizerConfig, behind its own, so that positional arguments keep their meaning."""
    tree = ast.parse("".join(lines))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "OptimizerConfig"]
    if not classes:
        raise SystemExit("make_patch: no class OptimizerConfig in this tree")
    methods = [node for node in classes[0].body if isinstance(node, ast.FunctionDef)]
    lines[methods[0].lineno - 1 : methods[0].lineno - 1] = config_fields()


def hook_optimizer(lines: list[str]) -> None:
    """The choice of the optimizer's class, and the check for configs that no argument parser has seen."""
    tree = ast.parse("".join(lines))
    build = function(tree, "_get_megatron_optimizer_based_on_param_groups")
    calls = [
        node
        for node in ast.walk(build)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "DistributedOptimizer"
    ]
    if len(calls) != 1:
        raise SystemExit(f"make_patch: {len(calls)} places build a DistributedOptimizer, expected one")
    index = calls[0].lineno - 1
    indent = " " * calls[0].col_offset
    lines[index] = lines[index].replace("DistributedOptimizer(", "optimizer_class(")
    lines[index:index] = [
        f"{indent}optimizer_class = DistributedOptimizer\n",
        f"{indent}if config.use_deep_optimizer_states:\n",
        f"{indent}    from megatron_dos.optimizer import DeepStatesOptimizer as optimizer_class\n",
    ]
    tree = ast.parse("".join(lines))
    start = start_of_body(function(tree, "get_megatron_optimizer"), lines)
    lines[start:start] = [
        "    if config.use_deep_optimizer_states:\n",
        "        from megatron_dos.arguments import validate_optimizer\n",
        "\n",
        "        validate_optimizer(config, model_chunks)\n",
        "\n",
    ]


HOOKS = {ARGUMENTS: hook_arguments, OPTIMIZER: hook_optimizer, CONFIG: hook_config}


def make(checkout: Path, versions: list[str]) -> tuple[str, str]:
    """The text of the diff and of the manifest for the unpatched tree `checkout`."""
    diff: list[str] = []
    files = {}
    for path in sorted(HOOKS):
        before = (checkout / path).read_bytes().decode()
        if "megatron_dos" in before:
            raise SystemExit(f"make_patch: {path} is patched already; give an unpatched tree")
        lines = split(before)
        HOOKS[path](lines)
        diff += difflib.unified_diff(split(before), lines, f"a/{path}", f"b/{path}", n=CONTEXT)
        files[path] = {
            "before": hashlib.sha256(before.encode()).hexdigest(),
            "after": hashlib.sha256("".join(lines).encode()).hexdigest(),
        }
    manifest = {
        "format": FORMAT,
        "versions": sorted({*versions, read_version(checkout)}),
        "diff": "hooks.diff",
        "files": files,
    }
    return "".join(diff), json.dumps(manifest, indent=2) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT", help="unpatched Megatron tree (only read)")
    parser.add_argument("name", metavar="NAME", help="folder under patches/, e.g. core_v0.19")
    parser.add_argument("--version", action="append", default=[], help="another version with the same files")
    options = parser.parse_args()
    diff, manifest = make(options.checkout, options.version)
    parse_diff(diff.encode())  # what the program could not read must not be stored
    folder = REPOSITORY / "patches" / options.name
    folder.mkdir(exist_ok=True)
    (folder / "hooks.diff").write_text(diff, encoding="utf-8")
    (folder / "manifest.json").write_text(manifest, encoding="utf-8")
    added = sum(line.startswith("+") and not line.startswith("+++") for line in diff.splitlines())
    print(f"wrote {folder}: {len(HOOKS)} files, {added} lines added")


if __name__ == "__main__":
    main()
