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
import re
import textwrap
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_dos.refusal import Refusal, end_in_one_message

__all__ = [
    "AUTOMATIC_EARLY_SLOTS",
    "EARLY_GRADS_REFUSALS",
    "REFUSALS",
    "DosOptions",
    "UnsupportedOptionError",
    "add_arguments",
    "allowed_cores",
    "can_send_grads_early",
    "check_args",
    "parse_steps",
    "validate_args",
    "validate_config",
    "validate_optimizer",
]

AUTOMATIC_EARLY_SLOTS = 4
"""Host slots for grads that are sent in the backward pass, where --dos-early-grad-slots is 0."""

_FLAG = "--use-deep-optimizer-states"
_EARLY = "--dos-overlap-grad-d2h on"
_MISSING = object()


class UnsupportedOptionError(ValueError, Refusal):
    """An option that deep optimizer states cannot honour; the message names the flags and the way out."""


@dataclass(frozen=True, kw_only=True)
class DosOptions:
    """What a user may choose about deep optimizer states.

    Raises:
        UnsupportedOptionError: a value of the wrong type, or outside the limits of its field.
    """

    use_deep_optimizer_states: bool = False
    """Keep the Adam states of the distributed optimizer (FP32 master parameters and both moments) in host memory
    and update them subgroup by subgroup. Needs --use-distributed-optimizer."""

    dos_subgroup_size: int = field(default=0, metadata={"metavar": "PARAMETERS", "maximum": 2**40})
    """Parameters per subgroup of the deep optimizer states. 0 chooses the size automatically."""

    dos_cpu_threads: int = field(default=0, metadata={"metavar": "THREADS", "maximum": 2**16})
    """Threads with which this rank updates its subgroups on the CPU. 0 takes this rank's share of the cores
    that it may use: those of its affinity mask, divided by the ranks that share them and capped by CPU quotas."""

    dos_gpu_share: float = field(default=-1.0, metadata={"metavar": "SHARE"})
    """Share of the parameters, 0 to 1, whose states are streamed through the GPU and updated there; the CPU updates
    the others at the same time. It is a share of those whose states are in host memory. The result is the same to the
    bit for every share. -1 chooses it automatically: nothing where there is no GPU, else what the measured rates of
    `megatron-dos calibrate` suggest, or half; then the first steps are measured, and the share is moved."""

    dos_update_stride: int = field(default=0, metadata={"metavar": "K", "maximum": 2**20})
    """Update one subgroup in K on the GPU, as in the published system, instead of a share. 0 is off."""

    dos_gpu_kernel: str = field(default="auto", metadata={"choices": ("auto", "triton", "te", "apex", "torch")})
    """Kernel of the updates on the GPU: triton, or auto, which does without Triton where that is missing; both give
    the bits of the CPU kernel. te (Transformer Engine), apex and torch round in their own way."""

    dos_grad_transfer: str = field(default="fp32", metadata={"choices": ("fp32", "model")})
    """How gradients go to the CPU: fp32 converts them on the GPU, model sends them in their own dtype and converts
    them inside the CPU update. The result is the same to the bit."""

    dos_resident_share: float = field(default=0.0, metadata={"metavar": "SHARE", "automatic": False})
    """Share of the parameters, 0 to 1, whose states stay in GPU memory, 12 bytes for each, instead of host memory. They
    are updated there, without any copies. The result is the same to the bit for every share."""

    dos_overlap_grad_d2h: str = field(default="auto", metadata={"choices": ("auto", "on", "off")})
    """Send gradients to the CPU in the backward pass, each bucket as soon as it is reduced. The norm, the check for
    infinities and clipping come before any update, as ever, and the result is the same to the bit, but for the last
    bits of a norm that Transformer Engine or Apex computes. Needs --overlap-grad-reduce; auto does it where that is on
    and there is a GPU, but not with CUDA_DEVICE_MAX_CONNECTIONS=1, TORCH_NCCL_BLOCKING_WAIT=1 or
    --log-num-zeros-in-grad. Gradients that a training loop edits in place before the step are sent again; torch does
    not count writes through .data, NumPy, raw pointers, collectives or CUDA graphs: code that writes so needs
    torch.autograd.graph.increment_version(param.main_grad) after it, or off."""

    dos_early_grad_slots: int = field(default=0, metadata={"metavar": "SUBGROUPS", "maximum": 2**16})
    """Number of subgroups whose gradients may be sent in the backward pass: each takes host memory of at most 4 bytes
    for each parameter of the largest subgroup. 0 chooses the number automatically."""

    dos_trace_dir: str = field(default="", metadata={"metavar": "FOLDER"})
    """Write traces of when each operation of some optimizer steps ran into this folder, a file for each rank and step.
    Perfetto (ui.perfetto.dev) and chrome://tracing open them."""

    dos_trace_steps: str = field(default="5-7", metadata={"metavar": "STEPS"})
    """Which optimizer steps to trace, like 5-7 or 3,10,20-22, counted as the optimizer counts them: steps that are
    skipped have no number. Only with --dos-trace-dir."""

    async_save: bool = field(default=False, metadata={"of_megatron": True})
    """Megatron's --async-save, which its optimizer has to know of here: the states then have to fit into the shared
    memory of the node once more while they are written."""

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):
            _check_value(option, getattr(self, option.name))
        if self.dos_update_stride and self.dos_gpu_share >= 0:
            raise UnsupportedOptionError(
                f"--dos-update-stride {self.dos_update_stride} and --dos-gpu-share {self.dos_gpu_share} both say what "
                "the GPU updates. Drop one of them."
            )
        if self.dos_early_grad_slots and self.dos_overlap_grad_d2h == "off":
            raise UnsupportedOptionError(
                f"--dos-early-grad-slots {self.dos_early_grad_slots} has no effect with --dos-overlap-grad-d2h off. "
                "Drop one of them."
            )
        parse_steps(self.dos_trace_steps)
        if self.dos_trace_steps != type(self).dos_trace_steps and not self.dos_trace_dir:
            raise UnsupportedOptionError(
                f"--dos-trace-steps {self.dos_trace_steps} has no effect without --dos-trace-dir. "
                "Add that, or drop the former."
            )

    @classmethod
    def from_args(cls, args: Any) -> DosOptions:
        """Read the options from Megatron's parsed arguments; an absent attribute means its default."""
        return cls(**{f.name: getattr(args, f.name) for f in dataclasses.fields(cls) if hasattr(args, f.name)})

    @classmethod
    def from_config(cls, config: Any) -> DosOptions:
        """Read the options from an OptimizerConfig, whose fields have the same names."""
        return cls.from_args(config)

    @classmethod
    def types(cls) -> dict[str, type]:
        """The type of each option, by field name, in order of declaration."""
        return typing.get_type_hints(cls)


