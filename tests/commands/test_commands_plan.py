# SPDX-License-Identifier: Apache-2.0
"""`megatron-dos plan`: what it says follows from the model's shape and from the performance model."""

from __future__ import annotations

import dataclasses
import json
from fractions import Fraction

import pytest

from megatron_dos import cli
from megatron_dos.planning import choice, rivals, workload
from megatron_dos.planning.machine import preset
from megatron_dos.planning.systems import OURS, RIVALS

ARGUMENTS = ["plan", "--model", "20b", "--gpus", "4", "--tensor-parallel", "2", "--machine", "h100-pcie5"]
ARGUMENTS += ["--subgroup-size", "100000000"]


@pytest.fixture(autouse=True)
def no_calibration(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


_known: dict[tuple[str, ...], str] = {}


@pytest.fixture
def plan(capsys):
    """Runs the command with --json, once for the same arguments."""

    def run(*arguments: str) -> dict:
        if arguments not in _known:
            assert cli.main([*arguments, "--json"]) == 0
            _known[arguments] = capsys.readouterr().out
        return json.loads(_known[arguments])

    return run


def error_of(capsys, *arguments: str) -> str:
    assert cli.main(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_memory_with_and_without_is_that_of_the_shape(plan):
    found = plan(*ARGUMENTS)
    rank, gpu, host = found["rank"], found["gpu_memory_bytes"], found["host_memory_bytes"]
    assert found["model"]["parameters"] == 15_326_663_680
    # Tensor parallelism divides all but the norms; two data-parallel ranks divide the states.
    norms = 81 * 5120
    assert rank["parameters"] == (15_326_663_680 - norms) // 2 + norms
    assert rank["owned_parameters"] == rank["parameters"] // 2
    assert gpu["params"] == 2 * rank["parameters"]
    assert gpu["grads"] == 4 * rank["parameters"]
    assert gpu["states_without"] == 12 * rank["owned_parameters"]
    assert gpu["without"] == gpu["params"] + gpu["grads"] + gpu["states_without"] + gpu["activations"]
    kept = gpu["params"] + gpu["grads"]
    assert gpu["with"] == kept + max(gpu["activations"], gpu["slots_during_the_step"])
    assert host["states"] == 4 * 12 * rank["owned_parameters"]
    assert host["with"] == host["states"] + host["slots"]


def test_resident_states_move_from_the_host_to_the_gpu(plan):
    found = plan(*ARGUMENTS, "--resident-share", "0.25")
    gpu, host = found["gpu_memory_bytes"], found["host_memory_bytes"]
    part = gpu["resident_states"] / gpu["states_without"]
    assert part == pytest.approx(0.25, abs=0.01)
    assert host["states"] == pytest.approx(4 * 0.75 * gpu["states_without"], rel=0.02)
    assert found["choice"]["resident_share"] == pytest.approx(part)


def test_choice_and_times_are_those_of_the_performance_model(plan):
    found = plan(*ARGUMENTS)
    machine, rank = preset("h100-pcie5"), found["rank"]
    work = workload.Workload(parameters=rank["owned_parameters"], ranks=4, subgroup=100_000_000)
    free = machine.gpu_memory - found["gpu_memory_bytes"]["params"] - found["gpu_memory_bytes"]["grads"]
    kept = found["gpu_memory_bytes"]["activations"]
    kept += machine.gpu_memory / 10  # which advice leaves free
    chosen = choice.choose(machine, work, free_gpu_memory=free, activations=kept, resident_share=0)
    assert found["choice"]["reason"] == chosen.reason
    assert found["choice"]["limited_by"] == chosen.limiting
    assert found["choice"]["step_seconds_with"] == {more.value: seconds for more, seconds in chosen.helps.items()}
    assert rank["subgroups"] == len(work.subgroups)
    systems = {system["name"]: system for system in found["systems"]}
    assert list(systems) == ["ours", *RIVALS, "states on the GPU: stock Megatron"]
    for system in (OURS, *RIVALS.values()):
        assert systems[system.name]["update_s"] == rivals.step_of(system, machine, work, Fraction(0)).makespan
    stock = systems["states on the GPU: stock Megatron"]
    assert stock["update_s"] == work.parameters / machine.gpu_update
    assert (stock["fits"], systems["ours"]["fits"]) == (False, True)


def test_iteration_is_the_passes_the_grads_that_are_not_hidden_and_the_update(plan):
    found = plan(*ARGUMENTS)
    machine, passes = preset("h100-pcie5"), found["passes_seconds"]
    systems = {system["name"]: system for system in found["systems"]}
    both = passes["forward"] + passes["backward"]
    ours = systems["ours"]
    assert ours["iteration_s"] == pytest.approx(both + ours["update_s"])
    full = systems["full offload"]
    sent = 4 * found["rank"]["owned_parameters"] / machine.d2h_alone
    assert full["iteration_s"] == pytest.approx(both + sent + full["update_s"])


def test_passes_are_floating_point_operations_over_the_machines_rate(plan):
    found = plan("plan", "--model", "13b", "--gpus", "8", "--machine", "h200", "--micro-batch-size", "2")
    tokens, words = 2 * 2048, 50304 * 5120
    attention = 40 * 2 * 2048 * 40 * 128
    forward = tokens * (2 * (11_315_860_480 - words) + attention) / preset("h200").matmul
    assert found["passes_seconds"]["forward"] == pytest.approx(forward)
    assert found["passes_seconds"]["backward"] == pytest.approx(3 * forward)  # with all activations recomputed
    kept = plan(
        *("plan", "--model", "13b", "--gpus", "8", "--machine", "h200", "--micro-batch-size", "2"),
        *("--recompute-granularity", "selective", "--global-batch-size", "64"),
    )
    assert kept["passes_seconds"]["forward"] == pytest.approx(4 * forward)
    assert kept["passes_seconds"]["backward"] == pytest.approx(8 * forward)


def test_pipeline_adds_its_bubble_and_its_slowest_stage_counts(plan):
    flags = ("plan", "--model", "llama2-7b", "--gpus", "4", "--machine", "h200")
    whole = plan(*flags)["passes_seconds"]["forward"]
    staged = plan(*flags, "--pipeline-parallel", "4", "--global-batch-size", "8")["passes_seconds"]["forward"]
    # 8 micro-batches through 4 stages, of which the last has the output layer; one rank's work before was 1.
    assert 8 / 4 * (1 + 3 / 8) * whole < staged < 8 / 4 * (1 + 3 / 8) * whole * 1.1


def test_activations_of_a_classical_layer_are_34_bytes_a_token_and_channel(plan, tmp_path):
    path = tmp_path / "gpt.txt"
    path.write_text(
        "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --max-position-embeddings 2048 --seq-length 2048 "
        "--vocab-size 51200 --bf16"
    )
    gpu = plan("plan", "--model", str(path), "--machine", "h200")["gpu_memory_bytes"]
    assert gpu["activations"] == 2048 * 1024 * 34 * 24 + 6 * 2048 * 51200
    halved = plan(
        *("plan", "--model", str(path), "--machine", "h200", "--gpus", "2", "--tensor-parallel", "2"),
        "--sequence-parallel",
    )
    assert halved["gpu_memory_bytes"]["activations"] == gpu["activations"] / 2


def test_grads_in_16_bits_are_half_the_memory_and_may_be_sent_so(plan):
    flags = (*ARGUMENTS, "--grad-reduce-in-bf16")
    found = plan(*flags)
    assert found["gpu_memory_bytes"]["grads"] == found["gpu_memory_bytes"]["params"]
    machine, owned = preset("h100-pcie5"), found["rank"]["owned_parameters"]
    for transfer, work in (
        ("fp32", workload.Workload(parameters=owned, ranks=4, subgroup=100_000_000, grad_bytes=4, casts=True)),
        ("model", workload.Workload(parameters=owned, ranks=4, subgroup=100_000_000, grad_bytes=2)),
    ):
        given = plan(*flags, "--grad-transfer", transfer, "--threads", "0")
        assert given["systems"][0]["update_s"] == rivals.ours(machine, work).makespan


def test_casts_of_16_bit_grads_take_slots_on_the_gpu(plan):
    flags = ["plan", "--model", "13b", "--machine", "h100-pcie5", "--subgroup-size", "500000000"]
    for transfer, cast_slots in (("fp32", 2 * 4 * 500_000_000), ("model", 0)):
        found = plan(*flags, "--grad-reduce-in-bf16", "--grad-transfer", transfer)
        assert found["choice"]["host_share"] > 0
        streaming = 3 * 12 * 500_000_000 if found["choice"]["streamed_share"] else 0
        assert found["gpu_memory_bytes"]["slots_during_the_step"] == streaming + cast_slots


def test_stage_with_most_to_update_is_the_one_that_counts(plan):
    flags = ("plan", "--model", "7b", "--gpus", "4", "--pipeline-parallel", "2", "--machine", "h200")
    flags += ("--subgroup-size", "500000000")
    first = plan(*flags, "--decoder-first-pipeline-num-layers", "24")["rank"]
    last = plan(*flags, "--decoder-last-pipeline-num-layers", "24")["rank"]
    layers = 24 * (173_015_040 + 2 * 4096)
    assert first["parameters"] == layers + 50304 * 4096
    assert last["parameters"] == layers + 50304 * 4096 + 4096
    assert last["owned_parameters"] == -(-last["parameters"] // 2)


def test_ranks_of_a_node_are_those_of_the_machine(plan):
    assert plan(*ARGUMENTS)["layout"]["ranks_per_node"] == 4
    assert plan("plan", "--model", "7b", "--gpus", "16", "--machine", "h100-pcie5")["layout"]["ranks_per_node"] == 4
    assert plan("plan", "--model", "7b", "--gpus", "2", "--machine", "h100-pcie5")["layout"]["ranks_per_node"] == 2


def test_page_has_the_figures(capsys):
    assert cli.main(ARGUMENTS) == 0
    page = capsys.readouterr().out
    for text in (
        "20b: 15,326,663,680 parameters",
        "data 2, tensor 2",
        "DOES NOT FIT",
        "HybridDeviceOptimizer",
        "states on the GPU: stock Megatron",
        "limited by: dram",
        "with a quarter of the GPU's memory for resident states:",
    ):
        assert text in page
    assert max(map(len, page.splitlines())) <= 120


def test_machine_may_be_a_file_and_a_preset_that_is_taken_without_one_is_named(plan, tmp_path):
    path = tmp_path / "node.json"
    path.write_text(preset("rtx4090").as_json())
    found = plan("plan", "--model", "7b", "--gpus", "8", "--tensor-parallel", "8", "--machine", str(path))
    assert found["machine"]["name"] == "rtx4090"
    unmeasured = plan("plan", "--model", "7b", "--gpus", "4")
    assert any("has not been measured: h100-pcie5 is taken" in note for note in unmeasured["notes"])


def test_states_that_exceed_the_nodes_memory_are_refused_with_numbers(capsys, tmp_path):
    path = tmp_path / "node.json"
    path.write_text(dataclasses.replace(preset("h100-pcie5"), host_memory=64e9).as_json())
    error = error_of(capsys, "plan", "--model", "7b", "--gpus", "2", "--machine", str(path))
    assert "7b on 2 GPUs: the update needs 6" in error
    assert "and 59.6 GiB are free" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "14b"], "neither a file nor a known model"),
        (["--model", "13b", "--machine", "abacus"], "--machine abacus: no preset or file of that name; presets: a100"),
        (["--model", "13b", "--gpus", "3", "--tensor-parallel", "2"], "--gpus 3 cannot be divided"),
        (
            ["--model", "20b", "--machine", "rtx4090"],
            "params and gradients of a rank need 85.6 GiB, and a GPU of rtx4090 has",
        ),
        (["--model", "13b", "--gpus", "1", "--tensor-parallel", "1", "--machine", "rtx4090"], "divide the model"),
        (
            ["--model", "20b", "--gpus", "2", "--tensor-parallel", "2", "--machine", "a100-pcie4"],
            "more --tensor-parallel or --pipeline-parallel, or give --grad-reduce-in-bf16",
        ),
        (
            [
                *("--model", "20b", "--gpus", "2", "--tensor-parallel", "2", "--machine", "a100-pcie4"),
                *("--grad-reduce-in-bf16", "--accumulate-allreduce-grads-in-fp32"),
            ],
            "--pipeline-parallel, or give no --accumulate-allreduce-grads-in-fp32",
        ),
        (["--model", "13b", "--dos-gpu-share", "2"], "--model 13b: --dos-gpu-share 2.0 is out of range"),
        (["--model", "13b", "--dos-cpu-threads", "1000"], "--dos-cpu-threads 1000: h100-pcie5 has 96 cores"),
        (["--model", "13b", "--threads", "-1"], "--threads -1: h100-pcie5 has 96 cores"),
        (["--model", "13b", "--threads", "1000"], "--threads 1000: h100-pcie5 has 96 cores"),
        (["--model", "13b", "--threads", "1000"], "give at most twice as many, or 0"),
        (["--model", "13b", "--subgroup-size", str(2**41)], "and at most 1099511627776"),
        (["--model", "13b", "--position-embedding-type", "sine"], "--position-embedding-type: invalid choice: 'sine'"),
        (
            ["--model", "13b", "--gpus", "8", "--resident-share", "1", "--machine", "h100-pcie5"],
            "lower --resident-share or --subgroup-size",
        ),
        (["--model", "13b", "--subgroup-size", "10"], "--subgroup-size 10: give 0, which is automatic, or at least"),
        (["--model", "13b", "--num-layers", "10000", "--hidden-size", "1000000"], "parameters are beyond any machine"),
        (["--model", "llama3-405b"], "each rank would own the states of 405.9B parameters"),
        (["--model", "13b", "--enqueue", "ahead"], "--enqueue ahead has no effect with a hardware queue for each"),
        (["--model", "13b", "--sub", "1"], "--sub 1: not a flag of this command"),
    ],
)
def test_what_cannot_be_is_one_clear_error(arguments, message, capsys):
    assert message in error_of(capsys, "plan", *arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--resident-share", "2"],
        ["--gpus", "0"],
        ["--gpus", "x"],
        ["--connections", "2"],
        ["--connections", "33"],
        ["--connections", "one"],
        ["--connections", "1", "--enqueue", "behind"],
        [],
    ],
)
def test_wrong_values_are_wrong_usage(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["plan", *(["--model", "13b"] if arguments else []), *arguments])
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("megatron-dos plan: ")
    assert error.endswith("; see megatron-dos plan --help\n")
    assert error.count("\n") == 1


