# SPDX-License-Identifier: Apache-2.0
"""The patch command's engine: diffs, trees it accepts, trees it refuses, and that it changes all files or none."""

from __future__ import annotations

import errno
import io
import json
import multiprocessing
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import make_patch
import megatron_trees
import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron_trees import PACKAGE_INFO, TARGETS, snapshot
from repository import ROOT

from megatron_dos import cli
from megatron_dos.arguments import field_docs
from megatron_dos.options.options import DosOptions
from megatron_dos.patching import on_disk as patching
from megatron_dos.patching.diffs import Hunk, apply_hunks, parse_diff
from megatron_dos.patching.on_disk import PatchError


@pytest.fixture
def tree(tmp_path) -> Path:
    return megatron_trees.small_tree(tmp_path / "Megatron-LM")


@pytest.fixture
def patched(tree) -> Path:
    patching.apply(tree)
    return tree


def refusal(call, path: Path, unchanged: Path) -> str:
    """The message with which `call(path)` refuses. Nothing below `unchanged` may have changed, nor been added."""
    before = snapshot(unchanged)
    with pytest.raises(PatchError) as caught:
        call(path)
    assert snapshot(unchanged) == before
    message = str(caught.value)
    assert "\n" not in message
    return message


def edit(file: Path, old: bytes, new: bytes) -> None:
    content = file.read_bytes()
    assert old in content
    file.write_bytes(content.replace(old, new, 1))


class TestPatchAndUnpatch:
    def test_round_trip_is_byte_exact(self, tree):
        before = snapshot(tree)
        result = patching.apply(tree)
        after = snapshot(tree)
        assert {name for name in before if before[name] != after[name]} == set(TARGETS)
        assert before.keys() == after.keys(), "no file may be left behind"
        assert {change.path for change in result.changes} == set(TARGETS)
        assert patching.revert(tree).changes
        assert snapshot(tree) == before

    def test_both_are_idempotent(self, tree):
        assert patching.revert(tree).changes == ()
        assert len(patching.apply(tree).changes) == 3
        once = snapshot(tree)
        assert patching.apply(tree).changes == ()
        assert snapshot(tree) == once
        assert len(patching.revert(tree).changes) == 3
        assert patching.revert(tree).changes == ()

    def test_reported_lines_are_the_changed_ones(self, tree):
        before = {name: (tree / name).read_text().splitlines() for name in TARGETS}
        result = patching.apply(tree)
        for change in result.changes:
            lines = (tree / change.path).read_text().splitlines()
            assert len(lines) - len(before[change.path]) == change.added - change.removed
            assert change.added >= 3
        undone = {change.path: change for change in patching.revert(tree).changes}
        for change in result.changes:
            assert (undone[change.path].removed, undone[change.path].added) == (change.added, change.removed)

    def test_result_names_version_and_root(self, tree):
        result = patching.apply(tree)
        assert result.root == tree.resolve()
        assert result.version == patching.read_version(tree)
        assert result.version in result.patch.versions

    @pytest.mark.parametrize("mode", [0o644, 0o664, 0o755, 0o600])
    def test_permissions_are_kept(self, tree, mode):
        for name in TARGETS:
            (tree / name).chmod(mode)
        patching.apply(tree)
        assert {stat.S_IMODE((tree / name).stat().st_mode) for name in TARGETS} == {mode}

    def test_hard_linked_copies_are_not_touched(self, tree, tmp_path):
        """Package managers link one file into many trees; writing through the link would patch them all."""
        other = tmp_path / "other.py"
        os.link(tree / TARGETS[0], other)
        before = other.read_bytes()
        patching.apply(tree)
        assert other.read_bytes() == before != (tree / TARGETS[0]).read_bytes()

    @pytest.mark.parametrize("name", ["a folder with spaces", "-rf", "ünïcode", "quote'\"$(x)"])
    def test_odd_folder_names(self, tmp_path, name):
        tree = megatron_trees.small_tree(tmp_path / name)
        before = snapshot(tree)
        patching.apply(tree)
        patching.revert(tree)
        assert snapshot(tree) == before

    def test_path_may_be_relative_or_a_link_to_the_checkout(self, tree, tmp_path, monkeypatch):
        monkeypatch.chdir(tree / "megatron")
        assert patching.apply("..").changes
        (tmp_path / "link").symlink_to(tree)
        assert patching.revert(tmp_path / "link").changes

    def test_release_with_the_same_files_needs_no_patch_of_its_own(self, tree):
        edit(tree / PACKAGE_INFO, b"PATCH = ", b"PATCH = 9")
        assert patching.apply(tree).changes


