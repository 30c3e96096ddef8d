"""Deep Optimizer States for Megatron-LM: the Adam states of the distributed optimizer, kept in host memory.

Importing this package needs neither a GPU nor apex, transformer-engine or Megatron: `install` is the only
public name here, and it imports Megatron when it is called.
"""

__version__ = "0.1.0"

__all__ = ["__version__", "install"]


def install() -> None:
    """Hook deep optimizer states into the installed Megatron, without patching a file (see `install.py`)."""
    from megatron_dos.install import install as hook_into_megatron

    hook_into_megatron()
