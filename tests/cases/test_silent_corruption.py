# SPDX-License-Identifier: Apache-2.0
"""Cases 1 to 13 of docs/cases.md: nothing fails, and the numbers are wrong."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import race_check
import test_cuda_device
import torch
from case_runs import CHECKPOINT_FORMATS, arguments_of, different_ends, in_ranks, prepare, rewind
from harness import PRECISIONS, TINY, CaseFailure, differences, same_bits
from shown_to_fail import fails_under

from megatron_dos.device import cuda
from megatron_dos.kernels import AdamScalars, device_kernel, reference
from megatron_dos.node import slab
from megatron_dos.program import partition
from megatron_dos.program.schedule import OpKind, SubgroupShape, build_program, mix
from megatron_dos.update import engine, memory
from megatron_dos.update.operations import StepInputs

# ---- 1: weights loaded after the optimizer was built ----------------------------------------------------------------


@fails_under(
    masters_ignore_loaded_weights="bfloat16: a quiet step changed",
    fp32_params_are_not_adopted="float32: a quiet step changed",
)
def test_case_01_weights_overwritten_after_construction(megatron, mutation):
    # Megatron asks for the masters of 16-bit params to be reloaded; an FP32 param it takes for its own master.
    for dtype, reload in (("bfloat16", True), ("float32", False)):
        of_ranks = in_ranks(megatron, "load_weights_after_construction", 2, mutation, dtype=dtype, reload=reload)
        for outcome in of_ranks:
            assert not outcome["changed"], f"{dtype}: a quiet step changed {outcome['changed']}"
            assert not outcome["quiet"], f"{dtype}: other than built after the load: {outcome['quiet']}"
            assert not outcome["real"], f"{dtype}: other than built after the load: {outcome['real']}"
        assert all(outcome["split"] for outcome in of_ranks)  # a param of which each rank owns a part


@pytest.fixture(scope="module")
def saved_in_fp32(megatron, tmp_path_factory):
    """A run in FP32, whose checkpoint holds FP32 weights: arguments but the precision, run, folder."""
    folder = tmp_path_factory.mktemp("saved_in_fp32")
    common = [*TINY, "--global-batch-size", "4", "--ckpt-format", "torch"]
    return common, megatron.train(common, 2, "dos", 3, save=folder), folder


@fails_under(masters_are_taken_from_rounded_weights="masters .* are rounded")
def test_case_01_masters_loaded_from_an_fp32_checkpoint(megatron, mutation, saved_in_fp32):
    common, saved, folder = saved_in_fp32
    loaded = megatron.train(
        [*common, *PRECISIONS["bf16"], "--no-load-optim", "--no-load-rng", "--load-main-params-from-ckpt"],
        *(2, "dos", 0),
        load=folder,
        inspect="hooks:state_at_start",
        prepare=prepare(mutation),
    )
    assert any(not same_bits(weight, weight.bfloat16().float()) for weight in saved.of_rank[0].weights.values())
    for before, after in zip(saved.of_rank, loaded.of_rank, strict=True):
        (start,) = after.inspected["start"]
        wrong = []
        for name, state in start["states"].items():
            assert same_bits(start["weights"][name], before.weights[name].bfloat16()), name
            of_file = before.weights[name].reshape(-1)[state["start"] : state["end"]]
            wrong += [] if same_bits(state["param"], of_file) else [name]
        assert not wrong, f"masters of {wrong} are rounded"


# ---- 2: the step after a resume -------------------------------------------------------------------------------------


# Embeddings have a learning rate of their own, so a group of their own, which is empty on most ranks.
WITH_EMPTY_GROUPS = arguments_of("dp4", "--decoupled-lr", "1e-3")


@pytest.fixture(scope="module")
def past_step_1000(megatron, tmp_path_factory):
    """A run saved at step 1000 that has gone on for one: run, folder."""
    folder = tmp_path_factory.mktemp("past_step_1000")
    settings = {"save": folder, "save_interval": 1, "inspect": "case_ranks:count_from_999", "keep_state": False}
    return megatron.train(WITH_EMPTY_GROUPS, 4, "dos", 2, **settings), rewind(folder, 1)


@fails_under(step_restarts_at_a_load="steps after the load", empty_groups_have_no_step="steps after the load")
def test_case_02_resume_at_step_1000(megatron, mutation, past_step_1000):
    unbroken, folder = past_step_1000
    resumed = megatron.train(
        *(WITH_EMPTY_GROUPS, 4, "dos", 2),
        load=folder,
        inspect="case_ranks:masters_and_steps",
        prepare=prepare(mutation),
        keep_state=False,
    )
    groups = [point["groups"] for rank in resumed.of_rank for point in rank.inspected["start"]]
    assert any(numel == 0 for of_rank in groups for _, numel in of_rank)
    assert {step for of_rank in groups for step, _ in of_rank} == {1000}, f"steps after the load: {groups}"
    for before, after in zip(unbroken.of_rank, resumed.of_rank, strict=True):
        (start,), (end,) = after.inspected["start"], after.inspected["step"]
        saved, expected = (point["masters"] for point in before.inspected["step"])
        assert same_bits(start["masters"], saved)
        ratio = (end["masters"] - saved).double() / (expected - saved).double()
        assert (expected != saved).any()
        extremes = ratio[expected != saved].min().item(), ratio[expected != saved].max().item()
        assert extremes == (1.0, 1.0), f"update ratio to the unbroken run: {extremes}"
        assert {step for step, _ in end["groups"]} == {1001}


# ---- 3 and 12: masters after a resume -------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=CHECKPOINT_FORMATS)
def overfitted(request, megatron, tmp_path_factory):
    """A run that has learned the mock data, saved at iteration 20 and gone on for two: arguments, run, folder."""
    folder = tmp_path_factory.mktemp("overfitted")
    common = arguments_of("dp2", *CHECKPOINT_FORMATS[request.param], "--lr", "1e-2", "--min-lr", "1e-2")
    return common, megatron.train(common, 2, "dos", 22, save=folder, save_interval=20), rewind(folder, 20)


@fails_under(loads_leave_the_masters_behind="after one step")
def test_case_03_resume_of_an_overfitted_model(megatron, mutation, overfitted):
    common, unbroken, folder = overfitted
    assert unbroken.losses[20] < 0.75 * unbroken.losses[0], unbroken.losses
    resumed = megatron.train(common, 2, "dos", 22, load=folder, prepare=prepare(mutation))
    assert resumed.losses[0] == unbroken.losses[20], "the loss before any step"
    assert resumed.losses[1:] == unbroken.losses[21:], f"the loss after one step: {resumed.losses}"
    assert not different_ends(resumed, unbroken), "after one step"


# Several buckets that end in padding. Megatron's own fully reshardable saves hold shifted states then.
PADDED_BUCKETS = ["--overlap-grad-reduce", "--ddp-bucket-size", "20000", "--dist-ckpt-optim-fully-reshardable"]
STOCK_OF_BUCKETS = [*TINY, *PRECISIONS["bf16"], "--global-batch-size", "4", *PADDED_BUCKETS]


@pytest.fixture(scope="module")
def shifted(megatron, tmp_path_factory):
    """A checkpoint of Megatron's own optimizer."""
    folder = tmp_path_factory.mktemp("shifted")
    megatron.train(STOCK_OF_BUCKETS, 2, "numpy", 3, save=folder)
    return folder


