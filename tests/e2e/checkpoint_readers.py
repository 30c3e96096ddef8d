# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of checkpoints that are not read from local files, and of who looks at the files."""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from checkpoint_faults import differences, reason_of
from flat import FlatRun, load_states, random_grads, save_states
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import FileSystemBase


def saved(folder: Path, layout: str) -> tuple[FlatRun, list[dict[str, torch.Tensor] | None]]:
    """A run after two steps that has been saved, and what its states are in the checkpoint."""
    run = FlatRun("bfloat16")
    run.step(random_grads(0))
    run.step(random_grads(1))
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    save_states(run, folder, layout)
    torch.distributed.barrier()
    return run, run.states()


def loaded_after_a_step(run: FlatRun, folder: Path, layout: str, expected: Any) -> dict[str, Any]:
    """Load when a step has made the states something else: what was raised, and what differs from the checkpoint."""
    run.step(random_grads(2))
    changed = differences(run, expected)
    before = run.states()
    error = reason_of(lambda: load_states(run, folder, layout))
    return {
        "error": error,
        "spoiled": len(changed) > 3,
        "in_states": differences(run, expected),
        "untouched": not differences(run, before),
    }


# ---- Who looks at local files ---------------------------------------------------------------------------------------


def looks(folder: str, layout: str, times: int = 1, alone: bool = False) -> list[dict[str, Any]]:
    """Load `times` times; for each how often this rank has asked for the size of which file.

    Args:
        alone: what lets one rank look for all is taken away.
    """
    from megatron_dos.checkpointing import loads as checkpoint

    if alone:
        checkpoint._asked_once = lambda question, answer: answer()
    run, expected = saved(Path(folder), layout)
    found = []
    for _ in range(times):
        with counted_stats() as counts:
            outcome = loaded_after_a_step(run, Path(folder), layout, expected)
        found.append({**outcome, "looks": dict(counts)})
        torch.distributed.barrier()
    return found


@contextmanager
def counted_stats() -> Iterator[Counter[str]]:
    counts: Counter[str] = Counter()
    stat = Path.stat

    def counting(self: Path, **named: Any) -> os.stat_result:
        counts[self.name] += self.suffix == ".distcp"
        return stat(self, **named)

    Path.stat = counting
    try:
        yield counts
    finally:
        Path.stat = stat
        for name in [name for name, count in counts.items() if count == 0]:
            del counts[name]


# ---- Bits that have flipped -----------------------------------------------------------------------------------------


def with_flipped_bits(folder: str, layout: str, protected: bool = True) -> list[dict[str, Any]]:
    """Flip a bit in the middle of each file of a checkpoint, one after the other, and load.

    Args:
        protected: false takes the comparison with the checksums away.
    """
    from megatron_dos.checkpointing import torch_file

    if not protected:
        torch_file.check_stream = lambda content: None
    run, expected = saved(Path(folder), layout)
    outcomes = []
    for path in sorted(Path(folder).glob("*.distcp")):
        whole = path.read_bytes()
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            path.write_bytes(flipped(whole))
        torch.distributed.barrier()
        outcome = loaded_after_a_step(run, Path(folder), layout, expected)
        outcome["step"] = reason_of(lambda: run.inner._whole.require("step"))
        outcomes.append(outcome)
        torch.distributed.barrier()
        path.write_bytes(whole)
        torch.distributed.barrier()
        load_states(run, Path(folder), layout)
    return outcomes


# ---- A load between the backward pass and the step ------------------------------------------------------------------


def between_backward_and_step(folder: str, layout: str) -> dict[str, Any]:
    """Load when the grads of a step are there already; the step that follows uses them, on what was loaded.

    Returns: states and weights after it, and after a load that came before the same grads.
    """
    run, _ = saved(Path(folder), layout)
    run.step(random_grads(2))
    load_states(run, Path(folder), layout)
    run.step(random_grads(3))
    expected = run.states(), run.weights()
    run.ddp.zero_grad_buffer()
    run.optimizer.zero_grad()
    for param, grad in zip(run.params, random_grads(3), strict=True):
        param.main_grad.copy_(grad)
    run.ddp.finish_grad_sync()
    load_states(run, Path(folder), layout)
    run.optimizer.step()
    return {
        "states": differences(run, expected[0]),
        "weights": all(map(torch.equal, run.weights(), expected[1])),
        "updated": any(state is not None and bool(state["exp_avg"].any()) for state in run.states()),
    }


# ---- A file system that is none -------------------------------------------------------------------------------------


