# SPDX-License-Identifier: Apache-2.0
"""AdamW exactly as docs/kernels.md specifies it, in the seat of Apex's FusedAdam.

Megatron's stock distributed optimizer around this one is what deep optimizer states must equal to the bit. The
interface is FusedAdam's, not torch's: one integer `step` per param group, which Megatron can save and resume.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from megatron_dos.kernels import AdamScalars, reference


class NumpyAdamW(torch.optim.AdamW):
    """AdamW whose update is `reference.adamw`, on FP32 params and grads.

    Args:
        params: param groups; `lr`, `betas`, `eps` and `weight_decay` are read from them at each step.
        adam_w_mode: decoupled weight decay when true, an L2 term of the grad when false.
        capturable: must be false; there is no graph to capture on a CPU.
    """

    def __init__(self, params: Any, adam_w_mode: bool = True, capturable: bool = False, **defaults: Any) -> None:
        if capturable:
            raise ValueError("NumpyAdamW: --optimizer-cuda-graph needs a GPU")
        super().__init__(params, **defaults)
        self.adam_w_mode = adam_w_mode

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)  # torch's AdamW would look for a step of each param

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        assert closure is None, "Megatron computes the grads before the step"
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            scalars = AdamScalars.at_step(
                group["step"],
                lr=float(group["lr"]),
                betas=tuple(group["betas"]),
                eps=float(group["eps"]),
                weight_decay=float(group["weight_decay"]),
                decoupled=self.adam_w_mode,
            )
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, scalars)

    def _update(self, param: torch.Tensor, scalars: AdamScalars) -> None:
        state = self.state[param]
        for key in ("exp_avg", "exp_avg_sq"):
            if key not in state:
                state[key] = torch.zeros_like(param)
        tensors = (param, state["exp_avg"], state["exp_avg_sq"])
        arrays = [tensor.detach().cpu().numpy().reshape(-1) for tensor in tensors]
        grad = param.grad.detach().cpu().numpy().reshape(-1)
        assert all(array.dtype == np.float32 for array in (*arrays, grad)), "the stock optimizer works in FP32"
        reference.adamw(*arrays, grad, scalars)
        for tensor, array in zip(tensors, arrays, strict=True):
            tensor.copy_(torch.from_numpy(array).view(tensor.shape))


def use_numpy_adam() -> None:
    """Make Megatron of this process build NumpyAdamW where it would build Apex's FusedAdam."""
    import megatron.core.optimizer as optimizer
    from megatron.core.optimizer import distrib_optimizer

    optimizer.USING_PYTORCH_OPTIMIZER = False
    optimizer.Adam = NumpyAdamW
    distrib_optimizer.HAVE_APEX_OR_TE = True
    distrib_optimizer.USING_APEX_OPTIMIZER = True
