# SPDX-License-Identifier: Apache-2.0
"""The command `megatron-dos`: one subcommand a task, each in a function of its own.

A subcommand prints its results to stdout and returns its exit status. Errors listed in `_USER_ERRORS` become one
line on stderr and exit status 2, without a traceback.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from typing import NoReturn

from megatron_dos import __version__
from megatron_dos.commands import CommandError, calibrate, check, compare_loss, doctor, plan, simulate
from megatron_dos.patching import on_disk as patching

__all__ = ["main"]

_USER_ERRORS = (patching.PatchError, CommandError)

_PATCH_HELP = """\
Add deep optimizer states to a Megatron-LM checkout: an argument group, a check of the arguments, fields of
OptimizerConfig, and the choice of the optimizer's class. Without --use-deep-optimizer-states the patched tree behaves
as before.

Every file is first compared with the known version; then either all of them are changed or none is. Patching twice is
harmless. If a killed run left a checkout patched in part, patching finishes it.
Known Megatron core versions: {versions}.

Training with a patched checkout imports megatron_dos: keep this package installed, or unpatch first."""

_UNPATCH_HELP = """\
Take the patch back and restore the former bytes of each file. This is harmless for an unpatched checkout, and repairs
one that is patched in part."""


def _patch(options: argparse.Namespace) -> int:
    result = patching.apply(options.path)
    if not result.changes:
        print(f"already patched: {result.root} (Megatron core {result.version})")
        return 0
    _report("patched", result)
    if result.mended:
        print("the other files were patched already: the tree was patched in part")
    print(f"train with: --use-distributed-optimizer --use-deep-optimizer-states\nundo with:  {_undo(result)}")
    return 0


def _unpatch(options: argparse.Namespace) -> int:
    result = patching.revert(options.path)
    if not result.changes:
        print(f"not patched: {result.root} (Megatron core {result.version})")
        return 0
    _report("unpatched", result)
    return 0


def _report(verb: str, result: patching.Result) -> None:
    print(f"{verb} {result.root} (Megatron core {result.version}, patch {result.patch.name})")
    width = max(len(change.path) for change in result.changes)
    for change in result.changes:
        print(f"  {change.path:{width}}  +{change.added} -{change.removed}")


def _undo(result: patching.Result) -> str:
    return f"megatron-dos unpatch {shlex.quote(str(result.root))}"


class _Parser(argparse.ArgumentParser):
    """Reports wrong usage in one line, as other errors; subcommands get parsers of this class, too."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="megatron-dos",
        description="Deep optimizer states for Megatron-LM. Each command has its own --help.",
    )
    parser.add_argument("--version", action="version", version=f"megatron-dos {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, run, summary, description in (
        ("patch", _patch, "add deep optimizer states to a Megatron-LM checkout", _PATCH_HELP),
        ("unpatch", _unpatch, "restore a patched checkout, byte for byte", _UNPATCH_HELP),
    ):
        command = commands.add_parser(
            name,
            help=summary,
            description=description.format(versions=patching.known_versions()),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("path", metavar="PATH", help="the checkout: the folder that holds megatron/")
        command.set_defaults(run=run)
    for module in (doctor, check, calibrate, plan, simulate, compare_loss):
        module.add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return the exit status."""
    try:
        parser = _parser()
        options, more = parser.parse_known_args(argv)
        options.more = more
        if options.more and not getattr(options, "takes_more", False):
            parser.error(f"unrecognized arguments: {' '.join(options.more)}")
        status = options.run(options)
        if sys.stdout is not None:  # which it is where it was closed before the start
            sys.stdout.flush()
        return status
    except _USER_ERRORS as error:
        print(f"megatron-dos: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("megatron-dos: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output has enough, and the work is done.
        _drop_output()
        return 0
    except OSError as error:
        # Commands name the option where a file cannot be written; what is left is the output itself.
        print(f"megatron-dos: cannot write the output: {error}", file=sys.stderr)
        _drop_output()
        return 2


def _drop_output() -> None:
    """Python must not fail in flushing the rest at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
