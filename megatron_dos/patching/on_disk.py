# SPDX-License-Identifier: Apache-2.0
"""Applies the patches under patches/ to a Megatron checkout, and takes them back.

A patch is applied to known bytes only: every file's SHA-256 is compared before anything is written, the new bytes
are computed in memory and compared too, and only then are the files replaced, each atomically and all or none.
Where the program is killed in between, the files are left in a state that harms no training, and the next run mends
the tree.
Nothing here imports Megatron or torch, and no git or patch program is needed.
"""

from __future__ import annotations

import ast
import contextlib
import enum
import fcntl
import functools
import hashlib
import importlib.resources
import json
import os
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dos.patching.diffs import Hunk, apply_hunks, parse_diff

if TYPE_CHECKING:
    from importlib.abc import Traversable

__all__ = [
    "Change",
    "Patch",
    "PatchError",
    "Result",
    "Status",
    "apply",
    "examine",
    "known_patches",
    "read_version",
    "revert",
]

FORMAT = 1
_PACKAGE_INFO = "megatron/core/package_info.py"
_INSTALL_INSTEAD = "call megatron_dos.install() before training, which needs no patch"

# Files are patched in this order and unpatched in the reverse one, so that a killed run leaves nothing that reads a
# config field which does not exist, and no flag without what it does. Files not named here come first.
_ORDER = (
    "megatron/core/optimizer/optimizer_config.py",
    "megatron/core/optimizer/__init__.py",
    "megatron/training/arguments.py",
)
# Between the name of the file and the random part of the name of its staged copy.
_STAGED = ".megatron-dos-"
_ABANDONED_AFTER_S = 3600
"""Age of a staged file that no run is taken to be using, on a file system without locks."""


class PatchError(Exception):
    """The tree cannot be patched or unpatched; nothing was changed. The message is the problem, and what to do instead.

    Attributes:
        problem: what is wrong.
        way_out: what to do, or what has been left as it was; may be ''.
    """

    def __init__(self, problem: str, way_out: str = "") -> None:
        super().__init__(f"{problem}. {way_out}" if way_out else problem)
        self.problem = problem
        self.way_out = way_out


# --- Unified diffs ---------------------------------------------------------------------------------------------


# --- The patches that come with the package --------------------------------------------------------------------


@dataclass(frozen=True)
class TargetFile:
    """A file that a patch changes; `path` is relative to the checkout, the digests are SHA-256 in hex."""

    path: str
    before: str
    after: str
    hunks: tuple[Hunk, ...]


@dataclass(frozen=True)
class Patch:
    """One folder of patches/: the trees it is for and what it changes."""

    name: str
    versions: tuple[str, ...]
    files: tuple[TargetFile, ...]


def _patches_folder() -> Traversable:
    try:
        return importlib.resources.files("megatron_dos.patches")
    except ModuleNotFoundError:
        # Run from a source tree that is not installed: there the folder lies beside the package.
        return Path(__file__).resolve().parents[2] / "patches"


def load_patch(folder: Traversable) -> Patch:
    """Read one folder of patches/. Raises ValueError where diff and manifest do not belong together."""
    manifest = json.loads(folder.joinpath("manifest.json").read_text(encoding="utf-8"))
    if manifest["format"] != FORMAT:
        raise ValueError(f"{folder}: manifest of format {manifest['format']}, this program reads format {FORMAT}")
    hunks = parse_diff(folder.joinpath(manifest["diff"]).read_bytes())
    if hunks.keys() != manifest["files"].keys():
        raise ValueError(f"{folder}: the diff and the manifest name different files")
    files = tuple(TargetFile(path, **digests, hunks=tuple(hunks[path])) for path, digests in manifest["files"].items())
    return Patch(folder.name, tuple(manifest["versions"]), files)


