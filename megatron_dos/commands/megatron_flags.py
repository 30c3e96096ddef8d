# SPDX-License-Identifier: Apache-2.0
"""Reads what a plan needs from Megatron's own flags: a known model's, those of a file, and those of the command line.

A file is a shell script, plain text, or YAML. Its flags are found and parsed; nothing in it is run.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megatron_dos.arguments import add_arguments, check_args
from megatron_dos.commands import CommandError
from megatron_dos.commands.launch_files import flags_of_file
from megatron_dos.commands.models import KNOWN_MODELS, Layout, Shape, moe_pattern
from megatron_dos.options.options import DosOptions, UnsupportedOptionError, own_options
from megatron_dos.options.refusals import EARLY_GRADS_REFUSALS, REFUSALS, can_send_grads_early

__all__ = ["Job", "Training", "add_layout_flags", "launch_flags", "layout_overrides", "read_job"]

_LARGEST = {"--num-layers": 10_000, "--hidden-size": 1_000_000, "--gpus": 1_000_000}
_DEFAULT_LARGEST = 100_000_000
_SIZES = (
    *("--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--num-query-groups"),
    *("--kv-channels", "--vocab-size", "--padded-vocab-size", "--max-position-embeddings", "--seq-length"),
    *("--num-experts", "--moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size", "--micro-batch-size"),
    *("--global-batch-size", "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"),
    *("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"),
    "--expert-tensor-parallel-size",
)
"""Flags with a number without a default in Megatron, or with one that depends on other flags."""
_VOCABULARIES = {"GPT2BPETokenizer": 50257}
_NOT_USED = ("dos_gpu_kernel", "dos_trace_dir", "dos_trace_steps")
"""Options of deep optimizer states that an estimate ignores."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """How the model is trained, as far as it shows in memory and time.

    `param_bytes` and `grad_bytes` are bytes of a model param and of a main grad; `recompute` is "none", "selective" or
    "full"; `narrower_grads` is what halves the grads, empty where they have 16 bits already; `overlaps` says whether
    grads are reduced in buckets during the backward pass, `early_grads` whether they can be sent to the host then.
    """

    sequence: int
    micro_batch: int
    micro_batches: int
    param_bytes: int
    grad_bytes: int
    recompute: str
    sequence_parallel: bool
    narrower_grads: str
    overlaps: bool
    early_grads: bool


@dataclass(frozen=True)
class Job:
    """A model, its division among GPUs and its training.

    Attributes:
        name: of the model.
        source: where its shape is from.
        notes: sentences for the user.
        settings: the options of deep optimizer states that were given.
        launch: the flags of `launch_flags` that the file has, with their values; empty for a known model.
    """

    name: str
    source: str
    shape: Shape
    layout: Layout
    training: Training
    notes: tuple[str, ...]
    settings: DosOptions
    launch: tuple[str, ...]


def read_job(model: str, overrides: Sequence[str]) -> Job:
    """The job that a known model, or a file of Megatron flags, stands for.

    Args:
        model: a name of KNOWN_MODELS, in any case, or a path.
        overrides: more of Megatron's flags, which count instead of the model's; --gpus among them.

    Raises:
        CommandError: unknown model, missing or impossible flags; the message names them.
    """
    known = KNOWN_MODELS.get(model.lower())
    if known is not None:
        name, source, given = model.lower(), known.source, shlex.split(known.flags)
        given += [] if "--fp16" in overrides else ["--bf16"]
    elif Path(model).is_file():
        name, source, given = Path(model).name, f"the flags in {model}", flags_of_file(Path(model))
    else:
        names = ", ".join(KNOWN_MODELS)
        raise CommandError(f"--model {model} is neither a file nor a known model. Known are: {names}")
    parser = _parser(f"--model {model}")
    args, unknown = parser.parse_known_args(given)
    in_file = _settings(args, f"--model {model}")
    launch = launch_flags(in_file, args.use_distributed_optimizer, args.overlap_grad_reduce)
    args, not_known = parser.parse_known_args(overrides, args)
    if not_known:
        raise CommandError(
            f"{' '.join(not_known)}: not a flag of this command, nor one of Megatron's that matters here"
        )
    notes = []
    if repeated := _repeated(given):
        notes.append(f"given more than once, so the last one applies: {', '.join(repeated)}")
    settings = _settings(args, f"--model {model}")
    if known is None and not in_file.use_deep_optimizer_states:
        notes.append(
            f"{name} has no --use-deep-optimizer-states: training would keep all states on the GPU, and refuse --dos-* "
            "flags. Add it"
        )
    notes += [f"training would refuse this: {complaint}" for complaint in _complaints(args, known is None)]
    ignored = [word.split("=")[0] for word in unknown if re.match(r"--[a-z]", word)]
    ignored += [_flag(f.name) for f in own_options() if f.name in _NOT_USED and getattr(settings, f.name) != f.default]
    if ignored:
        notes.append(f"not used by this estimate: {', '.join(dict.fromkeys(ignored))}")
    _complete(args, notes, f"--model {model}")
    return Job(name, source, _shape(args), _layout(args), _training(args, notes), tuple(notes), settings, launch)


def _settings(args: argparse.Namespace, where: str) -> DosOptions:
    try:
        return DosOptions.from_args(args)
    except UnsupportedOptionError as error:
        raise CommandError(f"{where}: {error}") from error


def _complaints(args: argparse.Namespace, is_launch: bool) -> list[str]:
    """What training would say of these flags; that of a model that is no launch leaves out what a launch adds."""
    checked = argparse.Namespace(**vars(args))
    checked.use_deep_optimizer_states = True
    checked.dos_cpu_threads = 0  # which training compares with its own node, not with this one
    checked.use_distributed_optimizer |= not is_launch
    try:
        check_args(checked)
    except UnsupportedOptionError as error:
        return str(error).splitlines()
    return []


def launch_flags(settings: DosOptions, distributed_optimizer: bool = True, overlaps: bool = False) -> tuple[str, ...]:
    """What a launch needs for deep optimizer states with these settings: each flag, with its value.

    Args:
        settings: those that differ from their default are named.
        distributed_optimizer: whether --use-distributed-optimizer is one of them.
        overlaps: whether --overlap-grad-reduce is.
    """
    flags = ["--use-distributed-optimizer"] if distributed_optimizer else []
    flags += ["--overlap-grad-reduce"] if overlaps else []
    for option in own_options():
        value = getattr(settings, option.name)
        if value != option.default:
            flags.append(_flag(option.name) if value is True else f"{_flag(option.name)} {_plain(value)}")
    return tuple(flags)


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else shlex.quote(str(value))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _repeated(words: Sequence[str]) -> list[str]:
    """Flags with several numbers as values, as where a script chooses between models."""
    values: dict[str, set[str]] = {}
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        flag, separator, value = word.partition("=")
        value = value if separator else following
        if flag in _SIZES and value.isdigit():
            values.setdefault(flag, set()).add(value)
    return [flag for flag, given in values.items() if len(given) > 1]


# --- The flags


class _Parser(argparse.ArgumentParser):
    """Reports errors as CommandError, without a usage of flags that are Megatron's own."""

    def __init__(self, where: str) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self._where = where

    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{self._where}: {message.removeprefix('argument ')}")