@fails_under(shifted_states_are_loaded="a checkpoint with shifted states was loaded")
def test_case_03_states_that_megatron_has_saved_in_other_places(megatron, mutation, shifted):
    common = arguments_of("dp2", *PADDED_BUCKETS)
    try:
        megatron.train(common, 2, "dos", 0, load=shifted, prepare=prepare(mutation))
    except CaseFailure as refused:
        found = str(refused)
    else:
        found = ""
    assert "the optimizer states of this checkpoint are shifted" in found, "a checkpoint with shifted states was loaded"


@fails_under(gathered_states_lose_their_padding="param of decoder.layers.1.pre_mlp_layernorm.bias of rank 0")
def test_case_03_gathered_states_are_saved_in_their_places(megatron, mutation, tmp_path):
    common = arguments_of("dp2", *PADDED_BUCKETS)
    gathers = "checkpoint_life:torch_is_too_old"
    saved = megatron.train(common, 2, "dos", 3, save=tmp_path, prepare=prepare(mutation, gathers))
    found = different_ends(megatron.train(STOCK_OF_BUCKETS, 2, "numpy", 0, load=tmp_path), saved)
    assert not found, found


@pytest.fixture(scope="module")
def barely_moving(megatron, tmp_path_factory):
    """A run whose learning rate is too small for bf16 weights, saved at iteration 3: arguments, run, folder."""
    folder = tmp_path_factory.mktemp("barely_moving")
    lr = ["--lr", "1e-8", "--min-lr", "1e-8", "--lr-warmup-iters", "0"]
    # No params that start at zero, where the smallest step shows.
    common = arguments_of("dp2", *lr, "--disable-bias-linear", "--normalization", "RMSNorm")
    run = megatron.train(common, 2, "dos", 6, save=folder, save_interval=3, inspect="hooks:state_at_start")
    return common, run, rewind(folder, 3)


