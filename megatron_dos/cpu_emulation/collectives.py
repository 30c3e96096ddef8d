# SPDX-License-Identifier: Apache-2.0
"""Replacements for collectives that fail under gloo."""

from __future__ import annotations

from typing import Any

import torch


class _Works:
    """What waits for several collectives."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def replace_coalesced_gather() -> None:
    """All-gathers that Megatron coalesces are done one by one.

    gloo's coalesced all-gather frees memory twice, now and then, when it is under way beside an all-reduce of any
    group: the heap breaks, and malloc ends the process (seen with torch 2.14.1 in a program that does nothing else,
    within some hundred rounds; pytorch/pytorch issues 65231 and 65237 tell of crashes in torch's own test of it).
    """
    if not torch.distributed.is_available():
        return
    group_type = torch.distributed.ProcessGroup

    def one_by_one(group: Any, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any) -> _Works:
        pairs = zip(outputs, inputs, strict=True)
        return _Works([group._allgather_base(gathered, own, options) for gathered, own in pairs])

    for name in ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"):  # the second from torch 2.14 on
        if hasattr(group_type, name):
            setattr(group_type, name, one_by_one)
