# SPDX-License-Identifier: Apache-2.0
"""Where this checkout and its folders are."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
