# SPDX-License-Identifier: Apache-2.0
"""Megatron trees and Megatron processes for the tests of the hooks."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from repository import ROOT

TARGETS = (
    "megatron/core/optimizer/__init__.py",
    "megatron/core/optimizer/optimizer_config.py",
    "megatron/training/arguments.py",
)
PACKAGE_INFO = "megatron/core/package_info.py"


def installed_megatron() -> Path:
    """The folder that holds the installed package's `megatron` folder. Nothing of it is imported."""
    places = [Path(place) for place in importlib.util.find_spec("megatron").submodule_search_locations]
    return next(place for place in places if (place / "core" / "package_info.py").is_file()).parent


def small_tree(root: Path) -> Path:
    """The files that the patch command looks at, copied from the installed package to `root`."""
    for name in (*TARGETS, PACKAGE_INFO):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(installed_megatron() / name, root / name)
    return root


def importable_tree(root: Path) -> Path:
    """The installed megatron.core and megatron.training, copied to `root`.

    With their compiled files, which stay valid as the copies keep their times: imports take half as long.
    """
    for package in ("core", "training"):
        shutil.copytree(installed_megatron() / "megatron" / package, root / "megatron" / package)
    return root


def trainable_tree(root: Path) -> Path:
    """A tree with a pretrain_gpt.py at `root`: a copy of the checkout that MEGATRON_LM names, without what was compiled
    there, or the installed package with scripts/pretrain_gpt.py."""
    checkout = os.environ.get("MEGATRON_LM")
    if checkout:
        skipped = shutil.ignore_patterns(".git", "__pycache__", "*.so", "build")
        shutil.copytree(Path(checkout).expanduser(), root, ignore=skipped)
    else:
        importable_tree(root)
        shutil.copyfile(ROOT / "scripts" / "pretrain_gpt.py", root / "pretrain_gpt.py")
    return root


def snapshot(root: Path) -> dict[str, tuple[int, bytes]]:
    """Mode and content of every file below `root`, by relative path."""
    return {
        str(path.relative_to(root)): (path.stat().st_mode, path.read_bytes())
        for path in root.rglob("*")
        if path.is_file()
    }


def run_python(code: str, *arguments: str, path: tuple[Path, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter that imports from `path` first and from this repository next."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT))),
            "CUDA_VISIBLE_DEVICES": "",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def results(code: str, *arguments: str, path: tuple[Path, ...] = ()) -> Any:
    """What `code` printed as its last line, as JSON. Megatron prints, too, before that."""
    finished = run_python(code, *arguments, path=path)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])
