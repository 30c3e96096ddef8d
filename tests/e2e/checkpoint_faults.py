# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of checkpoints that go wrong, or are written while the training goes on."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import torch
from flat import FlatRun, load_states, random_grads, sharded

STEPS_BEFORE = 2


# ---- Asynchronous saves ---------------------------------------------------------------------------------------------


def share_slabs() -> None:
    """Map the states shared with forked processes, as they are where they are page-locked for a GPU."""
    from megatron_dos import _cpp_adam
    from megatron_dos.node import slab

    def zeros(numel: int, dtype: torch.dtype = torch.float32, pin: bool | None = None) -> torch.Tensor:
        if numel == 0:
            return torch.zeros(0, dtype=dtype, device="cpu")
        shared = _cpp_adam.Slab(numel * dtype.itemsize, -1, shared=True)
        return torch.frombuffer(shared, dtype=dtype, count=numel)

    slab.zeros = zeros


def hold_writers(gate: Path) -> None:
    """Let whatever process writes a checkpoint begin only when the file `gate` is there."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    write = FileSystemWriterAsync.write_preloaded_data

    def held(*args: Any, **kwargs: Any) -> Any:
        end = time.monotonic() + 60
        while not gate.exists():
            assert time.monotonic() < end, "nobody has opened the gate"
            time.sleep(0.01)
        return write(*args, **kwargs)

    FileSystemWriterAsync.write_preloaded_data = staticmethod(held)


def written_while_stepping(
    folder: str, layout: str, persistent: bool, shared: bool, protected: bool = True
) -> dict[str, Any]:
    """Schedule an asynchronous save, step twice, only then let it be written, and load it.

    Args:
        layout: of the states in the file.
        persistent: Megatron's writer process that lives as long as the training, else one forked for the save.
        shared: the states are mapped shared, as page-locked ones are.
        protected: false removes what protects the save.

    Returns: differences between the states at the call and those in the file.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    from megatron_dos.checkpointing import handouts

    target = Path(folder) / f"{persistent}-{shared}-{protected}"
    gate = target.with_suffix(".go")
    if shared:
        share_slabs()
    if not protected:
        handouts.Handouts.detach = lambda handouts: 0
    hold_writers(gate)
    filesystem_async.get_write_results_queue("fork")
    rank = int(os.environ["RANK"])
    if persistent:
        AsyncCallsQueue.warmup_persistent_caller(rank)
    run = FlatRun("bfloat16")
    for step in range(STEPS_BEFORE):
        run.step(random_grads(step))
    expected = run.states()
    if rank == 0:
        target.mkdir(parents=True)
    torch.distributed.barrier()
    queue = AsyncCallsQueue(persistent=persistent)
    request = dist_checkpointing.save(
        sharded(run, layout=layout), str(target), async_sharded_save=True, async_strategy="mcore", content_metadata={}
    )
    queue.schedule_async_request(request)
    del request
    for step in range(STEPS_BEFORE, STEPS_BEFORE + 2):
        run.step(random_grads(step))
    went_on = differences(run, expected)
    gate.touch()
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    load_states(run, target, layout)
    return {"in_file": differences(run, expected), "went_on": went_on, "step": run.inner.optimizer.step_count}