@fails_under(masters_are_taken_from_rounded_weights="the resumed run differs")
def test_case_12_a_learning_rate_that_only_masters_feel(megatron, mutation, barely_moving):
    common, unbroken, folder = barely_moving
    for rank in unbroken.of_rank:
        (start,) = rank.inspected["start"]
        weights = [(start["weights"][name] != weight).view(-1) for name, weight in rank.weights.items()]
        masters = [start["states"][name]["param"] != state["param"] for name, state in rank.states.items()]
        assert torch.cat(weights).float().mean() < 0.001
        assert torch.cat(masters).float().mean() > 0.5
    resumed = megatron.train(common, 2, "dos", 6, load=folder, prepare=prepare(mutation))
    found = different_ends(resumed, unbroken)
    assert not found, f"the resumed run differs in {found}"


# ---- 4: asynchronous saves ------------------------------------------------------------------------------------------


@fails_under(forked_writers_see_later_steps="the file is torn")
def test_case_04_a_slow_writer_while_stepping(megatron, mutation, tmp_path):
    # A writer that is forked for the save, and Megatron's persistent one, which is sent the states.
    for persistent in (False, True):
        for outcome in in_ranks(megatron, "async_save", 2, mutation, folder=str(tmp_path), persistent=persistent):
            assert outcome["went_on"]  # states have changed since the call
            assert not outcome["in_file"], f"the file is torn: {outcome['in_file']}"
            assert outcome["step"] == 2


# ---- 5: micro-batches -----------------------------------------------------------------------------------------------


@fails_under(grads_are_taken_when_they_first_arrive="update of another grad")
def test_case_05_four_micro_batches(megatron, mutation):
    for early in (False, True):  # whether grads are sent to the CPU in the backward pass
        for outcome in in_ranks(megatron, "accumulate_micro_batches", 2, mutation, early=early):
            assert bool(outcome["early slots"]) == early
            assert not outcome["differences"], f"update of another grad than 3g: {outcome['differences']}"
            assert outcome["ours"] == outcome["stock"], f"norm {outcome['ours']}, stock {outcome['stock']}"
            assert outcome["ours"] == pytest.approx(outcome["expected"], rel=1e-6)


@fails_under(
    edits_of_sent_grads_go_unseen="elements moved of a matrix whose grads were zeroed",
    edits_are_counted_in_main_grads_only="a bucket scaled: other than the stock optimizer",
    other_tensors_go_unseen="another tensor: other than the stock optimizer",
    all_grads_share_one_count="none: sent again",
    reductions_count_as_edits="none: sent again",
)
def test_case_05_grads_edited_after_their_reduction(megatron, mutation):
    for of_rank in in_ranks(megatron, "edit_reduced_grads", 2, mutation):
        moved = of_rank["a matrix zeroed"]["moved"][3]
        assert moved == 0, f"{moved} elements moved of a matrix whose grads were zeroed"
        for name, outcome in of_rank.items():
            assert not outcome["differences"], f"{name}: other than the stock optimizer: {outcome['differences']}"
            assert all(ours == stock for ours, stock in outcome["steps"]), f"{name}: {outcome['steps']}"
            assert outcome["again"] == outcome["expected again"], f"{name}: sent again {outcome['again']}"


@fails_under(only_matrices_are_known="p[02]", embeddings_are_not_known_by_name="p3")
def test_case_05_grads_summed_after_their_reduction(megatron, mutation):
    for found in in_ranks(megatron, "sum_reduced_grads", 2, mutation):
        assert not found, f"other than the stock optimizer: {found}"


