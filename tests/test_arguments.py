# SPDX-License-Identifier: Apache-2.0
"""The options, and the combinations that are refused, with Megatron's own parser and config classes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from types import SimpleNamespace

import megatron_trees
import pytest

from megatron_dos import arguments
from megatron_dos.arguments import add_arguments, validate_args, validate_config
from megatron_dos.options import refusals
from megatron_dos.options.options import DosOptions, UnsupportedOptionError, own_options
from megatron_dos.patching import on_disk as patching

FLAG = "--use-deep-optimizer-states"

REFUSED_ARGUMENTS = {
    "--use-megatron-fsdp": "--use-megatron-fsdp --ckpt-format fsdp_dtensor",
    "--use-torch-fsdp2": "--use-torch-fsdp2",
    "--freeze-all-layers": "--freeze-all-layers",
    "--optimizer sgd": "--optimizer sgd",
    "--optimizer muon": "--optimizer muon",
    "--optimizer dist_muon": "--optimizer dist_muon",
    "--optimizer adaptive_muon": "--optimizer adaptive_muon",
    "--optimizer lion": "--optimizer lion",
    "--optimizer soap": "--optimizer soap",
    "--optimizer-cpu-offload": "--optimizer-cpu-offload",
    "--optimizer-offload-fraction 0.5": "--optimizer-offload-fraction 0.5",
    "--use-torch-optimizer-for-cpu-offload": "--use-torch-optimizer-for-cpu-offload",
    "--overlap-cpu-optimizer-d2h-h2d": "--overlap-cpu-optimizer-d2h-h2d",
    "--no-pin-cpu-grads": "--no-pin-cpu-grads",
    "--no-pin-cpu-params": "--no-pin-cpu-params",
    "--use-precision-aware-optimizer": "--use-precision-aware-optimizer",
    "--main-params-dtype fp16": "--main-params-dtype fp16",
    "--main-grads-dtype bf16": "--main-grads-dtype bf16",
    "--exp-avg-dtype bf16": "--exp-avg-dtype bf16",
    "--exp-avg-dtype fp16": "--exp-avg-dtype fp16",
    "--exp-avg-dtype fp8": "--exp-avg-dtype fp8",
    "--exp-avg-sq-dtype bf16": "--exp-avg-sq-dtype bf16",
    "--exp-avg-sq-dtype fp16": "--exp-avg-sq-dtype fp16",
    "--exp-avg-sq-dtype fp8": "--exp-avg-sq-dtype fp8",
    "--fp8-param-gather": "--fp8-param-gather --fp8-format hybrid --fp8-recipe tensorwise",
    "--fp4-param-gather": "--fp4-param-gather --fp4-format e2m1",
    "--reuse-grad-buf-for-mxfp8-param-ag": "--reuse-grad-buf-for-mxfp8-param-ag --fp8-format e4m3 --fp8-recipe mxfp8",
    "--optimizer-cuda-graph": "--optimizer-cuda-graph",
    "--qk-clip": "--qk-clip",
    "--ckpt-convert-update-legacy-dist-opt-format": "--ckpt-convert-update-legacy-dist-opt-format",
    "--use-distributed-optimizer": "",
}
"""The flag that the message must name -> the command line that it is refused in."""

REFUSED_FIELDS = {
    "--use-megatron-fsdp": ("ddp", "use_megatron_fsdp", True),
    "--optimizer sgd": ("optimizer", "optimizer", "sgd"),
    "--optimizer muon": ("optimizer", "optimizer", "muon"),
    "--optimizer lion": ("optimizer", "optimizer", "lion"),
    "use_layer_wise_distributed_optimizer": ("optimizer", "use_layer_wise_distributed_optimizer", True),
    "--optimizer-cpu-offload": ("optimizer", "optimizer_cpu_offload", True),
    "--optimizer-offload-fraction 0.5": ("optimizer", "optimizer_offload_fraction", 0.5),
    "--use-torch-optimizer-for-cpu-offload": ("optimizer", "use_torch_optimizer_for_cpu_offload", True),
    "--overlap-cpu-optimizer-d2h-h2d": ("optimizer", "overlap_cpu_optimizer_d2h_h2d", True),
    "--no-pin-cpu-grads": ("optimizer", "pin_cpu_grads", False),
    "--no-pin-cpu-params": ("optimizer", "pin_cpu_params", False),
    "--use-precision-aware-optimizer": ("optimizer", "use_precision_aware_optimizer", True),
    "--main-params-dtype fp16": ("optimizer", "main_params_dtype", "torch.float16"),
    "--main-grads-dtype bf16": ("optimizer", "main_grads_dtype", "torch.bfloat16"),
    "--exp-avg-dtype bf16": ("optimizer", "exp_avg_dtype", "torch.bfloat16"),
    "--exp-avg-dtype fp8": ("optimizer", "exp_avg_dtype", "torch.uint8"),
    "--exp-avg-sq-dtype fp16": ("optimizer", "exp_avg_sq_dtype", "torch.float16"),
    "--fp8-param-gather": ("ddp", "fp8_param_gather", True),
    "--fp8-param-gather of the model": ("model", "fp8_param", True),
    "--fp4-param-gather": ("ddp", "fp4_param_gather", True),
    "--fp4-param-gather of the model": ("model", "fp4_param", True),
    "--reuse-grad-buf-for-mxfp8-param-ag": ("optimizer", "reuse_grad_buf_for_mxfp8_param_ag", True),
    "--optimizer-cuda-graph": ("optimizer", "optimizer_cuda_graph", True),
    "--qk-clip": ("model", "qk_clip", True),
    "--use-distributed-optimizer": ("optimizer", "use_distributed_optimizer", False),
    "--use-distributed-optimizer of DDP": ("ddp", "use_distributed_optimizer", False),
}
"""The flag that the message must name -> config object, field and value that are refused."""

EARLY_FLAG = "--dos-overlap-grad-d2h on"

REFUSED_EARLY = {
    "--overlap-grad-reduce": {"overlap_grad_reduce": False},
    "--num-distributed-optimizer-instances 2": {"num_distributed_optimizer_instances": 2},
    "--reduce-scatter-with-fp32-accumulation": {"reduce_scatter_with_fp32_accumulation": True},
    "--calculate-per-token-loss": {"calculate_per_token_loss": True},
    "--tensor-parallel-num-weight-shards": {"gtp_weight_remat_size": 2},
    "--expert-tensor-parallel-num-weight-shards": {"expert_gtp_weight_remat_size": 2},
    "--cuda-graph-impl full_iteration": {"cuda_graph_impl": "full_iteration"},
}
"""The flag that the message must name -> the arguments that --dos-overlap-grad-d2h on is refused with."""

ALL_OPTIONS = {
    "dos_subgroup_size": 7,
    "dos_cpu_threads": 1,
    "dos_gpu_share": 0.25,
    "dos_gpu_kernel": "torch",
    "dos_grad_transfer": "model",
}

ACCEPTED_ARGUMENTS = {
    "bf16": "--bf16",
    "fp16": "--fp16",
    "fp32": "",
    "bf16 grads": "--bf16 --grad-reduce-in-bf16",
    "fp8 compute": "--bf16 --fp8-format hybrid --transformer-impl transformer_engine",
    "params norm": "--bf16 --log-params-norm",
    "async save": "--bf16 --async-save --use-persistent-ckpt-worker --async-strategy mcore",
    "all options": "--bf16 --dos-subgroup-size 7 --dos-cpu-threads 1 --dos-gpu-share 0.25 --dos-gpu-kernel torch"
    " --dos-grad-transfer model",
    "full-iteration graph": "--bf16 --cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad",
    "RL offload": "--bf16 --perform-rl-step --rl-offload-optimizer-during-inference",
    "meta device": "--bf16 --init-model-with-meta-device",
    "offload fraction of nothing": "--bf16 --optimizer-offload-fraction 0",
    "gather in the step": "--bf16 --overlap-grad-reduce --overlap-param-gather --num-layers 8"
    " --overlap-param-gather-with-optimizer-step --ckpt-format torch --pipeline-model-parallel-size 2"
    " --num-layers-per-virtual-pipeline-stage 2",
}

MEGATRON = """
import json, os, sys
from types import SimpleNamespace
tree, parsed, fields = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
import megatron.training.arguments as arguments
assert arguments.__file__.startswith(tree), arguments.__file__
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.training.training import get_megatron_optimizer_config
from megatron_dos.arguments import DosOptions, validate_config