def test_one_hardware_queue_is_slower_unless_operations_are_enqueued_when_needed(plan):
    each, eight = plan(*ARGUMENTS), plan(*ARGUMENTS, "--connections", "8")
    one = plan(*ARGUMENTS, "--connections", "1")
    needed = plan(*ARGUMENTS, "--connections", "1", "--enqueue", "when-needed")
    assert each == eight
    assert [found["queues"] for found in (each, one, needed)] == ["each", "one, ahead", "one, when needed"]
    seconds = [found["systems"][0]["update_s"] for found in (each, needed, one)]
    assert seconds == sorted(seconds)
    assert seconds[2] > 1.2 * seconds[0]
    assert any("they are enqueued ahead, as in training" in note for note in one["notes"])


def test_a_job_that_needs_no_offloading_is_told_so(plan):
    flags = ("plan", "--model", "13b", "--gpus", "8", "--machine")
    for machine, fits in (("h200", True), ("h100-pcie5", False)):
        found = plan(*flags, machine)
        assert found["systems"][-1]["fits"] is fits
        assert any("the states fit on the GPUs" in note for note in found["notes"]) is fits


def test_advice_keeps_to_the_memory_that_is_free(plan):
    helps = plan("plan", "--model", "13b", "--gpus", "8", "--machine", "h100-pcie5")["choice"]["step_seconds_with"]
    stock = 11_315_860_480 / 8 / preset("h100-pcie5").gpu_update
    assert helps["the free part of the GPU's memory for resident states"] > 4 * stock
    assert not any("a quarter" in name for name in helps)


