"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

__all__ = ["new_file", "new_files"]


@contextmanager
def new_file(path: str | os.PathLike[str], overwrite: bool = False) -> Iterator[Path]:
    """A temporary path to write to, which becomes `path` at the end of the block; after an error nothing is left.

    Raises:
        FileNotFoundError: there is no such folder.
        FileExistsError: `path` is there, and `overwrite` is false.
    """
    with new_files([path], overwrite) as (temporary,):
        yield temporary


@contextmanager
def new_files(paths: Sequence[str | os.PathLike[str]], overwrite: bool = False) -> Iterator[list[Path]]:
    """The same for several files: none of them appears before all are written.

    Raises:
        FileNotFoundError: a folder is missing.
        FileExistsError: one of the files is there, and `overwrite` is false.
    """
    targets = [Path(path) for path in paths]
    _check(targets, overwrite)
    temporaries = [target.with_name(f".{target.name}.{secrets.token_hex(4)}") for target in targets]
    with ExitStack() as leftovers:
        for temporary in temporaries:
            leftovers.callback(temporary.unlink, missing_ok=True)
        yield temporaries
        _check(targets, overwrite)
        for temporary, target in zip(temporaries, targets, strict=True):
            temporary.replace(target)


def _check(targets: Sequence[Path], overwrite: bool) -> None:
    for target in targets:
        if not target.parent.is_dir():
            raise FileNotFoundError(f"{target}: there is no folder {target.parent}")
        if not overwrite and target.exists():
            raise FileExistsError(f"{target} is there already")
