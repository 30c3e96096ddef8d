# SPDX-License-Identifier: Apache-2.0
"""Deep Optimizer States for Megatron-LM: the Adam states of the distributed optimizer, kept in host memory.

Importing this package needs neither a GPU nor apex, transformer-engine, torch or Megatron. Public here are `install`,
which hooks into Megatron without patching a file and imports Megatron when it is called, and `uninstall`, its undoing.
"""

from megatron_dos.patching.in_memory import install, uninstall
from megatron_dos.version import __version__

__all__ = ["__version__", "install", "uninstall"]