os.environ["WORLD_SIZE"] = "2"
BASE = '''--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
--micro-batch-size 1 --train-iters 2 --lr 1e-3 --transformer-impl local --no-gradient-accumulation-fusion
--no-persist-layer-norm --tokenizer-type NullTokenizer --vocab-size 100'''.split()

def outcome(call):
    try:
        return [type(None).__name__, call()]
    except Exception as error:
        return [type(error).__name__, str(error)]

def parse(line):
    sys.argv = ["pretrain_gpt.py", *BASE, *line.split()]
    args = arguments.parse_args()
    arguments.validate_args(args)
    config, _ = get_megatron_optimizer_config(args)
    return [getattr(config, name) for name in DosOptions.types()]

def check(owner, name, value):
    if isinstance(value, str) and value.startswith("torch."):
        value = getattr(torch, value.removeprefix("torch."))
    configs = {
        "optimizer": OptimizerConfig(use_deep_optimizer_states=True, use_distributed_optimizer=True),
        "ddp": DistributedDataParallelConfig(use_distributed_optimizer=True),
        "model": SimpleNamespace(qk_clip=False, fp8_param=False, fp4_param=False),
    }
    validate_config(*configs.values())
    setattr(configs[owner], name, value)
    chunk = SimpleNamespace(ddp_config=configs["ddp"], config=configs["model"])
    return [
        outcome(lambda: validate_config(*configs.values())),
        outcome(lambda: get_megatron_optimizer(configs["optimizer"], [chunk])),
    ]

