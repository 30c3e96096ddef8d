# SPDX-License-Identifier: Apache-2.0
"""Pretrain a GPT with Megatron, from pip's megatron-core package alone.

    torchrun --nproc-per-node 8 scripts/pretrain_gpt.py --num-layers 12 ... --use-deep-optimizer-states

pip's megatron-core carries megatron/training, but not Megatron-LM's pretrain_gpt.py; this script stands in for it. It
takes the same arguments and trains the same model on the same data in the same order, to the last bit; options beyond
plain GPT pretraining (listed in `refuse_unsupported`) are refused. Deep optimizer states come with the Megatron tree
if that is patched, and are hooked in otherwise.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import torch

try:  # a patched tree, or a run with Megatron's own optimizer, works without the package
    import megatron_dos
except ModuleNotFoundError:
    pass
else:
    megatron_dos.install()

from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args, get_timers, pretrain, print_rank_0
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

BATCH_FIELDS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
# A loss this many times the largest seen is reported, where --check-for-spiky-loss asks for it.
SPIKE = 10


def refuse_unsupported(args: Any) -> None:
    """Raise ValueError for Megatron options that this script would otherwise ignore."""
    unsupported = {
        "--sft": args.sft,
        "--fim-data": args.fim_data,
        "--mtp-num-layers": args.mtp_num_layers is not None,
        "--hybrid-context-parallel": args.hybrid_context_parallel,
        "--dataloader-inter-document-masking": args.dataloader_inter_document_masking,
        "--overlap-moe-expert-parallel-comm": args.overlap_moe_expert_parallel_comm,
        "--logits-load-dir": args.logits_load_dir is not None,
        "--inprocess-restart": args.inprocess_restart,
    }
    given = [flag for flag, is_given in unsupported.items() if is_given]
    if given:
        raise ValueError(f"{', '.join(given)}: not in this script, use pretrain_gpt.py of a Megatron-LM checkout")


# ---- Data -----------------------------------------------------------------------------------------------------------


def dataset_config(args: Any) -> GPTDatasetConfig:
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences_per_dataset = None
    if args.per_dataset_sequences_path is not None:
        with open(args.per_dataset_sequences_path) as file:
            sequences_per_dataset = json.load(file)
    return GPTDatasetConfig(
        tokenizer=build_tokenizer(args),
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        sequences_per_dataset=sequences_per_dataset,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        # What a sample holds
        create_attention_mask=args.create_attention_mask_in_dataloader,
        reset_attention_mask=args.reset_attention_mask,
        reset_position_ids=args.reset_position_ids,
        eod_mask_loss=args.eod_mask_loss,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        # How files are read
        mmap_bin_files=args.mmap_bin_files,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        object_storage_cache_path=args.object_storage_cache_path,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        # Who shares a sequence
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size if args.sequence_parallel else 0,
    )


def build_datasets(samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """The train, validation and test datasets, for the ranks that read data; `samples` says how many of each."""
    args = get_args()

    def reads_data() -> bool:
        return mpu.get_tensor_model_parallel_rank() == 0 and is_first_or_last_pipeline_stage(vp_stage)

    dataset = MockGPTDataset if args.mock_data else GPTDataset
    print_rank_0(f"> building the datasets ({dataset.__name__}) ...")
    return BlendedMegatronDatasetBuilder(dataset, samples, reads_data, dataset_config(args)).build()


build_datasets.is_distributed = True  # Megatron then asks every rank, and `reads_data` decides


def next_batch(data_iterator: Any, vp_stage: int | None) -> dict[str, torch.Tensor | None]:
    """This rank's share of the next micro-batch, by BATCH_FIELDS; None where the pipeline stage needs none."""
    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(BATCH_FIELDS)
    args = get_args()
    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch: dict[str, torch.Tensor | None] = {}
    if tp_rank == 0:
        sample = next(data_iterator)
        for field in BATCH_FIELDS:
            value = sample.get(field)
            batch[field] = None if value is None else value.cuda(non_blocking=True)
    batch = get_batch_on_this_tp_rank(
        batch,
        tp_rank=tp_rank,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())


# ---- Forward --------------------------------------------------------------------------------------------------------


def check_loss(loss: torch.Tensor, args: Any) -> None:
    """Megatron's guards: stop on NaN or infinity, report a spike, each as the arguments ask."""
    rerun = get_rerun_state_machine()
    # The forward pass is deterministic, so a rerun must give the very same loss.
    validate = partial(rerun.validate_result, result=loss, tolerance=0.0)
    if args.check_for_nan_in_loss_and_grad:
        validate(rejection_func=torch.isnan, message="found NaN in local forward loss calculation", fatal=True)
        validate(rejection_func=torch.isinf, message="found Inf in local forward loss calculation", fatal=True)
    if args.check_for_spiky_loss:
        is_spike = partial(rerun.is_unexpectedly_large, threshold=SPIKE, context="loss")
        validate(rejection_func=is_spike, message="Spiky loss", fatal=False)


def masked_loss(loss_mask: torch.Tensor, token_losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """(sum of the losses that count, how many they are, both again to be reported)."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(token_losses.view(-1).float() * mask)
    tokens = mask.sum().detach().to(torch.int)
    check_loss(loss, get_args())
    report = torch.stack([loss.detach(), tokens.to(loss.dtype)])
    return loss, tokens, {"lm loss": report}


def forward_step(data_iterator: Any, model: torch.nn.Module) -> tuple[torch.Tensor, partial]:
    """One micro-batch forward: the model's output and the function that makes a loss of it."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = next_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(masked_loss, batch["loss_mask"])


def embedding_ranks(pipeline_ranks: list[int]) -> list[int]:
    """The ranks of a pipeline that hold word embeddings: the last one too, where it shares the first one's."""
    last = [] if get_args().untie_embeddings_and_output_weights else pipeline_ranks[-1:]
    return sorted({pipeline_ranks[0], *last})


def main() -> None:
    """Parse the command line and train."""
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    refuse_unsupported(args)
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, build_datasets, ModelType.encoder_or_decoder, forward_step, get_embedding_ranks=embedding_ranks)


if __name__ == "__main__":
    main()
