# SPDX-License-Identifier: Apache-2.0
"""Slabs: aligned, zeroed, exactly as large as asked, alive as long as a tensor needs them."""

import dataclasses
import gc
import mmap
import os
import resource
from pathlib import Path

import pytest
import torch

from megatron_dos import _cpp_adam
from megatron_dos.node import gpu, ranks, slab, threads

HUGE = 2 * 2**20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def mapped() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def mapping_of(address: int) -> dict[str, str]:
    """The fields of /proc/self/smaps for the mapping that holds the address."""
    fields: dict[str, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            low, high = (int(part, 16) for part in head.split("-"))
            inside = low <= address < high
        elif inside:
            key, _, value = line.partition(":")
            fields[key] = value.strip()
    return fields


def is_shared(address: int) -> bool:
    return "sh" in mapping_of(address)["VmFlags"].split()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("numel", [1, 1000, 2**20 + 1])
def test_a_tensor_of_zeros(numel, dtype):
    tensor = slab.zeros(numel, dtype)
    assert tensor.shape == (numel,)
    assert tensor.dtype == dtype
    assert tensor.data_ptr() % mmap.PAGESIZE == 0
    assert (tensor == 0).all()
    tensor.fill_(3)
    assert (tensor == 3).all()


def test_no_elements_and_less():
    assert slab.zeros(0).shape == (0,)
    with pytest.raises(ValueError, match="numel"):
        slab.zeros(-1)


def test_memory_is_taken_page_by_page_and_given_back():
    before = resident()
    tensor = slab.zeros(64 * 2**20)
    assert resident() - before < 2**22, "untouched pages must not take memory"
    tensor[: 4 * 2**20].fill_(1)
    assert 15 * 2**20 < resident() - before < 24 * 2**20
    view = tensor[100:200]
    del tensor
    gc.collect()
    assert (view == 1).all(), "a view keeps the slab"
    del view
    gc.collect()
    assert resident() - before < 2**22


@pytest.mark.parametrize("shared", [False, True])
def test_a_large_slab_asks_for_huge_pages_and_maps_no_more_than_a_page_beyond(shared):
    size = 3 * HUGE + 5
    before = mapped()
    memory = _cpp_adam.Slab(size, shared=shared)
    assert mapped() - before == 3 * HUGE + mmap.PAGESIZE
    assert memory.address % HUGE == 0
    assert memory.nbytes == size
    assert len(memoryview(memory)) == size
    assert bytes(memoryview(memory)) == bytes(size), "zeroed"
    available = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    assert memory.huge_pages_asked == available.exists()
    if memory.huge_pages_asked:
        assert "hg" in mapping_of(memory.address)["VmFlags"].split()
    before = mapped()
    del memory
    assert before - mapped() == 3 * HUGE + mmap.PAGESIZE, "all of it is given back"


def test_a_large_shared_slab_begins_on_a_huge_page_of_its_memory():
    memory = _cpp_adam.Slab(3 * HUGE, shared=True)
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    (offset,) = [int(fields[2], 16) for fields in maps if fields[0].startswith(f"{memory.address:x}-")]
    assert offset == 0, "otherwise the kernel cannot map huge pages"


@pytest.mark.parametrize("shared", [False, True])
def test_a_preferred_node_is_never_a_reason_to_fail(shared):
    for node in (-1, 0, 1, 63, 1000):
        memory = _cpp_adam.Slab(mmap.PAGESIZE, node, shared)
        memoryview(memory)[0] = 1


@pytest.mark.parametrize(("arguments", "named"), [((0,), "nbytes"), ((-5,), "nbytes"), ((2**62,), "nbytes")])
def test_a_senseless_size_is_refused_by_name(arguments, named):
    with pytest.raises((ValueError, RuntimeError), match=named):
        _cpp_adam.Slab(*arguments)


def test_a_senseless_node_is_refused_by_name():
    for node in (-2, 2**20):
        with pytest.raises(ValueError, match="node"):
            _cpp_adam.Slab(1, node)


class FakeCudart:
    """Stands in for torch.cuda.cudart() on a machine without a GPU."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address, nbytes, flags):
        if self.error == 0:
            self.locked[address] = nbytes
        return self.error

    def cudaHostUnregister(self, address):
        # The memory must still be there.
        assert mapping_of(address)
        del self.locked[address]


def test_pages_are_locked_where_a_gpu_is_in_use_and_unlocked_before_they_go(monkeypatch):
    cudart = FakeCudart()
    monkeypatch.setattr(gpu, "in_use", lambda: True)
    monkeypatch.setattr(threads, "memory_node", lambda: None)
    monkeypatch.setattr(slab, "memory_node", lambda: None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    tensor = slab.zeros(1000)
    assert cudart.locked == {tensor.data_ptr(): 4000}, "exactly the bytes asked for"
    assert is_shared(tensor.data_ptr())
    del tensor
    gc.collect()
    assert cudart.locked == {}
    plain = slab.zeros(1000, pin=False)
    assert plain.sum() == 0
    assert not is_shared(plain.data_ptr())
    assert cudart.locked == {}
    locked = slab.zeros(1000, pin=True)
    assert is_shared(locked.data_ptr())


def test_failure_to_lock_pages_says_what_to_do(monkeypatch):
    monkeypatch.setattr(gpu, "in_use", lambda: True)
    monkeypatch.setattr(slab, "memory_node", lambda: None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeCudart(error=2))
    with pytest.raises(RuntimeError, match="ulimit -l"):
        slab.zeros(1000)


class FakeAffinity:
    """The calling thread's mask where a folder like the kernel's has CPUs 0-3 on node 0 and 4-7 on node 1."""

    def __init__(self, monkeypatch, folder: Path, cpus: tuple[int, ...], wanted: int | None) -> None:
        for node, cpulist in enumerate(("0-3", "4-7")):
            (folder / f"node/node{node}").mkdir(parents=True)
            (folder / f"node/node{node}/cpulist").write_text(cpulist)
        of = ranks.current()
        own = dataclasses.replace(of.own, cpus=cpus)
        monkeypatch.setattr(ranks, "current", lambda: type("Node", (), {"own": own}))
        monkeypatch.setattr(threads, "_SYSTEM", folder)
        monkeypatch.setattr(slab, "memory_node", lambda: wanted)
        monkeypatch.setattr(gpu, "in_use", lambda: True)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(self.mask))
        monkeypatch.setattr(os, "sched_setaffinity", self.set)
        self.mask = set(cpus)
        self.refused = False

    def set(self, _, cpus) -> None:
        if self.refused:
            raise OSError("not allowed")
        self.mask = set(cpus)


@pytest.mark.parametrize("error", [0, 2])
@pytest.mark.parametrize(
    ("cpus", "wanted", "refused", "while_locking"),
    [
        (tuple(range(8)), 1, False, {4, 5, 6, 7}),
        ((2, 3, 4), 1, False, {4}),
        ((0, 1), 1, False, {0, 1}),
        (tuple(range(8)), None, False, set(range(8))),
        (tuple(range(8)), 1, True, set(range(8))),
    ],
)
def test_pages_are_locked_on_cpus_of_their_node(monkeypatch, tmp_path, cpus, wanted, refused, while_locking, error):
    affinity = FakeAffinity(monkeypatch, tmp_path, cpus, wanted)
    affinity.refused = refused
    cudart = FakeCudart(error)
    register, seen = cudart.cudaHostRegister, []
    monkeypatch.setattr(cudart, "cudaHostRegister", lambda *given: (seen.append(affinity.mask), register(*given))[1])
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    if error:
        with pytest.raises(RuntimeError, match="ulimit -l"):
            slab.zeros(1000)
    else:
        slab.zeros(1000)
    assert seen == [while_locking]
    assert affinity.mask == set(cpus), "restored"


def test_the_real_affinity_is_restored_also_after_an_error():
    before = os.sched_getaffinity(0)
    with pytest.raises(RuntimeError, match="inside"), threads.on_node(0):
        raise RuntimeError("inside")
    assert os.sched_getaffinity(0) == before


def test_an_emulated_gpu_is_no_reason_to_lock_pages(monkeypatch):
    """torch.cuda may say anything; torch's own bindings count no device."""
    if torch.cuda.is_available():
        return
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert not gpu.in_use()
    assert gpu.numa_nodes(2) == [None, None]
    assert (slab.zeros(10) == 0).all()


def test_asking_for_locked_pages_without_a_gpu_is_refused():
    if gpu.in_use():
        return
    with pytest.raises(RuntimeError, match=r"^pin: "):
        slab.zeros(10, pin=True)


def test_an_error_while_unlocking_does_not_crash(monkeypatch):
    memory = _cpp_adam.Slab(10)
    seen = []
    monkeypatch.setattr("sys.unraisablehook", seen.append)

    def fail():
        raise OSError("no")

    memory.before_release = fail
    del memory
    gc.collect()
    assert len(seen) == 1


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_process_may_read_a_slab():
    tensor = slab.zeros(1000)
    tensor.fill_(5)
    child = os.fork()
    if child == 0:
        os._exit(0 if (tensor == 5).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("size", [100, HUGE + 100])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_writes_after_a_fork_cross_it_only_in_a_shared_slab(shared, size):
    memory = _cpp_adam.Slab(size, shared=shared)
    view = memoryview(memory)
    view[0] = view[-1] = 1
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(ready, 1)
        seen = view[0]
        view[-1] = 3
        os._exit(seen)
    view[0] = 2
    os.write(go, b"x")
    seen_by_child = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.close(ready)
    os.close(go)
    assert seen_by_child == (2 if shared else 1)
    assert view[-1] == (3 if shared else 1)
