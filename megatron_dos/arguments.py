# SPDX-License-Identifier: Apache-2.0
"""The options of deep optimizer states: their flags, their checks, and the combinations they refuse.

`DosOptions` is the one description of an option: the argparse group and the fields that OptimizerConfig gains
are generated from it. `REFUSALS` is the one list of combinations that cannot work, read by two readers:
`validate_args`, which Megatron calls with the raw command line, and `validate_config`, for programs that build
OptimizerConfig and DistributedDataParallelConfig themselves.

Nothing here imports Megatron, torch or the rest of this package but `refusal`: argument parsing needs none of them.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import itertools
import os
import textwrap
from collections.abc import Sequence
from typing import Any

from megatron_dos.options import refusals
from megatron_dos.options.options import (
    DosOptions,
    UnsupportedOptionError,
    flag_of,
    own_options,
)
from megatron_dos.refusal import end_in_one_message

__all__ = ["add_arguments", "allowed_cores", "check_args", "validate_args", "validate_config", "validate_optimizer"]


_FLAG = "--use-deep-optimizer-states"


@functools.cache
def field_docs() -> dict[str, str]:
    """The docstring under each field of DosOptions, on one line, by field name."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(DosOptions)))
    body = tree.body[0].body  # type: ignore[attr-defined]
    docs = {
        declared.target.id: " ".join(doc.value.value.split())
        for declared, doc in itertools.pairwise(body)
        if isinstance(declared, ast.AnnAssign)
        and isinstance(declared.target, ast.Name)
        and isinstance(doc, ast.Expr)
        and isinstance(doc.value, ast.Constant)
        and isinstance(doc.value.value, str)
    }
    undocumented = [f.name for f in dataclasses.fields(DosOptions) if f.name not in docs]
    if undocumented:
        raise TypeError(f"every field of DosOptions needs a docstring; missing: {', '.join(undocumented)}")
    return docs


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the argument group 'deep optimizer states' to `parser` and return it."""
    group = parser.add_argument_group(title="deep optimizer states")
    kinds, docs = DosOptions.types(), field_docs()
    for option in own_options():
        settings: dict[str, Any] = {"default": option.default, "help": docs[option.name].replace("%", "%%")}
        if kinds[option.name] is bool:
            settings["action"] = "store_true"
        elif "choices" in option.metadata:
            settings["choices"] = option.metadata["choices"]
        else:
            settings.update(type=kinds[option.name], metavar=option.metadata["metavar"])
        group.add_argument(flag_of(option.name), **settings)
    return parser


def allowed_cores() -> int:
    """CPU cores that this process may run on (its affinity mask, not the machine's total)."""
    return len(os.sched_getaffinity(0))


# --- The combinations that are refused -------------------------------------------------------------------------


def _validate(options: DosOptions, sources: Sequence[Any], are_configs: bool) -> None:
    if not options.use_deep_optimizer_states:
        given = [
            f"{flag_of(f.name)} {getattr(options, f.name)}"
            for f in own_options()
            if getattr(options, f.name) != f.default
        ]
        if given:
            raise UnsupportedOptionError(
                f"{', '.join(given)} has no effect without {_FLAG}. Add {_FLAG}, or drop the former."
            )
        return
    complaints = refusals.complaints(refusals.REFUSALS, _FLAG, sources, are_configs)
    if options.dos_overlap_grad_d2h == "on":
        complaints += refusals.complaints(refusals.EARLY_GRADS_REFUSALS, refusals.EARLY_FLAG, sources, are_configs)
    if complaints:
        raise UnsupportedOptionError("\n".join(complaints))
    if options.dos_cpu_threads > allowed_cores():
        raise UnsupportedOptionError(
            f"--dos-cpu-threads {options.dos_cpu_threads} is more than the {allowed_cores()} CPU cores that this "
            f"process may use. Give at most {allowed_cores()}, or 0 for this rank's share of them."
        )


def validate_args(args: Any) -> None:
    """`check_args` in Megatron's command line: a refusal that nobody catches, of these arguments or later on, ends all
    ranks with one message (see `refusal`).

    Raises:
        UnsupportedOptionError: as `check_args`.
    """
    if any(getattr(args, option.name, option.default) != option.default for option in own_options()):
        end_in_one_message()
    check_args(args)


def check_args(args: Any) -> None:
    """Check Megatron's raw arguments, before Megatron's own `validate_args` derives or changes any.

    Args:
        args: the namespace that Megatron's parser returned. Attributes that a Megatron version lacks are passed over.

    Raises:
        UnsupportedOptionError: deep optimizer states are asked for together with something they cannot work with
            (all such settings in one message), or a --dos-* option is given without --use-deep-optimizer-states.
    """
    # argparse leaves no flag out, so an absent attribute means that this Megatron has no such flag.
    _validate(DosOptions.from_args(args), [args], are_configs=False)


def validate_config(config: Any, ddp_config: Any = None, model_config: Any = None) -> None:
    """Check config objects as `validate_args` checks arguments, for programs that build them without argparse.

    Args:
        config: an OptimizerConfig.
        ddp_config: the DistributedDataParallelConfig of the model, where there is one.
        model_config: the TransformerConfig of the model, where there is one.

    Raises:
        UnsupportedOptionError: as `validate_args`.
    """
    sources = [source for source in (config, ddp_config, model_config) if source is not None]
    _validate(DosOptions.from_config(config), sources, are_configs=True)


def validate_optimizer(config: Any, model_chunks: Sequence[Any]) -> None:
    """`validate_config` with what `get_megatron_optimizer` is given: an OptimizerConfig and the model chunks."""
    first = model_chunks[0] if model_chunks else None
    validate_config(config, getattr(first, "ddp_config", None), getattr(first, "config", None))