class TestPatchedTree:
    @pytest.fixture
    def sources(self, patched) -> dict[str, str]:
        return {name: (patched / name).read_text() for name in TARGETS}

    def test_is_python(self, sources):
        for name, source in sources.items():
            compile(source, name, "exec")

    def test_imports_the_optimizer_only_where_the_flag_is_on(self, sources):
        source = sources["megatron/core/optimizer/__init__.py"]
        for line in source.splitlines():
            if "import" in line and "megatron_dos" in line:
                assert line.startswith("        "), "must be inside `if config.use_deep_optimizer_states:`"
        assert "megatron_dos" not in sources["megatron/core/optimizer/optimizer_config.py"]

    def test_is_what_the_generator_makes_of_the_options_of_today(self, tree):
        """A change of DosOptions needs a run of scripts/make_patch.py."""
        (patch,) = [one for one in patching.known_patches() if patching.read_version(tree) in one.versions]
        folder = ROOT / "patches" / patch.name
        diff, manifest = make_patch.make(tree, list(patch.versions))
        assert (folder / "hooks.diff").read_text() == diff
        assert (folder / "manifest.json").read_text() == manifest

    def test_config_has_the_options_as_plain_fields(self, sources):
        source = sources["megatron/core/optimizer/optimizer_config.py"]
        for name, kind in DosOptions.types().items():
            default = getattr(DosOptions(), name)
            assert f"    {name}: {kind.__name__} = {default!r}\n" in source
            assert field_docs()[name] in " ".join(source.split())

    def test_patch_is_small(self):
        for patch in patching.known_patches():
            assert len(patch.files) <= 4
            context = sum(hunk.count(b" ") for file in patch.files for hunk in file.hunks)
            hunks = sum(len(file.hunks) for file in patch.files)
            assert context <= 2 * hunks, "one line of context on each side"


