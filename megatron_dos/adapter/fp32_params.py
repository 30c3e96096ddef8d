# SPDX-License-Identifier: Apache-2.0
"""FP32 params of a model, which for Megatron are their own master params."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_dos.update.engine import UpdateEngine

__all__ = ["Fp32Params"]


class Fp32Params:
    """Keeps FP32 params and their master params the same. From one step to the next the update itself does.

    Args:
        engine: has the master params.
        shards: flat views of the params, in the order of the engine; those of other dtypes are left alone.
    """

    def __init__(self, engine: UpdateEngine, shards: Sequence[torch.Tensor]) -> None:
        self._engine = engine
        self._shards = {owner: shard for owner, shard in enumerate(shards) if shard.dtype == torch.float32}
        self._were_set = True

    def adopt(self) -> None:
        """Before the first step after construction or a load: the master params are what the params are.

        Megatron does not call `reload_model_params` after it has loaded FP32 weights without optimizer states.
        """
        if self._were_set:
            for owner, shard in self._shards.items():
                self._engine.write_owner_states(owner, {"master": shard.detach()})
        self._were_set = False

    def follow(self, owner: int) -> None:
        """The master params of a shard were loaded: so are the params, for Megatron."""
        if owner in self._shards:
            self._shards[owner].detach().copy_(self._engine.owner_states(owner)["master"])
            self._were_set = True
