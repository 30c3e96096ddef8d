"""Where a subgroup is updated never shows: share, order of operations and way of the grads leave every bit alone."""

import pytest
from harness import LAYOUTS, PRECISIONS, TINY, assert_same_bits

SMALL_SUBGROUPS = ["--dos-subgroup-size", "3000"]
STEPS = 10


def train(megatron, layout, precision, *more, **settings):
    ranks, arguments = LAYOUTS[layout]
    return megatron.train(
        TINY + arguments + PRECISIONS[precision] + SMALL_SUBGROUPS + list(more), ranks, "dos", STEPS, **settings
    )


@pytest.mark.parametrize("share", ["0", "0.3", "0.5", "1"])
@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2", "overlap-buckets"])
def test_the_device_program_in_random_orders_gives_the_inline_result(megatron, layout, share):
    inline = train(megatron, layout, "bf16")
    adversarial = train(megatron, layout, "bf16", "--dos-gpu-share", share, prepare="hooks:use_adversarial_device")
    assert_same_bits(adversarial, inline)


@pytest.mark.parametrize("precision", ["fp16", "bf16-bf16-grads", "fp32"])
@pytest.mark.parametrize("transfer", ["fp32", "model"])
def test_the_way_of_the_grads_does_not_show(megatron, precision, transfer):
    inline = train(megatron, "dp2", precision)
    other = train(
        megatron,
        "dp2",
        precision,
        *["--dos-gpu-share", "0.4", "--dos-grad-transfer", transfer],
        prepare="hooks:use_adversarial_device",
    )
    assert_same_bits(other, inline)


@pytest.mark.parametrize("share", ["0", "0.37", "1"])
def test_placement_invariance(megatron, share):
    assert_same_bits(train(megatron, "dp2", "bf16", "--dos-gpu-share", share), train(megatron, "dp2", "bf16"))


def test_the_published_stride(megatron):
    assert_same_bits(train(megatron, "dp2", "bf16", "--dos-update-stride", "2"), train(megatron, "dp2", "bf16"))


def test_the_share_may_change_between_steps(megatron):
    changing = train(megatron, "dp2", "fp16", inspect="hooks:change_share", prepare="hooks:use_adversarial_device")
    assert_same_bits(changing, train(megatron, "dp2", "fp16"))


@pytest.mark.parametrize("precision", ["bf16", "bf16-bf16-grads"])
@pytest.mark.parametrize("moe", [[], ["--num-experts", "2", "--expert-model-parallel-size", "2"]], ids=["dense", "moe"])
def test_every_param_gather_starts_within_the_step(megatron, precision, moe):
    run = train(
        megatron,
        "overlap-buckets",
        precision,
        *moe,
        *["--dos-gpu-share", "0.5"],
        inspect="hooks:gathers_in_flight",
        prepare="hooks:use_adversarial_device",
    )
    for rank in run.of_rank:
        for after_step in rank.inspected["step"]:
            assert after_step["buckets"] > 2
            assert all(after_step["started"])
    ranks, arguments = LAYOUTS["overlap-buckets"]
    assert_same_bits(run, megatron.train(TINY + arguments + PRECISIONS[precision] + moe, ranks, "numpy", STEPS))
