# SPDX-License-Identifier: Apache-2.0
"""Ranks find out which of them share a machine: real processes, real stores, real masks; made-up machines and CPUs.

The script below forks the ranks. Each takes on what its case says (a mask, a machine, an environment), sets up gloo,
meets the others and prints what it was given.
"""

import json
import os
import socket
import subprocess
import sys
import textwrap

import pytest

RANKS = textwrap.dedent(
    """
    import json, os, socket, sys
    import torch.distributed as dist
    from megatron_dos.node import ranks as node
    from megatron_dos.node import threads

    def rank(case, number, of):
        for name in node._SIZES + node._RANKS:
            os.environ.pop(name, None)
        os.environ.update(of.get("environment", {}))
        if "pinned" in of:
            os.sched_setaffinity(0, of["pinned"])
        if "cpus" in of:
            os.sched_getaffinity = lambda pid: set(of["cpus"])
        for name in ("machine_id", "cpu_quotas"):
            if name in of:
                setattr(node, name, lambda name=name: of[name])
        if "host" in of:
            socket.gethostname = lambda: of["host"]
        if "group" in case:
            with open(case["group"] + "/cgroup.procs", "w") as file:
                file.write(str(os.getpid()))
        for world in range(case.get("worlds", 1)):
            store = dist.FileStore(case["store"] + str(world)) if case.get("files") else dist.TCPStore(
                "127.0.0.1", case["ports"][world], len(case["ranks"]), is_master=number == 0)
            dist.init_process_group("gloo", store=store, rank=number, world_size=len(case["ranks"]))
            for _ in range(of.get("meets", 1)):
                node.meet(case.get("limit_s"))
            answer = dict(
                threads=threads.default_threads(), cpus=threads.cpus_of_rank(), source=threads.source_of_threads(),
                on_node=threads.ranks_on_node(), on_machine=threads.ranks_on_machine(),
                first=threads.is_first_on_node(), complaints=threads.complaints())
            dist.barrier()
            dist.destroy_process_group()
        return answer

    def meet(case):
        children = []
        for number, of in enumerate(case["ranks"]):
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.write(write, json.dumps(rank(case, number, of)).encode())
                os._exit(0)
            os.close(write)
            children.append((pid, read))
        answers = [os.fdopen(read).read() for _, read in children]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, _ in children]
        assert codes == [0] * len(codes), codes
        return [json.loads(answer) for answer in answers]

    print(json.dumps({name: meet(case) for name, case in json.loads(sys.argv[1]).items()}))
    """
)


