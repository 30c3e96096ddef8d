# SPDX-License-Identifier: Apache-2.0
"""Whether there is a GPU to check, found out in seconds: needs torch alone, and says why there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

__all__ = ["nvidia_smi", "why_not"]


def why_not() -> str:
    """Why torch sees no GPU here, on one line; empty where it sees one."""
    try:
        import torch
    except Exception as error:  # a broken installation raises whatever it likes
        said = " ".join(str(error).split())
        return f"torch cannot be imported by {sys.executable} ({said}); PYTHON=... names another interpreter"
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is not built for CUDA: install a build that is, from pytorch.org"
    if not torch.cuda.is_available():
        answer = nvidia_smi(["name"]).get("name", "no answer")
        return f"torch {torch.__version__} sees no CUDA GPU; nvidia-smi: {answer}"
    return ""


def nvidia_smi(queries: Sequence[str], gpu: str = "") -> dict[str, str]:
    """The answers of one call of nvidia-smi about one GPU; empty where there is none.

    Args:
        queries: what to ask for.
        gpu: its PCI address; the first GPU that CUDA_VISIBLE_DEVICES names by default.
    """
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", "-i", gpu or _first_visible(), f"--query-gpu={','.join(queries)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    lines = done.stdout.strip().splitlines()
    answers = [answer.strip() for answer in lines[0].split(",")] if lines else []
    if done.returncode != 0 or len(answers) != len(queries):
        return {}
    return {query: answer for query, answer in zip(queries, answers, strict=True) if answer}


def _first_visible() -> str:
    """The index or UUID of the GPU that CUDA takes first, as nvidia-smi takes them; 0 where none is named."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    return first if first.isdigit() or first.startswith("GPU-") else "0"