def test_narrower_grads_are_no_way_out_where_they_would_not_fit_either(capsys):
    error = error_of(capsys, "plan", "--model", "20b", "--machine", "rtx4090")
    assert error.endswith("--tensor-parallel or --pipeline-parallel\n")


class TestAssumptions:
    def test_page_says_how_the_model_is_trained(self, capsys):
        assert cli.main([*ARGUMENTS, "--global-batch-size", "16", "--micro-batch-size", "2"]) == 0
        page = capsys.readouterr().out
        assert "global batch 16 x sequence 2048, micro-batches 4 of 2, recompute full, gradients of 32 bits" in page
        assert "no --global-batch-size" not in page

    def test_batch_that_was_not_given_is_told_with_what_a_larger_one_does(self, plan):
        flags = ("plan", "--model", "13b", "--gpus", "4", "--machine", "h100-pcie5")
        (note,) = [note for note in plan(*flags)["notes"] if "no --global-batch-size" in note]
        assert "4 is taken, one micro-batch a rank" in note
        assert "shrinks as gradient accumulation grows" in note
        ratios = []
        for found in (plan(*flags), plan(*flags, "--global-batch-size", "64")):
            times = {system["name"]: system["iteration_s"] for system in found["systems"]}
            ratios.append(times["HybridDeviceOptimizer"] / times["ours"])
        assert 1 < ratios[1] < 1.05 < 1.2 < ratios[0]