def _check_value(option: dataclasses.Field, value: Any) -> None:
    flag, kind = _flag(option.name), DosOptions.types()[option.name]
    # bool is a subclass of int, and True is no number of threads.
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise UnsupportedOptionError(f"{flag} takes {_NAMES[kind]}, not {value!r}.")
    choices = option.metadata.get("choices")
    if choices is not None and value not in choices:
        raise UnsupportedOptionError(f"{flag} {value} is not known: give one of {', '.join(choices)}.")
    automatic = option.metadata.get("automatic", True)
    if kind is float and not (0 <= value <= 1 or (automatic and value == -1)):
        allowed = "-1 (automatic) or a number from 0 to 1" if automatic else "a number from 0 to 1"
        raise UnsupportedOptionError(f"{flag} {value} is out of range: give {allowed}.")
    maximum = option.metadata.get("maximum")
    if maximum is not None and not 0 <= value <= maximum:
        raise UnsupportedOptionError(f"{flag} {value} is out of range: give 0 (automatic) or 1 to {maximum}.")


_NAMES = {bool: "True or False", int: "a whole number", float: "a number", str: "a name"}


def parse_steps(text: str) -> tuple[range, ...]:
    """The steps that --dos-trace-steps names, from 1: "5-7" or "3,10,20-22".

    Raises:
        UnsupportedOptionError: the text names no steps.
    """
    steps = []
    for part in text.split(","):
        bounds = re.fullmatch(r"([0-9]{1,15})(?:-([0-9]{1,15}))?", part.strip())
        if bounds is None:
            raise UnsupportedOptionError(f"--dos-trace-steps {text!r} names no steps: give some like 5-7 or 3,10.")
        low, high = int(bounds[1]), int(bounds[2] or bounds[1])
        if not 1 <= low <= high:
            raise UnsupportedOptionError(f"--dos-trace-steps {text!r}: steps count from 1, and {part} has none.")
        steps.append(range(low, high + 1))
    return tuple(steps)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def own_options() -> list[dataclasses.Field]:
    """The fields that are flags of this package; the others hold flags that Megatron has already."""
    return [option for option in dataclasses.fields(DosOptions) if not option.metadata.get("of_megatron")]


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
        group.add_argument(_flag(option.name), **settings)
    return parser


