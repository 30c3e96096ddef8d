# SPDX-License-Identifier: Apache-2.0
"""Cases 14 to 18 of docs/cases.md: what breaks down, and what is accepted although it cannot work."""

from __future__ import annotations

import pytest
import torch
from case_runs import CHECKPOINT_FORMATS, arguments_of, different_ends, in_ranks, prepare
from harness import LAYOUTS, PRECISIONS, TINY
from shown_to_fail import Crash, fails_under
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import get_unsafe_globals_in_checkpoint

from megatron_dos.kernels import AdamScalars, cpu

# ---- 14: the first save ---------------------------------------------------------------------------------------------


@fails_under(groups_hold_class_objects="weights_only", empty_groups_have_no_step="differs between ranks")
def test_case_14_common_state(megatron, mutation):
    of_ranks = in_ranks(megatron, "common_state", 4, mutation)
    assert any(rank["an empty group"] for rank in of_ranks)
    for step in range(2):
        refused = of_ranks[0]["saved"][step]["refused"]
        assert not refused, f"weights_only=True refuses the common state: {refused}"
        texts = {rank["saved"][step]["text"] for rank in of_ranks}
        assert len(texts) == 1, f"the common state differs between ranks: {texts}"


@fails_under(states_hold_a_number=Crash("'int' object has no attribute"))
def test_case_14_a_save_at_step_1(megatron, mutation, tmp_path):
    for format, flags in CHECKPOINT_FORMATS.items():
        common = arguments_of("dp2", *flags)
        saved = megatron.train(common, 2, "dos", 1, save=tmp_path / format, prepare=prepare(mutation))
        loaded = megatron.train(common, 2, "dos", 0, load=tmp_path / format)
        assert not different_ends(loaded, saved), format
    # Megatron's own state holds objects: with weights_only, torch may refuse those, and none of ours.
    stock = [*TINY, *LAYOUTS["dp2"][1], *PRECISIONS["bf16"], "--ckpt-format", "torch"]
    megatron.train(stock, 2, "stock", 1, save=tmp_path / "stock")
    for file in sorted((tmp_path / "torch").rglob("*.pt")):
        of_stock = get_unsafe_globals_in_checkpoint(tmp_path / "stock" / file.relative_to(tmp_path / "torch"))
        ours_alone = set(get_unsafe_globals_in_checkpoint(file)) - set(of_stock)
        assert not ours_alone, f"weights_only=True refuses {file.name} for {ours_alone}"


# ---- 15: params kept in FP32 ----------------------------------------------------------------------------------------


@fails_under(
    new_params_are_staged_in_bf16="other than numpy",
    shards_go_to_torchs_constructor=Crash("non-leaf"),
    fp32_params_have_no_owner=Crash("KeyError"),
)
def test_case_15_fp32_params_among_bf16_ones(megatron, mutation, tmp_path):
    of_ranks = in_ranks(megatron, "params_kept_in_fp32", 2, mutation, folder=str(tmp_path))
    for outcome in of_ranks:
        assert not outcome["differences"], f"other than numpy's: {outcome['differences']}"
        assert set(outcome["dtypes"]) == {"torch.float32"}
        assert all(outcome["have more than bf16"])
        assert not outcome["loaded"]


# ---- 16 and 17: what cannot work together ---------------------------------------------------------------------------

DEEP = "--use-deep-optimizer-states"
REFUSED = {
    "--fp8-param-gather": ["--fp8-format", "hybrid", "--fp8-param-gather"],
    "--fp4-param-gather": ["--fp4-format", "e2m1", "--fp4-param-gather"],
    "--use-megatron-fsdp": ["--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params"],
    "--optimizer sgd": ["--optimizer", "sgd"],
    "--optimizer muon": ["--optimizer", "muon"],
    "--optimizer-cuda-graph": ["--optimizer-cuda-graph"],
    "--optimizer-cpu-offload": ["--optimizer-cpu-offload"],
    "--use-distributed-optimizer": [],
}
WITHOUT_DISTRIBUTED = [word for word in TINY if word != "--use-distributed-optimizer"]


@fails_under(nothing_is_refused="not refused by one clear error")
def test_case_16_unsupported_combinations(megatron, mutation):
    lines = {
        flag: [*(TINY if more else WITHOUT_DISTRIBUTED), *more, "--bf16", "--micro-batch-size", "2", DEEP]
        for flag, more in REFUSED.items()
    }
    lines["nothing else"] = [*TINY, "--bf16", DEEP]
    (outcome,) = in_ranks(megatron, "parse", 1, mutation, command_lines=lines)
    assert outcome.pop("nothing else") == "accepted"
    for flag, error in outcome.items():
        kind, _, message = error.partition(": ")
        clear = kind == "UnsupportedOptionError" and flag in message and DEEP in message and "\n" not in message
        assert clear, f"{flag} is not refused by one clear error: {error}"


@fails_under(nothing_is_refused="accepted and ignored")
def test_case_17_low_precision_states(megatron, mutation):
    lines = {
        f"{flag} {dtype}": [*TINY, "--bf16", flag, dtype, DEEP]
        for flag in ("--exp-avg-dtype", "--exp-avg-sq-dtype")
        for dtype in ("bf16", "fp16", "fp8")
    }
    lines["--main-params-dtype fp16"] = [*TINY, "--bf16", "--main-params-dtype", "fp16", DEEP]
    (parsed,) = in_ranks(megatron, "parse", 1, mutation, command_lines=lines)
    for flag, error in parsed.items():
        assert error.startswith("UnsupportedOptionError"), f"{flag} is accepted and ignored: {error}"
        assert flag in error


# ---- 18: operands the kernel cannot work on -------------------------------------------------------------------------


@fails_under(kernel_looks_at_addresses_only="DID NOT RAISE")
def test_case_18_operands_of_the_cpu_kernel():
    scalars = AdamScalars.at_step(1, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, decoupled=True)
    names = ("param", "exp_avg", "exp_avg_sq", "grad", "out")
    numel = 64
    with FakeTensorMode(allow_non_fake_inputs=True):
        on_a_gpu = torch.empty(numel, device="cuda")
    faults = {
        "non-contiguous": torch.zeros(2 * numel)[::2],
        "of two dimensions": torch.zeros(8, numel // 8),
        "of a wrong dtype": torch.zeros(numel, dtype=torch.int32),
        "misaligned": torch.frombuffer(bytearray(4 * numel + 4), dtype=torch.float32, count=numel, offset=2),
        "on a GPU": on_a_gpu,
    }
    for operand in faults.values():
        for name in names:
            given = {each: torch.zeros(numel) for each in names} | {name: operand}
            out = given.pop("out")
            with pytest.raises((TypeError, ValueError), match=rf"^{name}: "):
                cpu.adamw(**given, scalars=scalars, out=out)
