# SPDX-License-Identifier: Apache-2.0
"""How many parameters a GPT of a given shape has, in all and on each rank of Megatron's parallel groups.

The counts are those of Megatron's own GPTModel, to the unit: every bias, norm and padded row of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_dos.commands import CommandError

__all__ = ["KNOWN_MODELS", "KnownModel", "Layout", "Shape", "Stage", "stages", "total_parameters"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder-only transformer as Megatron builds it; names are those of Megatron's flags.

    `padded_vocab_size` is the vocabulary that is built; `moe_layers` says of each layer whether it has experts.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    padded_vocab_size: int
    max_position_embeddings: int = 0
    """Of learned positions; 0 where positions have no parameters."""
    gated: bool = False
    linear_bias: bool = True
    qkv_bias: bool = False
    norm_bias: bool = True
    qk_norm: bool = False
    untied: bool = False
    num_experts: int = 0
    moe_ffn_hidden_size: int = 0
    moe_layers: tuple[bool, ...] = ()
    shared_expert_size: int = 0
    shared_expert_gate: bool = False
    experts_per_token: int = 0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How Megatron divides the model: sizes of the parallel groups, and layers of the first and the last stage."""

    gpus: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    chunks: int = 1
    """Model chunks of a pipeline stage: virtual pipeline stages."""
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    account_for_embedding: bool = False
    account_for_loss: bool = False
    optimizer_instances: int = 1

    @property
    def data(self) -> int:
        return self.gpus // (self.tensor * self.pipeline * self.context)

    @property
    def shards(self) -> int:
        """Ranks that the distributed optimizer divides the states of ordinary parameters among."""
        return self.data * self.context // self.optimizer_instances

    @property
    def expert_shards(self) -> int:
        """Those that it divides the states of the experts' parameters among."""
        return self.gpus // (self.expert_tensor * self.expert * self.pipeline) // self.optimizer_instances


@dataclass(frozen=True)
class Stage:
    """Parameters of one rank of a pipeline stage, and those whose states it owns.

    Attributes:
        dense: parameters outside the experts.
        experts: parameters of the experts.
        owned: parameters whose states the distributed optimizer gives this rank; of the rank with most.
        layers: transformer layers.
    """

    dense: int
    experts: int
    owned: int
    layers: int

    @property
    def parameters(self) -> int:
        return self.dense + self.experts


def total_parameters(shape: Shape) -> int:
    """Parameters of the model, each counted once."""
    (whole,) = stages(shape, Layout(gpus=1))
    return whole.parameters


