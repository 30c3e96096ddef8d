# SPDX-License-Identifier: Apache-2.0
"""Counts the parameters of real Megatron models, rank by rank, in one process: the other ranks are only pretended.

    python count_parameters.py '[[["--num-layers", "2", ...], 4], ...]'

prints, as JSON on the last line, two counts for each case (Megatron's arguments, number of ranks) and each rank:
parameters outside the experts, and those of the experts.
"""

from __future__ import annotations

import json
import os
import sys
import traceback

import torch
import torch.distributed as dist

from megatron_dos import cpu_emulation

cpu_emulation.activate()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer  # noqa: E402
from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

cpu_emulation.adapt_megatron()


def counts_of_rank(flags: list[str], rank: int, ranks: int) -> list[int]:
    os.environ.update(WORLD_SIZE=str(ranks), RANK=str(rank), LOCAL_RANK="0")
    given = [*flags, "--use-cpu-initialization"]
    sys.argv = ["count", *given, *cpu_emulation.missing_arguments(given)]
    args = parse_args()
    validate_args(args)
    build_tokenizer(args)  # which pads the vocabulary
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    chunks = args.virtual_pipeline_model_parallel_size
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=chunks,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        create_gloo_process_groups=False,  # only pretended groups can be made
    )
    config = core_transformer_config_from_args(args)
    counts = [0, 0]
    for chunk in range(chunks or 1):
        stage = chunk if chunks else None
        # No memory: only the shapes are wanted.
        with torch.device("meta"):
            model = GPTModel(
                config,
                get_gpt_decoder_block_spec(config, False, normalization=args.normalization, vp_stage=stage),
                args.padded_vocab_size,
                args.max_position_embeddings,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
                position_embedding_type=args.position_embedding_type,
                vp_stage=stage,
            )
        for name, parameter in model.named_parameters():
            counts[".experts." in name and ".shared_experts." not in name] += parameter.numel()
    return counts


def in_child(flags: list[str], rank: int, ranks: int) -> list[int]:
    """The counts, from a process of its own: torch makes pretended process groups once."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, json.dumps(counts_of_rank(flags, rank, ranks)).encode())
        except BaseException:
            traceback.print_exc()
        os._exit(0)  # without the clean-up of what never was
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    if not text:
        raise SystemExit(f"rank {rank} of {ranks} failed with {' '.join(flags)}")
    return json.loads(text)


if __name__ == "__main__":
    cases = json.loads(sys.argv[1])
    print(json.dumps([[in_child(flags, rank, ranks) for rank in range(ranks)] for flags, ranks in cases]))
