# SPDX-License-Identifier: Apache-2.0
"""Launch files: the flags of Megatron that a shell script or a YAML file holds."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from megatron_dos.commands import CommandError

__all__ = ["flags_of_file"]


def flags_of_file(path: Path) -> list[str]:
    """The flags in a file, with their values, in order; words that belong to no flag may be among them.

    Raises:
        CommandError: the file cannot be read or taken apart.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"--model {path} cannot be read: {error}") from error
    if path.suffix.lower() in (".yaml", ".yml"):
        return _flags_of_yaml(path, text)
    try:
        return _flags_of_shell(text)
    except ValueError as error:  # an open quote
        raise CommandError(f"--model {path} cannot be taken apart: {error}") from error


_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))|\$\{\w+:?-([^${}]*)\}")


def _flags_of_shell(text: str) -> list[str]:
    """The words of a shell script, variables that it sets to plain values put in."""
    text = text.replace("\r\n", "\n").replace("\\\n", " ")
    lexer = shlex.shlex(text, posix=True, punctuation_chars="();&|<>")
    lexer.whitespace_split = True
    variables: dict[str, str] = {}
    words: list[str] = []
    for word in lexer:
        word = _with_variables(word, variables)
        assigned = _ASSIGNMENT.fullmatch(word)
        if assigned is None:
            words.append(word)
            continue
        name, value = assigned.groups()
        variables[name] = value
        if "--" in value:  # flags gathered in a variable
            words += shlex.split(value)
    return words


def _with_variables(word: str, variables: dict[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if name is None:  # ${NAME:-default}
            return found[3]
        return variables.get(name, found[0])

    return _VARIABLE.sub(value, word)


# Keys of configs that are flags by another name: key -> (value, flag).
_CONFIG_KEYS: dict[str, tuple[Any, str]] = {
    "gated_linear_unit": (True, "--swiglu"),
    "add_bias_linear": (False, "--disable-bias-linear"),
    "share_embeddings_and_output_weights": (False, "--untie-embeddings-and-output-weights"),
}


def _flags_of_yaml(path: Path, text: str) -> list[str]:
    try:
        import yaml
    except ImportError:
        raise CommandError(f"--model {path}: reading YAML needs PyYAML: pip install pyyaml") from None
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise CommandError(f"--model {path} is not YAML: {' '.join(str(error).split())}") from error
    except RecursionError:
        raise CommandError(f"--model {path} is nested too deeply") from None
    if not isinstance(content, dict):
        raise CommandError(f"--model {path} holds no mapping of flags to values")
    flags: list[str] = []
    try:
        _collect(content, flags)
    except RecursionError:
        raise CommandError(f"--model {path} holds a mapping that holds itself") from None
    return flags


def _collect(content: dict[Any, Any], flags: list[str]) -> None:
    """Flags of a mapping and of those within it: keys with or without leading dashes, true for a flag without value."""
    for key, value in content.items():
        if isinstance(value, dict):
            _collect(value, flags)
            continue
        name = str(key).lstrip("-").replace("-", "_")
        name = {"num_moe_experts": "num_experts"}.get(name, name)
        if name in _CONFIG_KEYS:
            expected, flag = _CONFIG_KEYS[name]
            flags += [flag] if value is expected else []
        elif value is True:
            flags.append("--" + name.replace("_", "-"))
        elif value is not None and value is not False:
            flags += ["--" + name.replace("_", "-"), *map(str, value if isinstance(value, list) else [value])]
