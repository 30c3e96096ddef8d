# SPDX-License-Identifier: Apache-2.0
"""Life of a training with deep optimizer states beyond the losses: loads, saves, steps with chosen grads."""

import os

import pytest
from harness import LAYOUTS, PRECISIONS, TINY, Result, assert_same_bits, same_bits

from megatron_dos.words import plural

BF16 = PRECISIONS["bf16"]
SMALL_SUBGROUPS = ["--dos-subgroup-size", "3000"]


def arguments(layout, precision="bf16"):
    return TINY + LAYOUTS[layout][1] + PRECISIONS[precision]


@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_case_01_a_step_with_zero_grads_and_no_decay_changes_no_bit(megatron, layout):
    run = megatron.train(arguments(layout) + SMALL_SUBGROUPS, 2, "dos", 1, inspect="hooks:quiet_step")
    for rank in run.of_rank:
        (outcome,) = rank.inspected["start"]
        assert outcome["compared"] > 10
        assert outcome["changed"] == []


@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_case_11_a_constant_grad_moves_every_element(megatron, layout):
    run = megatron.train(arguments(layout) + SMALL_SUBGROUPS, 2, "dos", 1, inspect="hooks:constant_step")
    assert_all_moved_alike(run)


def test_case_08_all_experts_train_on_every_replica(megatron):
    layout = ["--global-batch-size", "8", "--num-experts", "2", "--expert-model-parallel-size", "2"]
    run = megatron.train(TINY + layout + BF16 + SMALL_SUBGROUPS, 4, "dos", 1, inspect="hooks:constant_step")
    assert_all_moved_alike(run)
    names = set().union(*(rank.inspected["start"][0]["sizes"] for rank in run.of_rank))
    assert any("expert" in name for name in names)
    # Expert parallelism of 2 over 4 ranks: ranks 0 and 2 hold the same experts, 1 and 3 the others.
    for one, other in ((0, 2), (1, 3)):
        weights = [run.of_rank[rank].inspected["start"][0]["weights"] for rank in (one, other)]
        assert all(same_bits(weight, weights[1][name]) for name, weight in weights[0].items())


def assert_all_moved_alike(run: Result) -> None:
    """Every element of every param moved, by the same amount, on the rank that owns it; and all are owned."""
    owned: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for rank in run.of_rank:
        (outcome,) = rank.inspected["start"]
        sizes.update(outcome["sizes"])
        for name, (low, high, numel) in outcome["moved"].items():
            assert low > 0.99e-3, f"{name}: an element moved by {low}"
            assert high < 1.01e-3, f"{name}: an element moved by {high}"
            owned[name] = owned.get(name, 0) + numel
    for name, size in sizes.items():
        assert owned.get(name, 0) % size == 0, f"{name}: {owned.get(name, 0)} elements owned of {size}"
        assert owned.get(name, 0) > 0, f"{name} is owned by no rank"


@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2", "ep2"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_resume_from_a_torch_dist_checkpoint_is_exact(megatron, tmp_path, layout, precision):
    ranks = LAYOUTS[layout][0]
    common = arguments(layout, precision) + SMALL_SUBGROUPS
    megatron.train(common, ranks, "dos", 6, save=tmp_path)
    unbroken = megatron.train(common, ranks, "dos", 10)
    resumed = megatron.train(common, ranks, "dos", 10, load=tmp_path)
    assert [one.iteration for one in resumed.of_rank[0].iterations] == [7, 8, 9, 10]
    assert_same_end(resumed, unbroken)
    assert resumed.losses == unbroken.losses[6:]


def assert_same_end(run: Result, reference: Result) -> None:
    """Weights, states and step are equal to the bit at the end."""
    for mine, theirs in zip(run.of_rank, reference.of_rank, strict=True):
        assert mine.weights.keys() == theirs.weights.keys()
        assert all(same_bits(weight, theirs.weights[name]) for name, weight in mine.weights.items())
        for name, state in mine.states.items():
            expected = theirs.states[name]
            assert state["step"] == expected["step"]
            assert all(same_bits(state[key], expected[key]) for key in ("param", "exp_avg", "exp_avg_sq")), name


@pytest.mark.quick
def test_case_02_the_step_resumes_on_every_rank(megatron, tmp_path):
    common = arguments("dp2") + SMALL_SUBGROUPS
    saved = megatron.train(common, 2, "dos", 5, save=tmp_path)
    loaded = megatron.train(common, 2, "dos", 0, load=tmp_path, inspect="hooks:state_at_start")
    for before, after in zip(saved.of_rank, loaded.of_rank, strict=True):
        (start,) = after.inspected["start"]
        assert {state["step"] for state in start["states"].values()} == {5}
        for name, state in before.states.items():
            loaded_state = start["states"][name]
            assert all(same_bits(state[key], loaded_state[key]) for key in ("param", "exp_avg", "exp_avg_sq")), name