def _parser(where: str) -> argparse.ArgumentParser:
    parser = _Parser(where)
    for flag in _SIZES:
        parser.add_argument(flag, type=_count(flag))
    for flag, default in (
        ("--make-vocab-size-divisible-by", 128),
        ("--moe-router-topk", 2),
        ("--num-distributed-optimizer-instances", 1),
    ):
        parser.add_argument(flag, type=_count(flag), default=default)
    add_layout_flags(parser)
    for flag in (
        *("--group-query-attention", "--swiglu", "--quick-geglu", "--disable-bias-linear", "--add-qkv-bias"),
        *("--qk-layernorm", "--untie-embeddings-and-output-weights", "--moe-shared-expert-gate", "--bf16", "--fp16"),
        *("--no-position-embedding", "--use-rotary-position-embeddings", "--no-pad-vocab-size"),
        *("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split", "--sequence-parallel"),
        *("--grad-reduce-in-bf16", "--accumulate-allreduce-grads-in-fp32", "--recompute-activations"),
        *("--use-distributed-optimizer", "--overlap-grad-reduce", "--log-num-zeros-in-grad"),
    ):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--normalization", default="LayerNorm", choices=("LayerNorm", "RMSNorm"))
    kinds = ("learned_absolute", "rope", "mrope", "yarn", "none")
    parser.add_argument("--position-embedding-type", default="learned_absolute", choices=kinds)
    parser.add_argument("--moe-layer-freq", type=_frequency, default=1)
    parser.add_argument("--recompute-granularity", choices=("full", "selective"))
    parser.add_argument("--tokenizer-type")
    # These change the parameters in ways that are not counted here.
    for flag in ("--multi-latent-attention", "--attention-output-gate", "--is-hybrid-model"):
        parser.add_argument(flag, action=_Refuse, nargs=0)
    for flag in (
        *("--mtp-num-layers", "--hybrid-layer-pattern", "--hybrid-override-pattern", "--moe-latent-size", "--spec"),
        *("--experimental-attention-variant", "--linear-attention-freq", "--pipeline-model-parallel-layout"),
        *("--heterogeneous-layers-config-path", "--heterogeneous-layers-config-encoded-json"),
    ):
        parser.add_argument(flag, action=_Refuse, nargs="+")
    add_arguments(parser)
    _add_refused_flags(parser)
    return parser


