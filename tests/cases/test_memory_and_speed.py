# SPDX-License-Identifier: Apache-2.0
"""Cases 19 to 23 of docs/cases.md: what takes too much memory or time, and what only shows on other machines."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import test_cuda_device
import torch
from case_runs import arguments_of, in_ranks, prepare
from repository import ROOT
from shown_to_fail import fails_under

from megatron_dos import _cpp_adam
from megatron_dos.device import cuda
from megatron_dos.device.sim import SimDevice
from megatron_dos.kernels import AdamScalars, device_kernel
from megatron_dos.node import control_groups, gpu, threads
from megatron_dos.node import ranks as node
from megatron_dos.program import partition
from megatron_dos.program.schedule import OpKind, Placement, Stream, SubgroupShape, build_program, mix
from megatron_dos.update import engine
from megatron_dos.update.operations import StepInputs
from megatron_dos.words import plural

CPP = ROOT / "cpp_adam" / "src"

# ---- 19: memory -----------------------------------------------------------------------------------------------------


@fails_under(states_are_held_twice="more than the estimate", slabs_are_rounded_up_to_powers_of_two="bytes a parameter")
def test_case_19_host_memory_of_the_states(megatron, mutation):
    for sizes in in_ranks(megatron, "memory_of_states", 2, mutation):
        page = 4096  # each slab ends on one
        assert sizes["states"] <= 12 * sizes["owned"] + 3 * page, (
            f"{sizes['states'] / sizes['owned']} bytes a parameter"
        )
        assert sizes["all"] <= sizes["estimate"] + 7 * page, f"{sizes['all']}: more than the estimate"
        assert sizes["on the device"] == 0


@fails_under(estimate_comes_too_late="memory was taken first")
def test_case_19_the_estimate_comes_before_the_memory(megatron, mutation):
    events, *_ = in_ranks(megatron, "order_of_construction", 2, mutation)
    assert events.count("estimate") == 1
    assert "memory" in events
    assert events[0] == "estimate", "memory was taken first"


@fails_under(nobody_asks_whether_states_fit="took memory")
def test_case_19_what_does_not_fit_is_refused(megatron, mutation):
    (outcome,) = in_ranks(megatron, "refuse_what_does_not_fit", 1, mutation)
    assert not outcome["taken"], f"took memory: {outcome['taken']}"
    assert "--use-deep-optimizer-states needs" in outcome["error"]


@fails_under(steps_keep_their_staging="step 10")
def test_case_19_device_memory_after_ten_steps(megatron, mutation):
    for sizes in in_ranks(megatron, "memory_between_steps", 1, mutation):
        assert sizes["step 10"] == sizes["step 1"], f"bytes after step 1 and step 10: {sizes}"


@fails_under(saves_keep_a_copy="resident size grows")
def test_case_19_twenty_saves(megatron, mutation, tmp_path):
    (sizes,) = in_ranks(megatron, "resident_size_over_saves", 1, mutation, folder=str(tmp_path), saves=30)
    # The first saves make the allocators of the process grow. Copies of the states would be 60 MiB.
    grown = (sizes[29] - sizes[9]) / 2**20
    assert grown < 16, f"resident size grows by {grown:.0f} MiB over 20 saves"


# ---- 20: threads ----------------------------------------------------------------------------------------------------


@fails_under(
    threads_follow_omp_num_threads="threads of 8 ranks",
    every_rank_takes_all_cpus="threads of 8 ranks|share CPUs",
    cpus_are_divided_without_regard_to_nodes="NUMA node",
)
def test_case_20_eight_ranks_of_a_node_divide_its_cpus(monkeypatch):
    # Sixteen CPUs, two sockets; the first four GPUs hang on the second.
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(threads, "_nodes_of_cpus", lambda: {number: number // 8 for number in range(16)})
    monkeypatch.setattr(threads, "_first_sibling", lambda number: number)
    monkeypatch.setattr(node, "cpu_quotas", dict)
    monkeypatch.setattr(gpu, "numa_nodes", lambda ranks: [1, 1, 1, 1, 0, 0, 0, 0])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    counts, taken = [], []
    for rank in range(8):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        counts.append(threads.default_threads())
        taken.append(threads.cpus_of_rank())
    assert counts == [2] * 8, f"threads of 8 ranks on 16 CPUs: {counts}"
    assert len({number for of_rank in taken for number in of_rank}) == sum(map(len, taken)) == 16, "ranks share CPUs"
    nodes = [{number // 8 for number in of_rank} for of_rank in taken]
    assert nodes == [{1}] * 4 + [{0}] * 4, f"CPUs and GPUs are not on one NUMA node: {taken}"


@fails_under(
    own_masks_are_divided_again="^bound: .*'threads': 6",
    ranks_do_not_meet="^unbound",
    machines_are_told_apart_by_name="machines of one name",
)
def test_case_20_ranks_under_launchers_that_bind_or_say_nothing(megatron, mutation, tmp_path):
    for masks, machines, threads_of, what in (
        ([range(12), range(12, 24)], "aa", [12, 12], "bound"),
        ([range(24), range(24)], "aa", [12, 12], "unbound"),
        ([range(24), range(24)], "ab", [24, 24], "machines of one name"),
    ):
        found = in_ranks(
            *(megatron, "threads_of_ranks", 2, mutation),
            masks=[list(mask) for mask in masks],
            machines=machines,
            folder=str(tmp_path),
        )
        assert [of["threads"] for of in found] == threads_of, f"{what}: {found}"
        assert all(set(of["cpus"]) <= set(mask) for of, mask in zip(found, masks, strict=True)), f"{what}: {found}"


@fails_under(quotas_are_ignored="the quota of 1 CPU")
def test_case_20_a_container_with_a_quota_of_one_cpu(monkeypatch, tmp_path):
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    monkeypatch.setattr(control_groups, "_MOUNT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert threads.default_threads() == 1, "more threads than the quota of 1 CPU has time for"


@fails_under(threads_follow_omp_num_threads="single-threaded")
def test_case_20_the_update_uses_all_cpus_of_the_rank(megatron, mutation):
    allowed = len(os.sched_getaffinity(0))
    if allowed == 1:
        pytest.skip("one CPU cannot show whether more are used")
    common = arguments_of("dp1")
    environment = {"OMP_NUM_THREADS": "1"}
    run = megatron.train(common, 1, "dos", 1, environment=environment, prepare=prepare(mutation))
    threads = f"CPU with {plural(allowed, 'thread')} (own mask of {allowed} CPUs)"
    assert threads in run.log(), f"single-threaded: {run.log()}"
    chosen = megatron.train([*common, "--dos-cpu-threads", "1"], 1, "dos", 1, environment=environment)
    assert "CPU with 1 thread (--dos-cpu-threads)" in chosen.log()


# ---- 21: the share of the GPU ---------------------------------------------------------------------------------------


@fails_under(params_are_not_split="asked")
def test_case_21_a_param_with_60_percent_of_the_bytes(megatron, mutation):
    asked, size, numel = [0.0, 0.1, 0.25, 0.37, 0.5, 0.7, 0.9, 1.0], 1024, 40000
    (found,) = in_ranks(megatron, "real_shares", 1, mutation, asked=asked, subgroup_size=size)
    for share, real in found.items():
        assert abs(real - float(share)) * numel <= size, f"asked for {share} on the GPU, got {real}"


# ---- 22: denormals --------------------------------------------------------------------------------------------------


@fails_under(denormals_stay_in_the_moments="denormal")
def test_case_22_two_thousand_steps_without_a_grad():
    numel = 512
    parts = partition.partition([partition.OwnedRange(0, (0, 0), 0, numel)], numel // 2)
    built = engine.UpdateEngine(
        parts,
        [torch.zeros(numel, dtype=torch.bfloat16)],
        engine.EngineOptions(threads=1, host_share=Fraction(1, 2)),
        SimDevice(0),
        device_kernel.select("auto", torch.device("cpu"), threads=1),
    )
    program = built.program([torch.zeros(numel)])
    assert set(program.placements) == {Placement.HOST, Placement.STREAMED}
    generator = torch.Generator().manual_seed(22)
    grad = torch.randn(numel, generator=generator) * torch.logspace(-18, 0, numel)
    found = 0
    for step in range(1, 2002):
        scalars = AdamScalars.at_step(step, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, decoupled=True)
        built.update(StepInputs([grad if step == 1 else torch.zeros(numel)], [scalars]))
        if step % 20 == 1:
            states = built.owner_states(0)
            found += sum(denormals(states[name]) for name in ("exp_avg", "exp_avg_sq"))
    assert found == 0, f"{found} times a moment was denormal"
    assert not states["exp_avg"].any()
    assert not states["exp_avg_sq"].any()


def denormals(state: torch.Tensor) -> int:
    """How many elements are denormal, whatever the floating-point mode of this thread makes of them."""
    bits = state.numpy().view(np.uint32) & 0x7FFFFFFF
    return int(((bits > 0) & (bits < 0x00800000)).sum())


# ---- 23: building ---------------------------------------------------------------------------------------------------

STEP = """
import sys
import torch
started = []
starts = ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.fork", "os.system")
sys.addaudithook(lambda event, args: started.append((event, args)) if event in starts else None)
from megatron_dos.program import partition
from megatron_dos.update import engine
from megatron_dos.kernels import AdamScalars, cpu
from megatron_dos.update.operations import StepInputs
if sys.argv[1:]:
    import mutations
    mutations.apply(sys.argv[1])
