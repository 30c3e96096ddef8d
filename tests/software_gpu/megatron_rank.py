# SPDX-License-Identifier: Apache-2.0
"""One rank of real Megatron on the software GPU: `python megatron_rank.py CASE.json`, with a launcher's environment.

A case is one of tests/e2e/harness.py with the folder of the libraries in it. The results are those of rank_main.py.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import traceback
from pathlib import Path


def main(case: dict) -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_RANK"] = "0"  # every rank has a GPU of its own, and it is the first
    import software_gpu

    software_gpu.activate(Path(case["libraries"]))
    import torch

    torch.compile = lambda model=None, **options: model if model is not None else lambda function: function
    torch.set_num_threads(1)
    from software_gpu import nccl

    nccl.install()
    import pretrain_gpt  # noqa: F401  rank_main takes it from sys.modules
    from megatron.core.datasets import utils

    from software_gpu.kernels import replace_triton

    utils.compile_helpers = lambda: None  # pip's package has them compiled
    replace_triton()
    if case["mutation"]:
        from software_gpu import mutations

        try:
            mutations.make(case["mutation"])
        except BaseException:
            traceback.print_exc()
            os._exit(mutations.NOT_PLANTED)
    import rank_main

    rank_main.run(case, rank)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
