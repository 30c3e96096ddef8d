# SPDX-License-Identifier: Apache-2.0
"""The command line: what it prints, where, and with which exit status."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import megatron_trees
import pytest
from megatron_trees import TARGETS, snapshot
from repository import ROOT

import megatron_dos
from megatron_dos import cli
from megatron_dos.patching import on_disk as patching


@pytest.fixture
def tree(tmp_path) -> Path:
    return megatron_trees.small_tree(tmp_path / "my Megatron-LM")


def test_patch_says_what_it_changed_and_how_to_go_back(tree, capsys):
    assert cli.main(["patch", str(tree)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert f"patched {tree} (Megatron core 0.19." in out
    for name in TARGETS:
        assert re.search(rf"^  {re.escape(name)} +\+\d+ -\d+$", out, re.MULTILINE)
    assert "--use-distributed-optimizer --use-deep-optimizer-states" in out
    assert f"megatron-dos unpatch '{tree}'" in out


def test_second_patch_says_so_and_succeeds(tree, capsys):
    cli.main(["patch", str(tree)])
    capsys.readouterr()
    assert cli.main(["patch", str(tree)]) == 0
    assert capsys.readouterr().out.startswith("already patched")


def test_unpatch_says_what_it_changed(tree, capsys):
    before = snapshot(tree)
    assert cli.main(["unpatch", str(tree)]) == 0
    assert capsys.readouterr().out.startswith("not patched")
    cli.main(["patch", str(tree)])
    capsys.readouterr()
    assert cli.main(["unpatch", str(tree)]) == 0
    assert capsys.readouterr().out.startswith(f"unpatched {tree}")
    assert snapshot(tree) == before


@pytest.mark.parametrize("command", ["patch", "unpatch"])
def test_errors_are_one_line_on_stderr_and_status_2(command, tmp_path, capsys):
    assert cli.main([command, str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"megatron-dos: [^\n]+\n", err)


def test_name_with_a_line_end_leaves_the_error_one_line(tmp_path, capsys):
    assert cli.main(["patch", str(tmp_path / "a\nb")]) == 2
    assert re.fullmatch(r"megatron-dos: [^\n]+/a b does not exist[^\n]+\n", capsys.readouterr().err)


def test_damaged_installation_is_an_error_without_a_traceback(monkeypatch, capsys):
    def damaged():
        raise patching.PatchError("this installation has no patches. Install megatron-dos again.")

    monkeypatch.setattr(patching, "known_patches", damaged)
    assert cli.main(["patch", "x"]) == 2
    assert capsys.readouterr().err == "megatron-dos: this installation has no patches. Install megatron-dos again.\n"


@pytest.mark.parametrize("arguments", [[], ["patch"], ["unpatch"], ["no-such-command"], ["patch", "a", "b"]])
def test_wrong_usage_is_one_line_and_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert re.fullmatch(r"(megatron-dos[ a-z]*): [^\n]+; see \1 --help\n", capsys.readouterr().err)


def test_interruption_is_no_traceback(monkeypatch, capsys):
    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(patching, "apply", interrupted)
    assert cli.main(["patch", "x"]) == 130
    assert capsys.readouterr().err == "megatron-dos: interrupted\n"


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"megatron-dos {megatron_dos.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], ["patch", "unpatch"]),
        (["patch", "--help"], ["0.19.2", "all of them are changed or none is", "keep this package installed"]),
        (["unpatch", "--help"], ["former bytes"]),
        (["check", "--help"], ["--dry-run", "--budget", "--stages", "--parameters", "one_connection"]),
    ],
)
def test_help(arguments, words, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert all(word in out for word in words)


def test_runs_as_a_module_without_torch_or_megatron(tree):
    code = (
        "import sys, runpy; sys.modules.update(torch=None, megatron=None, numpy=None); "
        "sys.argv = ['megatron-dos', 'patch', sys.argv[1]]; runpy.run_module('megatron_dos.cli', run_name='__main__')"
    )
    finished = megatron_trees.run_python(code, str(tree))
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith("patched")
    assert not finished.stderr


def test_closed_output_is_no_traceback(tree):
    command = f"{sys.executable} -m megatron_dos.cli patch '{tree}' | true"
    finished = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize(("target", "status"), [(">/dev/full", 2), (">&-", 0)])
def test_output_that_cannot_be_written_is_no_traceback(tree, target, status):
    command = f"{sys.executable} -m megatron_dos.cli unpatch '{tree}' {target}"
    finished = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert finished.returncode == status, finished.stderr
    assert re.fullmatch(r"(megatron-dos: cannot write the output: [^\n]+\n)?", finished.stderr)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("doctor", ["Exit status", "--json"]),
        ("calibrate", ["XDG_CACHE_HOME", "--ranks", "--again", "preset"]),
        ("plan", ["llama3-70b", "--tensor-parallel", "--machine", "h100-pcie5"]),
        ("simulate", ["iteration.trace.json", "published-k2", "hybriddeviceoptimizer", "--out"]),
    ],
)
def test_help_of_the_planning_commands_needs_no_torch(command, words):
    code = (
        "import sys; sys.modules.update(torch=None, megatron=None, numpy=None, matplotlib=None, yaml=None); "
        "from megatron_dos import cli; cli.main([sys.argv[1], '--help'])"
    )
    finished = megatron_trees.run_python(code, command)
    assert finished.returncode == 0, finished.stderr
    assert all(word in finished.stdout for word in words)
    assert max(map(len, finished.stdout.splitlines())) <= 120


def test_only_plans_take_flags_of_megatron(tree, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["patch", str(tree), "--tensor-model-parallel-size", "2"])
    assert exit_.value.code == 2
    assert "unrecognized arguments: --tensor-model-parallel-size 2" in capsys.readouterr().err
    assert cli.main(["patch", str(tree)]) == 0
    assert capsys.readouterr().out.startswith("patched")


def test_package_runs_as_a_command():
    finished = subprocess.run(
        [sys.executable, "-m", "megatron_dos", "--version"],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert (finished.returncode, finished.stdout) == (0, f"megatron-dos {megatron_dos.__version__}\n")
    finished = subprocess.run(
        [sys.executable, "-m", "megatron_dos", "patch", "/nowhere"],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert finished.returncode == 2
    assert finished.stderr.startswith("megatron-dos: ")
