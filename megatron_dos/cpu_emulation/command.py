# SPDX-License-Identifier: Apache-2.0
"""The command line: run a Megatron script under the stand-in."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence

from megatron_dos.cpu_emulation.activation import activate
from megatron_dos.cpu_emulation.megatron import adapt_megatron

# What Megatron must be told on a CPU, and what satisfies it: NCCL, Transformer Engine and fused kernels need a GPU.
MEGATRON_ARGUMENTS: dict[str, str | None] = {
    "--distributed-backend": "gloo",
    "--transformer-impl": "local",
    "--no-persist-layer-norm": None,
    "--no-gradient-accumulation-fusion": None,
    "--no-masked-softmax-fusion": None,
    "--no-bias-gelu-fusion": None,
    "--no-bias-swiglu-fusion": None,
    "--no-bias-dropout-fusion": None,
    "--no-rope-fusion": None,
}

_DEEP = "--use-deep-optimizer-states"


def missing_arguments(given: Sequence[str]) -> list[str]:
    """The arguments of MEGATRON_ARGUMENTS that are not among `given`, as a list to append."""
    names = {argument.split("=", 1)[0] for argument in given}
    added: list[str] = []
    for name, value in MEGATRON_ARGUMENTS.items():
        if name not in names:
            added += [name] if value is None else [name, value]
    return added


def _be_the_only_rank() -> None:
    """Set what a launcher would have set, for a process that was started without one."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        return
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    # The rank finds itself: any free port will do, and no host name needs to resolve.
    alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: run a Megatron script under the stand-in."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_dos.cpu_emulation",
        description="Run a Megatron training script on a machine without a GPU: gloo in the place of NCCL, the CPU in "
        "the place of the GPU. For demos and tests, not for training.",
    )
    parser.add_argument("--force", action="store_true", help="go on although a GPU is present")
    parser.add_argument(
        "--as-given", action="store_true", help="do not add the arguments that Megatron needs on a CPU where absent"
    )
    parser.add_argument("script", help="the Megatron script, such as pretrain_gpt.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(argv)
    if not os.path.isfile(options.script):
        parser.error(f"no such script: {options.script}")

    if _DEEP in options.arguments and importlib.util.find_spec("megatron_dos._cpp_adam") is None:
        folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        sys.exit(
            f"cpu_emulation: {_DEEP} needs the C++ module, which is not built in {folder}. Start from a folder outside "
            "the checkout, where Python finds the installed package, or build the checkout: make setup"
        )
    _be_the_only_rank()
    try:
        activate(force=options.force)
    except RuntimeError as error:
        sys.exit(f"cpu_emulation: {error}")
    # What `python SCRIPT` would have: the script's folder, not the current one, holds its imports.
    sys.path[0] = os.path.dirname(os.path.abspath(options.script))
    arguments = list(options.arguments)
    if not options.as_given:
        added = missing_arguments(arguments)
        if added and int(os.environ.get("RANK", "0")) == 0:
            print(f"cpu_emulation: added the arguments {' '.join(added)}", flush=True)
        arguments += added
    try:
        importlib.import_module("megatron.core")
    except ImportError as error:
        sys.exit(f"cpu_emulation: {options.script} needs megatron.core, which cannot be imported: {error}")
    adapt_megatron()
    sys.argv = [options.script, *arguments]
    runpy.run_path(options.script, run_name="__main__")