# ---- 6: races between streams ---------------------------------------------------------------------------------------


@fails_under(buckets_are_released_at_once="runs differ")
def test_case_06_forward_reads_whole_weights(megatron, mutation):
    # The all-gathers of the next forward pass start within the step, bucket by bucket.
    common = arguments_of("overlap-buckets")
    inline = megatron.train(common, 2, "dos", 5)
    mixed = megatron.train(
        [*common, "--dos-gpu-share", "0.5"],
        *(2, "dos", 5),
        prepare=prepare(mutation, "case_ranks:use_unchecked_adversarial_device"),
    )
    assert not differences(mixed, inline), "runs differ"


@fails_under(slots_are_reused_at_once="differ|overwrites", copies_wait_for_their_own_stream_only="differ|reads")
def test_case_06_random_orders_of_operations():
    found = [fault for seed in range(1000, 1010) for fault in race_check.check_orders(seed, 30)]
    assert not found, found


@fails_under(caller_does_not_wait_for_the_streams="memory was given back")
def test_case_06_staging_outlives_the_copies_that_read_it(monkeypatch):
    program = build_program([SubgroupShape((0, 0), 4, False)] * 6, mix([4] * 6, host_share=0))
    for seed in range(20):
        machine = test_cuda_device.Machine(seed)
        for name in ("Stream", "Event", "stream", "current_stream"):
            monkeypatch.setattr(cuda.torch.cuda, name, getattr(machine, name))
        ended: list[int] = []
        handlers = dict.fromkeys(OpKind, functools.partial(_launch, machine, ended))
        cuda.CudaDevice(torch.device("cuda")).run(program, handlers, lambda resource: [])
        # The caching allocator hands memory on in the order of the caller's stream.
        ended_at_reuse: list[int] = []
        machine.default.queue.append(("work", lambda reuse=ended_at_reuse, ops=ended: reuse.extend(ops), 0))
        machine.drain()
        assert len(ended_at_reuse) == len(program.ops), "memory was given back while operations were in flight"


def _launch(machine, ended, op):
    machine.launch(lambda: ended.append(op.index))


# ---- 7: one step for all subgroups ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("subgroups", "size"), [(1, 2**20), (2, 18944), (7, 5440)])
@fails_under(
    steps_are_counted_by_the_kernel="other than the reference",
    every_place_counts_its_own_steps="other than the reference",
)
def test_case_07_bias_correction(megatron, mutation, subgroups, size):
    for seed, share in enumerate((0, 0.5, 1)):
        (outcome,) = in_ranks(megatron, "bias_corrections", 1, mutation, subgroup_size=size, share=share, seed=seed)
        assert outcome["subgroups"] == subgroups
        assert not outcome["differences"], f"other than the reference: {outcome['differences']}"


# ---- 8: experts -----------------------------------------------------------------------------------------------------


@fails_under(experts_are_cut_by_the_dense_group="moved|differs")
def test_case_08_every_expert_trains_on_every_replica(megatron, mutation):
    moe = ["--global-batch-size", "8", "--num-experts", "2", "--expert-model-parallel-size", "2"]
    common = [*TINY, *moe, *PRECISIONS["bf16"], "--dos-subgroup-size", "3000"]
    run = megatron.train(common, 4, "dos", 1, inspect="hooks:constant_step", prepare=prepare(mutation))
    outcomes = [rank.inspected["start"][0] for rank in run.of_rank]
    # Expert parallelism of 2 over 4 ranks: ranks 0 and 2 hold the same experts, 1 and 3 the others.
    for replicas in ((0, 2), (1, 3)):
        sizes = outcomes[replicas[0]]["sizes"]
        experts = {name for name in sizes if "experts" in name}
        assert experts
        for name, size in sizes.items():
            owners = replicas if name in experts else range(4)
            moves = [outcomes[rank]["moved"][name] for rank in owners if name in outcomes[rank]["moved"]]
            owned = sum(numel for _, _, numel in moves)
            assert owned == size, f"{owned} of the {size} elements of {name} moved"
            assert max(high for _, high, _ in moves) < 1.01e-3
            assert min(low for low, _, _ in moves) > 0.99e-3
            first = outcomes[owners[0]]["weights"][name]
            assert all(same_bits(outcomes[rank]["weights"][name], first) for rank in owners), f"{name} differs"


