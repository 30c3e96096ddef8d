# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of the file of optimizer states that `--ckpt-format torch` writes."""

from __future__ import annotations

import functools
import hashlib
import os
import resource
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import checkpoint_memory
import flat
import torch
from checkpoint_faults import reason_of
from flat import FlatRun, random_grads

from megatron_dos.checkpointing import state_stream, torch_file

FILE = "distrib_optim.pt"


def small_pieces() -> None:
    """Chunks smaller than a parameter, and several buckets a buffer."""
    from megatron.core import distributed

    state_stream.CHUNK = 1000
    distributed.DistributedDataParallelConfig = functools.partial(
        distributed.DistributedDataParallelConfig, bucket_size=3000
    )


def set_states(run: FlatRun, seed: int) -> None:
    """Give all states values of their own, and forget the params."""
    generator = torch.Generator().manual_seed(1000 * seed + torch.distributed.get_rank())
    for part in parts_of(run):
        part.copy_(torch.randn(part.shape, generator=generator))
    for shard in run.inner._shards:
        shard.detach().zero_()


def parts_of(run: FlatRun) -> list[torch.Tensor]:
    """Views of all states of this rank."""
    owned = range(len(run.inner._shards))
    return [part for owner in owned for parts in run.inner._engine.owner_parts(owner).values() for part in parts]


def bits_of(run: FlatRun) -> str:
    """A hash of all states of this rank."""
    return hashlib.sha256(b"".join(part.cpu().numpy().tobytes() for part in parts_of(run))).hexdigest()


def hash_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ---- The same as Megatron's -----------------------------------------------------------------------------------------


def beside_megatrons(folder: str) -> dict[str, Any]:
    """Save states with our code and with Megatron's, which takes the same optimizer for one of its own; compare the
    files, and load each with the other's code."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    small_pieces()
    run = FlatRun("bfloat16", overlap_grad_reduce=True, dos_resident_share=0.4)
    first = torch.distributed.get_rank() == 0
    ours, theirs, again = (Path(folder) / name / FILE for name in ("ours", "theirs", "again"))
    if first:
        for path in (ours, theirs, again):
            path.parent.mkdir()
    torch.distributed.barrier()
    set_states(run, 1)
    expected = bits_of(run)
    outcome: dict[str, Any] = {"buckets": [len(buffer.buckets) for buffer in run.inner.buffers]}
    run.optimizer.save_parameter_state(str(ours))
    DistributedOptimizer.save_parameter_state(run.inner, str(theirs))
    run.optimizer.save_parameter_state(str(again))
    torch.distributed.barrier()
    if first:
        outcome["differences"] = list(differences(ours, theirs))
        outcome["repeated"] = hash_of(ours) == hash_of(again)
    set_states(run, 2)
    outcome["spoiled"] = bits_of(run) != expected
    DistributedOptimizer.load_parameter_state_from_dp_zero(
        run.inner, torch.load(ours, weights_only=True) if first else None
    )
    outcome["theirs loads ours"] = bits_of(run) == expected
    set_states(run, 3)
    run.optimizer.load_parameter_state(str(theirs))
    outcome["ours loads theirs"] = bits_of(run) == expected
    set_states(run, 4)
    content = torch.load(theirs, weights_only=True) if first else None
    kept = torch.load(theirs, weights_only=True) if first else None
    run.inner.load_parameter_state_from_dp_zero(content)
    outcome["ours loads what Megatron has read"] = bits_of(run) == expected
    outcome["what Megatron has read is as it was"] = equal(content, kept)
    outcome["fp32 params"] = all(
        torch.equal(shard.detach(), run.inner._engine.owner_states(owner)["master"])
        for owner, shard in enumerate(run.inner._shards)
        if shard.dtype == torch.float32
    )
    return outcome


def differences(one: Path, other: Path) -> Iterator[str]:
    """Of the pickles and of the bytes of all tensors; torch's own records, which say how it has written, aside."""
    with zipfile.ZipFile(one) as first, zipfile.ZipFile(other) as second:
        if first.testzip():
            yield "a record has another checksum"
        names = [name for name in second.namelist() if name.split("/", 1)[1].startswith("data")]
        if names != [name for name in first.namelist() if name.split("/", 1)[1].startswith("data")]:
            yield "other records"
        for name in names:
            if first.read(name) != second.read(name):
                yield name


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


# ---- Chains, as expert parallelism makes them -----------------------------------------------------------------------


