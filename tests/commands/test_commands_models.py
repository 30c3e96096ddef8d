# SPDX-License-Identifier: Apache-2.0
"""Parameters of models: those of Megatron's own GPTModel to the unit, and what is read from Megatron's flags."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT

from megatron_dos.commands import CommandError
from megatron_dos.commands.launch_files import flags_of_file
from megatron_dos.commands.megatron_flags import read_job
from megatron_dos.commands.models import KNOWN_MODELS, Layout, Shape, stages, total_parameters

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 64 --seq-length 64 "
    "--micro-batch-size 1 --tokenizer-type NullTokenizer --vocab-size 500 --bf16"
)
LLAMA = (
    "--swiglu --disable-bias-linear --add-qkv-bias --normalization RMSNorm --untie-embeddings-and-output-weights "
    "--position-embedding-type rope --group-query-attention --num-query-groups 2 --kv-channels 24 --qk-layernorm"
)
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 48 --moe-layer-freq ([0]*1+[1]*3)"
REAL = {
    "gpt": ("", 1),
    "gpt-tp2": ("--tensor-model-parallel-size 2", 2),
    "gpt-pp2-tied": ("--pipeline-model-parallel-size 2", 2),
    "swiglu-default-size": (
        "--swiglu --ffn-hidden-size 128 --normalization RMSNorm --make-vocab-size-divisible-by 7",
        1,
    ),
    "llama-pp2": (f"--pipeline-model-parallel-size 2 {LLAMA}", 2),
    "llama-tp4-of-2-groups": (f"--tensor-model-parallel-size 4 {LLAMA}", 4),
    "uneven-stages": ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1", 2),
    "embedding-and-loss-as-layers": (
        "--num-layers 6 --pipeline-model-parallel-size 4 --account-for-embedding-in-pipeline-split "
        "--account-for-loss-in-pipeline-split",
        4,
    ),
    "experts-ep2": (f"--expert-model-parallel-size 2 {EXPERTS}", 2),
    "experts-vpp2-ep2": (
        f"--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 {EXPERTS} --disable-bias-linear "
        "--swiglu --expert-model-parallel-size 2 --moe-shared-expert-intermediate-size 32 --moe-shared-expert-gate",
        4,
    ),
    "experts-tp2-etp1": (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-experts 2 --sequence-parallel "
        "--expert-tensor-parallel-size 1 --moe-layer-freq 2",
        4,
    ),
}


@pytest.fixture(scope="module")
def real_counts() -> dict[str, list[list[int]]]:
    """What Megatron builds: for each case and rank, parameters outside the experts and of the experts."""
    cases = [(shlex.split(f"{SMALL} {flags}"), ranks) for flags, ranks in REAL.values()]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "tests" / "helpers" / "count_parameters.py"), json.dumps(cases)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(REAL, json.loads(done.stdout.splitlines()[-1]), strict=True))


def job_of(flags: str, tmp_path: Path, *overrides: str):
    path = tmp_path / "job.txt"
    path.write_text(" ".join(map(shlex.quote, shlex.split(flags))))
    return read_job(str(path), overrides)


@pytest.mark.parametrize("case", REAL)
def test_every_rank_has_the_parameters_of_megatrons_own_model(case, real_counts, tmp_path):
    flags, ranks = REAL[case]
    job = job_of(f"{SMALL} {flags}", tmp_path, "--gpus", str(ranks))
    found = stages(job.shape, job.layout)
    expected = [[stage.dense, stage.experts] for stage in found for _ in range(ranks // len(found))]
    assert real_counts[case] == expected


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        # As the published system counts: 5.949e9, 9.143e9, 9.919e9, 11.316e9, 15.327e9.
        ("7b", 5_948_837_888),
        ("8.3b", 9_142_717_440),
        ("10b", 9_918_500_864),
        ("13b", 11_315_860_480),
        ("20b", 15_326_663_680),
        # As their model cards count.
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
        ("Llama3-8B", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("mistral-7b", 7_241_732_096),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-72b", 72_706_203_648),
        ("qwen3-8b", 8_190_735_360),
        ("gpt2-1.5b", 1_557_611_200 + 47 * 1600),  # and 47 rows that pad the vocabulary
        ("gpt3-6.7b", 6_658_596_864),
        ("gpt3-175b", 174_604_836_864),
    ],
)
def test_known_models_have_as_many_parameters_as_their_makers_say(model, parameters):
    assert total_parameters(read_job(model, []).shape) == parameters


def test_every_known_model_has_a_source_and_a_count():
    for name, model in KNOWN_MODELS.items():
        assert model.source
        assert total_parameters(read_job(name, []).shape) > 1e9


def test_owned_parameters_are_those_of_the_optimizers_shards():
    shape = read_job("mixtral-8x7b", []).shape
    (stage,) = stages(shape, Layout(gpus=8, expert=4))
    assert stage.experts == 45_097_156_608 // 4
    assert stage.owned == 1_605_636_096 // 8 + 45_097_156_608 // 4 // 2
    whole = stages(shape, Layout(gpus=16, tensor=2, pipeline=2, expert=2, expert_tensor=2))
    assert [s.owned for s in whole] == [-(-s.dense // 4) + -(-s.experts // 2) for s in whole]
    (instances,) = stages(shape, Layout(gpus=8, optimizer_instances=2))
    assert instances.owned == 1_605_636_096 // 4 + 45_097_156_608 // 4


class TestFiles:
    SCRIPT = """#!/bin/bash
