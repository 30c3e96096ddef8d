# SPDX-License-Identifier: Apache-2.0
"""Random numbers of the host and of the device.

[Note: two generators] CPU operations draw from torch's default generator, and here they stand for device operations, so
that one is the device's. Host-side draws, which must not disturb it, get a second generator: torch.get_rng_state,
torch.manual_seed, DataLoader, and draws into host tensors (parameters are often initialised on the host) use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_dos.cpu_emulation.devices import device_count, device_index
from megatron_dos.cpu_emulation.host_tensors import as_host, device_kind, no_dispatch

_REAL_GENERATOR = torch.Generator
host_generator = torch.Generator()


class _GeneratorType(type):
    """torch.Generator that takes a GPU device too; isinstance() still knows torch's own."""

    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        return _REAL_GENERATOR("cpu" if device_kind(device) else device)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _REAL_GENERATOR)

    def __getattr__(cls, name: str) -> Any:  # torch.Generator.get_state and so on
        return getattr(_REAL_GENERATOR, name)


class Generator(metaclass=_GeneratorType):
    pass


class DefaultGenerators(Sequence[torch.Generator]):
    """torch.cuda.default_generators: one generator for each device, all the same one here."""

    def __getitem__(self, device: Any) -> torch.Generator:  # type: ignore[override]  # no slices
        device_index(device)
        return torch.default_generator

    def __len__(self) -> int:
        return device_count()


def get_device_rng_state(device: Any = "cuda") -> torch.Tensor:
    return as_host(torch.default_generator.get_state())


def set_device_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    with no_dispatch():
        torch.default_generator.set_state(new_state.as_subclass(torch.Tensor))


def seed_device() -> None:
    torch.default_generator.seed()


def manual_seed_device(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def replace_host_random() -> None:
    """torch.manual_seed and its like: they mean the host's generator, or both."""
    seed_all, manual_seed_all = torch.seed, torch.manual_seed

    def get_rng_state() -> torch.Tensor:
        return as_host(host_generator.get_state())

    def set_rng_state(new_state: torch.Tensor) -> None:
        with no_dispatch():
            host_generator.set_state(new_state.as_subclass(torch.Tensor))

    def manual_seed(seed: int) -> torch.Generator:
        host_generator.manual_seed(int(seed))
        return manual_seed_all(seed)

    def seed() -> int:
        value = seed_all()
        host_generator.manual_seed(value)
        return value

    for function in (get_rng_state, set_rng_state, manual_seed, seed):
        setattr(torch, function.__name__, function)
        setattr(torch.random, function.__name__, function)