def chained(folder: str) -> dict[str, Any]:
    """Save and load a chain of two optimizers; Megatron reads the file as well. Then the disk is full."""
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    small_pieces()
    runs = [FlatRun("bfloat16", overlap_grad_reduce=True, seed=seed) for seed in range(2)]
    chain = ChainedOptimizer([run.inner for run in runs])
    path = Path(folder) / FILE
    for seed, run in enumerate(runs):
        set_states(run, seed)
    expected = [bits_of(run) for run in runs]
    gathers: list[Any] = []
    type(runs[0].inner).get_parameter_state_dp_zero = lambda *args, **kwargs: gathers.append(args)
    chain.save_parameter_state(str(path))
    torch.distributed.barrier()
    outcome: dict[str, Any] = {"gathers": len(gathers)}
    for name in ("ours", "Megatron's"):
        for run in runs:
            set_states(run, 5)
        load = chain.load_parameter_state
        (load if name == "ours" else functools.partial(load.__wrapped__, chain))(str(path))
        outcome[name] = [bits_of(run) for run in runs] == expected
    before = hash_of(path)
    with full_disk(60_000):
        outcome["full disk"] = reason_of(lambda: chain.save_parameter_state(str(path)))
    outcome["of one"] = reason_of(lambda: runs[0].optimizer.load_parameter_state(str(path)))
    torch.distributed.barrier()
    return outcome | {"kept": hash_of(path) == before, "files": sorted(os.listdir(folder))}


# ---- Faults ---------------------------------------------------------------------------------------------------------


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file may grow beyond `size` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def faults(folder: str) -> dict[str, dict[str, Any]]:
    """Saves and loads that fail in the middle: for each what was raised, what it has changed, and whether the training
    goes on."""
    state_stream.CHUNK = 1000
    run = FlatRun("bfloat16")
    run.step(random_grads(1))
    path = Path(folder) / FILE
    run.optimizer.save_parameter_state(str(path))
    torch.distributed.barrier()
    good, outcomes = hash_of(path), {}

    def attempt(name: str, action: Callable[[], Any]) -> None:
        before = bits_of(run)
        outcomes[name] = {"error": reason_of(action), "states": bits_of(run) == before}
        torch.distributed.barrier()
        outcomes[name] |= {"file": hash_of(path) == good, "files": sorted(os.listdir(folder))}
        outcomes[name]["step"] = reason_of(lambda: run.step(random_grads(2)))

    def save() -> None:
        run.optimizer.save_parameter_state(str(path))

    def load() -> None:
        run.optimizer.load_parameter_state(str(path))

    with full_disk(path.stat().st_size // 2):
        attempt("full disk", save)
    attempt("no folder", lambda: run.optimizer.save_parameter_state(f"{folder}/none/{FILE}"))
    copies = state_stream.DividedTensor.copy_to, state_stream.DividedTensor.copy_from
    state_stream.DividedTensor.copy_to = fails_on_rank_1(copies[0])
    attempt("a rank cannot read its states", save)
    state_stream.DividedTensor.copy_from = fails_on_rank_1(copies[1])
    attempt("a rank cannot write its states", load)
    state_stream.DividedTensor.copy_to, state_stream.DividedTensor.copy_from = copies
    attempt("load after", load)
    attempt("save after", save)
    flip_a_bit(path)
    attempt("flipped bit", load)
    check = torch_file.check
    torch_file.check = lambda *args: None
    attempt("flipped bit, unchecked", load)
    torch_file.check = check
    return outcomes


def flip_a_bit(path: Path) -> None:
    """Of an element of the file."""
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0x40
        path.write_bytes(data)
    torch.distributed.barrier()


def fails_on_rank_1(copy: Callable[..., None]) -> Callable[..., None]:
    """In its third chunk."""
    calls = []

    def failing(share: Any, chunk: torch.Tensor, start: int) -> None:
        calls.append(start)
        if torch.distributed.get_rank() == 1 and len(calls) == 3:
            raise RuntimeError("out of luck")
        copy(share, chunk, start)

    return failing


# ---- Memory ---------------------------------------------------------------------------------------------------------


def peaks(folder: str) -> dict[str, float]:
    """Of a save and a load, in multiples of the states of all ranks."""
    flat.SHAPES, flat.KEPT_IN_FP32 = checkpoint_memory.SHAPES, ()
    run = FlatRun("bfloat16", dos_subgroup_size=1 << 20)
    set_states(run, 1)
    expected, path = bits_of(run), str(Path(folder) / FILE)
    found = {"save": checkpoint_memory.peak_of(lambda: run.optimizer.save_parameter_state(path))}
    torch.distributed.barrier()
    set_states(run, 2)
    found["load"] = checkpoint_memory.peak_of(lambda: run.optimizer.load_parameter_state(path))
    assert bits_of(run) == expected
    return {what: peak / (12 * sum(param.numel() for param in run.params)) for what, peak in found.items()}
