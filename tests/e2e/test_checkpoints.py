# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: what is saved in one process comes back in another to the bit, whoever saved it and whatever the layout.

`UPDATE_DOCS=1 python -m pytest tests/e2e/test_checkpoints.py` writes the table of docs/checkpoints.md anew.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from checkpoints import WAYS
from harness import LAYOUTS, PRECISIONS, ROOT, TINY, CaseFailure, Megatron, assert_same_bits, same_bits

PAGE = ROOT / "docs" / "checkpoints.md"
BEGIN, END = "<!-- table of tests/e2e/test_checkpoints.py: begin -->", "<!-- end -->"
# dp4 needs eight sequences a batch, and a checkpoint can only be loaded with the batch that it was saved with. The two
# halves of a gated MLP are one param, but apart in a checkpoint.
STOCK = [*TINY, *PRECISIONS["bf16"], "--global-batch-size", "8", "--swiglu"]
# Small subgroups, and a part of the states on the device: one parameter's are in both places then.
COMMON = [*STOCK, "--dos-subgroup-size", "3000", "--dos-resident-share", "0.3"]
EXPERTS = ["--num-experts", "4", "--expert-model-parallel-size"]

# Four buckets, whose last elements are padding.
BUCKETS = ["--overlap-grad-reduce", "--ddp-bucket-size", "20000"]

SOURCES = {"dp2": LAYOUTS["dp2"], "ep2": (2, [*EXPERTS, "2"]), "buckets": (2, BUCKETS)}
CHANGES = {
    "none": ("dp2", *LAYOUTS["dp2"]),
    "DP 2 → 1": ("dp2", *LAYOUTS["dp1"]),
    "DP 2 → 4": ("dp2", *LAYOUTS["dp4"]),
    "TP 1 → 2": ("dp2", *LAYOUTS["tp2"]),
    "PP 1 → 2": ("dp2", *LAYOUTS["pp2"]),
    "none, EP 2": ("ep2", *SOURCES["ep2"]),
    "EP 2 → 1": ("ep2", 2, [*EXPERTS, "1"]),
    "none, padded buckets": ("buckets", *SOURCES["buckets"]),
    "DP 2 → 1, padded buckets": ("buckets", 1, BUCKETS),
}
"""Change of the layout -> the source, and ranks and arguments of the process that loads."""
DIRECTIONS = {"ours → ours": ("dos", "dos"), "ours → stock": ("dos", "numpy"), "stock → ours": ("numpy", "dos")}
"""Direction -> who saves and who loads."""
SHIFTED = "CheckpointError: the optimizer states of this checkpoint are shifted: "


def arguments(optimizer: str, layout: list[str]) -> list[str]:
    return (COMMON if optimizer == "dos" else STOCK) + [*layout, "--global-batch-size", "8"]