parts = partition.partition([partition.OwnedRange(0, (0, 0), 0, 300)], 100)
built = engine.UpdateEngine(parts, [torch.zeros(300)], engine.EngineOptions(threads=2))
scalars = AdamScalars.at_step(1, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, decoupled=True)
built.update(StepInputs([torch.ones(300)], [scalars]))
assert built.owner_states(0)["master"].ne(0).all()
print("started:", started)
"""


@fails_under(first_update_compiles="started")
def test_case_23_no_compiler_at_run_time(mutation, tmp_path):
    arguments = [mutation] if mutation else []
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])  # the latter for the mutations
    # Neither a compiler nor anything else is found on this PATH.
    environment = {"PATH": str(tmp_path), "PYTHONPATH": path, "HOME": str(tmp_path)}
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", STEP, *arguments],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "started: []" in finished.stdout, f"started: {finished.stdout}{finished.stderr}"


LOAD = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("megatron_dos._cpp_adam", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.supported_isas())
"""

UPDATE_WITH_THE_BEST = """
#include "kernels.h"
#include <cstdio>
int main() {
  float p[64] = {}, m[64] = {}, v[64] = {}, g[64];
  for (float& x : g) x = 1.0f;
  dos::Update update{};
  update.param = p; update.exp_avg = m; update.exp_avg_sq = v; update.grad = g; update.count = 64;
  update.exp_avg_dtype = update.exp_avg_sq_dtype = update.grad_dtype = dos::DType::float32;
  update.out_dtype = dos::DType::none; update.unscale = update.grad_scale = 1.0f;
  const dos::Isa& best = dos::supported_isas().front();
  std::printf("%s\\n", best.name);
  std::fflush(stdout);
  best.update_range(update, 0, 64);
  std::printf("updated\\n");
}
"""