class TestRefused:
    @pytest.fixture(params=[patching.apply, patching.revert], ids=["patch", "unpatch"])
    def call(self, request):
        return request.param

    def test_missing_path(self, call, tmp_path):
        assert "does not exist" in refusal(call, tmp_path / "no such", tmp_path)

    def test_file_as_path(self, call, tree):
        assert "is a file" in refusal(call, tree / PACKAGE_INFO, tree)

    def test_file_as_folder_of_the_path(self, call, tree):
        assert "cannot be read" in refusal(call, tree / PACKAGE_INFO / "x", tree)

    def test_any_other_folder(self, call, tmp_path):
        (tmp_path / "README.md").write_text("hello")
        assert "no Megatron-LM checkout" in refusal(call, tmp_path, tmp_path)

    def test_the_package_instead_of_the_checkout(self, call, tree):
        assert f"Give the folder above: {tree}" in refusal(call, tree / "megatron", tree)

    def test_core_without_training(self, call, tree):
        shutil.rmtree(tree / "megatron" / "training")
        message = refusal(call, tree, tree)
        assert "without megatron/training" in message
        assert "megatron_dos.install()" in message

    def test_installed_package(self, call, tmp_path):
        tree = megatron_trees.small_tree(tmp_path / "lib" / "site-packages")
        assert "megatron_dos.install()" in refusal(call, tree, tree)
        (tmp_path / "innocent name").symlink_to(tree)
        assert "installed package" in refusal(call, tmp_path / "innocent name", tree)

    def test_unknown_version(self, call, tree):
        edit(tree / PACKAGE_INFO, b"MINOR = 19", b"MINOR = 99")
        edit(tree / TARGETS[0], b"\n", b"\n\n")
        message = refusal(call, tree, tree)
        assert "Megatron core 0.99." in message
        assert f"Known versions: {patching.known_versions()}" in message

    @pytest.mark.parametrize("content", [b"", b"MAJOR = \n", b"x = 1\n", b"\xff\xfe\x00"])
    def test_unreadable_version(self, call, tree, content):
        (tree / PACKAGE_INFO).write_bytes(content)
        assert f"{PACKAGE_INFO} does not state" in refusal(call, tree, tree)

    @pytest.mark.parametrize("target", TARGETS)
    def test_locally_changed_file_is_named_with_two_ways_out(self, call, tree, target):
        edit(tree / target, b"import", b"import  ")
        message = refusal(call, tree, tree)
        assert message.startswith(f"{target} was changed locally")
        assert f"git checkout -- {target}" in message
        assert "megatron_dos.install()" in message

    def test_change_to_a_patched_file(self, call, patched):
        with open(patched / TARGETS[0], "ab") as file:
            file.write(b"# mine\n")
        assert TARGETS[0] in refusal(call, patched, patched)

    def test_truncated_file(self, call, tree):
        content = (tree / TARGETS[1]).read_bytes()
        (tree / TARGETS[1]).write_bytes(content[: len(content) // 2])
        assert TARGETS[1] in refusal(call, tree, tree)

    def test_windows_line_ends_are_told_apart_from_changes(self, call, tree):
        for name in TARGETS:
            (tree / name).write_bytes((tree / name).read_bytes().replace(b"\n", b"\r\n"))
        message = refusal(call, tree, tree)
        assert "Windows line ends" in message
        assert "core.autocrlf" in message

    def test_missing_target(self, call, tree):
        (tree / TARGETS[2]).unlink()
        assert f"{TARGETS[2]} is missing" in refusal(call, tree, tree)

    def test_folder_in_the_place_of_a_target(self, call, tree):
        (tree / TARGETS[2]).unlink()
        (tree / TARGETS[2]).mkdir()
        assert f"{TARGETS[2]} is a folder" in refusal(call, tree, tree)

    def test_linked_file_and_linked_folder(self, call, tree, tmp_path):
        """Replacing a link would leave its target, and writing through it would change another tree."""
        other = megatron_trees.small_tree(tmp_path / "other")
        (tree / TARGETS[0]).unlink()
        (tree / TARGETS[0]).symlink_to(other / TARGETS[0])
        assert "symbolic link" in refusal(call, tree, tmp_path)
        shutil.rmtree(tree / "megatron" / "core")
        (tree / "megatron" / "core").symlink_to(other / "megatron" / "core")
        assert str(other / TARGETS[0]) in refusal(call, tree, tmp_path)

    def test_loop_of_links(self, call, tmp_path):
        (tmp_path / "loop").symlink_to(tmp_path / "loop")
        assert "loop" in refusal(call, tmp_path / "loop", tmp_path)


class TestPatchedInPart:
    @pytest.mark.parametrize("missing", TARGETS)
    def test_patch_finishes_and_unpatch_takes_back(self, tree, missing):
        before = snapshot(tree)
        assert not patching.apply(tree).mended
        after = snapshot(tree)
        (tree / missing).write_bytes(before[missing][1])
        result = patching.apply(tree)
        assert [change.path for change in result.changes] == [missing]
        assert result.mended
        assert snapshot(tree) == after
        (tree / missing).write_bytes(before[missing][1])
        assert len(patching.revert(tree).changes) == 2
        assert snapshot(tree) == before

    def test_the_command_says_that_it_finished_the_rest(self, tree, capsys):
        original = (tree / TARGETS[1]).read_bytes()
        assert cli.main(["patch", str(tree)]) == 0
        assert "in part" not in capsys.readouterr().out
        (tree / TARGETS[1]).write_bytes(original)
        assert cli.main(["patch", str(tree)]) == 0
        out = capsys.readouterr().out
        assert "the tree was patched in part" in out
        assert TARGETS[0] not in out

    def test_a_local_change_beside_it_is_still_refused(self, patched):
        edit(patched / TARGETS[1], b"import", b"import  ")
        assert TARGETS[1] in refusal(patching.apply, patched, patched)


def killed(call, tree: Path, renames: int) -> None:
    """Run `call(tree)` in a process that ends without any cleaning up at its rename number `renames`, from 0."""
    patching.known_patches()
    child = os.fork()
    if child == 0:
        done, replace = [], os.replace

        def replace_or_die(source, target):
            if len(done) == renames:
                os._exit(9)
            done.append(target)
            replace(source, target)

        patching.os.replace = replace_or_die
        try:
            call(tree)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


class TestKilledRun:
    """What is left by a run that could not clean up, and what the next run makes of it."""

    ORDER = (TARGETS[1], TARGETS[0], TARGETS[2])  # config fields, their reader in the optimizer, flags

    @pytest.fixture(params=[patching.apply, patching.revert], ids=["patch", "unpatch"])
    def call(self, request):
        return request.param

    @pytest.mark.parametrize("following", [patching.apply, patching.revert], ids=["then patch", "then unpatch"])
    @pytest.mark.parametrize("renames", range(3))
    def test_the_next_run_mends_it_and_leaves_nothing_behind(self, tree, call, renames, following):
        original = snapshot(tree)
        patching.apply(tree)
        patched = snapshot(tree)
        if call is patching.apply:
            patching.revert(tree)
        killed(call, tree, renames)
        assert snapshot(tree).keys() > original.keys(), "the killed run had staged files"
        following(tree)
        assert snapshot(tree) == (patched if following is patching.apply else original)
        patching.revert(tree)
        assert snapshot(tree) == original

    @pytest.mark.parametrize("renames", range(4))
    def test_fields_come_before_their_readers_and_flags_last(self, tree, renames):
        original = snapshot(tree)
        patching.apply(tree)
        patched = snapshot(tree)
        patching.revert(tree)
        half = {name: (patched if name in self.ORDER[:renames] else original)[name] for name in TARGETS}
        if renames < 3:
            killed(patching.apply, tree, renames)
            assert half.items() <= snapshot(tree).items()
        patching.apply(tree)
        if renames > 0:
            killed(patching.revert, tree, 3 - renames)
            assert half.items() <= snapshot(tree).items()

    def test_a_tree_that_needs_no_change_is_swept_too(self, tree, call):
        if call is patching.apply:
            patching.apply(tree)
        before = snapshot(tree)
        (tree / TARGETS[0]).with_name(".__init__.py.megatron-dos-a1b2c3d4.tmp").write_text("left")
        assert call(tree).changes == ()
        assert snapshot(tree) == before

    def test_files_of_others_stay(self, tree, call):
        names = (".__init__.py.swp", ".__init__.py.a1b2c3d4", "__init__.py.megatron-dos-a.tmp", ".megatron-dos-a.tmp")
        others = [(tree / TARGETS[0]).with_name(name) for name in names]
        for other in others:
            other.write_text("mine")
        call(tree)
        assert [other.read_text() for other in others] == ["mine"] * len(others)

    def test_without_locks_what_another_run_may_be_using_stays(self, tree, monkeypatch):
        def no_locks(descriptor, operation):
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(patching.fcntl, "flock", no_locks)
        leftover = (tree / TARGETS[0]).with_name(".__init__.py.megatron-dos-a1b2c3d4.tmp")
        leftover.write_text("left")
        patching.apply(tree)
        assert leftover.exists()
        old = leftover.stat().st_mtime - 2 * 3600
        os.utime(leftover, (old, old))
        patching.revert(tree)
        assert not leftover.exists()


class TestAllOrNothing:
    @pytest.fixture(params=[patching.apply, patching.revert], ids=["patch", "unpatch"])
    def case(self, request, tree):
        if request.param is patching.revert:
            patching.apply(tree)
        return request.param, tree

    @pytest.mark.parametrize("failing", [0, 1, 2])
    def test_failure_between_the_files_is_rolled_back(self, case, monkeypatch, failing):
        call, tree = case
        calls, replace = [], os.replace

        def failing_replace(source, target):
            calls.append(target)
            if len(calls) == failing + 1:
                raise OSError(errno.EIO, "Input/output error")
            replace(source, target)

        monkeypatch.setattr(patching.os, "replace", failing_replace)
        assert "Input/output error" in refusal(call, tree, tree)

    def test_interrupt_between_the_files_is_rolled_back(self, case, monkeypatch):
        call, tree = case
        before, calls, replace = snapshot(tree), [], os.replace

        def interrupted_replace(source, target):
            replace(source, target)
            calls.append(target)
            if len(calls) == 2:
                raise KeyboardInterrupt

        monkeypatch.setattr(patching.os, "replace", interrupted_replace)
        with pytest.raises(KeyboardInterrupt):
            call(tree)
        assert snapshot(tree) == before

    @pytest.mark.parametrize("failing", range(6))
    def test_full_disk_changes_nothing(self, case, monkeypatch, failing):
        call, tree = case
        calls, fsync = [], os.fsync

        def full(descriptor):
            calls.append(descriptor)
            if len(calls) == failing + 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            fsync(descriptor)

        monkeypatch.setattr(patching.os, "fsync", full)
        assert "No space left on device" in refusal(call, tree, tree)

    def test_failure_of_the_rollback_is_told(self, tree, monkeypatch):
        replace = os.replace

        def broken_after_first(source, target):
            if Path(target) != tree / TARGETS[1] or broken_after_first.done:
                raise OSError(errno.EROFS, "Read-only file system")
            replace(source, target)
            broken_after_first.done = True

        broken_after_first.done = False
        before = snapshot(tree)
        with monkeypatch.context() as patch:
            patch.setattr(patching.os, "replace", broken_after_first)
            with pytest.raises(PatchError, match="could not be put back") as caught:
                patching.apply(tree)
        assert TARGETS[1] in str(caught.value)
        assert f"megatron-dos unpatch {tree}" in str(caught.value)
        patching.revert(tree)
        assert snapshot(tree) == before

    def test_damaged_patch_writes_nothing(self, tree, monkeypatch):
        patch = patching.apply(tree).patch
        patching.revert(tree)
        file = patch.files[0]
        hunk = file.hunks[0]
        lines = tuple((kind, text.replace(b"optimizer_class", b"other_class")) for kind, text in hunk.lines)
        damaged = patching.TargetFile(file.path, file.before, file.after, (Hunk(hunk.start, lines), *file.hunks[1:]))
        broken = patching.Patch(patch.name, patch.versions, (damaged, *patch.files[1:]))
        monkeypatch.setattr(patching, "known_patches", lambda: (broken,))
        assert "is damaged" in refusal(patching.apply, tree, tree)

    def test_read_only_file(self, case, monkeypatch):
        """Root may write anything, so the answer of the operating system is replaced."""
        call, tree = case
        access = os.access
        monkeypatch.setattr(
            patching.os, "access", lambda path, mode: not str(path).endswith(TARGETS[1]) and access(path, mode)
        )
        message = refusal(call, tree, tree)
        assert message.startswith(f"{TARGETS[1]} is read-only")
        assert "chmod u+w" in message


def without_rights(work) -> str:
    """Run `work` in a forked process that has given up root's rights, and return what it returns."""
    patching.known_patches()  # read while we may
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            answer = work()
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer


class TestPermissionDenied:
    """With an ordinary user's rights, also when the tests run as root."""

    @pytest.fixture
    def open_tree(self) -> Iterator[Path]:
        """A tree that the unprivileged user owns and can reach, unlike pytest's own temporary folders."""
        with tempfile.TemporaryDirectory() as folder:
            tree = megatron_trees.small_tree(Path(folder) / "Megatron-LM")
            Path(folder).chmod(0o755)
            if os.geteuid() == 0:
                for path in (tree, *tree.rglob("*")):
                    os.chown(path, 65534, 65534)
            yield tree

    def attempt(self, tree: Path) -> str:
        def work() -> str:
            try:
                return f"{len(patching.apply(tree).changes)} files changed"
            except PatchError as error:
                return str(error)

        return without_rights(work)

    def test_own_tree_can_be_patched(self, open_tree):
        assert self.attempt(open_tree) == "3 files changed"

    @pytest.mark.parametrize("target", TARGETS)
    def test_read_only_file(self, open_tree, target):
        (open_tree / target).chmod(0o444)
        before = snapshot(open_tree)
        assert self.attempt(open_tree).startswith(f"{target} is read-only")
        assert snapshot(open_tree) == before

    def test_read_only_folder(self, open_tree):
        folder = (open_tree / TARGETS[2]).parent
        folder.chmod(0o555)
        before = snapshot(open_tree)
        message = self.attempt(open_tree)
        assert "Permission denied" in message
        assert "Nothing was changed" in message
        assert snapshot(open_tree) == before
        folder.chmod(0o755)

    def test_unreadable_file(self, open_tree):
        (open_tree / TARGETS[0]).chmod(0)
        assert self.attempt(open_tree).startswith(f"{TARGETS[0]} cannot be read: Permission denied")

    def test_closed_folder(self, open_tree):
        open_tree.chmod(0)
        assert "Permission denied" in self.attempt(open_tree)
        open_tree.chmod(0o755)


def _patch_in_another_process(tree: Path, barrier, answers) -> None:
    barrier.wait()
    try:
        answers.put(len(patching.apply(tree).changes))
    except PatchError as error:
        answers.put(str(error))


def test_concurrent_runs_leave_one_complete_patch(tree):
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(4), context.Queue()
    processes = [context.Process(target=_patch_in_another_process, args=(tree, barrier, answers)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert sorted(answers.get(timeout=5) for _ in processes) == [0, 0, 0, 3]
    assert patching.apply(tree).changes == ()


def test_a_file_system_without_locks_is_no_obstacle(tree, monkeypatch):
    def no_locks(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(patching.fcntl, "flock", no_locks)
    assert patching.apply(tree).changes


class TestDiffs:
    @staticmethod
    def unified(old: str, new: str, context: int) -> bytes:
        lines = make_patch.difflib.unified_diff(
            list(io.StringIO(old, newline="\n")), list(io.StringIO(new, newline="\n")), "a/f", "b/f", n=context
        )
        return "".join(lines).encode()

    @given(
        old=st.lists(st.sampled_from(["a", "b", "c", "", "d\x0c", "\r"]), max_size=12),
        new=st.lists(st.sampled_from(["a", "b", "c", "", "d\x0c", "\r"]), max_size=12),
        context=st.integers(0, 3),
    )
    def test_applies_and_takes_back_what_difflib_wrote(self, old, new, context):
        before, after = ("".join(line + "\n" for line in lines) for lines in (old, new))
        diff = self.unified(before, after, context)
        hunks = parse_diff(diff)["f"] if diff else []
        assert apply_hunks(before.encode(), hunks) == after.encode()
        assert apply_hunks(after.encode(), hunks, reverse=True) == before.encode()

    def test_other_lines_than_expected_are_an_error(self):
        hunks = parse_diff(self.unified("a\nb\nc\n", "a\nx\nc\n", 1))["f"]
        for content in (b"a\nB\nc\n", b"new\na\nb\nc\n", b"a\n", b"", b"a\nb\nc"):
            with pytest.raises(ValueError, match="not what the diff expects"):
                apply_hunks(content, hunks)

    @pytest.mark.parametrize(
        "diff",
        [
            b"hello\n",
            b"hello",
            b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b",
            b"--- a/f\n+++ b/g\n@@ -1 +1 @@\n-a\n+b\n",
            b"@@ -1 +1 @@\n-a\n+b\n",
            b"--- a/f\n+++ b/f\n@@ -1,2 +1 @@\n-a\n+b\n",
            b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n+c\n",
            b"--- a/f\n+++ b/f\n@@ -1 +1,2 @@\n-a\n-b\n+c\n",
            b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n\n",
        ],
    )
    def test_anything_but_a_complete_diff_is_an_error(self, diff):
        with pytest.raises(ValueError, match="diff"):
            parse_diff(diff)


class TestPatchesFolder:
    def write(self, folder: Path, manifest: dict, diff: bytes = b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n") -> Path:
        (folder / "manifest.json").write_text(json.dumps(manifest))
        (folder / "hooks.diff").write_bytes(diff)
        return folder

    def manifest(self, **changes) -> dict:
        digests = {"before": "0" * 64, "after": "1" * 64}
        return {"format": 1, "versions": ["1.0"], "diff": "hooks.diff", "files": {"f": digests}} | changes

    def test_reads_a_folder(self, tmp_path):
        patch = patching.load_patch(self.write(tmp_path, self.manifest()))
        assert (patch.versions, patch.files[0].path, len(patch.files[0].hunks)) == (("1.0",), "f", 1)

    def test_manifest_and_diff_must_name_the_same_files(self, tmp_path):
        with pytest.raises(ValueError, match="different files"):
            patching.load_patch(self.write(tmp_path, self.manifest(files={})))

    def test_newer_format_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match="format 2"):
            patching.load_patch(self.write(tmp_path, self.manifest(format=2)))

    @pytest.mark.parametrize("damage", ["no folder", "no manifest", "no json", "no key"])
    def test_damaged_installation_is_told(self, tmp_path, monkeypatch, damage):
        folder = tmp_path / "patches" / "core_v1"
        folder.mkdir(parents=True)
        self.write(folder, self.manifest() if damage != "no key" else {"format": 1})
        if damage == "no manifest":
            (folder / "manifest.json").unlink()
        if damage == "no json":
            (folder / "manifest.json").write_text("{")
        place = tmp_path / ("nowhere" if damage == "no folder" else "patches")
        monkeypatch.setattr(patching, "_patches_folder", lambda: place)
        with pytest.raises(PatchError, match="Install megatron-dos again"):
            patching.known_patches.__wrapped__()

    def test_found_in_a_source_tree_that_is_not_installed(self, monkeypatch):
        def absent(name):
            raise ModuleNotFoundError(name)

        monkeypatch.setattr(patching.importlib.resources, "files", absent)
        assert patching.known_patches.__wrapped__() == patching.known_patches() != ()


class TestGenerator:
    def test_refuses_a_patched_tree(self, patched):
        with pytest.raises(SystemExit, match="patched already"):
            make_patch.make(patched, [])

    @pytest.mark.parametrize(
        ("target", "name"),
        [
            (TARGETS[0], b"def get_megatron_optimizer("),
            (TARGETS[0], b"            optimizer = DistributedOptimizer("),
            (TARGETS[1], b"class OptimizerConfig"),
            (TARGETS[2], b"def validate_args"),
        ],
    )
    def test_names_the_place_that_a_tree_lacks(self, tree, target, name):
        edit(
            tree / target,
            name,
            name.replace(b"get_meg", b"new_meg")
            .replace(b"Config", b"Settings")
            .replace(b"= Dist", b"= New")
            .replace(b"validate", b"check"),
        )
        with pytest.raises(SystemExit, match=r"no function|no class|0 places"):
            make_patch.make(tree, [])

    def test_does_not_change_the_tree(self, tree):
        before = snapshot(tree)
        make_patch.make(tree, [])
        assert snapshot(tree) == before


def test_page_shows_the_size_of_the_patch():
    """docs/patching.md shows what the command prints of each file."""
    page = (ROOT / "docs" / "patching.md").read_text(encoding="utf-8")
    (patch,) = patching.known_patches()
    shown = dict(re.findall(r"^  (megatron/\S+) +(\+\d+ -\d+)$", page, re.MULTILINE))
    sizes = {
        file.path: "+{} -{}".format(*(sum(hunk.count(kind) for hunk in file.hunks) for kind in (b"+", b"-")))
        for file in patch.files
    }
    assert shown == sizes