class Vault(FileSystemBase):
    """Files in memory, under names that are no paths."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.looks = files, Counter()
        self.stream: Callable[[bytes, Callable[[], None]], io.IOBase] = Stream

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        assert mode == "rb"
        if path not in self.files:
            raise FileNotFoundError(f"the vault has no {path}")
        yield self.stream(self.files[path], lambda: self.looks.update([path]))

    def concat_path(self, path: Any, suffix: str) -> str:
        return f"{path}:{suffix}"

    def init_path(self, path: Any) -> str:
        return f"vault://{Path(path).name}"

    def exists(self, path: Any) -> bool:
        return path in self.files

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def rename(self, path: Any, new_path: Any) -> None:
        raise NotImplementedError

    mkdir = rm_file = rename


class Stream(io.BytesIO):
    """Tells when it is asked for its end."""

    def __init__(self, data: bytes, looked: Callable[[], None]) -> None:
        super().__init__(data)
        self.looked = looked

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_END:
            self.looked()
        return super().seek(offset, whence)


class Endless(Stream):
    """Cannot tell its size."""

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_END:
            raise self.error
        return super().seek(offset, whence)


class Unsupported(Endless):
    error = io.UnsupportedOperation("no end is known")


class Remote(Endless):
    error = RuntimeError("403: no permission to list")


class VaultReader(FileSystemReader):
    vault: Vault

    def __init__(self, path: Any) -> None:
        super().__init__(path)
        self.fs, self.path = self.vault, self.vault.init_path(path)


def from_a_vault(folder: str, layout: str) -> dict[str, dict[str, Any]]:
    """Load from it as it is, and with files that are missing, short, damaged, or of no known size."""
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import torch as strategy

    place = Path(folder)
    run, expected = saved(place, layout)
    for module in (serialization, strategy):
        module._get_filesystem_reader = lambda path, *args, **kwargs: VaultReader(path)
    prefix = f"vault://{place.name}:"
    whole = {f"{prefix}{path.name}": path.read_bytes() for path in place.iterdir()}
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        for path in place.glob("*.distcp"):
            path.unlink()
    torch.distributed.barrier()
    last, outcomes = f"{prefix}__1_0.distcp", {}

    def attempt(name: str, files: dict[str, bytes], stream: Any = Stream) -> None:
        VaultReader.vault = Vault(files)
        VaultReader.vault.stream = stream
        outcomes[name] = loaded_after_a_step(run, place, layout, expected)
        looks = {path.removeprefix(prefix): count for path, count in VaultReader.vault.looks.items()}
        outcomes[name]["looks"] = {path: count for path, count in looks.items() if path.endswith(".distcp")}
        torch.distributed.barrier()
        VaultReader.vault = Vault(whole)
        load_states(run, place, layout)

    attempt("whole", whole)
    attempt("missing", {path: data for path, data in whole.items() if path != last})
    attempt("short", whole | {last: whole[last][:-100]})
    attempt("size not supported", whole, Unsupported)
    attempt("size not permitted", whole, Remote)
    attempt("damaged", whole | {last: flipped(whole[last])})
    return outcomes


def flipped(data: bytes) -> bytes:
    """One bit is another, in the elements of the largest tensor."""
    spoiled = bytearray(data)
    spoiled[len(data) // 2] ^= 1
    return bytes(spoiled)


# ---- Multi-storage-client -------------------------------------------------------------------------------------------


def from_msc(folder: str, layout: str) -> dict[str, Any]:
    """Save and load as with --enable-msc, through its `file` profile; then with a file that is missing."""
    from megatron.core.dist_checkpointing.strategies import torch as strategy
    from megatron.core.msc_utils import MultiStorageClientFeature

    config = Path(folder) / f"rank{os.environ['RANK']}.json"
    provider = {"type": "file", "options": {"base_path": folder}}
    config.write_text(json.dumps({"profiles": {"here": {"storage_provider": provider}}}))
    os.environ["MSC_CONFIG"] = str(config)
    MultiStorageClientFeature.enable()
    place: Any = "msc://here/saved"
    (Path(folder) / "saved").mkdir(exist_ok=True)
    run, expected = saved(NoPath(place), layout)
    files = sorted(path.name for path in (Path(folder) / "saved").iterdir())
    outcome = {"whole": loaded_after_a_step(run, place, layout, expected), "files": files}
    outcome["reader"] = type(strategy._get_filesystem_reader(place)).__name__
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        (Path(folder) / "saved" / "__1_0.distcp").unlink()
    torch.distributed.barrier()
    outcome["missing"] = loaded_after_a_step(run, place, layout, expected)
    return outcome


class NoPath(str):
    """Where a checkpoint goes that has a place already."""

    def mkdir(self, **named: Any) -> None: ...
