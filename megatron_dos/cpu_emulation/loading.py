# SPDX-License-Identifier: Apache-2.0
"""Tensors that come from elsewhere: from a DataLoader, from another process, from a file."""

from __future__ import annotations

import functools
from typing import Any

import torch

from megatron_dos.cpu_emulation.host_tensors import MARK, HostTensor, as_host, host_mark, map_tensors, no_dispatch
from megatron_dos.cpu_emulation.random import host_generator


def replace_data_loading() -> None:
    """DataLoader and torch.load: their tensors are host tensors; nothing is page-locked."""
    from multiprocessing.reduction import ForkingPickler

    from torch.multiprocessing import reductions
    from torch.utils.data import DataLoader
    from torch.utils.data import dataloader as loader_module

    make_loader = DataLoader.__init__

    @functools.wraps(make_loader)
    def loader(self: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
        make_loader(self, *args, **kwargs)
        self.pin_memory = False
        if self.generator is None:  # [Note: two generators]
            self.generator = host_generator
            if getattr(self.sampler, "generator", self) is None:
                self.sampler.generator = host_generator

    DataLoader.__init__ = loader

    next_batch = loader_module._BaseDataLoaderIter.__next__

    def host_batch(self: Any) -> Any:  # worker processes send plain tensors
        return map_tensors(next_batch(self), lambda tensor: tensor if host_mark(tensor) else as_host(tensor))

    loader_module._BaseDataLoaderIter.__next__ = host_batch

    def send_plain(tensor: HostTensor) -> Any:
        with no_dispatch():
            return reductions.reduce_tensor(tensor.as_subclass(torch.Tensor))

    ForkingPickler.register(HostTensor, send_plain)

    def restore(storage: Any, location: str) -> Any:
        if location != "cpu" and not location.startswith("cuda"):
            return None
        if location == "cpu":
            setattr(getattr(storage, "_untyped_storage", storage), MARK, "pageable")
        return storage

    # Before torch's own entries (10 and up). Saved tensors carry 'cpu' as their place, whatever their kind.
    torch.serialization.register_package(5, lambda storage: None, restore)