def free_ports(count):
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def meet_all(cases):
    """Name of a case -> what each of its ranks was given, a dict."""
    cases = {name: {"ports": free_ports(case.get("worlds", 1)), **case} for name, case in cases.items()}
    command = [sys.executable, "-c", RANKS, json.dumps(cases)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def each(answers, name):
    return [answer[name] for answer in answers]


def disjoint(answers):
    taken = [cpu for answer in answers for cpu in answer["cpus"]]
    return len(taken) == len(set(taken))


def needs_cpus(count):
    return pytest.mark.skipif(len(os.sched_getaffinity(0)) < count, reason=f"needs {count} CPUs to have masks of")


ALL = list(range(96))
BOUND = [{"cpus": ALL[12 * rank : 12 * rank + 12]} for rank in range(8)]
TORCHRUN = [{"LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"} for rank in range(8)]
MPIRUN = [{"OMPI_COMM_WORLD_LOCAL_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": str(rank)} for rank in range(8)]
SRUN = [{"SLURM_NTASKS_PER_NODE": "8", "SLURM_LOCALID": str(rank)} for rank in range(8)]
LAUNCHERS = {
    "torchrun": [{"cpus": ALL, "environment": of} for of in TORCHRUN],
    "torchrun --numa-binding exclusive": [
        {**mask, "environment": of} for mask, of in zip(BOUND, TORCHRUN, strict=True)
    ],
    "torchrun --numa-binding node": [
        {"cpus": ALL[:48] if rank < 4 else ALL[48:], "environment": of} for rank, of in enumerate(TORCHRUN)
    ],
    "srun --cpus-per-task=12": [{**mask, "environment": of} for mask, of in zip(BOUND, SRUN, strict=True)],
    "mpirun --map-by slot:PE=12": [{**mask, "environment": of} for mask, of in zip(BOUND, MPIRUN, strict=True)],
    "Ray or Monarch actors": [{"cpus": ALL}] * 8,
    "Ray actors with one GPU each": [{"cpus": ALL, "environment": {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}}] * 8,
}


CPUS = sorted(os.sched_getaffinity(0))
CASES = {
    **{launcher: {"ranks": ranks} for launcher, ranks in LAUNCHERS.items()},
    "srun -N2 -n16": {
        "ranks": [
            {"cpus": ALL, "machine_id": f"boot {rank // 8}", "environment": {"SLURM_LOCALID": str(rank % 8)}}
            for rank in range(16)
        ]
    },
    "containers": {"ranks": [{"cpus": ALL, "host": f"pod{rank % 2}"} for rank in range(4)]},
    "real masks": {"ranks": [{"pinned": CPUS[:1]}, {"pinned": CPUS[1:2] or CPUS}]},
    "overlapping masks": {"ranks": [{"pinned": CPUS[:2]}, {"pinned": CPUS[:1]}]},
    "quota": {"ranks": [{"cpus": ALL, "cpu_quotas": {"group": 1.0}, "environment": TORCHRUN[0]}]},
    "several optimizers": {"ranks": [{"cpus": ALL, "meets": count} for count in (1, 3, 2)], "worlds": 2},
    "one stays away": {
        "ranks": [{"cpus": ALL, "environment": {"LOCAL_WORLD_SIZE": "4"}}, {"cpus": ALL, "meets": 0}],
        "limit_s": 1.0,
    },
}


@pytest.fixture(scope="module")
def answers():
    return meet_all(CASES)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_eight_ranks_have_12_of_96_cpus_under_every_launcher(answers, launcher):
    of = answers[launcher]
    assert each(of, "threads") == [12] * 8
    assert disjoint(of)
    assert each(of, "on_node") == [8] * 8
    assert each(of, "first") == [True] + [False] * 7


def test_srun_without_binding_or_a_number_of_tasks_per_node(answers):
    """SLURM_NTASKS_PER_NODE is not set, and the two machines have one name."""
    of = answers["srun -N2 -n16"]
    assert each(of, "threads") == [12] * 16
    assert each(of, "source") == ["96 CPUs shared by 8 ranks"] * 16
    assert each(of, "on_node") == [8] * 16
    assert each(of, "first") == ([True] + [False] * 7) * 2
    assert disjoint(of[:8])
    assert disjoint(of[8:])


def test_containers_of_one_machine_divide_its_cpus_and_not_their_memory(answers):
    of = answers["containers"]
    assert each(of, "threads") == [24] * 4
    assert disjoint(of)
    assert each(of, "on_machine") == [4] * 4
    assert each(of, "on_node") == [2] * 4
    assert each(of, "first") == [True, True, False, False]


@needs_cpus(2)
def test_ranks_with_real_masks_of_their_own(answers):
    assert each(answers["real masks"], "cpus") == [CPUS[:1], CPUS[1:2]]
    assert each(answers["real masks"], "source") == ["own mask of 1 CPU"] * 2


@needs_cpus(2)
def test_ranks_with_real_masks_that_overlap_in_part(answers):
    assert each(answers["overlapping masks"], "threads") == [1, 1]
    assert each(answers["overlapping masks"], "cpus") == [CPUS[1:2], CPUS[:1]]


def test_a_quota_of_one_cpu_leaves_one_thread_and_a_complaint(answers):
    (of,) = answers["quota"]
    assert (of["threads"], of["source"]) == (1, "container quota of 1 CPU")
    if os.cpu_count() > 1:
        assert "updated with 1 CPU thread (container quota of 1 CPU)" in of["complaints"][0]


def test_ranks_meet_once_a_world_however_many_optimizers_each_builds(answers):
    assert each(answers["several optimizers"], "threads") == [32] * 3
    assert disjoint(answers["several optimizers"])


def test_a_rank_that_stays_away_is_waited_for_in_vain_and_the_environment_counts(answers):
    of = answers["one stays away"][0]
    assert of["threads"] == 24
    assert of["source"].startswith("96 CPUs shared by 4 ranks; the ranks did not meet: ")
    assert "\n" not in of["source"]


def test_ranks_of_a_real_control_group_share_its_quota(real_group):
    (limit,) = [file for file in ("cpu.max", "cpu.cfs_quota_us") if (real_group / file).exists()]
    (real_group / limit).write_text("600000 100000" if limit == "cpu.max" else "600000")
    of = meet_all({"": {"ranks": [{"cpus": ALL}] * 2, "group": str(real_group)}})[""]
    assert each(of, "threads") == [3, 3]
    assert each(of, "source") == ["container quota of 6 CPUs shared by 2 ranks"] * 2


def test_ranks_meet_through_files(tmp_path):
    of = meet_all({"": {"ranks": [{"cpus": ALL}] * 2, "files": True, "store": str(tmp_path / "store")}})[""]
    assert each(of, "threads") == [48] * 2


def test_a_store_that_only_pretends_is_no_meeting():
    code = textwrap.dedent(
        """
        import os
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore
        from megatron_dos.node import ranks as node
        from megatron_dos.node import threads
        os.sched_getaffinity = lambda pid: set(range(8))
        dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=64)
        node.meet()
        print(threads.default_threads(), threads.source_of_threads())
        """
    )
    environment = {**os.environ, "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "3"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("2 8 CPUs shared by 4 ranks; the ranks did not meet: ")