answers = {k: outcome(lambda: parse(v)) for k, v in parsed.items()}, {k: check(*v) for k, v in fields.items()}
print()
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def patched_megatron(tmp_path_factory) -> tuple[dict, dict]:
    """What a patched Megatron made of all command lines and config objects of this file, in one process."""
    tree = megatron_trees.importable_tree(tmp_path_factory.mktemp("megatron"))
    patching.apply(tree)
    lines = {f"refused {key}": line for key, line in REFUSED_ARGUMENTS.items()}
    lines = {
        key: f"--bf16 {FLAG} {line}" + ("" if "--use-distributed" in key else " --use-distributed-optimizer")
        for key, line in lines.items()
    }
    for key, line in ACCEPTED_ARGUMENTS.items():
        lines[f"accepted {key}"] = f"{FLAG} --use-distributed-optimizer {line}"
    lines["off"] = "--bf16 --use-distributed-optimizer"
    lines["off, sgd"] = "--bf16 --optimizer sgd"
    lines["off, subgroups"] = "--bf16 --use-distributed-optimizer --dos-subgroup-size 7"
    lines["many"] = f"--bf16 {FLAG} --optimizer sgd --exp-avg-dtype bf16"
    lines["threads"] = f"--bf16 {FLAG} --use-distributed-optimizer --dos-cpu-threads 5000"
    code, arguments_of_child = MEGATRON, (str(tree), json.dumps(lines), json.dumps(REFUSED_FIELDS))
    return tuple(megatron_trees.results(code, *arguments_of_child, path=(tree,)))


class TestRefusedByMegatronsParser:
    @pytest.mark.parametrize("flag", REFUSED_ARGUMENTS)
    def test_message_names_both_flags_and_a_way_out(self, patched_megatron, flag):
        kind, message = patched_megatron[0][f"refused {flag}"]
        assert kind == "UnsupportedOptionError"
        lines = message.splitlines()
        assert len(lines) == 1, "one setting is one line"
        assert re.search(rf"{FLAG} (does not work with|needs) {re.escape(flag)}: ", message)
        assert re.search(rf"(Drop|Use|Add|For) .*, or drop {FLAG}\.$", message)

    def test_all_settings_are_named_at_once(self, patched_megatron):
        kind, message = patched_megatron[0]["many"]
        assert kind == "UnsupportedOptionError"
        assert [line.split(":")[0].split(" ", 1)[1] for line in message.splitlines()] == [
            "does not work with --optimizer sgd",
            "does not work with --exp-avg-dtype bf16",
            "needs --use-distributed-optimizer",
        ]

    def test_option_without_the_main_flag_is_not_ignored(self, patched_megatron):
        kind, message = patched_megatron[0]["off, subgroups"]
        assert kind == "UnsupportedOptionError"
        assert "--dos-subgroup-size 7" in message
        assert FLAG in message

    def test_more_threads_than_cores(self, patched_megatron):
        kind, message = patched_megatron[0]["threads"]
        assert kind == "UnsupportedOptionError"
        assert f"--dos-cpu-threads 5000 is more than the {arguments.allowed_cores()} CPU cores" in message

    @pytest.mark.parametrize("case", ACCEPTED_ARGUMENTS)
    def test_supported_combinations_pass_megatrons_own_validation(self, patched_megatron, case):
        given = {
            "all options": ALL_OPTIONS,
            "async save": {"async_save": True},
        }.get(case, {})
        expected = DosOptions(use_deep_optimizer_states=True, **given)
        assert patched_megatron[0][f"accepted {case}"] == ["NoneType", list(dataclasses.asdict(expected).values())]

    def test_flag_off_refuses_nothing(self, patched_megatron):
        defaults = list(dataclasses.asdict(DosOptions()).values())
        assert patched_megatron[0]["off"] == ["NoneType", defaults]
        assert patched_megatron[0]["off, sgd"] == ["NoneType", defaults]


