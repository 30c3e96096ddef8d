# SPDX-License-Identifier: Apache-2.0
"""What killed writers leave, and who removes it. That files appear whole is tested in test_trace.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_dos import files
from megatron_dos.files import new_file, remove_leftovers

WRITER = """
import sys, time
from megatron_dos.files import new_file
with new_file(sys.argv[1], overwrite=True) as temporary:
    temporary.write_text("half a file")
    print(temporary, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "states.pt"


@pytest.fixture
def writer(target: Path):
    """Another process, in the middle of writing `target`; and its temporary file."""
    with subprocess.Popen([sys.executable, "-c", WRITER, target], stdout=subprocess.PIPE, text=True) as process:
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def write(target: Path) -> None:
    with new_file(target, overwrite=True) as temporary:
        temporary.write_text("whole")


@pytest.mark.parametrize("reaped", [True, False], ids=["gone", "still in the table of processes"])
def test_the_next_writer_removes_what_a_killed_one_has_left(target, writer, reaped):
    process, temporary = writer
    process.send_signal(signal.SIGKILL)
    if reaped:
        process.wait()
    else:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert temporary.exists(), "there has to be something to remove"
    write(target)
    assert os.listdir(target.parent) == ["states.pt"]


def test_a_living_writer_is_left_alone(target, writer):
    process, temporary = writer
    write(target)
    assert temporary.read_text() == "half a file"
    assert process.poll() is None


def test_a_process_that_has_got_the_number_of_a_dead_one_protects_nothing(target):
    place, pid, _ = files._writer().split("-")
    leftover = target.with_name(f".{target.name}.{place}-{pid}-1.0123abcd")
    leftover.touch()
    remove_leftovers(target)
    assert not leftover.exists()


@pytest.mark.parametrize("name", [".states.pt.0123abcd-1-1.0123abcd", ".states.pt.0123abcd"])
def test_a_writer_elsewhere_is_given_a_day(target, name):
    """Of another machine or container; and those of versions that did not name the writer."""
    leftover = target.with_name(name)
    leftover.touch()
    remove_leftovers(target)
    assert leftover.exists()
    day_ago = time.time() - 25 * 60 * 60
    os.utime(leftover, (day_ago, day_ago))
    remove_leftovers(target)
    assert not leftover.exists()


@pytest.mark.parametrize(
    "name", [".states.pt.backup", ".states.pt.0123abcd.gz", "states.pt.0123abcd", ".other.pt.0123abcd", ".states.pt."]
)
def test_files_of_others_stay(target, name):
    theirs = target.with_name(name)
    theirs.touch()
    os.utime(theirs, (0, 0))
    write(target)
    assert theirs.exists()


def test_without_a_process_table_files_are_written_and_no_writer_is_taken_for_dead(target, monkeypatch):
    unreadable = lambda *args, **kwargs: (_ for _ in ()).throw(FileNotFoundError("/proc"))  # noqa: E731
    monkeypatch.setattr(Path, "read_text", unreadable)
    files._place.cache_clear()
    with new_file(target) as temporary:
        temporary.touch()
        remove_leftovers(target)
        assert temporary.exists()
    files._place.cache_clear()
    assert target.exists()
