# SPDX-License-Identifier: Apache-2.0
"""Which CPUs and memory a rank gets, on this machine and on made-up ones. How CPUs are divided: test_placement."""

import os
from types import SimpleNamespace

import pytest
import torch

from megatron_dos.node import gpu, threads
from megatron_dos.node import ranks as node
from megatron_dos.node.placement import RankFacts

TWO_SOCKETS = {cpu: cpu // 4 for cpu in range(8)}


@pytest.fixture(autouse=True)
def no_quota(monkeypatch):
    monkeypatch.setattr(node, "cpu_quotas", dict)


@pytest.fixture
def two_sockets(monkeypatch):
    monkeypatch.setattr(threads, "_nodes_of_cpus", lambda: TWO_SOCKETS)
    monkeypatch.setattr(threads, "_first_sibling", lambda cpu: cpu)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)


def ranks_are(monkeypatch, *facts, index=0):
    """Make this process one of ranks that have met; `facts` are what differs from a rank on CPUs 0 to 7."""
    common = {"machine": "m", "container": "c", "cpus": tuple(range(8))}
    ranks = tuple(RankFacts(**{"rank": rank, **common, **of}) for rank, of in enumerate(facts))
    monkeypatch.setattr(node, "current", lambda: node.Node(ranks, index))


class TestEnvironment:
    """Where the ranks have not met, a launcher's variables count, and all ranks are taken to have this one's mask."""

    def test_ranks_share_the_allowed_cpus(self, monkeypatch):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(3, 19)))
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        taken: list[int] = []
        for rank in range(4):
            monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
            monkeypatch.setenv("LOCAL_RANK", str(rank))
            assert threads.default_threads() == 4
            taken += threads.cpus_of_rank()
        assert sorted(taken) == list(range(3, 19))
        assert threads.source_of_threads() == "16 CPUs shared by 4 ranks; the ranks have not met"

    def test_more_ranks_than_cpus_leaves_one_thread_each_on_any_cpu(self, monkeypatch):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
        monkeypatch.setenv("LOCAL_RANK", "5")
        assert threads.default_threads() == 1
        assert threads.cpus_of_rank() == [0, 1]

    def test_a_rank_that_knows_its_number_only_is_not_alone(self, monkeypatch):
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
        monkeypatch.setenv("LOCAL_RANK", "3")
        assert threads.ranks_on_node() == 4
        assert threads.cpus_of_rank() == [6, 7]
        assert not threads.is_first_on_node()

    @pytest.mark.parametrize("name", ["LOCAL_WORLD_SIZE", "LOCAL_RANK"])
    @pytest.mark.parametrize("value", ["-1", "two", "1.5"])
    def test_a_senseless_variable_is_refused_by_name(self, monkeypatch, name, value):
        monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match=name):
            threads.cpus_of_rank()


def test_a_single_worker_is_not_pinned_and_many_get_every_allowed_cpu(monkeypatch, two_sockets):
    ranks_are(monkeypatch, {}, {})
    assert threads.cpus_for(1) == []
    assert threads.cpus_for(3) == threads.cpus_for(4) == [0, 1, 2, 3]
    assert threads.cpus_for(5) == list(range(8))


def test_memory_is_counted_by_container_and_bandwidth_by_machine(monkeypatch):
    ranks_are(monkeypatch, {"container": "other"}, {}, {}, {"container": "other"}, index=1)
    assert threads.ranks_on_node() == 2
    assert threads.ranks_on_machine() == 4
    assert threads.is_first_on_node()
    assert threads.default_threads() == 2


def test_kernel_lists_are_read(tmp_path):
    path = tmp_path / "cpulist"
    path.write_text("0-3,8,10-11\n")
    assert threads._numbers(path) == [0, 1, 2, 3, 8, 10, 11]
    path.write_text("\n")
    assert threads._numbers(path) == []
    assert threads._numbers(tmp_path / "missing") == []


def test_memory_node_follows_the_gpu_and_else_the_cpus(monkeypatch, two_sockets):
    ranks_are(monkeypatch, {}, {}, index=1)
    assert threads.memory_node() == 1
    ranks_are(monkeypatch, {"gpu_node": 1}, {"gpu_node": 0}, index=1)
    assert threads.memory_node() == 0
    assert threads.cpus_of_rank() == [0, 1, 2, 3]
    ranks_are(monkeypatch, {})
    assert threads.memory_node() is None


