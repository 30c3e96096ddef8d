# SPDX-License-Identifier: Apache-2.0
"""How refused trainings end: uncaught in Megatron's command line, and in programs that catch errors."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import pytest
from repository import ROOT

from megatron_dos import arguments, refusal
from megatron_dos.checkpointing.handouts import CheckpointError
from megatron_dos.node.memory import HostMemoryError
from megatron_dos.options import options
from megatron_dos.update.memory import DeviceMemoryError

HOOK = """
from megatron_dos.refusal import Refusal, end_in_one_message
end_in_one_message()
end_in_one_message()
"""


def start(code: str, **variables: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**kept, **variables},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=120)
    return process.returncode, errors


@pytest.mark.parametrize(
    ("kind", "former"),
    [
        (options.UnsupportedOptionError, ValueError),
        (HostMemoryError, MemoryError),
        (DeviceMemoryError, MemoryError),
        (CheckpointError, RuntimeError),
    ],
)
def test_refusals_are_of_one_class_and_of_their_former_ones(kind, former):
    assert issubclass(kind, refusal.Refusal)
    assert issubclass(kind, former)


def test_uncaught_refusal_is_its_message_and_status_2():
    assert ended(start(HOOK + "raise Refusal('no: do that')")) == (2, "megatron-dos: no: do that\n")


def test_without_the_hook_it_is_a_traceback():
    status, errors = ended(start("from megatron_dos.refusal import Refusal\nraise Refusal('no')"))
    assert status == 1
    assert "Traceback" in errors


def test_other_errors_keep_their_traceback():
    status, errors = ended(start(HOOK + "raise ValueError('else')"))
    assert status == 1
    assert "Traceback" in errors
    assert "ValueError: else" in errors


def test_programs_catch_refusals():
    code = HOOK + "try:\n    raise Refusal('no')\nexcept Refusal: print('caught')"
    assert ended(start(code)) == (0, "")


def test_hook_is_set_by_the_command_line_with_our_flags_alone(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    arguments.validate_args(argparse.Namespace())
    assert sys.excepthook is sys.__excepthook__
    with pytest.raises(options.UnsupportedOptionError):
        arguments.check_args(argparse.Namespace(dos_gpu_share=7.0))
    assert sys.excepthook is sys.__excepthook__
    with pytest.raises(options.UnsupportedOptionError):
        arguments.validate_args(argparse.Namespace(dos_gpu_share=7.0))
    assert sys.excepthook is not sys.__excepthook__


RANK = """
import os, time, torch.distributed as dist
from megatron_dos import refusal
refusal._PATIENCE_S = 4.0
refusal.end_in_one_message()
dist.init_process_group("gloo", init_method=os.environ["MEET"], rank=int(os.environ["RANK"]), world_size=2)
if os.environ["RANK"] in os.environ["REFUSED"]:
    time.sleep(float(os.environ["LATE"]))
    raise refusal.Refusal("no")
time.sleep(8)
"""


@pytest.mark.parametrize(
    ("refused", "late", "speaker"),
    [("01", "0", 0), ("01", "1.5", 0), ("1", "0", 1)],
    ids=["both", "the first one later", "the other alone"],
)
@pytest.mark.slow
def test_one_rank_speaks(tmp_path, refused, late, speaker):
    variables = {"MEET": f"file://{tmp_path}/meet", "WORLD_SIZE": "2", "REFUSED": refused, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [start(RANK, RANK=str(rank), LATE=late if rank == 0 else "0", **variables) for rank in (0, 1)]
    results = [ended(rank) for rank in ranks]
    assert [errors.count("megatron-dos: no") for _, errors in results] == [int(rank == speaker) for rank in (0, 1)]
    assert all(results[int(rank)][0] == 2 for rank in refused)
