# SPDX-License-Identifier: Apache-2.0
"""Host memory: what does not fit is refused before it is allocated; what fits is lazily mapped."""

import psutil
import pytest
import torch

from megatron_dos.node import memory
from megatron_dos.program.partition import OwnedRange, partition
from megatron_dos.update import memory as states
from megatron_dos.update.engine import EngineOptions, UpdateEngine
from megatron_dos.update.memory import host_bytes, staging_bytes


def test_refuses_what_does_not_fit_and_says_how_much_is_missing(monkeypatch):
    monkeypatch.setattr(memory, "available_host_memory", lambda: 10 * 2**30)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    memory.require_host_memory(5 * 2**30)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(memory.HostMemoryError, match=r"5\.00 GiB.*15\.00 GiB for the 3 rank.*10\.00 GiB are available"):
        memory.require_host_memory(5 * 2**30)


def test_page_locked_memory_of_earlier_ranks_is_not_counted_twice(monkeypatch):
    monkeypatch.setattr(memory, "available_host_memory", lambda: 30 * 2**30)  # 7 of 8 ranks have taken their 10 GiB
    monkeypatch.setattr(memory.gpu, "in_use", lambda: True)
    monkeypatch.setattr(memory.gpu, "numa_node", lambda: (None, ""))
    monkeypatch.setattr(memory.gpu, "numa_nodes", lambda ranks: [None] * ranks)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    memory.require_host_memory(10 * 2**30)
    with pytest.raises(memory.HostMemoryError):
        memory.require_host_memory(31 * 2**30)


def test_a_launcher_other_than_torchrun_says_how_many_ranks_there_are(monkeypatch):
    monkeypatch.setattr(memory, "available_host_memory", lambda: 10 * 2**30)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    memory.require_host_memory(5 * 2**30)
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "4")
    with pytest.raises(memory.HostMemoryError, match="4 rank"):
        memory.require_host_memory(5 * 2**30)


def test_the_engine_allocates_nothing_when_it_refuses(monkeypatch):
    monkeypatch.setattr(memory, "available_host_memory", lambda: 1000)
    monkeypatch.setattr(states.HostStates, "__init__", lambda *a: pytest.fail("allocated"))
    parts = partition([OwnedRange(0, (0, 0), 0, 4096)], 1024)
    with pytest.raises(memory.HostMemoryError):
        UpdateEngine(parts, [torch.zeros(4096)], EngineOptions(threads=1))


def test_a_limit_of_any_control_group_counts_and_file_cache_does_not(monkeypatch, tmp_path):
    job, step = tmp_path / "job", tmp_path / "job" / "step"
    step.mkdir(parents=True)
    monkeypatch.setattr(memory, "control_groups", lambda controller: iter([step, job, tmp_path]))
    for group, limit, usage, cache in ((step, "max", 1000, 0), (job, "5000", 2500, 500)):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{usage}\n")
        (group / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")
    assert memory.available_host_memory() == 5000 - (2500 - 500)
    (job / "memory.max").write_text("max\n")
    assert memory.available_host_memory() == pytest.approx(psutil.virtual_memory().available, rel=0.2)


def test_states_take_12_bytes_a_parameter_and_staging_is_bounded():
    numel, size = 1_000_000, 10_000
    parts = partition([OwnedRange(0, (0, 0), 0, numel)], size)
    engine = UpdateEngine(parts, [torch.zeros(numel)], EngineOptions(threads=1))
    slabs = [engine.memory.states.master, engine.memory.states.exp_avg, engine.memory.states.exp_avg_sq]
    assert sum(slab.untyped_storage().nbytes() for slab in slabs) == 12 * numel
    slots = engine.memory.host_grads + engine.memory.host_params
    assert (
        sum(slot.untyped_storage().nbytes() for slot in slots)
        == staging_bytes(engine.partition, engine.options)
        == 2 * size * 8
    )
    assert host_bytes(engine.partition, engine.options) == 12 * numel + staging_bytes(engine.partition, engine.options)


def test_states_start_as_zeros_and_take_memory_only_when_written():
    resident = psutil.Process().memory_info().rss
    host = states.HostStates(256 * 2**20)  # 3 GiB of address space
    assert psutil.Process().memory_info().rss - resident < 64 * 2**20
    assert not host.exp_avg[:1000].any()


def test_resident_states_are_refused_when_they_do_not_fit_into_what_the_device_can_give(monkeypatch):
    """The caching allocator gives back what it holds unused before the device is asked what is free."""
    free, cuda = [1000], torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.append(1200))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[-1], 2000))
    monkeypatch.setattr(torch, "zeros", lambda numel, device: (numel, device))
    assert states.ResidentStates(100, cuda).master == (100, cuda)
    with pytest.raises(states.DeviceMemoryError, match=r"--dos-resident-share keeps .* Lower the share"):
        states.ResidentStates(101, cuda)