LLAMA = """
torchrun pretrain_gpt.py --num-layers 40 --hidden-size 5120 --ffn-hidden-size 13824 --num-attention-heads 40 \\
    --seq-length 1024 --max-position-embeddings 4096 --swiglu --disable-bias-linear --normalization RMSNorm \\
    --untie-embeddings-and-output-weights --position-embedding-type rope --vocab-size 32000 --bf16 \\
    --tensor-model-parallel-size 2 --global-batch-size 8 --recompute-granularity full --lr 1e-4
"""


class TestLaunch:
    """What the flags of a script do to its plan."""

    @pytest.fixture
    def of_script(self, plan, tmp_path):
        def run(flags: str = "", *more: str, gpus: str = "2", machine: str = "h200") -> dict:
            path = tmp_path / "train.sh"
            path.write_text(f"{LLAMA.strip()} {flags}\n")
            _known.clear()  # the file has changed
            return plan("plan", "--model", str(path), "--gpus", gpus, "--machine", machine, *more)

        return run

    USES = "--use-distributed-optimizer --use-deep-optimizer-states"

    @pytest.mark.parametrize(
        ("flag", "short"),
        [
            ("--dos-resident-share 0.3", "--resident-share 0.3"),
            ("--dos-subgroup-size 100000000", "--subgroup-size 100000000"),
            ("--dos-cpu-threads 3", "--threads 3"),
            ("--dos-grad-transfer model --grad-reduce-in-bf16", "--grad-transfer model --grad-reduce-in-bf16"),
        ],
    )
    def test_settings_of_the_script_are_those_of_the_command_line(self, flag, short, of_script):
        given, plain = of_script(f"{self.USES} {flag}"), of_script(self.USES)
        named = of_script(self.USES, *short.split())
        for part in ("rank", "gpu_memory_bytes", "host_memory_bytes", "choice", "systems"):
            assert given[part] == named[part]
        assert any(given[part] != plain[part] for part in ("rank", "gpu_memory_bytes", "choice", "systems"))
        assert given["launch"] == []
        dos = next(iter(flag.partition(" --grad-reduce")))
        assert named["launch"] == [dos]

    def test_command_line_counts_more_than_the_script(self, of_script):
        found = of_script(f"{self.USES} --dos-resident-share 0.3", "--resident-share", "0.1")
        assert found["choice"]["resident_share"] == pytest.approx(0.1, abs=0.01)
        assert found["launch"] == ["--dos-resident-share 0.1"]

    @pytest.mark.parametrize(
        ("flag", "host"), [("--dos-gpu-share 0.25", 0.75), ("--dos-update-stride 2", 0.5), ("--dos-gpu-share 0", 1)]
    )
    def test_share_and_stride_are_obeyed_by_choice_and_table(self, flag, host, of_script):
        found = of_script(f"{self.USES} {flag}")
        choice, ours = found["choice"], found["systems"][0]
        assert choice["host_share"] == pytest.approx(host, abs=0.01)
        assert ours["update_s"] == pytest.approx(choice["step_seconds"], rel=0.03)
        assert ours["update_s"] > of_script(self.USES)["systems"][0]["update_s"]

    def test_what_training_would_refuse_is_named_with_the_way_out(self, of_script):
        notes = of_script(
            f"{self.USES} --use-megatron-fsdp --optimizer sgd --no-pin-cpu-grads --main-params-dtype bf16"
        )
        refused = [note for note in notes["notes"] if note.startswith("training would refuse this: ")]
        for flag, way_out, note in zip(
            ("--use-megatron-fsdp", "--optimizer sgd", "--no-pin-cpu-grads", "--main-params-dtype bf16"),
            ("Drop --use-megatron-fsdp", "Use --optimizer adam", "Drop --no-pin-cpu-grads", "Drop --main-params-dtype"),
            refused,
            strict=True,
        ):
            assert f"does not work with {flag}" in note
            assert way_out in note
        taken = of_script(f"{self.USES} --optimizer adam --optimizer-offload-fraction 1.0 --dos-cpu-threads 90")
        assert not [note for note in taken["notes"] if "refuse" in note]

    def test_flags_that_the_script_lacks_are_named(self, of_script):
        found = of_script()
        assert any("train.sh has no --use-deep-optimizer-states" in note for note in found["notes"])
        assert any("needs --use-distributed-optimizer" in note for note in found["notes"])
        assert found["launch"][:2] == self.USES.split()
        assert of_script("--use-distributed-optimizer")["launch"][0] == "--use-deep-optimizer-states"
        assert not [note for note in of_script(self.USES)["notes"] if "--use-d" in note]

    def test_known_model_lacks_nothing_and_is_checked_all_the_same(self, plan):
        assert not [note for note in plan(*ARGUMENTS)["notes"] if "refuse" in note]
        (note,) = [note for note in plan(*ARGUMENTS, "--optimizer", "sgd")["notes"] if "refuse" in note]
        assert "does not work with --optimizer sgd" in note

    def test_flags_that_are_not_used_are_listed(self, of_script):
        notes = of_script(f"{self.USES} --dos-gpu-kernel torch --dos-trace-dir there --save here")["notes"]
        assert "not used by this estimate: --lr, --save, --dos-gpu-kernel, --dos-trace-dir" in notes

    def test_reduction_of_grads_in_the_backward_pass_counts_where_all_of_them_have_a_slot(self, of_script):
        overlap = f"{self.USES} --overlap-grad-reduce --dos-gpu-share 0"
        few, all_, early = (
            of_script(overlap),
            of_script(f"{overlap} --dos-early-grad-slots 194"),
            of_script(overlap, "--early-grads"),
        )
        assert any("gradients of 4 of 194 subgroups may be sent" in note for note in few["notes"])
        assert not any("of 194 subgroups" in note for note in all_["notes"])
        assert all_["systems"] == early["systems"] != few["systems"]
        assert early["launch"] == ["--dos-early-grad-slots 194"]
        assert any("unless CUDA_DEVICE_MAX_CONNECTIONS" in note for note in all_["notes"])
        off = of_script(f"{overlap} --dos-overlap-grad-d2h off", "--early-grads")
        assert off["launch"] == ["--dos-overlap-grad-d2h on", "--dos-early-grad-slots 194"]
        for cannot in ("--dos-overlap-grad-d2h off", "--calculate-per-token-loss"):
            found = of_script(f"{overlap} {cannot}")
            assert found["systems"] == few["systems"]
            assert not any("may be sent in the backward pass" in note for note in found["notes"])

    def test_no_grads_are_sent_in_the_backward_pass_with_one_queue_unless_they_are_asked_for(self, of_script):
        overlap = f"{self.USES} --overlap-grad-reduce --dos-gpu-share 0 --dos-early-grad-slots 194"
        auto = of_script(overlap, "--connections", "1")
        on = of_script(f"{overlap} --dos-overlap-grad-d2h on", "--connections", "1")
        assert any("auto is off with CUDA_DEVICE_MAX_CONNECTIONS=1" in note for note in auto["notes"])
        assert not any("unless CUDA_DEVICE_MAX_CONNECTIONS" in note for note in auto["notes"])
        assert on["systems"][0]["update_s"] < auto["systems"][0]["update_s"]
        assert "--dos-overlap-grad-d2h on" in of_script(overlap, "--connections", "1", "--early-grads")["launch"]


