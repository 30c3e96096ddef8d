# SPDX-License-Identifier: Apache-2.0
"""Environment variables of the check's workers: each stage has what it measures, whoever starts the check.

Needs the standard library alone.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["INHERITED", "LAUNCHER", "REMOVED", "named", "of_worker"]

LAUNCHER = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)
"""What launchers say about ranks. With them, the one process of the check would take a rank's share of the CPUs."""

REMOVED = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", *LAUNCHER)
"""A worker has them only from its stage. The first two change the order and the time of what streams do."""

INHERITED = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "OMP_NUM_THREADS"),
    *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "MEGATRON_DOS_ISA"),
)
"""What else a reader of the figures should know; workers have them as they were given."""


def of_worker(given: Mapping[str, str], stage: Mapping[str, str]) -> dict[str, str]:
    """The environment of a worker: what was given, without REMOVED, and with the variables of its stages."""
    return {**{name: value for name, value in given.items() if name not in REMOVED}, **stage}


def named(environment: Mapping[str, str]) -> dict[str, str]:
    """Those variables for the result that are set. No others, since values may be secrets."""
    return {name: environment[name] for name in (*REMOVED, *INHERITED) if name in environment}
