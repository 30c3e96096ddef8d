# SPDX-License-Identifier: Apache-2.0
"""Run an unmodified Megatron script on a machine without a GPU.

    python -m megatron_dos.cpu_emulation SCRIPT ARGS...
    torchrun --nproc-per-node 2 -m megatron_dos.cpu_emulation SCRIPT ARGS...

The first form trains with one rank, and needs no launcher's environment variables.

Importing this package changes nothing. `activate()` (which the command line calls first) puts a CPU stand-in in the
place of `torch.cuda`, so that code written for a GPU runs on the CPU, with gloo in the place of NCCL. It is for the
demo and the tests alone: nothing else in megatron_dos imports it, and it refuses to start where a GPU is present,
unless `--force` or MEGATRON_DOS_FORCE_CPU_EMULATION=1 says otherwise.

What is not covered here fails with an error that names it. Nothing pretends to work.

The parts of the stand-in are base, host_tensors, devices, streams, random, tensors, loading, collectives and cuda; each
imports only parts that stand before it in this list. `activation` puts them in place, `megatron` changes Megatron,
`command` is the command line.
"""

from megatron_dos.cpu_emulation.activation import FORCE_VARIABLE, activate
from megatron_dos.cpu_emulation.base import NotCoveredError, is_active
from megatron_dos.cpu_emulation.command import MEGATRON_ARGUMENTS, main, missing_arguments
from megatron_dos.cpu_emulation.host_tensors import HostTensor
from megatron_dos.cpu_emulation.megatron import adapt_megatron

__all__ = [
    "FORCE_VARIABLE",
    "MEGATRON_ARGUMENTS",
    "HostTensor",
    "NotCoveredError",
    "activate",
    "adapt_megatron",
    "is_active",
    "main",
    "missing_arguments",
]