def without_room(folder: str, layout: str, persistent: bool, protected: bool = True) -> dict[str, Any]:
    """Save asynchronously when /dev/shm is full on rank 1, and once more when there is room again.

    Args:
        protected: false takes away the copy before a save is scheduled. Only for a writer that is forked: the other
            would be waited for without end.

    Returns: for each the error, which states differ from those at the call in what was written, and whether training
        goes on in between. Nothing if this machine lets nobody have a /dev/shm of its own.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    if not own_shared_memory():
        return {}
    from megatron_dos.adapter import hooks

    share_slabs()
    if not protected:
        hooks.share_handouts = lambda: ""
    filesystem_async.get_write_results_queue("fork")
    rank = int(os.environ["RANK"])
    if persistent:
        AsyncCallsQueue.warmup_persistent_caller(rank)
    run, queue = FlatRun("bfloat16"), AsyncCallsQueue(persistent=persistent)

    def save(name: str) -> None:
        target = Path(folder) / name
        target.mkdir(exist_ok=True)
        torch.distributed.barrier()
        queue.schedule_async_request(
            dist_checkpointing.save(
                sharded(run, layout=layout),
                str(target),
                async_sharded_save=True,
                async_strategy="mcore",
                content_metadata={},
            )
        )
        queue.maybe_finalize_async_calls(blocking=True)

    run.step(random_grads(0))
    before, outcome = run.states(), {}
    save("before")
    filler = Path("/dev/shm/filler")
    if rank == 1:
        fill(filler)
    outcome["full"] = reason_of(lambda: save("full"))
    outcome["complete"] = (Path(folder) / "full" / ".metadata").exists()
    outcome["step"] = reason_of(lambda: run.step(random_grads(1)))
    load_states(run, Path(folder) / "before", layout)
    outcome["before"] = differences(run, before)
    filler.unlink(missing_ok=True)
    queue.async_calls.clear()  # of a save that failed in its end, where nothing is protected
    outcome["with room"] = reason_of(lambda: save("after"))
    queue.close()
    run.step(random_grads(2))
    load_states(run, Path(folder) / "after", layout)
    outcome["after"] = differences(run, before)
    return outcome


def own_shared_memory() -> bool:
    """Give this process and its children a small /dev/shm that nobody else sees."""
    try:
        os.unshare(os.CLONE_NEWNS)
    except OSError:
        return False
    mounts = (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", "size=4m", "tmpfs", "/dev/shm"])
    return all(subprocess.run(["mount", *mount], check=False).returncode == 0 for mount in mounts)


def fill(path: Path) -> None:
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(path.parent).free)


def differences(run: FlatRun, expected: list[dict[str, torch.Tensor] | None]) -> list[str]:
    return [
        f"{key} of p{index}"
        for index, (mine, theirs) in enumerate(zip(run.states(), expected, strict=True))
        for key in (mine or {})
        if not torch.equal(mine[key].view(torch.uint8), theirs[key].view(torch.uint8))
    ]


# ---- A training whose asynchronous save is held up until later steps are done ---------------------------------------


def async_training() -> None:
    """Before set-up: states as with a GPU, and a writer that is held."""
    share_slabs()
    hold_writers(Path(os.environ["GATE"]))


def open_gate_after_later_steps(point: str, model: Any, optimizer: Any, args: Any) -> Any:
    """Opens the gate at the end of iteration 4; tells what the training is in at the end of iteration 2, and from when
    on the writer wrote."""
    if point != "step":
        return None
    iteration = args.curr_iteration + 1
    if iteration == 4:
        Path(os.environ["GATE"]).touch()
    if iteration == 2:
        return checkpoints.digest(model, optimizer)
    return {"written": [str(path) for path in Path(args.save).rglob("*.distcp")]} if iteration == 3 else None


def digest_at_start(point: str, model: Any, optimizer: Any, args: Any) -> Any:
    return checkpoints.digest(model, optimizer) if point == "start" else None


def digest_at_end(point: str, model: Any, optimizer: Any, args: Any) -> Any:
    return checkpoints.digest(model, optimizer) if point == "end" else None


# ---- Faults ---------------------------------------------------------------------------------------------------------


def kill_in_the_second_save() -> None:
    """Before set-up: rank 1 is killed with the second checkpoint half written (`torch`: the first rank, who writes)."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    from megatron_dos.checkpointing import torch_file

    saves = {"count": 0}
    write, plain = FileSystemWriterAsync.write_preloaded_data, torch_file.write

    def die(path: Path) -> None:
        path.write_bytes(b"PK\x03\x04 half a file")
        os.kill(os.getpid(), signal.SIGKILL)

    def write_or_die(transforms: Any, *args: Any, **kwargs: Any) -> Any:
        saves["count"] += 1
        if saves["count"] == 2 and os.environ["RANK"] == "1":
            die(Path(kwargs["write_bucket"][0]))
        return write(transforms, *args, **kwargs)

    def write_states_or_die(path: Path, *args: Any) -> None:
        saves["count"] += 1
        if saves["count"] == 2:
            die(path)
        plain(path, *args)

    FileSystemWriterAsync.write_preloaded_data = staticmethod(write_or_die)
    torch_file.write = write_states_or_die