OTHER_CPU = ["qemu-x86_64", "-cpu", "Nehalem"]  # of 2008: no AVX
NEEDS_EMULATOR = pytest.mark.skipif(
    platform.machine() != "x86_64" or not shutil.which(OTHER_CPU[0]), reason="needs qemu-user (apt-get install)"
)


@NEEDS_EMULATOR
def test_case_23_the_module_runs_on_an_older_cpu():
    finished = subprocess.run(
        [*OTHER_CPU, sys.executable, "-S", "-E", "-c", LOAD, _cpp_adam.__file__],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert finished.stdout.strip() == "['scalar']", finished.stderr


@pytest.fixture(scope="module")
def kernel_objects(tmp_path_factory):
    """The kernels of each instruction set, compiled, and a program that updates with the one that is chosen."""
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "main.cpp").write_text(UPDATE_WITH_THE_BEST)
    for name, flags in (
        ("kernel_scalar", []),
        ("kernel_avx2", ["-mavx2", "-mf16c"]),
        ("kernel_avx512", ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]),
    ):
        compile_one(CPP / f"{name}.cpp", folder / f"{name}.o", *flags, "-c")
    compile_one(folder / "main.cpp", folder / "main.o", f"-I{CPP}", "-c")
    return list(folder.glob("*.o"))


@NEEDS_EMULATOR
@pytest.mark.parametrize("protected", [True, False], ids=["as it is", "without the choice at run time"])
def test_case_23_an_illegal_instruction_is_never_met(tmp_path, kernel_objects, protected):
    # The mutation: every CPU is taken to have every instruction set.
    without = [] if protected else ["-D__builtin_cpu_supports(name)=1"]
    compile_one(CPP / "kernels.cpp", tmp_path / "main", *without, *kernel_objects)
    finished = subprocess.run([*OTHER_CPU, tmp_path / "main"], capture_output=True, text=True, timeout=60, check=False)
    if protected:
        assert finished.stdout.split() == ["scalar", "updated"], finished
    else:
        assert finished.returncode in (-signal.SIGILL, 128 + signal.SIGILL), finished
        assert "updated" not in finished.stdout


def compile_one(source, target, *more):
    subprocess.run(["g++", "-std=c++17", "-O0", "-w", source, *more, "-o", target], check=True)


@fails_under(tickets_are_waited_for_in_the_open="error of the clean-up")
def test_case_23_an_error_of_the_clean_up_does_not_hide_the_real_one(monkeypatch):
    program = build_program([SubgroupShape((0, 0), 4, False)] * 3, mix([4] * 3, host_share=1))

    class Ticket:
        def __init__(self, subgroup):
            self.fails = subgroup == 1

        def poll(self):
            return not self.fails

        def wait(self):
            if self.fails:
                raise RuntimeError("error of the clean-up")

    def handle(op):
        if op.kind is OpKind.GRAD_TO_HOST and op.subgroup == 2:
            raise RuntimeError("the real error")
        return Ticket(op.subgroup) if op.stream is Stream.CPU else None

    for seed in range(10):
        machine = test_cuda_device.Machine(seed)
        for name in ("Stream", "Event", "stream", "current_stream"):
            monkeypatch.setattr(cuda.torch.cuda, name, getattr(machine, name))
        with pytest.raises(RuntimeError) as raised:
            cuda.CudaDevice(torch.device("cuda")).run(program, dict.fromkeys(OpKind, handle), lambda resource: [])
        assert str(raised.value) == "the real error"