@functools.cache
def known_patches() -> tuple[Patch, ...]:
    """All patches that come with this package, by name. Raises PatchError where one is damaged or missing."""
    try:
        folders = [entry for entry in _patches_folder().iterdir() if entry.joinpath("manifest.json").is_file()]
        patches = tuple(load_patch(folder) for folder in sorted(folders, key=lambda folder: folder.name))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PatchError(
            f"the patches of this installation are damaged: {error}", "Install megatron-dos again."
        ) from error
    if not patches:
        raise PatchError("this installation has no patches", "Install megatron-dos again.")
    return patches


def known_versions() -> str:
    """The Megatron versions that there are patches for, for messages."""
    return ", ".join(version for patch in known_patches() for version in patch.versions)


# --- The tree --------------------------------------------------------------------------------------------------


class State(enum.Enum):
    """How a target file stands to a patch."""

    UNPATCHED = enum.auto()
    PATCHED = enum.auto()
    OTHER = enum.auto()


@dataclass(frozen=True)
class Change:
    """One file that was changed, with its number of added and removed lines."""

    path: str
    added: int
    removed: int


@dataclass(frozen=True)
class Result:
    """What `apply` or `revert` did. No changes: the tree was already as asked."""

    root: Path
    version: str
    patch: Patch
    changes: tuple[Change, ...]

    @property
    def mended(self) -> bool:
        """Whether some files were as asked already, and others not: after a killed run, or a checkout of one file."""
        return 0 < len(self.changes) < len(self.patch.files)


@dataclass(frozen=True)
class Status:
    """How a tree stands to its patch: `patched` are the files, of those that the patch changes, that are changed."""

    root: Path
    version: str
    patch: Patch
    patched: tuple[str, ...]


def read_version(root: Path) -> str:
    """Version of the Megatron tree at `root`, from megatron/core/package_info.py, which is read but not run."""
    source = (root / _PACKAGE_INFO).read_bytes()
    try:
        values: dict[str, Any] = {
            node.targets[0].id: node.value.value
            for node in ast.parse(source).body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        }
        return f"{values['MAJOR']}.{values['MINOR']}.{values['PATCH']}{values.get('PRE_RELEASE', '')}"
    except (SyntaxError, ValueError, KeyError):
        raise PatchError(f"{root / _PACKAGE_INFO} does not state Megatron's version", "Is the tree damaged?") from None


def _find_root(path: Path) -> Path:
    """The resolved folder that holds megatron/core and megatron/training, or a PatchError saying what is wrong."""
    try:
        root = path.expanduser().resolve(strict=True)
    except FileNotFoundError:
        raise PatchError(f"{path} does not exist", "Give the folder of a Megatron-LM checkout.") from None
    except RuntimeError as error:  # a loop of symbolic links, before Python 3.13; no home folder for ~
        raise PatchError(f"{path} cannot be resolved: {error}") from None
    if not root.is_dir():
        raise PatchError(
            f"{path} is a file", "Give the folder of a Megatron-LM checkout, the one that holds megatron/."
        )
    if not (root / _PACKAGE_INFO).is_file():
        if root.name == "megatron" and (root / "core" / "package_info.py").is_file():
            raise PatchError(f"{path} is the package inside a checkout", f"Give the folder above: {root.parent}")
        raise PatchError(
            f"{path} is no Megatron-LM checkout: it holds no {_PACKAGE_INFO}",
            "Give the folder that holds megatron/.",
        )
    if {"site-packages", "dist-packages"}.intersection(root.parts):
        raise PatchError(
            f"{path} is an installed package, which pip would overwrite and other programs share; it is not patched",
            f"Patch a checkout or a copy of the tree, or {_INSTALL_INSTEAD}.",
        )
    if not (root / "megatron" / "training").is_dir():
        raise PatchError(
            f"{path} holds megatron/core without megatron/training, so there is no argument parser to patch",
            f"In your program, {_INSTALL_INSTEAD}.",
        )
    return root