class Matrix:
    """All saves and loads of this module, each run once."""

    def __init__(self, megatron: Megatron, folder: Path) -> None:
        self.saved = {}
        self.failed_saves = {}
        for source, (ranks, layout) in SOURCES.items():
            for saver in ("dos", "numpy"):
                order = {"folder": str(folder / source / saver), "ways": list(WAYS)}
                run = self.run(megatron, saver, ranks, layout, 4, "save_in_all_ways", order)
                self.saved[source, saver] = [rank["digest"] for rank in run]
                self.failed_saves[source, saver] = run[0]["failed"]
        self.folder = folder
        self.loaded = {}
        for change, (source, ranks, layout) in CHANGES.items():
            ways = [way for way in WAYS if way not in self.failed_saves[source, "dos"]]
            for loader in ("dos", "numpy"):
                # What the stock optimizer makes of its own files is needed where something may fail.
                fails = source == "buckets" or not change.startswith(("none", "DP"))
                savers = ("dos",) if loader == "numpy" and not fails else ("dos", "numpy")
                folders = {saver: str(folder / source / saver) for saver in savers}
                order = {"folders": list(folders.values()), "ways": ways}
                run = self.run(megatron, loader, ranks, layout, 0, "load_from_all", order)
                for saver, of_saver in folders.items():
                    for way in ways:
                        self.loaded[change, saver, loader, way] = [rank[f"{of_saver}: {way}"] for rank in run]

    @staticmethod
    def run(megatron, optimizer, ranks, layout, iterations, hook, order):
        run = megatron.train(
            arguments(optimizer, layout),
            ranks,
            optimizer,
            iterations,
            inspect=f"checkpoints:{hook}",
            environment={"CHECKPOINTS": json.dumps(order)},
            keep_state=False,
        )
        return [rank.inspected["end" if iterations else "start"][0] for rank in run.of_rank]

    def errors(self, change: str, saver: str, loader: str, way: str) -> list[str]:
        """What the ranks that load have raised; empty strings where all went well."""
        source = CHANGES[change][0]
        if way in self.failed_saves[source, saver]:
            return [self.failed_saves[source, saver][way]]
        return [rank["error"] for rank in self.loaded[change, saver, loader, way]]

    def differs(self, change: str, saver: str, loader: str, way: str) -> list[str]:
        """What of the training did not come back to the bit, of a load without errors."""
        expected = self.saved[CHANGES[change][0], saver][0]
        loaded = self.loaded[change, saver, loader, way]
        # Megatron leaves the random state alone where TP or PP has changed.
        keys = [key for key in expected if not (key == "random" and change.startswith(("TP", "PP")))]
        found = [key for key in keys if loaded[0][key] != expected[key]]
        return found + [f"{key} of rank {rank}" for key in ("step", "scheduler", "scaler") for rank, one in
                        enumerate(loaded) if set(map(repr, one[key])) - set(map(repr, expected[key]))]  # fmt: skip

    def cell(self, change: str, direction: str, way: str) -> str:
        saver, loader = DIRECTIONS[direction]
        errors = self.errors(change, saver, loader, way)
        if all(error.startswith(SHIFTED) for error in errors):
            return "refused"
        if any(errors):
            return "no"
        return "DIFFERS" if self.differs(change, saver, loader, way) else "yes"

    def table(self) -> str:
        """The table of the page."""
        lines = ["| saved as | direction | " + " | ".join(CHANGES) + " |", "|---|---|" + "---|" * len(CHANGES)]
        for way in WAYS:
            for direction in DIRECTIONS:
                cells = " | ".join(self.cell(change, direction, way) for change in CHANGES)
                lines.append(f"| {way} | {direction} | {cells} |")
        return "\n".join(lines)