# ---- 9: more than 2^31 elements -------------------------------------------------------------------------------------


@pytest.mark.parametrize("host_share", [0, 1], ids=["streamed", "on the CPU"])
@fails_under(slab_offsets_have_32_bits="the last elements")
def test_case_09_more_than_two_to_the_31_elements_in_one_buffer(monkeypatch, host_share):
    # Pages are mapped when they are written, and of the subgroups only the last, beyond 2^31, are updated.
    monkeypatch.setattr(memory, "require_host_memory", lambda needed: None)
    numel, tail = 2**31 + 2**22, 4096
    whole = partition.partition([partition.OwnedRange(0, (0, 0), 0, numel)], 2**20)
    last = [replace(subgroup, index=index) for index, subgroup in enumerate(whole.subgroups[-2:])]
    assert last[0].pieces[0].offset > 2**31
    param, grad = slab.zeros(numel, torch.bfloat16), slab.zeros(numel, torch.bfloat16)
    end = slice(numel - tail, numel)
    generator = torch.Generator().manual_seed(9)
    for tensor in (param, grad):
        tensor[end] = torch.randn(tail, generator=generator)
    built = engine.UpdateEngine(
        replace(whole, subgroups=tuple(last)),
        [param],
        engine.EngineOptions(threads=1, host_share=host_share),
        device_kernel=device_kernel.select("auto", torch.device("cpu"), threads=1),
    )
    built.owner_states(0)["master"][end] = param[end]
    expected = [param[end].float().numpy(), np.zeros(tail, np.float32), np.zeros(tail, np.float32)]
    scalars = AdamScalars.at_step(1, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, decoupled=True)
    reference.adamw(*expected, grad[end].float().numpy(), scalars)
    built.update(StepInputs([grad], [scalars]))
    states = built.owner_states(0)
    for name, array in zip(("master", "exp_avg", "exp_avg_sq"), expected, strict=True):
        assert np.array_equal(states[name][end].numpy().view(np.uint32), array.view(np.uint32)), (
            f"the last elements of {name}"
        )
    assert same_bits(param[end], torch.from_numpy(expected[0]).bfloat16())


# ---- 10: clipping and skipping --------------------------------------------------------------------------------------


@pytest.mark.parametrize("grads_in_fp32", [True, False], ids=["FP32 grads", "bf16 grads"])
@fails_under(updates_start_before_grads_are_checked="other than the clipped reference")
def test_case_10_one_huge_grad(megatron, mutation, grads_in_fp32):
    for outcome in in_ranks(megatron, "clipped_first_step", 2, mutation, grads_in_fp32=grads_in_fp32):
        assert not outcome["differences"], f"other than the clipped reference: {outcome['differences']}"
        assert outcome["norms"][0] == outcome["norms"][1] > 2**19


@pytest.mark.parametrize("grads_in_fp32", [True, False], ids=["FP32 grads", "fp16 grads"])
@fails_under(updates_start_before_grads_are_checked="the skipped step changed")
def test_case_10_an_inf_in_the_last_bucket(megatron, mutation, grads_in_fp32):
    for outcome in in_ranks(megatron, "skipped_step", 2, mutation, grads_in_fp32=grads_in_fp32):
        assert not outcome["success"]
        assert not outcome["changed"], f"the skipped step changed {outcome['changed']}"
        assert outcome["counters"] == (1, 1)


# ---- 11 and 13: an update that does nothing, and one that nobody asked for ------------------------------------------


@fails_under(grads_come_from_another_attribute="stayed")
def test_case_11_every_param_with_a_grad_moves(megatron, mutation):
    for still in in_ranks(megatron, "step_with_grads", 2, mutation):
        assert not still, f"stayed as they were: {still}"


@fails_under(construction_runs_an_update="construction changed")
def test_case_13_initialisation_updates_nothing(megatron, mutation):
    for outcome in in_ranks(megatron, "build_and_prepare_to_load", 2, mutation):
        assert not outcome["changed"], f"construction changed {outcome['changed']}"
