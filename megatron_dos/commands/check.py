# SPDX-License-Identifier: Apache-2.0
"""`megatron-dos check`: checks and measures megatron-dos on this machine's GPU."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_dos.gpu_check import runner

__all__ = ["add", "run"]


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "check",
        help="check and measure megatron-dos on this machine's GPU",
        description=runner.DESCRIPTION,
        epilog=runner.EPILOG,
    )
    runner.add_arguments(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    return runner.run(options, "megatron-dos")
