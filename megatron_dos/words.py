# SPDX-License-Identifier: Apache-2.0
"""How messages write counts and amounts: memory in GiB of 2^30 bytes, everywhere; only rates are in decimal GB/s."""

from __future__ import annotations

__all__ = ["gib", "plural"]


def plural(count: int, what: str) -> str:
    """'1 GPU', '8 GPUs', '2,000 subgroups'."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def gib(nbytes: float, digits: int = 1) -> str:
    """Bytes as GiB: '12.3 GiB'."""
    return f"{nbytes / 2**30:,.{digits}f} GiB"
