# SPDX-License-Identifier: Apache-2.0
"""Where a subgroup is updated never shows: share, order of operations and way of the grads leave every bit alone."""

import pytest
from harness import LAYOUTS, PRECISIONS, TINY, assert_same_bits, differences

SMALL_SUBGROUPS = ["--dos-subgroup-size", "3000"]
OVERLAP = ["--overlap-grad-reduce", "--ddp-bucket-size", "30000"]
OVERLAPPING = {
    "overlap-buckets": LAYOUTS["overlap-buckets"],
    "tp2-sequence-parallel": (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel", *OVERLAP]),
    "pp2-tied": (2, ["--pipeline-model-parallel-size", "2", *OVERLAP]),
    "ep2": (2, ["--num-experts", "2", "--expert-model-parallel-size", "2", *OVERLAP]),
}
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


@pytest.mark.parametrize(
    ("layout", "precision"),
    [(layout, "bf16") for layout in OVERLAPPING]
    + [("overlap-buckets", "bf16-bf16-grads"), ("tp2-sequence-parallel", "fp16")],
)
def test_grads_that_are_sent_in_the_backward_pass(megatron, layout, precision):
    """Also where Megatron sums grads once more after their reduction: of norms and of tied embeddings."""
    ranks, arguments = OVERLAPPING[layout]
    arguments = TINY + arguments + PRECISIONS[precision] + SMALL_SUBGROUPS
    run = megatron.train(
        [*arguments, "--dos-overlap-grad-d2h", "on", "--dos-early-grad-slots", "1000", "--dos-gpu-share", "0.4"],
        ranks,
        "dos",
        STEPS,
        inspect="hooks:sent_early",
        prepare="hooks:use_adversarial_device",
    )
    assert_same_bits(run, megatron.train(arguments, ranks, "dos", STEPS))
    for rank in run.of_rank:
        first, *steps = [step for step in rank.inspected["step"] if step is not None]
        # In the first step Megatron may change grads after their reduction, see `EarlyGrads`. In fp16 it is skipped.
        assert precision == "fp16" or first["early"] == 0 < first["on_host"]
        assert steps
        assert all(step["early"] == step["on_host"] > 0 for step in steps)
        assert any(step["sent_again"] for step in steps)
        assert all(step["sent_again"] == step["may_change"] for step in steps)


@pytest.mark.parametrize("mutation", [False, True], ids=["as it is", "scaling goes unseen"])
def test_early_grads_that_megatron_scales_after_the_backward_pass(megatron, mutation):
    """`--calculate-per-token-loss` refuses early grads, as all are sent twice; here it is let through."""
    ranks, arguments = OVERLAPPING["overlap-buckets"]
    arguments = [*TINY, *arguments, *PRECISIONS["bf16"], "--calculate-per-token-loss"]
    early = [*SMALL_SUBGROUPS, "--dos-overlap-grad-d2h", "on", "--dos-early-grad-slots", "1000"]
    hooks = ["hooks:let_grads_be_scaled", "hooks:use_adversarial_device"]
    if mutation:
        hooks.append("hooks:do_not_look_at_buffers")
    run = megatron.train([*arguments, *early], ranks, "dos", STEPS, inspect="hooks:sent_early", prepare=hooks)
    expected = megatron.train(arguments, ranks, "numpy", STEPS)
    if mutation:
        assert differences(run, expected)
        return
    assert_same_bits(run, expected)
    for rank in run.of_rank:
        _, *steps = [step for step in rank.inspected["step"] if step is not None]
        assert all(step["early"] == step["on_host"] == step["sent_again"] > 0 for step in steps)


def test_early_grads_leave_skipped_steps_alone(megatron):
    """A loss scale that overflows at first: the same steps are skipped, and nothing of their grads is used."""
    ranks, arguments = OVERLAPPING["overlap-buckets"]
    arguments = [*TINY, *arguments, "--fp16", "--initial-loss-scale", str(2.0**40), "--hysteresis", "1"]
    arguments += SMALL_SUBGROUPS
    run = megatron.train(
        [*arguments, "--dos-overlap-grad-d2h", "on", "--dos-gpu-share", "0.4"],
        ranks,
        "dos",
        40,
        prepare="hooks:use_adversarial_device",
    )
    assert_same_bits(run, megatron.train(arguments, ranks, "dos", 40))


@pytest.mark.parametrize("share", ["0.3", "1"])
@pytest.mark.parametrize("layout", ["dp2", "overlap-buckets"])
def test_resident_states(megatron, layout, share):
    run = train(
        megatron,
        layout,
        "fp16",
        *["--dos-resident-share", share, "--dos-gpu-share", "0.5"],
        prepare="hooks:use_adversarial_device",
    )
    assert_same_bits(run, train(megatron, layout, "fp16"))


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


def test_slots_for_early_grads_are_not_ignored_in_silence(megatron):
    run = train(megatron, "dp2", "bf16", "--dos-early-grad-slots", "3")
    assert "--dos-early-grad-slots 3 has no effect: no grads can be sent in the backward pass" in run.log()
