# SPDX-License-Identifier: Apache-2.0
"""Real Megatron on the software GPU, two ranks over the stand-in for NCCL: the bits of its own optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import LAYOUTS, PRECISIONS, TINY, differences
from repository import ROOT

import software_gpu
from software_gpu.trainings import train

pytestmark = [
    pytest.mark.skipif(not software_gpu.is_possible(), reason="torch is no CUDA build; the sim device covers programs"),
    pytest.mark.slow,
]
ITERATIONS = 4


def test_both_overlaps_and_early_grads_leave_the_bits_of_the_stock_optimizer(tmp_path):
    libraries: Path = software_gpu.build(ROOT / ".cache" / "software-gpu")
    ranks, layout = LAYOUTS["overlap-buckets"]
    arguments = [*TINY, *layout, *PRECISIONS["bf16"]]
    ours = [*arguments, "--dos-subgroup-size", "4321", "--dos-gpu-share", "0.5"]
    reference = train(libraries, tmp_path / "stock", arguments, ranks, "numpy", ITERATIONS, SOFTWARE_GPU_DELAY_US="0")
    run = train(libraries, tmp_path / "ours", ours, ranks, "dos", ITERATIONS, SOFTWARE_GPU_DELAY_US="50")
    assert differences(run, reference) == []
    assert min(run.losses) < run.losses[0]
    for rank in run.of_rank:
        counts = rank.inspected["end"][0]
        assert counts.pop("grads sent early") > 0
        assert 0 < counts.pop("largest share of the CPU") < 1
        assert counts == {"steps": ITERATIONS, "backend": "nccl", "device": True}
