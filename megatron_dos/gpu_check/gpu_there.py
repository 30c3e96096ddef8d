# SPDX-License-Identifier: Apache-2.0
"""Whether there is a GPU to check, found out in seconds: needs torch alone, and says why there is none."""

from __future__ import annotations

import shutil
import subprocess
import sys

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
        return f"torch {torch.__version__} sees no CUDA GPU; nvidia-smi: {nvidia_smi('name') or 'no answer'}"
    return ""


def nvidia_smi(query: str) -> str:
    """One answer of nvidia-smi about the first GPU; empty where there is none."""
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    answer = done.stdout.strip().splitlines()
    return answer[0].strip() if done.returncode == 0 and answer else ""