def _add_refused_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that training may refuse, for `validate_args` to see: absent where they are not given."""
    added = {"--use-distributed-optimizer", "--overlap-grad-reduce", "--num-distributed-optimizer-instances"}
    for row in (*REFUSALS, *EARLY_GRADS_REFUSALS):
        flag, *value = row.flag.split()
        if flag in added or not flag.startswith("--"):
            continue
        added.add(flag)
        kind: dict[str, Any] = {"action": "store_true"}
        if value or flag.endswith("-num-weight-shards"):
            kind = {"type": _number_or_name}
        elif flag.startswith("--no-"):
            kind = {"action": "store_false"}
        parser.add_argument(flag, dest=row.fields[0], default=argparse.SUPPRESS, **kind)


def _number_or_name(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


_RECOMPUTE = "--recompute"
"""Not Megatron's: that has no flag which turns off what another has turned on, as the flags of a known model do."""
_LAYOUT = (
    ("--gpus", "--gpus", "GPUs in all (1)"),
    ("--tensor-parallel", "--tensor-model-parallel-size", "GPUs that divide each layer"),
    ("--pipeline-parallel", "--pipeline-model-parallel-size", "stages that divide the layers"),
    ("--context-parallel", "--context-parallel-size", "GPUs that divide each sequence"),
    ("--expert-parallel", "--expert-model-parallel-size", "GPUs that divide the experts"),
)


def add_layout_flags(parser: argparse.ArgumentParser, default: Any = 1) -> None:
    """The flags that say how a model is divided, under Megatron's names and shorter ones, and what it recomputes."""
    for short, flag, what in _LAYOUT:
        names = dict.fromkeys((short, flag))
        parser.add_argument(*names, dest=_dest(flag), type=_count(flag), default=default, metavar="N", help=what)
    parser.add_argument(
        _RECOMPUTE,
        choices=("none", "selective", "full"),
        default=default if default is argparse.SUPPRESS else None,
        help="activations that are recomputed in the backward pass; default: as the model's flags say",
    )


def layout_overrides(options: argparse.Namespace) -> list[str]:
    """The flags of `add_layout_flags` that were given, where their default is argparse.SUPPRESS."""
    given = [flag for flag in (*(flag for _, flag, _ in _LAYOUT), _RECOMPUTE) if hasattr(options, _dest(flag))]
    return [word for flag in given for word in (flag, str(getattr(options, _dest(flag))))]


