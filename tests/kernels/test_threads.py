"""Which CPUs and memory a rank gets, on this machine and on made-up ones."""

import os

import pytest

from megatron_dos.kernels import gpu, threads

TWO_SOCKETS = {cpu: cpu // 4 for cpu in range(8)}


def test_ranks_share_the_allowed_cpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(3, 19)))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    taken: list[int] = []
    for rank in range(4):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert threads.default_threads() == 4
        taken += threads.cpus_of_rank()
    assert sorted(taken) == list(range(3, 19))


def test_more_ranks_than_cpus_leaves_one_thread_each_on_any_cpu(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert threads.default_threads() == 1
    assert threads.cpus_of_rank() == [0, 1]


def test_a_single_worker_is_not_pinned_and_many_get_every_allowed_cpu(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert threads.cpus_for(1) == []
    assert len(threads.cpus_for(4)) == 4
    assert threads.cpus_for(5) == list(range(8))


@pytest.mark.parametrize("name", ["LOCAL_WORLD_SIZE", "LOCAL_RANK"])
@pytest.mark.parametrize("value", ["-1", "two", "1.5"])
def test_a_senseless_environment_is_refused_by_name(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=name):
        threads.cpus_of_rank()


def test_ranks_get_cpus_of_the_node_of_their_gpu():
    assert threads.divide_cpus(range(8), TWO_SOCKETS, [1, 0]) == [[4, 5, 6, 7], [0, 1, 2, 3]]
    assert threads.divide_cpus(range(8), TWO_SOCKETS, [1, 0, 1, 0]) == [[4, 5], [0, 1], [6, 7], [2, 3]]


def test_a_rank_whose_node_is_used_up_gets_what_is_left():
    shares = threads.divide_cpus(range(8), TWO_SOCKETS, [1, 1])
    assert shares == [[4, 5, 6, 7], [0, 1, 2, 3]]
    assert threads.divide_cpus(range(8), TWO_SOCKETS, [None, 0, 7, None]) == [[2, 3], [0, 1], [4, 5], [6, 7]]


def test_shares_are_disjoint_and_as_large_as_they_can_be():
    for ranks in range(1, 9):
        for wanted in ([None] * ranks, [0] * ranks, [1] * ranks, [rank % 2 for rank in range(ranks)]):
            shares = threads.divide_cpus(range(8), TWO_SOCKETS, wanted)
            taken = [cpu for share in shares for cpu in share]
            assert len(taken) == len(set(taken)) == 8 // ranks * ranks


def test_kernel_lists_are_read(tmp_path):
    path = tmp_path / "cpulist"
    path.write_text("0-3,8,10-11\n")
    assert threads._numbers(path) == [0, 1, 2, 3, 8, 10, 11]
    path.write_text("\n")
    assert threads._numbers(path) == []
    assert threads._numbers(tmp_path / "missing") == []


def test_memory_node_follows_the_gpu_and_else_the_cpus(monkeypatch):
    monkeypatch.setattr(threads, "_nodes_of_cpus", lambda: TWO_SOCKETS)
    monkeypatch.setattr(threads, "_first_sibling", lambda cpu: cpu)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert threads.memory_node() == 1
    monkeypatch.setattr(gpu, "numa_nodes", lambda ranks: [1, 0])
    assert threads.memory_node() == 0
    assert threads.cpus_of_rank() == [0, 1, 2, 3]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(gpu, "numa_nodes", lambda ranks: [None])
    assert threads.memory_node() is None