def allowed_cores() -> int:
    """CPU cores that this process may run on (its affinity mask, not the machine's total)."""
    return len(os.sched_getaffinity(0))


# --- The combinations that are refused -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Refusal:
    """One setting of Megatron's that deep optimizer states cannot work with."""

    verb: str = "does not work with"
    flag: str
    """The flag to name. `{value}` stands for the value that was given."""
    fields: tuple[str, ...]
    """The attributes that hold the setting, in args and in the config objects alike. Absent ones are passed over."""
    refused: Callable[[Any], bool]
    """Whether a value of one of these attributes is refused."""
    reason: str
    """Why it cannot work, a clause without a full stop."""
    way_out: str
    """What the user can do other than giving up deep optimizer states, or '' where there is nothing."""


def _dtype_name(dtype: Any) -> str:
    """'bf16' for 'bf16' (raw arguments) and for torch.bfloat16 (configs) alike."""
    name = str(dtype).removeprefix("torch.")
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "uint8": "fp8"}.get(name, name)


def _not_fp32(dtype: Any) -> bool:
    return dtype is not None and _dtype_name(dtype) != "fp32"


def _is_false(value: Any) -> bool:
    return value is not None and not value


_DROP = "Drop {flag}"

REFUSALS: tuple[_Refusal, ...] = (
    _Refusal(
        flag="--use-megatron-fsdp",
        fields=("use_megatron_fsdp", "use_custom_fsdp"),
        refused=bool,
        reason="Megatron-FSDP shards and updates the parameters itself, without the distributed optimizer's buffers",
        way_out=_DROP,
    ),
    _Refusal(
        flag="--use-torch-fsdp2",
        fields=("use_torch_fsdp2",),
        refused=bool,
        reason="torch's FSDP2 shards the parameters itself, without the distributed optimizer's buffers",
        way_out=_DROP,
    ),
    _Refusal(
        flag="--freeze-all-layers",
        fields=("freeze_all_layers",),
        refused=bool,
        reason="Megatron then turns the distributed optimizer off, as there is nothing to update",
        way_out=_DROP,
    ),
    _Refusal(
        flag="--optimizer {value}",
        fields=("optimizer",),
        refused=lambda name: name != "adam",
        reason="the update is Adam's",
        way_out="Use --optimizer adam",
    ),
    _Refusal(
        # No flag of Megatron's: it sets this field itself where --optimizer is not adam or sgd.
        flag="use_layer_wise_distributed_optimizer",
        fields=("use_layer_wise_distributed_optimizer",),
        refused=bool,
        reason="it assigns whole layers to ranks, and deep optimizer states need the distributed optimizer's shards",
        way_out="Use --optimizer adam with --use-distributed-optimizer",
    ),
    _Refusal(
        flag="--optimizer-cpu-offload",
        fields=("optimizer_cpu_offload",),
        refused=bool,
        reason="both keep the optimizer states in host memory, each in its own way",
        way_out="Drop {flag} and the flags that belong to it",
    ),
    _Refusal(
        flag="--optimizer-offload-fraction {value}",
        fields=("optimizer_offload_fraction",),
        # 1.0 is the default of the arguments, 0.0 that of OptimizerConfig.
        refused=lambda fraction: fraction not in (None, 0.0, 1.0),
        reason="it sets the share of --optimizer-cpu-offload, and all states live in host memory here",
        way_out=_DROP,
    ),
    _Refusal(
        flag="--use-torch-optimizer-for-cpu-offload",
        fields=("use_torch_optimizer_for_cpu_offload",),
        refused=bool,
        reason="it belongs to --optimizer-cpu-offload, and the CPU update is this project's own here",
        way_out=_DROP,
    ),
    _Refusal(
        flag="--overlap-cpu-optimizer-d2h-h2d",
        fields=("overlap_cpu_optimizer_d2h_h2d",),
        refused=bool,
        reason="it belongs to --optimizer-cpu-offload, and would change nothing here",
        way_out=_DROP,
    ),
    _Refusal(
        flag="--no-pin-cpu-grads",
        fields=("pin_cpu_grads",),
        refused=_is_false,
        reason="it belongs to --optimizer-cpu-offload, and would change nothing here",
        way_out=_DROP,
    ),
    _Refusal(
        flag="--no-pin-cpu-params",
        fields=("pin_cpu_params",),
        refused=_is_false,
        reason="it belongs to --optimizer-cpu-offload, and would change nothing here",
        way_out=_DROP,
    ),
    _Refusal(
        flag="--use-precision-aware-optimizer",
        fields=("use_precision_aware_optimizer",),
        refused=bool,
        reason="it leaves master parameters and moments to Transformer Engine's optimizer, on the GPU",
        way_out=_DROP,
    ),
    _Refusal(
        flag="--main-params-dtype {value}",
        fields=("main_params_dtype",),
        refused=_not_fp32,
        reason="the master parameters are kept in fp32",
        way_out=_DROP,
    ),
    _Refusal(
        flag="--main-grads-dtype {value}",
        fields=("main_grads_dtype",),
        refused=_not_fp32,
        reason="it takes effect through --use-precision-aware-optimizer only",
        way_out="For bf16 gradients give --grad-reduce-in-bf16 instead",
    ),
    _Refusal(
        flag="--exp-avg-dtype {value}",
        fields=("exp_avg_dtype",),
        refused=_not_fp32,
        reason="the moments are kept in fp32",
        way_out=_DROP,
    ),
    _Refusal(
        flag="--exp-avg-sq-dtype {value}",
        fields=("exp_avg_sq_dtype",),
        refused=_not_fp32,
        reason="the moments are kept in fp32",
        way_out=_DROP,
    ),
    _Refusal(
        flag="--fp8-param-gather",
        fields=("fp8_param_gather", "fp8_param"),
        refused=bool,
        reason="the update writes fp32, bf16 or fp16 parameters, and cannot quantize them to FP8",
        way_out="Drop {flag} (FP8 compute with bf16 parameters works)",
    ),
    _Refusal(
        flag="--fp4-param-gather",
        fields=("fp4_param_gather", "fp4_param"),
        refused=bool,
        reason="the update writes fp32, bf16 or fp16 parameters, and cannot quantize them to FP4",
        way_out="Drop {flag} (FP4 compute with bf16 parameters works)",
    ),
    _Refusal(
        flag="--reuse-grad-buf-for-mxfp8-param-ag",
        fields=("reuse_grad_buf_for_mxfp8_param_ag",),
        refused=bool,
        reason="it gathers MXFP8 parameters out of main parameters on the GPU, which do not exist here",
        way_out=_DROP,
    ),
    _Refusal(
        flag="--optimizer-cuda-graph",
        fields=("optimizer_cuda_graph",),
        refused=bool,
        reason="a CUDA graph cannot capture a step that works on the CPU as well",
        way_out="Drop {flag} (CUDA graphs of the forward and backward passes work)",
    ),
    _Refusal(
        flag="--qk-clip",
        fields=("qk_clip",),
        refused=bool,
        reason="it rescales the main parameters on the GPU after the step, which do not exist here",
        way_out=_DROP,
    ),
    _Refusal(
        flag="--ckpt-convert-update-legacy-dist-opt-format",
        fields=("ckpt_convert_update_legacy_dist_opt_format",),
        refused=bool,
        reason="Megatron's converter of that old format writes to main parameters on the GPU, which do not exist here",
        way_out="Use Megatron without deep optimizer states once to convert the checkpoint",
    ),
    # Last, because Megatron turns the distributed optimizer off for some of the above, which are then the cause.
    _Refusal(
        verb="needs",
        flag="--use-distributed-optimizer",
        fields=("use_distributed_optimizer",),
        refused=lambda used: not used,
        reason="the states are those of the distributed optimizer",
        way_out="Add {flag}",
    ),
)


