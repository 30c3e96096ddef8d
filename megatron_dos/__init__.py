# SPDX-License-Identifier: Apache-2.0
"""Deep Optimizer States for Megatron-LM: the Adam states of the distributed optimizer, kept in host memory.

Importing this package needs neither a GPU nor apex, transformer-engine, torch or Megatron: `install`, which hooks
into Megatron without patching a file, is the only public name here, and it imports Megatron when it is called.
"""

# The function has the name of its module. Bound here, it stays what `megatron_dos.install` means; were the module
# imported later, Python would put the module in its place.
from megatron_dos.patching.in_memory import install
from megatron_dos.version import __version__

__all__ = ["__version__", "install"]
