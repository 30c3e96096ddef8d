# SPDX-License-Identifier: Apache-2.0
"""The version of this package, as `pip` and `megatron-dos --version` report it.

The build (setup.py) writes it to `_version.py`, so that no run has to ask git: `0.1.0` for the release, which is the
commit tagged `v0.1.0`, and `0.1.0.dev0+g<commit>` for any other commit, with `.dirty` where files were changed.
"""

from __future__ import annotations

__all__ = ["RELEASE", "__version__"]

RELEASE = "0.1.0"
"""The release that this tree is, or is going to be."""

__version__: str
try:
    from megatron_dos._version import version as __version__
except ModuleNotFoundError:  # a checkout in which nothing was built
    __version__ = f"{RELEASE}.dev0"