class TestRefusedByTheConfigs:
    @pytest.mark.parametrize("flag", REFUSED_FIELDS)
    def test_message_names_flag_and_field(self, patched_megatron, flag):
        by_validate_config, by_get_megatron_optimizer = patched_megatron[1][flag]
        kind, message = by_validate_config
        assert kind == "UnsupportedOptionError"
        assert f" {flag.split(' of ')[0]} (" in message
        assert f".{REFUSED_FIELDS[flag][1]} = " in message
        assert f"or drop {FLAG}." in message
        assert by_get_megatron_optimizer == by_validate_config, "the patched constructor path checks the same"


class TestEveryRefusalIsTested:
    def test_each_row_of_the_table(self):
        tested = {flag.split(" ")[0] for flag in (*REFUSED_ARGUMENTS, *REFUSED_FIELDS)}
        assert {row.flag.split(" ")[0] for row in refusals.REFUSALS} == tested

    def test_each_field_of_the_table(self):
        """Fields that this Megatron's configs do not have are tested here: they come from raw arguments."""
        for row in refusals.REFUSALS:
            for name in row.fields:
                refused = next(value for value in (True, False, "sgd", "bf16", 0.5) if row.refused(value))
                args = SimpleNamespace(
                    use_deep_optimizer_states=True, **({"use_distributed_optimizer": True} | {name: refused})
                )
                with pytest.raises(UnsupportedOptionError, match=re.escape(row.flag.split(" ")[0])):
                    validate_args(args)