class TestNearness:
    def test_it_is_said_where_the_threads_run(self, monkeypatch, two_sockets):
        ranks_are(monkeypatch, {"gpu_node": 1}, {"gpu_node": 0})
        assert threads.nearness(4) == "on NUMA node 1 of the GPU"
        assert threads.nearness(8) == "of which 4 of 8 CPUs are on NUMA node 1 of the GPU"
        assert threads.complaints() == []

    def test_a_mask_away_from_the_gpu_is_a_complaint(self, monkeypatch, two_sockets):
        far = {"gpu_node": 1, "cpus": (0, 1, 2, 3)}
        ranks_are(monkeypatch, far, {"gpu_node": 1, "cpus": (4, 5, 6, 7)}, {**far, "container": "other"})
        assert threads.complaints() == [
            "states of rank 0 are updated by CPU threads of which 0 of 2 CPUs are on NUMA node 1 of the GPU"
        ]

    def test_an_unknown_node_is_a_complaint_with_its_reason(self, monkeypatch, two_sockets):
        unknown = {"gpu_unknown": "/sys/bus/pci/devices/x/numa_node is -1"}
        ranks_are(monkeypatch, unknown, {"gpu_node": 1}, unknown)
        assert threads.complaints() == [
            "states of ranks 0, 2 are updated by CPU threads not known to be near the GPU: "
            "/sys/bus/pci/devices/x/numa_node is -1"
        ]

    def test_a_kernel_without_nodes_is_a_complaint(self, monkeypatch, two_sockets):
        monkeypatch.setattr(threads, "_nodes_of_cpus", dict)
        ranks_are(monkeypatch, {"gpu_node": 0})
        (complaint,) = threads.complaints()
        assert complaint.endswith("not known to be near the GPU: the kernel lists no NUMA nodes")

    def test_one_node_or_no_gpu_is_none(self, monkeypatch, two_sockets):
        ranks_are(monkeypatch, {})
        assert threads.nearness(8) == ""
        monkeypatch.setattr(threads, "_nodes_of_cpus", lambda: dict.fromkeys(range(8), 0))
        ranks_are(monkeypatch, {"gpu_unknown": "a hidden bus"})
        assert threads.nearness(8) == ""
        assert threads.complaints() == []

    def test_the_node_of_a_gpu_is_the_one_of_its_pci_device(self, monkeypatch, tmp_path):
        properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        monkeypatch.setattr(gpu, "Path", lambda path: tmp_path / path.lstrip("/"))
        file = tmp_path / "sys/bus/pci/devices/0000:1b:00.0/numa_node"
        node_of, reason = gpu._numa_node(0)
        assert node_of is None
        assert "0000:1b:00.0/numa_node cannot be read" in reason
        file.parent.mkdir(parents=True)
        file.write_text("-1\n")
        assert gpu._numa_node(0)[0] is None
        assert gpu._numa_node(0)[1].endswith("numa_node is -1")
        file.write_text("1\n")
        assert gpu._numa_node(0) == (1, "")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace())
        assert "does not report PCI addresses" in gpu._numa_node(0)[1]


class TestOneThread:
    def test_it_is_a_complaint_where_there_are_more_cpus(self, monkeypatch, two_sockets):
        ranks_are(monkeypatch, {"cpus": (0,)}, {"cpus": (1,)}, {"cpus": (2, 3)})
        assert threads.complaints() == [
            "states of ranks 0, 1 are updated with 1 CPU thread (own mask of 1 CPU), and the machine has 8 CPUs for 3 "
            "ranks. Have the launcher give each rank more CPUs, or raise the CPU quota of the container"
        ]

    def test_it_is_none_where_there_are_not_or_the_user_has_chosen_it(self, monkeypatch, two_sockets):
        ranks_are(monkeypatch, {"cpus": (0,)}, {"cpus": (1,)})
        assert threads.complaints(chosen=1) == []
        ranks_are(monkeypatch, *[{}] * 8)
        assert threads.default_threads() == 1
        assert threads.complaints() == []

    def test_a_quota_is_named(self, monkeypatch, two_sockets):
        ranks_are(monkeypatch, {"quotas": {"g": 1.0}})
        assert threads.default_threads() == 1
        assert "(container quota of 1 CPU)" in threads.complaints()[0]