def _read_target(root: Path, path: str) -> bytes:
    """Bytes of a target file, which must be a regular file of this very tree."""
    file = root / path
    if file.resolve() != file:
        raise PatchError(
            f"{path} is a symbolic link, or lies behind one, to {file.resolve()}",
            "Patch the checkout that it leads to, or a copy without links.",
        )
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise PatchError(f"{path} is missing in {root}", f"Restore it with: git checkout -- {path}") from None
    except IsADirectoryError:
        raise PatchError(f"{path} is a folder in {root}, and should be a file", "Is the tree damaged?") from None
    except OSError as error:
        raise PatchError(f"{path} cannot be read: {error.strerror}", "Nothing was changed.") from None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _state(file: TargetFile, content: bytes) -> State:
    return {file.before: State.UNPATCHED, file.after: State.PATCHED}.get(_digest(content), State.OTHER)


def _changed_file(path: str, content: bytes, file: TargetFile) -> PatchError:
    """The complaint about a target file that is neither as Megatron ships it nor as the patch leaves it."""
    if b"\r\n" in content and _digest(content.replace(b"\r\n", b"\n")) in (file.before, file.after):
        return PatchError(
            f"{path} has Windows line ends (CR LF)",
            f"Check it out with: git config core.autocrlf false, then: git checkout -- {path}",
        )
    return PatchError(
        f"{path} was changed locally, so the patch does not fit",
        f"Put your change aside (git checkout -- {path}), or leave the tree as it is and {_INSTALL_INSTEAD}.",
    )


def _read_targets(root: Path, patch: Patch) -> dict[str, bytes]:
    """Bytes of each target file of `patch`, all of which are as Megatron ships them or as the patch leaves them."""
    contents = {file.path: _read_target(root, file.path) for file in patch.files}
    for file in patch.files:
        if _state(file, contents[file.path]) is State.OTHER:
            raise _changed_file(file.path, contents[file.path], file)
    return contents


def _match(root: Path, version: str) -> tuple[Patch, dict[str, bytes]]:
    """The patch for the tree at `root`, and the bytes of each target file."""
    # The files decide, not the version: a release whose files are the same needs no patch of its own.
    for patch in known_patches():
        with contextlib.suppress(PatchError):
            return patch, _read_targets(root, patch)
    for patch in known_patches():
        if version in patch.versions:
            return patch, _read_targets(root, patch)
    raise PatchError(
        f"{root} is Megatron core {version}, for which there is no patch",
        f"Known versions: {known_versions()}. Check out one of these.",
    )


# --- Writing ---------------------------------------------------------------------------------------------------


def _stage(file: Path, content: bytes) -> Path:
    """Write `content` beside `file`, with its permissions, and return where. Nothing is left behind on failure."""
    status = file.stat()
    descriptor, name = tempfile.mkstemp(prefix=f".{file.name}{_STAGED}", suffix=".tmp", dir=file.parent)
    try:
        with open(descriptor, "wb") as stream:
            if os.geteuid() == 0:
                os.fchown(stream.fileno(), status.st_uid, status.st_gid)  # root must not take a user's files over
            os.fchmod(stream.fileno(), stat.S_IMODE(status.st_mode))
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
    except BaseException:
        os.unlink(name)
        raise
    return Path(name)


def _remove_leftovers(root: Path, patch: Patch, locked: bool) -> None:
    """Remove what killed runs staged. Without a lock a recent file may belong to a run under way, and stays."""
    for target in patch.files:
        file = root / target.path
        for leftover in file.parent.glob(f".{file.name}{_STAGED}*.tmp"):
            with contextlib.suppress(OSError):
                if locked or time.time() - leftover.stat().st_mtime > _ABANDONED_AFTER_S:
                    leftover.unlink()