class TestOptions:
    def test_flags_types_defaults_and_help_come_from_the_fields(self):
        parser = add_arguments(argparse.ArgumentParser())
        (group,) = [g for g in parser._action_groups if g.title == "deep optimizer states"]
        assert [action.dest for action in group._group_actions] == [f.name for f in own_options()]
        for action, option in zip(group._group_actions, own_options(), strict=True):
            assert action.option_strings == ["--" + option.name.replace("_", "-")]
            assert action.default == option.default
            assert action.help % {} == arguments.field_docs()[option.name]
        assert DosOptions.from_args(parser.parse_args([])) == DosOptions()
        given = parser.parse_args([FLAG, "--dos-subgroup-size", "10", "--dos-cpu-threads", "1"])
        assert DosOptions.from_args(given) == DosOptions(
            use_deep_optimizer_states=True, dos_subgroup_size=10, dos_cpu_threads=1
        )
        assert FLAG in parser.format_help()

    def test_a_field_without_a_docstring_is_an_error(self, monkeypatch):
        source = "class DosOptions:\n    use_deep_optimizer_states: bool = False\n    dos_subgroup_size: int = 0\n"
        monkeypatch.setattr(arguments.inspect, "getsource", lambda _: source)
        with pytest.raises(TypeError, match="dos_subgroup_size"):
            arguments.field_docs.__wrapped__()

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("dos_subgroup_size", -1),
            ("dos_subgroup_size", 2**63),
            ("dos_subgroup_size", 1e6),
            ("dos_subgroup_size", "10"),
            ("dos_subgroup_size", None),
            ("dos_cpu_threads", -4),
            ("dos_cpu_threads", True),
            ("dos_cpu_threads", 10**9),
            ("dos_gpu_share", 1.5),
            ("dos_gpu_share", -0.5),
            ("dos_gpu_share", float("nan")),
            ("dos_gpu_share", "0.5"),
            ("dos_update_stride", -2),
            ("dos_update_stride", 0.5),
            ("dos_gpu_kernel", "cuda"),
            ("dos_gpu_kernel", None),
            ("dos_grad_transfer", "bf16"),
            ("use_deep_optimizer_states", 1),
            ("use_deep_optimizer_states", "yes"),
        ],
    )
    def test_absurd_values_are_refused_by_name(self, name, value):
        with pytest.raises(UnsupportedOptionError, match="--" + name.replace("_", "-")):
            DosOptions(**{name: value})
        with pytest.raises(UnsupportedOptionError, match="--" + name.replace("_", "-")):
            validate_args(SimpleNamespace(**{name: value}))
        with pytest.raises(UnsupportedOptionError, match="--" + name.replace("_", "-")):
            validate_config(SimpleNamespace(**{name: value}))

    def test_share_and_stride_exclude_one_another(self):
        with pytest.raises(UnsupportedOptionError, match=r"--dos-update-stride 2 and --dos-gpu-share 0.5"):
            DosOptions(dos_update_stride=2, dos_gpu_share=0.5)
        assert DosOptions(dos_update_stride=2).dos_gpu_share == -1

    def test_the_kernels_are_those_of_the_choice(self):
        from megatron_dos.kernels.device_kernel import NAMES

        (option,) = [f for f in dataclasses.fields(DosOptions) if f.name == "dos_gpu_kernel"]
        assert option.metadata["choices"] == NAMES

    def test_options_are_frozen_and_by_keyword(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            DosOptions().dos_cpu_threads = 1
        with pytest.raises(TypeError):
            DosOptions(True)

    def test_refusal_is_a_value_error(self):
        assert issubclass(UnsupportedOptionError, ValueError)


class TestOtherMegatronVersions:
    def test_absent_attributes_are_passed_over(self):
        validate_args(SimpleNamespace())
        validate_args(SimpleNamespace(use_deep_optimizer_states=True, use_distributed_optimizer=True))
        validate_config(SimpleNamespace(use_deep_optimizer_states=True, use_distributed_optimizer=True), None, None)

    def test_values_of_none_are_no_refusal(self):
        """Some versions leave an unset dtype None."""
        validate_args(
            SimpleNamespace(
                use_deep_optimizer_states=True,
                use_distributed_optimizer=True,
                exp_avg_dtype=None,
                pin_cpu_grads=None,
                optimizer_offload_fraction=None,
            )
        )

    def test_threads_within_the_affinity_mask_pass(self, monkeypatch):
        monkeypatch.setattr(arguments.os, "sched_getaffinity", lambda pid: {3, 5, 7})
        ours = {"use_deep_optimizer_states": True, "use_distributed_optimizer": True}
        validate_args(SimpleNamespace(**ours, dos_cpu_threads=3))
        with pytest.raises(UnsupportedOptionError, match="at most 3"):
            validate_args(SimpleNamespace(**ours, dos_cpu_threads=4))


def args_with(**more) -> SimpleNamespace:
    return SimpleNamespace(**{"use_deep_optimizer_states": True, "use_distributed_optimizer": True, **more})


class TestEarlyGrads:
    """--dos-overlap-grad-d2h."""

    @pytest.mark.parametrize("flag", REFUSED_EARLY)
    def test_asked_for_where_it_cannot_work_it_is_refused(self, flag):
        args = args_with(**{"overlap_grad_reduce": True, "dos_overlap_grad_d2h": "on", **REFUSED_EARLY[flag]})
        with pytest.raises(UnsupportedOptionError, match=f"^{EARLY_FLAG} .*{flag}.*or drop {EARLY_FLAG}"):
            validate_args(args)
        assert not refusals.can_send_grads_early(args)

    @pytest.mark.parametrize("flag", REFUSED_EARLY)
    def test_left_to_itself_it_refuses_nothing(self, flag):
        validate_args(args_with(**{"overlap_grad_reduce": True, **REFUSED_EARLY[flag]}))

    def test_it_works_with_overlapped_reductions(self):
        args = args_with(overlap_grad_reduce=True, dos_overlap_grad_d2h="on", num_distributed_optimizer_instances=1)
        validate_args(args)
        assert refusals.can_send_grads_early(args)

    def test_slots_without_it_are_refused(self):
        with pytest.raises(UnsupportedOptionError, match=r"--dos-early-grad-slots 2 .* --dos-overlap-grad-d2h off"):
            DosOptions(dos_early_grad_slots=2, dos_overlap_grad_d2h="off")


@pytest.mark.parametrize("share", [-1.0, 1.5, float("nan")])
def test_a_resident_share_lies_between_0_and_1(share):
    with pytest.raises(UnsupportedOptionError, match=r"--dos-resident-share .* give a number from 0 to 1"):
        DosOptions(dos_resident_share=share)
