# SPDX-License-Identifier: Apache-2.0
"""docs/cpu-emulation.md: its commands, as they stand there, in a folder and an environment as its reader has them."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import megatron_trees
import pytest
from repository import ROOT

BLOCKS = re.findall(
    r"^```bash\n(.*?)^```$", (ROOT / "docs" / "cpu-emulation.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)
INSTALL, PIP_TRAININGS = BLOCKS[0].split("\n", 1)
ARGUMENTS = re.search(r"^TINY=\(.*?\)$", PIP_TRAININGS, re.MULTILINE | re.DOTALL)[0]


def run(commands: str, folder: Path) -> str:
    """What the commands print, run by bash in `folder`, which is the home as well; they have to succeed.

    Nothing of a launcher or of a path for imports is in the environment.
    """
    bin_folder = Path(sys.executable).parent
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder,
        env={"PATH": f"{bin_folder}:/usr/bin:/bin", "HOME": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def assert_trained(printed: str, trainings: int, deep: int) -> None:
    """So many trainings ran to their fifth iteration, so many of them with deep optimizer states."""
    assert len(re.findall(r" iteration +5/ +5 .* lm loss: [\d.E+-]+ ", printed)) == trainings
    assert printed.count("deep optimizer states: rank 0 owns") == deep


def test_the_extra_that_the_page_installs_exists():
    extra = re.fullmatch(r"pip install '\./megatron-dos\[(\w+)\]'", INSTALL)[1]
    assert extra in importlib.metadata.metadata("megatron-dos").get_all("Provides-Extra")


def test_the_commands_for_pips_megatron_run_as_written(tmp_path):
    (tmp_path / "megatron-dos").symlink_to(ROOT)
    assert_trained(run(PIP_TRAININGS, tmp_path), trainings=2, deep=1)


def test_the_commands_for_a_checkout_run_as_written(tmp_path):
    megatron_trees.trainable_tree(tmp_path / "Megatron-LM")
    assert_trained(run(ARGUMENTS + "\n" + BLOCKS[1], tmp_path), trainings=2, deep=1)


def test_every_command_of_the_page_is_run_here():
    assert len(BLOCKS) == 2
    text = (ROOT / "docs" / "cpu-emulation.md").read_text(encoding="utf-8")
    assert text.count("-m megatron_dos.cpu_emulation") == "".join(BLOCKS).count("-m megatron_dos.cpu_emulation")


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "MASTER_ADDR"])
def test_what_a_launcher_has_set_stays(variable, tmp_path):
    code = (
        "import os; from megatron_dos.cpu_emulation import command; command._be_the_only_rank(); "
        "print(*(os.environ.get(name) for name in ('WORLD_SIZE', 'RANK', 'MASTER_ADDR', 'MASTER_PORT')))"
    )
    given = {"WORLD_SIZE": "2", "MASTER_ADDR": "node7"}[variable]
    expected = {"WORLD_SIZE": "2 None None None", "MASTER_ADDR": "1 0 node7 0"}[variable]
    assert run(f'{variable}={given} python -W ignore -c "{code}"', tmp_path).split("\n")[-2] == expected