@pytest.fixture(scope="module")
def matrix(megatron, tmp_path_factory) -> Matrix:
    return Matrix(megatron, tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize("source", SOURCES)
def test_both_optimizers_have_trained_to_the_same_bits(matrix, source):
    assert matrix.saved[source, "dos"] == matrix.saved[source, "numpy"]
    assert matrix.failed_saves[source, "dos"] == matrix.failed_saves[source, "numpy"]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_was_saved_comes_back_to_the_bit_or_the_stock_optimizer_fails_too(matrix, change, direction):
    saver, loader = DIRECTIONS[direction]
    for way in WAYS:
        errors = matrix.errors(change, saver, loader, way)
        if all(error.startswith(SHIFTED) for error in errors):
            # They are not what was saved, says Megatron's own optimizer, which loads them.
            assert matrix.differs(change, "numpy", "numpy", way) == ["tensors"], way
        elif any(errors):
            # The limit is Megatron's own: its optimizer says the same of its own files.
            assert errors == matrix.errors(change, "numpy", "numpy", way), way
        else:
            assert matrix.differs(change, saver, loader, way) == [], way


def test_layouts_that_can_change_are_not_refused(matrix):
    """The table has no more 'no' than Megatron's documentation lets expect. (For EP 2 → 1 see the next test.)"""
    kept = [way for way in WAYS if "in the space of" not in way]
    for direction in DIRECTIONS:
        for way in kept:
            for change in CHANGES:
                reshardable = "fully reshardable" in way
                shifted = reshardable and direction == "stock → ours" and change.endswith("padded buckets")
                if (reshardable and change != "EP 2 → 1") or change.startswith(("none", "DP")):
                    expected = "refused" if shifted else "yes"
                    assert matrix.cell(change, direction, way) == expected, (way, direction, change)


def test_a_fully_reshardable_checkpoint_can_change_expert_parallelism(megatron, matrix):
    """Without expert parallelism Megatron has one optimizer, with it two, hence the table's 'no' for EP 2 → 1."""
    way = "torch_dist, fully reshardable"
    folders = [str(matrix.folder / "ep2" / saver) for saver in ("dos", "numpy")]
    ranks = matrix.run(megatron, "dos", 4, [*EXPERTS, "4"], 0, "load_from_all", {"folders": folders, "ways": [way]})
    for folder in folders:
        assert [rank[f"{folder}: {way}"]["error"] for rank in ranks] == [""] * 4
        loaded = ranks[0][f"{folder}: {way}"]
        expected = matrix.saved["ep2", "dos"][0]
        assert [key for key in ("tensors", "step", "groups", "scheduler") if loaded[key] != expected[key]] == []


def test_the_page_has_the_table_of_these_tests(matrix):
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END, 1)[1]
    expected = f"{before}{BEGIN}\n\n{matrix.table()}\n\n{END}{after}"
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(expected, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == expected, "UPDATE_DOCS=1 writes the table anew"


# ---- The life of a training around its checkpoints ------------------------------------------------------------------

DP2 = LAYOUTS["dp2"][1]
SUBGROUPS = ["--dos-subgroup-size", "3000"]


@pytest.mark.parametrize(
    ("precision", "flags"),
    [
        ("fp16", ["--ckpt-format", "torch"]),
        ("fp16", ["--dist-ckpt-optim-fully-reshardable"]),
        ("fp32", []),
        ("fp32", ["--ckpt-format", "torch"]),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value) or "torch_dist",
)
def test_a_resumed_training_is_the_unbroken_one(megatron, tmp_path, precision, flags):
    common = [*TINY, *DP2, *PRECISIONS[precision], *SUBGROUPS]
    megatron.train([*common, *flags], 2, "dos", 4, save=tmp_path)
    resumed = megatron.train([*common, *flags], 2, "dos", 7, load=tmp_path)
    unbroken = megatron.train(common, 2, "dos", 7)
    assert_same_end(resumed, unbroken)
    assert resumed.losses == unbroken.losses[4:]
    assert resumed.loss_scales == unbroken.loss_scales[4:]


@pytest.fixture(scope="module")
def stock_checkpoint(megatron, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stock")
    megatron.train([*TINY, *DP2, "--bf16"], 2, "numpy", 3, save=folder)
    return folder


@pytest.mark.parametrize(
    "flags",
    [
        ["--override-opt_param-scheduler", "--lr-decay-style", "linear", "--weight-decay", "0.01"],
        ["--use-checkpoint-opt_param-scheduler", "--lr-decay-style", "linear", "--lr-warmup-iters", "5"],
        ["--no-load-optim", "--no-load-rng", "--override-opt_param-scheduler", "--adam-beta2", "0.9"],
    ],
    ids=lambda flags: flags[0],
)
def test_settings_that_change_at_a_load_mean_what_they_mean_to_the_stock_optimizer(megatron, stock_checkpoint, flags):
    common = [*TINY, *DP2, "--bf16", *flags]
    ours, stock = (megatron.train(common, 2, optimizer, 6, load=stock_checkpoint) for optimizer in ("dos", "numpy"))
    assert_same_bits(ours, stock)


def test_another_learning_rate_is_refused_at_a_load_as_by_the_stock_optimizer(megatron, stock_checkpoint):
    common = [*TINY, *DP2, "--bf16", "--override-opt_param-scheduler", "--lr", "5e-4"]
    for optimizer in ("dos", "numpy"):  # Megatron tells param groups apart by their largest learning rate, too
        with pytest.raises(CaseFailure, match=r"KeyError: \(None, 0.0005, 0.0001"):
            megatron.train(common, 2, optimizer, 6, load=stock_checkpoint)


def test_main_params_come_from_an_fp32_checkpoint_unrounded(megatron, tmp_path):
    saved = megatron.train([*TINY, *DP2, "--ckpt-format", "torch"], 2, "numpy", 3, save=tmp_path)
    flags = ["--bf16", "--ckpt-format", "torch", "--no-load-optim", "--no-load-rng", "--load-main-params-from-ckpt",
             "--override-opt_param-scheduler"]  # fmt: skip
    ours, stock = (
        megatron.train([*TINY, *DP2, *flags], 2, optimizer, 5, load=tmp_path, inspect="hooks:state_at_start")
        for optimizer in ("dos", "numpy")
    )
    assert_same_bits(ours, stock)
    rounded = 0
    for rank, before in zip(ours.of_rank, saved.of_rank, strict=True):
        for name, state in rank.inspected["start"][0]["states"].items():
            exact = before.weights[name].reshape(-1)[state["start"] : state["end"]]
            assert same_bits(state["param"], exact), name
            rounded += int((exact != exact.bfloat16().float()).sum())
    assert rounded, "some values are ones that bf16 would have rounded"


RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"


@pytest.mark.parametrize("saver", ["dos", "numpy"])
@pytest.mark.parametrize(("rows", "other"), [("128", "1024"), ("1024", "128")])
def test_the_vocabulary_may_be_padded_to_another_size(megatron, tmp_path, saver, rows, other):
    common = [*TINY, *DP2, "--bf16", RESHARDABLE, "--make-vocab-size-divisible-by"]
    megatron.train([*common, rows], 2, saver, 3, save=tmp_path)
    ours, stock = (
        megatron.train([*common, other, *more], 2, optimizer, 0, load=tmp_path)
        for optimizer, more in (("dos", SUBGROUPS), ("numpy", []))
    )
    assert_same_end(ours, stock)
    embedding = "embedding.word_embeddings.weight"
    assert all(rank.weights[embedding].shape[0] == max(512, int(other)) for rank in ours.of_rank)


@pytest.mark.parametrize("loader", ["dos", "numpy"])
def test_several_optimizer_instances_save_each_state_once(megatron, tmp_path, loader):
    common = [*TINY, "--global-batch-size", "8", "--bf16", RESHARDABLE, "--num-distributed-optimizer-instances"]
    saved = megatron.train([*common, "2", *SUBGROUPS], 4, "dos", 3, save=tmp_path)
    loaded = megatron.train([*common, "1"], 2, loader, 0, load=tmp_path)
    for mine in loaded.of_rank:
        twins = [rank for rank in saved.of_rank if ranges_of(rank) == ranges_of(mine)]
        assert len(twins) == 2
        for twin in twins:
            assert_same_rank(mine, twin)


# What pads a bucket that is not the last of its buffer -> ranks and arguments.
PADDED = {
    "buckets": (1, BUCKETS),
    "experts": (2, [*EXPERTS, "2", *BUCKETS]),
    "tied embeddings": (4, ["--pipeline-model-parallel-size", "2"]),
    # The second bucket begins behind all that Megatron has gathered, so that its states are saved as zeros. Two of four
    # ranks own nothing.
    "padding longer than params": (4, [*BUCKETS, "--hidden-size", "32", "--ddp-pad-buckets-for-high-nccl-busbw"]),
}


@pytest.mark.parametrize(
    ("case", "precision"),
    [("buckets", "fp32"), ("buckets", "fp16"), *((case, "bf16") for case in PADDED if case != "buckets")],
)
def test_states_are_saved_as_they_are_where_megatrons_own_save_shifts_them(megatron, tmp_path, case, precision):
    ranks, layout = PADDED[case]
    common = [*TINY, *layout, "--global-batch-size", "8", *PRECISIONS[precision], RESHARDABLE]
    saved = {
        saver: megatron.train([*common, *more], ranks, saver, 3, save=tmp_path / saver)
        for saver, more in (("dos", SUBGROUPS), ("numpy", []))
    }
    for loader in ("dos", "numpy"):
        assert_same_end(megatron.train(common, ranks, loader, 0, load=tmp_path / "dos"), saved["dos"])
    shifted = megatron.train(common, ranks, "numpy", 0, load=tmp_path / "numpy")
    with pytest.raises(AssertionError):
        assert_same_end(shifted, saved["numpy"])
    with pytest.raises(CaseFailure, match=SHIFTED):
        megatron.train(common, ranks, "dos", 0, load=tmp_path / "numpy")


@pytest.fixture(scope="module")
def shifted_checkpoint(megatron, tmp_path_factory) -> Path:
    """Of Megatron's own, fully reshardable, from several buckets at DP 2."""
    folder = tmp_path_factory.mktemp("shifted")
    megatron.train([*STOCK, *BUCKETS, RESHARDABLE], 2, "numpy", 3, save=folder)
    return folder


@pytest.mark.parametrize("layout", ["dp1", "dp4", "tp2", "pp2"])
def test_shifted_states_are_refused_in_every_layout(megatron, shifted_checkpoint, layout):
    ranks, flags = LAYOUTS[layout]
    with pytest.raises(CaseFailure, match=f"{SHIFTED}the master params of .* are those of [0-9]+ elements further on"):
        megatron.train(arguments("dos", flags), ranks, "dos", 0, load=shifted_checkpoint)


@pytest.mark.parametrize(
    "flags", [["--no-load-optim", "--no-load-rng", "--override-opt_param-scheduler"], ["--finetune"]]
)
def test_the_way_out_of_shifted_states_trains_as_with_the_stock_optimizer(megatron, shifted_checkpoint, flags):
    common = [*STOCK, *BUCKETS, *flags]
    ours, stock = (
        megatron.train(common, 2, optimizer, 3 if "--finetune" in flags else 6, load=shifted_checkpoint)
        for optimizer in ("dos", "numpy")
    )
    assert len(ours.losses) == 3
    assert_same_bits(ours, stock)


def test_no_step_is_possible_after_shifted_states_until_whole_ones_are_loaded(megatron, shifted_checkpoint, tmp_path):
    common = [*COMMON, *BUCKETS]
    megatron.train([*common, RESHARDABLE], 2, "dos", 3, save=tmp_path)
    order = {"folders": [str(shifted_checkpoint), str(tmp_path)]}
    run = megatron.train(
        common,
        2,
        "dos",
        0,
        inspect="checkpoint_life:loads_and_steps",
        environment={"CHECKPOINTS": json.dumps(order)},
    )
    (first, last), others = run.of_rank[0].inspected["start"][0], run.of_rank[1].inspected["start"][0]
    assert first["load"].startswith(SHIFTED)
    refused = "the optimizer states of a checkpoint were read, and then refused. Load a whole checkpoint first."
    for what in ("step", "save"):
        assert first[what] == f"CheckpointError: no {what} is possible: {refused}"
    assert last == {"load": "", "step": "", "save": ""}
    assert [first, last] == others, "all ranks say the same"


def test_a_rank_that_owns_nothing_trains_on_after_a_load(megatron, tmp_path):
    ranks = megatron.call("checkpoint_life:trained_on_after_a_load", 4, folder=str(tmp_path)).values
    assert ["owns 0"] in ranks
    assert all(rank in (["owns 0"], ["owns 1"]) for rank in ranks)


@pytest.mark.parametrize(("saver", "loader"), DIRECTIONS.values(), ids=DIRECTIONS)
def test_an_empty_rank_and_padding_at_the_end_alone_change_nothing(megatron, tmp_path, saver, loader):
    layout = ["--hidden-size", "32", "--ddp-pad-buckets-for-high-nccl-busbw", "--global-batch-size", "8"]
    common = [*TINY, *layout, "--bf16", RESHARDABLE]
    saved = megatron.train(common, 4, saver, 3, save=tmp_path)
    assert [bool(rank.states) for rank in saved.of_rank] == [True, True, True, False]
    assert_same_end(megatron.train(common, 4, loader, 0, load=tmp_path), saved)


@pytest.mark.parametrize("prepare", ["torch_is_too_old", "params_are_cut_by_columns"])
@pytest.mark.parametrize(("saver", "loader"), [*DIRECTIONS.values()], ids=DIRECTIONS)
@pytest.mark.parametrize("layout", [[], BUCKETS], ids=["one bucket", "padded buckets"])
def test_whole_tensors_are_saved_and_loaded_where_they_cannot_be_cut(
    megatron, tmp_path, saver, loader, layout, prepare
):
    common = [*STOCK, *layout, RESHARDABLE]
    prepare = f"checkpoint_life:{prepare}"
    saved = megatron.train(common, 2, saver, 3, save=tmp_path, prepare=prepare)
    if layout and saver == "numpy":
        with pytest.raises(CaseFailure, match=SHIFTED):
            megatron.train(common, 2, loader, 0, load=tmp_path, prepare=prepare)
    else:
        assert_same_end(megatron.train(common, 2, loader, 0, load=tmp_path, prepare=prepare), saved)


HYBRID = ["--optimizer-cpu-offload", "--use-precision-aware-optimizer"]


def test_files_of_megatrons_own_cpu_offloading_load_to_the_bit(megatron, tmp_path):
    saved = megatron.train([*TINY, *DP2, "--bf16", *HYBRID], 2, "stock", 4, save=tmp_path)
    loaded = megatron.train([*TINY, *DP2, "--bf16", *SUBGROUPS], 2, "dos", 0, load=tmp_path)
    assert_same_end(loaded, saved)


def test_torch_files_of_megatrons_own_cpu_offloading_can_be_loaded_by_nobody(megatron, tmp_path):
    common = [*TINY, *DP2, "--bf16", "--ckpt-format", "torch"]
    megatron.train([*common, *HYBRID], 2, "stock", 1, save=tmp_path)
    for optimizer, flags in (("stock", HYBRID), ("dos", [])):
        run = megatron.train([*common, *flags], 2, optimizer, 0, load=tmp_path)
        assert "could not load the checkpoint" in run.log(), "the file holds an object of torch's AdamW"
        assert "GLOBAL torch.optim.adamw.AdamW" in run.log()


def assert_same_end(run, reference) -> None:
    """Weights, states and steps are equal to the bit at the end."""
    for mine, theirs in zip(run.of_rank, reference.of_rank, strict=True):
        assert_same_rank(mine, theirs)


def assert_same_rank(mine, theirs) -> None:
    assert mine.weights.keys() == theirs.weights.keys()
    assert all(same_bits(weight, theirs.weights[name]) for name, weight in mine.weights.items())
    assert mine.states.keys() == theirs.states.keys()
    for name, state in mine.states.items():
        assert (name, state["step"]) == (name, theirs.states[name]["step"])
        assert all(same_bits(state[key], theirs.states[name][key]) for key in ("param", "exp_avg", "exp_avg_sq"))


def ranges_of(rank) -> dict[str, tuple[int, int]]:
    """What the rank owns of each param, by name."""
    return {name: (state["start"], state["end"]) for name, state in rank.states.items()}


@pytest.mark.parametrize("resident", ["0", "0.4"])
def test_offloads_for_inference_in_any_order_change_no_bit(megatron, resident):
    common = [*TINY, *DP2, "--bf16", *SUBGROUPS, "--dos-resident-share", resident]
    disturbed = megatron.train(common, 2, "dos", 5, inspect="checkpoint_life:offload_between_steps")
    assert_same_bits(disturbed, megatron.train([*TINY, *DP2, "--bf16"], 2, "numpy", 5))


class TestFiles:
    @pytest.fixture(scope="class")
    @staticmethod
    def ranks(megatron, tmp_path_factory):
        folder = tmp_path_factory.mktemp("files")
        return folder, megatron.call("checkpoint_life:files_of_two_saves", 3, folder=str(folder)).values

    def test_two_saves_of_the_same_states_are_the_same_files(self, ranks):
        first, second = ranks[1][0]["hashes"]
        assert first == second
        assert {"dist/.metadata", "dist/__2_0.distcp", "distrib_optim.pt", "optimizer.pt"} <= set(first)
        assert {"reshardable/.metadata", "reshardable/__2_0.distcp"} <= set(first)

    def test_what_ranks_have_in_common_is_equal(self, ranks):
        for rank in ranks[1]:
            assert repr(rank["common"]) == repr(ranks[1][0]["common"])

    @pytest.mark.parametrize(
        ("name", "expected"),
        [("distrib_optim.pt", ["0", "1", "buckets_coalesced"]), ("optimizer.pt", ["optimizer"])],
    )
    def test_files_hold_tensors_and_plain_values_only(self, ranks, name, expected):
        loaded = torch.load(ranks[0] / "0" / name, weights_only=True)  # this process has allowed no other types
        assert sorted(map(str, loaded)) == expected


class TestMemory:
    @pytest.fixture(scope="class")
    @staticmethod
    def peaks(megatron, tmp_path_factory):
        """Optimizer -> layout -> peaks of a save and a load in multiples of the states."""
        found = {}
        for name, deep in (("ours", True), ("stock", False)):
            folder = str(tmp_path_factory.mktemp("memory"))
            (measured,) = megatron.call("checkpoint_memory:peaks", 1, folder=folder, deep=deep).values
            states = measured.pop("states")
            assert all(of_layout.pop("loaded") for of_layout in measured.values())
            found[name] = {
                layout: {what: peak / states for what, peak in of_layout.items()}
                for layout, of_layout in measured.items()
            }
        return found

    @pytest.mark.parametrize("layout", ["dp_reshardable", "fully_reshardable", "torch"])
    @pytest.mark.parametrize("what", ["save", "load"])
    def test_no_layout_takes_a_second_copy_of_the_states(self, peaks, layout, what):
        assert peaks["ours"][layout][what] < 0.2

    @pytest.mark.parametrize("layout", ["dp_reshardable", "fully_reshardable", "torch"])
    def test_the_copies_that_megatron_takes_are_seen(self, peaks, layout):
        assert peaks["stock"][layout]["save"] > 0.9