# --num-layers 99 is only a comment
HIDDEN=2048
export LAYERS=${LAYERS:-24}
GPT_MODEL_ARGS=(
    --num-layers $LAYERS   # layers
    --hidden-size "${HIDDEN}" \\
    --num-attention-heads 16
)
DATA_ARGS="--vocab-size 32000 --seq-length ${SEQ:-4096} \\
    --data-path $1"
torchrun --nproc_per_node 8 pretrain_gpt.py ${GPT_MODEL_ARGS[@]} $DATA_ARGS --bf16 --swiglu \\
    --position-embedding-type rope --lr 1e-4 --micro-batch-size=2 > log.txt 2>&1
"""

    def test_shell_script_is_read_without_being_run(self, tmp_path):
        path = tmp_path / "train.sh"
        path.write_text(self.SCRIPT)
        job = read_job(str(path), ["--gpus", "8"])
        shape = job.shape
        assert (shape.num_layers, shape.hidden_size, shape.num_attention_heads) == (24, 2048, 16)
        assert (shape.padded_vocab_size, shape.gated, shape.ffn_hidden_size) == (32000, True, 5440)
        assert (job.training.sequence, job.training.micro_batch) == (4096, 2)
        (note,) = [note for note in job.notes if note.startswith("not used by this estimate: ")]
        assert "--nproc_per_node" in note
        assert "--lr" in note
        assert "--num-layers" not in note

    def test_windows_line_ends_and_plain_text(self, tmp_path):
        path = tmp_path / "args"
        path.write_bytes(f"{SMALL}\r\n--tensor-model-parallel-size 2\r\n".encode())
        assert read_job(str(path), ["--gpus", "2"]).layout.tensor == 2

    @pytest.mark.parametrize(
        "text",
        [
            "MODEL_ARGS:\n  --num-layers: 4\n  --hidden-size: 64\n  --num-attention-heads: 4\n  --swiglu: true\n"
            "  --vocab-size: 500\n  --bf16: true\n  --fp16: false\n  --position-embedding-type: rope\n"
            "  --disable-bias-linear: true\n  --moe-layer-freq: ([0]*1+[1]*3)\n  --num-experts: 2\n",
            "language_model:\n  num_layers: 4\n  hidden_size: 64\n  num_attention_heads: 4\n  gated_linear_unit: true\n"
            "  add_bias_linear: false\n  num_moe_experts: 2\n  moe_layer_freq: '[0, 1, 1, 1]'\nvocab_size: 500\n"
            "bf16: true\nposition_embedding_type: rope\nload: null\n",
        ],
    )
    def test_yaml_with_flags_or_with_config_names(self, text, tmp_path):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        shape = read_job(str(path), []).shape
        assert (shape.num_layers, shape.hidden_size, shape.gated, shape.linear_bias) == (4, 64, True, False)
        assert shape.moe_layers == (False, True, True, True)

    def test_command_line_counts_more_than_the_file(self, tmp_path):
        job = job_of(SMALL, tmp_path, "--num-layers", "8", "--tensor-parallel", "2", "--gpus", "4")
        assert (job.shape.num_layers, job.layout.tensor, job.layout.data) == (8, 2, 2)

    def test_flag_with_two_values_is_noted(self, tmp_path):
        job = job_of(f"{SMALL} --num-layers 8", tmp_path)
        assert job.shape.num_layers == 8
        assert "given more than once, so the last one applies: --num-layers" in job.notes

    def test_fp16_on_the_command_line_replaces_the_bf16_of_a_known_model(self):
        assert read_job("13b", ["--fp16"]).training.grad_bytes == 2
        assert read_job("13b", []).training.grad_bytes == 4

    def test_unknown_flag_on_the_command_line_is_refused(self):
        with pytest.raises(CommandError, match="--tensor-paralel 2: not a flag"):
            read_job("13b", ["--tensor-paralel", "2"])

    def test_words_keep_their_order(self, tmp_path):
        path = tmp_path / "args.txt"
        path.write_text("A=1\n--num-layers $A --num-layers 2 --name 'a b'")
        assert flags_of_file(path) == ["--num-layers", "1", "--num-layers", "2", "--name", "a b"]


class TestMegatronsDefaults:
    def test_grads_are_kept_as_megatron_keeps_them(self, tmp_path):
        for flags, size in (
            ("--bf16", 4),
            ("--bf16 --grad-reduce-in-bf16", 2),
            ("--fp16", 2),
            ("--fp16 --accumulate-allreduce-grads-in-fp32", 4),
        ):
            job = job_of(f"{SMALL.removesuffix('--bf16')} {flags}", tmp_path)
            assert job.training.grad_bytes == size

    def test_group_query_attention_without_groups_has_one(self, tmp_path):
        assert job_of(f"{SMALL} --group-query-attention", tmp_path).shape.num_query_groups == 1
        assert job_of(f"{SMALL} --num-query-groups 2", tmp_path).shape.num_query_groups == 4

    def test_micro_batches_follow_from_the_global_batch(self, tmp_path):
        job = job_of(f"{SMALL} --global-batch-size 32", tmp_path, "--gpus", "4")
        assert job.training.micro_batches == 8


@pytest.mark.parametrize(
    ("flags", "overrides", "message"),
    [
        ("--hidden-size 64 --bf16", "", "--num-layers, --num-attention-heads, --vocab-size, --max-position-emb"),
        (SMALL, "--num-layers 0", "--num-layers: 0 is out of range: give 1 to 10000"),
        (SMALL, "--hidden-size 99999999", "--hidden-size: 99999999 is out of range"),
        (SMALL, "--num-layers many", "'many' is not a whole number"),
        (
            SMALL,
            "--gpus 3 --tensor-parallel 2",
            "--gpus 3 cannot be divided by tensor x pipeline x context parallel size 2",
        ),
        (
            SMALL,
            "--gpus 3 --pipeline-parallel 3",
            "--num-layers 4 cannot be divided by --pipeline-model-parallel-size 3",
        ),
        (SMALL, "--gpus 3 --tensor-parallel 3", "--num-attention-heads 4 cannot be divided by --tensor-model"),
        (SMALL, "--num-attention-heads 5", "cannot be divided by --num-attention-heads 5, and there is no --kv-ch"),
        (SMALL, "--gpus 2 --expert-parallel 2", "--expert-model-parallel-size 2 needs --num-experts"),
        (f"{SMALL} --num-experts 3", "--gpus 2 --expert-parallel 2", "--num-experts 3 cannot be divided by"),
        (f"{SMALL} --num-experts 2 --moe-layer-freq '[1,0]'", "", "--moe-layer-freq has 2 values for --num-layers 4"),
        (f"{SMALL} --moe-layer-freq '__import__(\"os\")'", "", "neither a positive number nor a list of 0 and 1"),
        (f"{SMALL} --moe-layer-freq '[1]*99999999'", "", "neither a positive number nor a list of 0 and 1"),
        (f"{SMALL} --multi-latent-attention", "", "--multi-latent-attention: parameters of such models are not"),
        (f"{SMALL} --mtp-num-layers 1", "", "--mtp-num-layers: parameters of such models are not counted here"),
        (f"{SMALL} --fp16", "", "--bf16 and --fp16 exclude each other"),
        (SMALL, "--global-batch-size 3 --gpus 2", "--global-batch-size 3 cannot be divided by micro-batch size 1 x 2"),
        (SMALL, "--pipeline-parallel 2 --gpus 2 --decoder-first-pipeline-num-layers 5", "do not fill"),
    ],
)
def test_impossible_flags_are_one_clear_error(flags, overrides, message, tmp_path):
    def plan():
        job = job_of(flags, tmp_path, *shlex.split(overrides))
        return stages(job.shape, job.layout)

    with pytest.raises(CommandError) as error:
        plan()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_unknown_model_names_the_known_ones():
    with pytest.raises(CommandError, match=r"--model 14b is neither a file nor a known model. Known are: 7b, 8.3b"):
        read_job("14b", [])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.yaml", "- 1\n", "holds no mapping"),
        ("a.yaml", "a: [", "is not YAML"),
        ("a.yaml", "a: " + "[" * 5000, "is nested too deeply"),
        ("a.yaml", "a: &self {b: *self}", "holds a mapping that holds itself"),
        ("a.sh", "echo 'open", "cannot be taken apart"),
        ("a.sh", b"\xff\xfe", "cannot be read"),
    ],
)
def test_unreadable_file_is_one_clear_error(name, content, message, tmp_path):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CommandError, match=message) as error:
        read_job(str(path), [])
    assert "\n" not in str(error.value)


def test_missing_yaml_library_is_named_with_the_way_out(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "yaml", None)
    path = tmp_path / "a.yaml"
    path.write_text("num_layers: 2")
    with pytest.raises(CommandError, match="pip install pyyaml"):
        read_job(str(path), [])


def test_shape_of_one_layer_by_hand():
    shape = Shape(
        num_layers=1,
        hidden_size=8,
        ffn_hidden_size=32,
        num_attention_heads=2,
        num_query_groups=2,
        kv_channels=4,
        padded_vocab_size=16,
        max_position_embeddings=4,
    )
    attention = 8 * 24 + 24 + 8 * 8 + 8
    mlp = 8 * 32 + 32 + 32 * 8 + 8
    assert total_parameters(shape) == 16 * 8 + 4 * 8 + attention + mlp + 3 * 16
