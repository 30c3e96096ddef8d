# SPDX-License-Identifier: Apache-2.0
"""Step times of a small model, to compare a process with CUDA_DEVICE_MAX_CONNECTIONS=1 to one without.

Megatron asks for 1 with tensor or context parallelism on most GPUs. All streams of the process then share one queue to
the GPU, where an operation that waits may hold up those of other streams behind it.
"""

from __future__ import annotations

import os
from fractions import Fraction
from functools import partial

from megatron_dos.gpu_check.context import Context, median
from megatron_dos.gpu_check.step_time import Bench, gpt_layer

__all__ = ["run"]

SHARES = (Fraction(0), Fraction(1, 2), Fraction(1))
"""GPU's shares."""
ROUNDS = 5


def run(context: Context) -> None:
    sizes = context.sizes
    per_layer = sum(gpt_layer(sizes.hidden, sizes.ffn, sizes.kv_channels))
    bench = Bench(context, max(round(sizes.connection_parameters / per_layer), 1))
    seconds: dict[Fraction, list[float]] = {share: [] for share in SHARES}
    for number in range(ROUNDS + 1):
        if number > 1 and context.left() < 2:
            break
        for share, each in seconds.items():
            each.append(bench.seconds(partial(bench.update, share)))
            if number == 0:  # compiles and touches pages
                each.clear()
    context.value("CUDA_DEVICE_MAX_CONNECTIONS", os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))
    context.value("parameters", bench.numel)
    context.value(
        "median_seconds_of_gpu_share", {f"{float(share):.1f}": median(each) for share, each in seconds.items()}
    )