class TestMemoryOfEachWay:
    FLAGS = ("plan", "--model", "13b", "--gpus", "4", "--tensor-parallel", "2", "--subgroup-size", "100000000")

    @pytest.fixture
    def on(self, plan, tmp_path):
        def run(**values: float) -> dict:
            path = tmp_path / "node.json"
            path.write_text(dataclasses.replace(preset("a100-pcie4"), **values).as_json())
            _known.clear()
            return plan(*self.FLAGS, "--machine", str(path))

        return run

    def test_nothing_is_streamed_where_there_is_no_room_and_the_page_says_so(self, on):
        kept = 2 * 5.658e9 + 4 * 5.658e9
        found = on(gpu_memory=kept + 3.0e9)  # 3.6e9 are the slots
        choice, systems = found["choice"], {system["name"]: system for system in found["systems"]}
        assert (choice["streamed_share"], choice["host_share"]) == (0, 1)
        assert systems["ours"]["update_s"] == pytest.approx(choice["step_seconds"], rel=0.02)
        assert "nothing can be streamed: 0.6 GiB of GPU memory are missing for its slots" in choice["reason"]
        for name, system in systems.items():
            streams = name.startswith(("published", "GPU streaming", "states on the GPU"))
            assert system["fits"] is not streams, name
        roomy = on(gpu_memory=kept + 4.0e9)
        assert roomy["choice"]["streamed_share"] > 0
        assert roomy["systems"][0]["update_s"] < systems["ours"]["update_s"]
        assert "nothing can be streamed" not in roomy["choice"]["reason"]
        assert {system["name"] for system in roomy["systems"] if not system["fits"]} == {
            "states on the GPU: stock Megatron"
        }

    def test_grads_of_other_systems_take_host_memory(self, on):
        found = on(host_memory=4 * 12 * 2.83e9 + 10e9)
        fits = {system["name"]: system["fits"] for system in found["systems"]}
        assert (fits["ours"], fits["GPU streaming"]) == (True, True)
        assert (fits["full offload"], fits["HybridDeviceOptimizer"]) == (False, False)
        host = {system["name"]: system["host_bytes"] for system in found["systems"]}
        owned = found["rank"]["owned_parameters"]
        assert host["full offload"] - host["GPU streaming"] == 4 * 4 * owned
        assert host["ours"] == found["host_memory_bytes"]["with"]