def stages(shape: Shape, layout: Layout) -> list[Stage]:
    """One entry for each pipeline stage.

    Raises:
        CommandError: the groups do not divide the model or the GPUs.
    """
    _check(shape, layout)
    found = []
    for number, layers in enumerate(_layers_of_stages(shape, layout)):
        dense = sum(_layer(shape, layer, layout.tensor) for layer in layers)
        experts = sum(_experts(shape, layer, layout) for layer in layers)
        words = shape.padded_vocab_size // layout.tensor * shape.hidden_size
        first, last = number == 0, number == layout.pipeline - 1
        if first:
            dense += words + shape.max_position_embeddings * shape.hidden_size
        if last:
            dense += _norm(shape, shape.hidden_size)
            # Tied to the embedding of the same rank, the output layer has no parameters of its own.
            dense += words if shape.untied or not first else 0
        owned = -(-dense // layout.shards) + -(-experts // layout.expert_shards)
        found.append(Stage(dense, experts, owned, len(layers)))
    return found


def _norm(shape: Shape, size: int) -> int:
    return size * (2 if shape.norm_bias else 1)


def _layer(shape: Shape, layer: int, tensor: int) -> int:
    """Parameters of a layer on one rank, without those of experts."""
    hidden, query = shape.hidden_size, shape.num_attention_heads * shape.kv_channels
    qkv = query + 2 * shape.num_query_groups * shape.kv_channels
    attention = (qkv * hidden + query * hidden) // tensor
    attention += qkv // tensor if shape.linear_bias or shape.qkv_bias else 0
    attention += hidden if shape.linear_bias else 0
    attention += 2 * _norm(shape, shape.kv_channels) if shape.qk_norm else 0
    norms = 2 * _norm(shape, hidden)
    if not _has_experts(shape, layer):
        return attention + norms + _mlp(shape, shape.ffn_hidden_size, tensor, shape.linear_bias)
    router = shape.num_experts * (hidden + (1 if shape.linear_bias else 0))
    shared = 0
    if shape.shared_expert_size:
        shared = _mlp(shape, shape.shared_expert_size, tensor, shape.linear_bias)
        shared += hidden if shape.shared_expert_gate else 0
    return attention + norms + router + shared


def _mlp(shape: Shape, inner: int, tensor: int, bias: bool) -> int:
    outer = inner * (2 if shape.gated else 1)
    weights = (outer + inner) * shape.hidden_size // tensor
    return weights + (outer // tensor + shape.hidden_size if bias else 0)


def _experts(shape: Shape, layer: int, layout: Layout) -> int:
    if not _has_experts(shape, layer):
        return 0
    one = _mlp(shape, shape.moe_ffn_hidden_size, layout.expert_tensor, shape.linear_bias)
    return one * (shape.num_experts // layout.expert)


def _has_experts(shape: Shape, layer: int) -> bool:
    return bool(shape.num_experts) and shape.moe_layers[layer]


def _layers_of_stages(shape: Shape, layout: Layout) -> list[list[int]]:
    """The numbers of the layers of each stage. With model chunks, a stage has a run of layers for each chunk."""
    counts = _layer_counts(shape, layout)
    numbers: list[list[int]] = [[] for _ in counts]
    layer = 0
    for chunk in range(layout.chunks):
        for stage, count in enumerate(counts):
            size = count // layout.chunks
            # An embedding or a loss that counts as a layer takes a place in the first or the last chunk.
            size -= layout.account_for_embedding and stage == 0 and chunk == 0
            size -= layout.account_for_loss and stage == len(counts) - 1 and chunk == layout.chunks - 1
            numbers[stage] += range(layer, layer + size)
            layer += size
    return numbers


def _layer_counts(shape: Shape, layout: Layout) -> list[int]:
    """Layers of each stage, an embedding or a loss that counts as one included."""
    given = (layout.first_stage_layers, layout.last_stage_layers)
    if any(count is not None for count in given) and layout.pipeline > 1:
        first, last = given
        left = shape.num_layers - (first or 0) - (last or 0)
        stages_left = layout.pipeline - sum(count is not None for count in given)
        if left < 0 or (stages_left == 0 and left) or (stages_left and left % stages_left):
            raise CommandError(
                f"--num-layers {shape.num_layers} do not fill --pipeline-model-parallel-size {layout.pipeline} "
                "with the given numbers of layers in the first and the last one"
            )
        counts = [left // stages_left if stages_left else 0] * layout.pipeline
        counts[0] = first if first is not None else counts[0]
        counts[-1] = last if last is not None else counts[-1]
    else:
        places = shape.num_layers + layout.account_for_embedding + layout.account_for_loss
        _divides("--num-layers", places, "--pipeline-model-parallel-size", layout.pipeline)
        counts = [places // layout.pipeline] * layout.pipeline
    for count in counts:
        _divides("layers of a stage:", count, "virtual pipeline stages:", layout.chunks)
    return counts


def _check(shape: Shape, layout: Layout) -> None:
    groups = layout.tensor * layout.pipeline * layout.context
    _divides("--gpus", layout.gpus, "tensor x pipeline x context parallel size", groups)
    expert_groups = layout.expert * layout.expert_tensor * layout.pipeline
    _divides("--gpus", layout.gpus, "expert x expert-tensor x pipeline parallel size", expert_groups)
    tensor = ("--tensor-model-parallel-size", layout.tensor)
    _divides("--num-attention-heads", shape.num_attention_heads, *tensor)
    _divides("--num-attention-heads", shape.num_attention_heads, "--num-query-groups", shape.num_query_groups)
    if shape.num_query_groups % layout.tensor and layout.tensor % shape.num_query_groups:
        raise CommandError(
            f"--num-query-groups {shape.num_query_groups} and --tensor-model-parallel-size {layout.tensor}: one has to "
            "be a multiple of the other"
        )
    _divides("--ffn-hidden-size", shape.ffn_hidden_size, *tensor)
    _divides("padded vocabulary", shape.padded_vocab_size, *tensor)
    _divides("--num-experts", shape.num_experts, "--expert-model-parallel-size", layout.expert)
    if layout.expert > 1 and not shape.num_experts:
        raise CommandError(f"--expert-model-parallel-size {layout.expert} needs --num-experts")
    _divides("--moe-ffn-hidden-size", shape.moe_ffn_hidden_size, "expert tensor parallel size", layout.expert_tensor)
    _divides("--moe-shared-expert-intermediate-size", shape.shared_expert_size, *tensor)
    instances = ("--num-distributed-optimizer-instances", layout.optimizer_instances)
    _divides("data x context parallel size", layout.data * layout.context, *instances)


def _divides(name: str, number: int, divisor_name: str, divisor: int) -> None:
    if number % divisor:
        raise CommandError(f"{name} {number} cannot be divided by {divisor_name} {divisor}")


# --- Models that are known by name


@dataclass(frozen=True)
class KnownModel:
    """A model by name: the Megatron flags of its shape, and where that is from."""

    flags: str
    source: str


_NO_BIAS = "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope"
_GPT3 = "--position-embedding-type learned_absolute --max-position-embeddings 2048 --seq-length 2048"


def _published(layers: int, hidden: int, ffn: int, heads: int) -> KnownModel:
    return KnownModel(
        f"--num-layers {layers} --hidden-size {hidden} --ffn-hidden-size {ffn} --num-attention-heads {heads} "
        "--group-query-attention --num-query-groups 4 --untie-embeddings-and-output-weights "
        f"--padded-vocab-size 50304 --seq-length 2048 --recompute-granularity full {_NO_BIAS}",
        "the published evaluation of Deep Optimizer States, Middleware 2024",
    )


def _llama(shape: str, vocabulary: int, sequence: int, source: str) -> KnownModel:
    layers, hidden, ffn, heads, groups = shape.split("/")
    return KnownModel(
        f"--num-layers {layers} --hidden-size {hidden} --ffn-hidden-size {ffn} --num-attention-heads {heads} "
        f"--group-query-attention --num-query-groups {groups} --untie-embeddings-and-output-weights "
        f"--vocab-size {vocabulary} --seq-length {sequence} {_NO_BIAS}",
        source,
    )


def _with(model: KnownModel, flags: str) -> KnownModel:
    return replace(model, flags=f"{model.flags} {flags}")


_LLAMA2 = "Touvron et al. 2023 (Llama 2) and its config.json"
_LLAMA3 = "Grattafiori et al. 2024 (Llama 3) and its config.json"
_BROWN = "Brown et al. 2020 (GPT-3), table 2.1"

KNOWN_MODELS: dict[str, KnownModel] = {
    "7b": _published(32, 4096, 11008, 32),
    "8.3b": _published(72, 3072, 11008, 32),
    "10b": _published(50, 4096, 12400, 32),
    "13b": _published(40, 5120, 13824, 40),
    "20b": _published(40, 5120, 20480, 64),
    "gpt2-1.5b": KnownModel(
        "--num-layers 48 --hidden-size 1600 --num-attention-heads 25 --vocab-size 50257 "
        "--position-embedding-type learned_absolute --max-position-embeddings 1024 --seq-length 1024",
        "Radford et al. 2019 (GPT-2)",
    ),
    "gpt3-6.7b": KnownModel(
        f"--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --vocab-size 50257 {_GPT3}", _BROWN
    ),
    "gpt3-175b": KnownModel(
        f"--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --vocab-size 50257 {_GPT3}", _BROWN
    ),
    "llama2-7b": _llama("32/4096/11008/32/32", 32000, 4096, _LLAMA2),
    "llama2-13b": _llama("40/5120/13824/40/40", 32000, 4096, _LLAMA2),
    "llama2-70b": _llama("80/8192/28672/64/8", 32000, 4096, _LLAMA2),
    "llama3-8b": _llama("32/4096/14336/32/8", 128256, 8192, _LLAMA3),
    "llama3-70b": _llama("80/8192/28672/64/8", 128256, 8192, _LLAMA3),
    "llama3-405b": _llama("126/16384/53248/128/8", 128256, 8192, _LLAMA3),
    "mistral-7b": _llama("32/4096/14336/32/8", 32000, 8192, "Jiang et al. 2023 (Mistral 7B) and its config.json"),
    "mixtral-8x7b": _with(
        _llama("32/4096/14336/32/8", 32000, 8192, "Jiang et al. 2024 (Mixtral) and its config.json"), "--num-experts 8"
    ),
    "qwen2.5-7b": _with(
        _llama("28/3584/18944/28/4", 152064, 8192, "Qwen2.5 technical report and its config.json"), "--add-qkv-bias"
    ),
    "qwen2.5-72b": _with(
        _llama("80/8192/29568/64/8", 152064, 8192, "Qwen2.5 technical report and its config.json"), "--add-qkv-bias"
    ),
    "qwen3-8b": _with(
        _llama("36/4096/12288/32/8", 151936, 8192, "Qwen3 technical report and its config.json"), "--qk-layernorm"
    ),
}
"""By name, in lower case. Sequence lengths are those of the (main) pre-training, and can be overridden."""


def moe_pattern(frequency: int | Sequence[int], num_layers: int) -> tuple[bool, ...]:
    """Which layers have experts, from --moe-layer-freq: every N-th, starting with the first, or 0 and 1 for each.

    Raises:
        CommandError: there is not one value for each layer.
    """
    if isinstance(frequency, int):
        return tuple(layer % frequency == 0 for layer in range(num_layers))
    if len(frequency) != num_layers:
        raise CommandError(f"--moe-layer-freq has {len(frequency)} values for --num-layers {num_layers}")
    return tuple(bool(value) for value in frequency)