def faults(point: str, model: Any, optimizer: Any, args: Any) -> Any:
    """At the end: a full disk, and files that are cut short, missing, foreign or garbage. For each what was raised and
    what it has changed; and afterwards a load of the good checkpoint and a step."""
    if point != "end":
        return None
    folder = Path(os.environ["FAULTS"])
    attempt = _Attempts(model, optimizer, args)
    for way in json.loads(os.environ["WAYS"]):
        good = folder / checkpoints.folder_of(way)
        checkpoints.save(model, optimizer, args, good, way, iteration=5)
        attempt.save(f"{way}: full disk", good, way)
        attempt.load(f"{way}: after full disk", good, way)
        for fault, spoil in FAULTS.items():
            bad = folder / f"{good.name} {fault}"
            if torch.distributed.get_rank() == 0:
                shutil.copytree(good, bad)
                for path in sorted(bad.glob("iter_*/**/*")):
                    spoil(path)
            torch.distributed.barrier()
            attempt.load(f"{way}: {fault}", bad, way)
            if fault == "missing" and way != "torch":
                reason_of(lambda bad=bad, way=way: checkpoints.load(model, optimizer, args, bad, way))
                attempt.load(f"{way}: weights alone", good, way, no_load_optim=True)
            attempt.load(f"{way}: after {fault}", good, way)
        # Megatron compares this with the file when it has read everything.
        attempt.load(f"{way}: given up", good, way, num_attention_heads=2)
        attempt.load(f"{way}: after given up", good, way)
        foreign = Path(os.environ["FOREIGN"]) / checkpoints.folder_of(way)
        attempt.load(f"{way}: of another model", foreign, way)
        attempt.load(f"{way}: after of another model", good, way)
    return attempt.outcomes


def _cut(path: Path) -> None:
    if path.suffix == ".distcp" or path.name == "distrib_optim.pt":
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)


def _remove(path: Path) -> None:
    if path.name.startswith("__1") or path.name == "distrib_optim.pt":
        path.unlink()


def _garbage(path: Path) -> None:
    """Other bytes of the same length, from the middle of the file on."""
    if path.suffix == ".distcp" or path.name == "distrib_optim.pt":
        half = path.stat().st_size // 2
        with path.open("r+b") as file:
            file.seek(half)
            file.write(random.Random(1).randbytes(half))


def _incomplete(path: Path) -> None:
    """A fully reshardable checkpoint without a state that one rank owns. Others are as they were."""
    if path.name == ".metadata":
        metadata = pickle.loads(path.read_bytes())
        metadata.state_dict_metadata.pop("optimizer.state.exp_avg.decoder.final_layernorm.bias", None)
        path.write_bytes(pickle.dumps(metadata))


def _foreign(path: Path) -> None:
    if path.name in (".metadata", "distrib_optim.pt"):
        path.write_bytes(b"#!/bin/sh\necho this is no checkpoint\n")


FAULTS: dict[str, Callable[[Path], None]] = {
    "cut short": _cut,
    "missing": _remove,
    "garbage": _garbage,
    "foreign": _foreign,
    "incomplete": _incomplete,
}


class _Attempts:
    """Tries saves and loads; notes for each the error, what it changed on this rank, and whether a step is possible."""

    def __init__(self, model: Any, optimizer: Any, args: Any) -> None:
        self._model, self._optimizer, self._args = model, optimizer, args
        self.outcomes: dict[str, dict[str, Any]] = {}

    def save(self, name: str, folder: Path, way: str) -> None:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        # No file may grow beyond, as on a full disk. The logs of the ranks are smaller, the checkpoint's files larger.
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limits[1]))
        try:
            self._try(name, lambda: checkpoints.save(*self._run(), folder, way, iteration=6))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        self.outcomes[name]["tracker"] = (folder / "latest_checkpointed_iteration.txt").read_text()

    def load(self, name: str, folder: Path, way: str, **arguments: Any) -> None:
        self._try(name, lambda: checkpoints.load(*self._run(), folder, way, **arguments))
        outcome = self.outcomes[name]
        outcome["step"] = reason_of(lambda: step_with_no_grads(self._model, self._optimizer))
        if outcome["step"]:
            outcome["save"] = reason_of(lambda: checkpoints.save(*self._run(), folder.parent / "never", way, 7))

    def _run(self) -> tuple[Any, Any, Any]:
        return self._model, self._optimizer, self._args

    def _try(self, name: str, what: Callable[[], None]) -> None:
        before = checkpoints.local_digest(self._model, self._optimizer)
        error = reason_of(what)
        after = checkpoints.local_digest(self._model, self._optimizer)
        self.outcomes[name] = {"error": error, "changed": [key for key in before if before[key] != after[key]],
                               "after": after}  # fmt: skip


def reason_of(what: Callable[[], Any]) -> str:
    """Everything that the error says, or nothing."""
    try:
        what()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


def step_with_no_grads(model: Any, optimizer: Any) -> None:
    """A step that changes nothing but the moments and the counter."""
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    optimizer.step()