def _write_all(root: Path, contents: Mapping[str, tuple[bytes, bytes]]) -> None:
    """Replace each file's old bytes by its new ones, `contents` being path -> (old, new): all of them, or none.

    The files are replaced in the order of `contents`, and put back in the reverse one.
    Each file is replaced atomically, so no reader sees half a file. New and old bytes are both staged before the
    first replacement: what can fail for want of space or rights fails while nothing is changed, and going back is
    a mere rename.
    """
    for path in contents:
        if not os.access(root / path, os.W_OK):
            raise PatchError(f"{path} is read-only", f"Make it writable (chmod u+w), or {_INSTALL_INSTEAD}.")
    staged: list[Path] = []
    replaced: list[tuple[Path, Path]] = []
    try:
        plan = []
        for path, versions in contents.items():
            for content in versions:
                staged.append(_stage(root / path, content))
            plan.append((root / path, staged[-2], staged[-1]))
        for file, old, new in plan:
            replaced.append((file, old))
            os.replace(new, file)
    except BaseException as error:
        stuck = [str(file.relative_to(root)) for file, old in reversed(replaced) if not _put_back(old, file)]
        if stuck:
            raise PatchError(
                f"{root} cannot be written ({error}), and these files could not be put back: {', '.join(stuck)}",
                f"When it can be written again: megatron-dos unpatch {root}",
            ) from error
        if isinstance(error, OSError):
            raise PatchError(f"{root} cannot be written: {error}", "Nothing was changed.") from error
        raise
    finally:
        for leftover in staged:
            with contextlib.suppress(OSError):
                leftover.unlink()


def _put_back(old: Path, file: Path) -> bool:
    try:
        os.replace(old, file)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[bool]:
    """Hold off other runs of this program on the same tree, and tell whether that is possible."""
    descriptor = os.open(root, os.O_RDONLY)
    try:
        locked = False
        # Some network file systems cannot lock a folder. What is written is complete and checked all the same.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            locked = True
        yield locked
    finally:
        os.close(descriptor)


def _place(path: str) -> int:
    """Where a target file stands in the order of patching."""
    return _ORDER.index(path) if path in _ORDER else -1


def _convert(path: Path, wanted: State) -> Result:
    root = _find_root(path)
    with _locked(root) as locked:
        version = read_version(root)
        patch, contents = _match(root, version)
        todo = [file for file in patch.files if _state(file, contents[file.path]) is not wanted]
        changes, rewritten = [], {}
        for file in todo:
            old = contents[file.path]
            new = apply_hunks(old, file.hunks, reverse=wanted is State.UNPATCHED)
            if _state(file, new) is not wanted:
                raise PatchError(f"patch {patch.name} is damaged: {file.path} comes out wrong", "Nothing was changed.")
            rewritten[file.path] = (old, new)
            added, removed = (sum(hunk.count(kind) for hunk in file.hunks) for kind in (b"+", b"-"))
            changes.append(Change(file.path, *((added, removed) if wanted is State.PATCHED else (removed, added))))
        _remove_leftovers(root, patch, locked)
        order = sorted(rewritten, key=_place, reverse=wanted is State.UNPATCHED)
        _write_all(root, {path: rewritten[path] for path in order})
    return Result(root, version, patch, tuple(changes))


def _guarded(path: Path, wanted: State) -> Result:
    try:
        return _convert(path, wanted)
    except OSError as error:  # a folder without search permission, a vanished file: before anything was written
        raise PatchError(f"{path} cannot be read: {error}", "Nothing was changed.") from error


def examine(path: str | os.PathLike[str]) -> Status:
    """How the Megatron checkout at `path` stands to its patch. Nothing is changed.

    Raises:
        PatchError: the tree is no checkout, of an unknown version, or changed locally.
    """
    try:
        root = _find_root(Path(path))
        version = read_version(root)
        patch, contents = _match(root, version)
    except OSError as error:
        raise PatchError(f"{path} cannot be read: {error}.") from error
    done = tuple(file.path for file in patch.files if _state(file, contents[file.path]) is State.PATCHED)
    return Status(root, version, patch, done)


def apply(path: str | os.PathLike[str]) -> Result:
    """Patch the Megatron checkout at `path`. Also finishes a tree that is patched in part.

    Raises:
        PatchError: the tree is no checkout, of an unknown version, changed locally, or not writable. Nothing was
            changed.
    """
    return _guarded(Path(path), State.PATCHED)


def revert(path: str | os.PathLike[str]) -> Result:
    """Take the patch back, so that each file has its former bytes. Also mends a tree that is patched in part.

    Raises:
        PatchError: as `apply`.
    """
    return _guarded(Path(path), State.UNPATCHED)