EARLY_GRADS_REFUSALS: tuple[_Refusal, ...] = (
    _Refusal(
        verb="needs",
        flag="--overlap-grad-reduce",
        fields=("overlap_grad_reduce",),
        refused=lambda used: not used,
        reason="gradients are final before the end of the backward pass only with it",
        way_out="Add {flag}",
    ),
    _Refusal(
        flag="--num-distributed-optimizer-instances {value}",
        fields=("num_distributed_optimizer_instances",),
        refused=lambda instances: instances not in (None, 1),
        reason="gradients are reduced once more over the instances",
        way_out=_DROP,
    ),
    _Refusal(
        flag="--reduce-scatter-with-fp32-accumulation",
        fields=("reduce_scatter_with_fp32_accumulation",),
        refused=bool,
        reason="it completes a reduction only when the backward pass has ended",
        way_out=_DROP,
    ),
    _Refusal(
        flag="--calculate-per-token-loss",
        fields=("calculate_per_token_loss",),
        refused=bool,
        reason="it scales all gradients after the backward pass",
        way_out=_DROP,
    ),
    _Refusal(
        flag="--tensor-parallel-num-weight-shards",
        fields=("gtp_weight_remat_size",),
        refused=lambda size: size not in (None, 1),
        reason="it reduces gradients once more after the backward pass",
        way_out=_DROP,
    ),
    _Refusal(
        flag="--expert-tensor-parallel-num-weight-shards",
        fields=("expert_gtp_weight_remat_size",),
        refused=lambda size: size not in (None, 1),
        reason="it reduces gradients of experts once more after the backward pass",
        way_out=_DROP,
    ),
    _Refusal(
        flag="--cuda-graph-impl {value}",
        fields=("cuda_graph_impl",),
        refused=lambda graph: graph == "full_iteration",
        reason="a CUDA graph of the whole iteration cannot hold copies that change from step to step",
        way_out=_DROP,
    ),
)
"""What --dos-overlap-grad-d2h cannot work with."""