def test_case_01_finetuning_starts_from_the_loaded_weights(megatron, tmp_path):
    saved = megatron.train(arguments("dp2"), 2, "numpy", 5, save=tmp_path)
    tuned = megatron.train(
        [*arguments("dp2"), *SMALL_SUBGROUPS, "--finetune"], 2, "dos", 0, load=tmp_path, inspect="hooks:state_at_start"
    )
    for before, after in zip(saved.of_rank, tuned.of_rank, strict=True):
        (start,) = after.inspected["start"]
        assert all(same_bits(weight, start["weights"][name]) for name, weight in before.weights.items())
        for name, state in start["states"].items():
            weight = start["weights"][name].float().reshape(-1)[state["start"] : state["end"]]
            assert same_bits(state["param"], weight), name
            assert state["step"] in (None, 0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("flags", [["--finetune"], ["--no-load-optim", "--no-load-rng"]], ids=lambda flags: flags[0])
def test_case_01_training_goes_on_from_weights_loaded_without_states(megatron, tmp_path, precision, flags):
    # Megatron reloads the masters of 16-bit params itself, but takes an FP32 param for its own master.
    megatron.train(arguments("dp2", precision), 2, "dos", 4, save=tmp_path)
    ours, reference = (
        megatron.train(
            [*arguments("dp2", precision), *flags, "--override-opt_param-scheduler"],
            *(2, optimizer, 3 if flags == ["--finetune"] else 7),
            seed=7,
            load=tmp_path,
        )
        for optimizer in ("dos", "numpy")
    )
    assert len(ours.losses) == 3
    assert_same_bits(ours, reference)


def test_a_rank_whose_optimizer_has_no_buffers(megatron):
    # The experts are all on the second pipeline stage, the optimizer of experts is on both.
    layout = ["--pipeline-model-parallel-size", "2", "--expert-model-parallel-size", "2", "--num-experts", "2"]
    common = [*TINY, "--global-batch-size", "4", *BF16, *layout, "--moe-layer-freq", "[0,1]", "--disable-bias-linear"]
    assert_same_bits(*(megatron.train(common, 4, optimizer, 4) for optimizer in ("dos", "numpy")))


def test_two_steps_without_a_forward_pass_between_them(megatron):
    common = [*TINY, "--global-batch-size", "4", *BF16, "--overlap-grad-reduce", "--overlap-param-gather"]
    runs = (megatron.train(common, 2, optimizer, 4, inspect="hooks:step_again") for optimizer in ("dos", "numpy"))
    assert_same_bits(*runs)


@pytest.mark.parametrize("prepare", [None, "hooks:forget_unused_gathers"], ids=["as it is", "without the wait"])
def test_a_step_waits_for_the_gathers_that_no_forward_pass_has_used(megatron, prepare):
    common = [*TINY, "--global-batch-size", "4", *BF16, "--overlap-grad-reduce", "--overlap-param-gather"]
    common += ["--ddp-bucket-size", "30000"]
    run = megatron.train(common, 2, "dos", 2, inspect="hooks:step_again_and_watch", prepare=prepare)
    for rank in run.of_rank:
        (step,) = rank.inspected["step"]
        assert step["pending"] > 2
        assert step["waited"] == (list(range(step["pending"])) if prepare is None else [])


def test_a_save_takes_no_second_copy_of_the_states(megatron):
    (sizes,) = megatron.call("flat:storages_of_states", 1).values
    assert sizes["storages"] == sizes["tensors"]  # Megatron copies parts of larger storages before it saves them


def test_threads_are_the_ranks_share_whatever_omp_num_threads_says(megatron):
    # As of actors with one GPU each: the ranks find out themselves that they are two.
    environment = {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    run = megatron.train(arguments("dp2"), 2, "dos", 1, environment=environment)
    cpus = len(os.sched_getaffinity(0))
    assert (
        f"CPU with {plural(max(cpus // 2, 1), 'thread')} ({plural(cpus, 'CPU')} shared by 2 ranks)" in run.log()
    )
    fixed = megatron.train([*arguments("dp2"), "--dos-cpu-threads", "2"], 2, "dos", 1)
    assert "CPU with 2 threads (--dos-cpu-threads)" in fixed.log()