def _dest(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _count(flag: str) -> Any:
    largest = _LARGEST.get(flag, _DEFAULT_LARGEST)

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not 1 <= value <= largest:
            raise argparse.ArgumentTypeError(f"{value} is out of range: give 1 to {largest}")
        return value

    return parse


class _Refuse(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        parser.error(f"{option}: parameters of such models are not counted here")


def _frequency(text: str) -> int | list[int]:
    """--moe-layer-freq: a number, or a list such as ([0]*3+[1]*58)."""
    try:
        value = _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError):
        value = None
    if isinstance(value, int) and value >= 1:
        return value
    if isinstance(value, list) and all(each in (0, 1) for each in value):
        return value
    raise argparse.ArgumentTypeError(f"{text!r} is neither a positive number nor a list of 0 and 1")


def _evaluate(node: ast.expr) -> Any:
    """Numbers, lists, + and *; lists of at most 10,000 elements."""
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) <= _LARGEST["--num-layers"]:
        return node.value
    if isinstance(node, ast.List):
        return [_evaluate(element) for element in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
        left, right = _evaluate(node.left), _evaluate(node.right)
        value = left + right if isinstance(node.op, ast.Add) else left * right
        if isinstance(value, list) and len(value) > _LARGEST["--num-layers"]:
            raise ValueError("too long")
        return value
    raise ValueError("not a list of numbers")


def _complete(args: argparse.Namespace, notes: list[str], where: str) -> None:
    """Fill in what follows from other flags, as Megatron does."""
    needed = ("num_layers", "hidden_size", "num_attention_heads")
    missing = ["--" + name.replace("_", "-") for name in needed if getattr(args, name) is None]
    if args.vocab_size is None and args.padded_vocab_size is None:
        if args.tokenizer_type in _VOCABULARIES:
            args.vocab_size = _VOCABULARIES[args.tokenizer_type]
        else:
            missing.append("--vocab-size")
    if args.use_rotary_position_embeddings:
        args.position_embedding_type = "rope"
    learned = args.position_embedding_type == "learned_absolute" and not args.no_position_embedding
    if learned and args.max_position_embeddings is None:
        missing.append("--max-position-embeddings")
    if missing:
        raise CommandError(f"{where}: {', '.join(missing)} is missing; give it on the command line, or in the file")
    if not learned:
        args.max_position_embeddings = 0
    if args.kv_channels is None:
        if args.hidden_size % args.num_attention_heads:
            raise CommandError(
                f"{where}: --hidden-size {args.hidden_size} cannot be divided by --num-attention-heads "
                f"{args.num_attention_heads}, and there is no --kv-channels"
            )
        args.kv_channels = args.hidden_size // args.num_attention_heads
    if args.group_query_attention:
        args.num_query_groups = args.num_query_groups or 1
    else:
        args.num_query_groups = args.num_attention_heads
    if args.ffn_hidden_size is None:
        # A gated MLP has three matrices, not two: two thirds of the size, in whole multiples of 64.
        args.ffn_hidden_size = 4 * args.hidden_size
        if args.swiglu:
            args.ffn_hidden_size = int((4 * args.hidden_size * 2 / 3) / 64) * 64
    if args.padded_vocab_size is None:
        multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
        args.padded_vocab_size = args.vocab_size
        if not args.no_pad_vocab_size:
            args.padded_vocab_size = -(-args.vocab_size // multiple) * multiple
    if args.seq_length is None:
        args.seq_length = args.max_position_embeddings or 2048
        notes.append(f"no --seq-length: {args.seq_length} is taken")
    if args.bf16 and args.fp16:
        raise CommandError(f"{where}: --bf16 and --fp16 exclude each other")


def _shape(args: argparse.Namespace) -> Shape:
    experts = args.num_experts or 0
    return Shape(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        kv_channels=args.kv_channels,
        padded_vocab_size=args.padded_vocab_size,
        max_position_embeddings=args.max_position_embeddings,
        gated=args.swiglu or args.quick_geglu,
        linear_bias=not args.disable_bias_linear,
        qkv_bias=args.add_qkv_bias,
        norm_bias=args.normalization == "LayerNorm",
        qk_norm=args.qk_layernorm,
        untied=args.untie_embeddings_and_output_weights,
        num_experts=experts,
        moe_ffn_hidden_size=(args.moe_ffn_hidden_size or args.ffn_hidden_size) if experts else 0,
        moe_layers=moe_pattern(args.moe_layer_freq, args.num_layers) if experts else (),
        shared_expert_size=(args.moe_shared_expert_intermediate_size or 0) if experts else 0,
        shared_expert_gate=args.moe_shared_expert_gate,
        experts_per_token=args.moe_router_topk if experts else 0,
    )


def _layout(args: argparse.Namespace) -> Layout:
    pipeline = args.pipeline_model_parallel_size
    chunks = args.num_virtual_stages_per_pipeline_rank or 1
    if args.num_layers_per_virtual_pipeline_stage and pipeline > 1:
        of_stage = args.num_layers // pipeline
        if of_stage % args.num_layers_per_virtual_pipeline_stage:
            raise CommandError(
                f"the {of_stage} layers of a stage cannot be divided by --num-layers-per-virtual-pipeline-stage "
                f"{args.num_layers_per_virtual_pipeline_stage}"
            )
        chunks = of_stage // args.num_layers_per_virtual_pipeline_stage
    return Layout(
        gpus=args.gpus,
        tensor=args.tensor_model_parallel_size,
        pipeline=pipeline,
        context=args.context_parallel_size,
        expert=args.expert_model_parallel_size,
        expert_tensor=args.expert_tensor_parallel_size or args.tensor_model_parallel_size,
        chunks=chunks if pipeline > 1 else 1,
        first_stage_layers=args.decoder_first_pipeline_num_layers,
        last_stage_layers=args.decoder_last_pipeline_num_layers,
        account_for_embedding=args.account_for_embedding_in_pipeline_split,
        account_for_loss=args.account_for_loss_in_pipeline_split,
        optimizer_instances=args.num_distributed_optimizer_instances,
    )


def _training(args: argparse.Namespace, notes: list[str]) -> Training:
    if not (args.bf16 or args.fp16):
        args.bf16 = True
        notes.append("neither --bf16 nor --fp16: bf16 is taken")
    layout = _layout(args)
    if layout.gpus % (layout.tensor * layout.pipeline * layout.context):
        micro_batches = 1  # what divides the GPUs is checked, and refused, where parameters are counted
    else:
        micro_batch = args.micro_batch_size or 1
        each = micro_batch * layout.data
        batch = args.global_batch_size or each
        if args.global_batch_size is None:
            notes.append(
                f"no --global-batch-size: {batch} is taken, one micro-batch a rank. With more, the passes take longer "
                "and the update does not: the gain of an iteration shrinks as gradient accumulation grows"
            )
        if batch % each:
            raise CommandError(
                f"--global-batch-size {batch} cannot be divided by micro-batch size {micro_batch} x {layout.data} "
                "data-parallel ranks"
            )
        micro_batches = batch // each
    in_fp32 = args.accumulate_allreduce_grads_in_fp32 or (args.bf16 and not args.grad_reduce_in_bf16)
    recompute = args.recompute or args.recompute_granularity or ("selective" if args.recompute_activations else "none")
    return Training(
        sequence=args.seq_length,
        micro_batch=args.micro_batch_size or 1,
        micro_batches=micro_batches,
        param_bytes=2,
        grad_bytes=4 if in_fp32 else 2,
        recompute=recompute,
        sequence_parallel=args.sequence_parallel,
        narrower_grads=_narrower_grads(args) if in_fp32 else "",
        overlaps=args.overlap_grad_reduce,
        early_grads=_can_send_early(args),
    )


def _narrower_grads(args: argparse.Namespace) -> str:
    add = "--grad-reduce-in-bf16" if args.bf16 and not args.grad_reduce_in_bf16 else ""
    drop = "no --accumulate-allreduce-grads-in-fp32" if args.accumulate_allreduce_grads_in_fp32 else ""
    return " and ".join(filter(None, (add, drop)))


def _can_send_early(args: argparse.Namespace) -> bool:
    """As training decides it, but for what its environment says."""
    if args.dos_overlap_grad_d2h == "off" or (args.dos_overlap_grad_d2h == "auto" and args.log_num_zeros_in_grad):
        return False
    return can_send_grads_early(args)