class TestWhatToType:
    def test_page_ends_with_the_flags_of_a_launch(self, capsys):
        assert cli.main(["plan", "--model", "13b", "--gpus", "4", "--machine", "h100-pcie5"]) == 0
        end = capsys.readouterr().out.rstrip().split("\n\n")[-1]
        assert end == "add to your launch: --use-distributed-optimizer --use-deep-optimizer-states"

    def test_states_are_kept_on_the_gpu_where_there_is_room_beside_activations(self, plan, capsys):
        found = plan(*ARGUMENTS)
        share = found["advised_resident_share"]
        assert found["launch"][-1] == f"--dos-resident-share {share:g}"
        with_it = plan(*ARGUMENTS, "--resident-share", str(share))
        gpu = with_it["gpu_memory_bytes"]
        assert gpu["with"] <= 0.95 * gpu["there"]
        assert with_it["choice"]["step_seconds"] < 0.95 * found["choice"]["step_seconds"]
        assert with_it["advised_resident_share"] == 0  # it was given
        assert with_it["launch"] == found["launch"]

    def test_what_was_planned_with_is_named(self, plan):
        flags = ("--threads", "8", "--subgroup-size", "100000000", "--resident-share", "0.1", "--early-grads")
        launch = plan(
            "plan",
            "--model",
            "20b",
            "--gpus",
            "4",
            "--tensor-parallel",
            "2",
            "--machine",
            "a100-pcie4",
            *("--grad-reduce-in-bf16", "--grad-transfer", "model", *flags),
        )["launch"]
        assert launch[:3] == ["--use-distributed-optimizer", "--overlap-grad-reduce", "--use-deep-optimizer-states"]
        assert {"--dos-cpu-threads 8", "--dos-subgroup-size 100000000", "--dos-grad-transfer model"} < set(launch)
        assert "--dos-resident-share 0.1" in launch

    def test_job_that_needs_no_offloading_is_not_urged(self, capsys):
        assert cli.main(["plan", "--model", "13b", "--gpus", "8", "--machine", "h200"]) == 0
        end = capsys.readouterr().out.rstrip().split("\n\n")[-1]
        assert end == (
            "for deep optimizer states all the same, add: --use-distributed-optimizer --use-deep-optimizer-states"
        )


def test_a_known_model_need_not_recompute(capsys):
    whole = ["plan", "--model", "7b", "--gpus", "4", "--machine", "h100-pcie5", "--json"]
    found = {}
    for recompute in ("full", "selective", "none"):
        assert cli.main([*whole, "--recompute", recompute]) == 0
        found[recompute] = json.loads(capsys.readouterr().out)
        assert found[recompute]["training"]["recompute"] == recompute
    assert cli.main(whole) == 0
    assert json.loads(capsys.readouterr().out) == found["full"], "its own flags count where nothing is said"
    activations = {name: plan["gpu_memory_bytes"]["activations"] for name, plan in found.items()}
    assert activations["none"] > 2 * activations["full"]
    passes = {name: plan["passes_seconds"] for name, plan in found.items()}
    assert passes["full"]["backward"] == pytest.approx(1.5 * passes["none"]["backward"])
