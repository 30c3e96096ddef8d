# SPDX-License-Identifier: Apache-2.0
"""Settings of Megatron that cannot work with this optimizer: one table, each row with its reason and a remedy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["EARLY_FLAG", "EARLY_GRADS_REFUSALS", "REFUSALS", "can_send_grads_early", "complaints"]


EARLY_FLAG = "--dos-overlap-grad-d2h on"
_MISSING = object()


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
    return not complaints(EARLY_GRADS_REFUSALS, EARLY_FLAG, sources, are_configs=True)


def complaints(rows: Sequence[_Refusal], subject: str, sources: Sequence[Any], are_configs: bool) -> list[str]:
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