def can_send_grads_early(*sources: Any) -> bool:
    """Whether gradients can be sent to the CPU in the backward pass, for an OptimizerConfig, a
    DistributedDataParallelConfig and a TransformerConfig."""
    return not _complaints(EARLY_GRADS_REFUSALS, _EARLY, sources, are_configs=True)


def _complaints(rows: Sequence[_Refusal], subject: str, sources: Sequence[Any], are_configs: bool) -> list[str]:
    """One complaint for each of the `rows` that an attribute of one of the `sources` falls under."""
    complaints = []
    for row in rows:
        for source, name in itertools.product(sources, row.fields):
            value = getattr(source, name, _MISSING)
            if value is _MISSING or not row.refused(value):
                continue
            flag = row.flag.format(value=_dtype_name(value))
            # Who built the config object knows its field, not the flag.
            where = f" ({type(source).__name__}.{name} = {value!r})" if are_configs else ""
            way_out = row.way_out.format(flag=flag)
            complaints.append(f"{subject} {row.verb} {flag}{where}: {row.reason}. {way_out}, or drop {subject}.")
            break
    return complaints


def _validate(options: DosOptions, sources: Sequence[Any], are_configs: bool) -> None:
    if not options.use_deep_optimizer_states:
        given = [
            f"{_flag(f.name)} {getattr(options, f.name)}"
            for f in own_options()
            if getattr(options, f.name) != f.default
        ]
        if given:
            raise UnsupportedOptionError(
                f"{', '.join(given)} has no effect without {_FLAG}. Add {_FLAG}, or drop the former."
            )
        return
    complaints = _complaints(REFUSALS, _FLAG, sources, are_configs)
    if options.dos_overlap_grad_d2h == "on":
        complaints += _complaints(EARLY_GRADS_REFUSALS, _EARLY, sources, are_configs)
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
