# SPDX-License-Identifier: Apache-2.0
"""What the package is made of: its version, its description, what the build refuses, and the source distribution."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from repository import ROOT

from megatron_dos.version import RELEASE


def setup_of(tree: Path) -> ModuleType:
    """The functions of the tree's setup.py; nothing is built."""
    spec = importlib.util.spec_from_file_location("setup_of_megatron_dos", tree / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def git(tree: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.invalid", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *identity, *arguments], cwd=tree, capture_output=True, text=True, check=True).stdout


def commit_all(tree: Path) -> str:
    """Commits everything; the twelve first digits of the commit."""
    git(tree, "init", "-q")
    git(tree, "add", "-A")
    git(tree, "commit", "-q", "-m", "all")
    return git(tree, "rev-parse", "--short=12", "HEAD").strip()


# ---- The version -----------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path) -> Path:
    """As much of the source tree as the version depends on."""
    target = tmp_path / "megatron-dos"
    (target / "megatron_dos").mkdir(parents=True)
    for name in ("setup.py", "megatron_dos/version.py"):
        shutil.copyfile(ROOT / name, target / name)
    return target


def test_a_commit_is_no_release(tree):
    commit = commit_all(tree)
    assert setup_of(tree).version() == f"{RELEASE}.dev0+g{commit}"
    git(tree, "tag", "v99.0")
    git(tree, "tag", RELEASE)
    assert setup_of(tree).version() == f"{RELEASE}.dev0+g{commit}"


def test_the_tagged_commit_is_the_release_unless_it_was_changed(tree):
    commit = commit_all(tree)
    git(tree, "tag", "-a", f"v{RELEASE}", "-m", "release")
    assert setup_of(tree).version() == RELEASE
    (tree / "notes.txt").write_text("not under git")
    assert setup_of(tree).version() == RELEASE
    with (tree / "setup.py").open("a") as file:
        file.write("\n")
    assert setup_of(tree).version() == f"{RELEASE}.dev0+g{commit}.dirty"
    git(tree, "commit", "-q", "-a", "-m", "later")
    assert setup_of(tree).version().startswith(f"{RELEASE}.dev0+g")


def test_a_tree_without_git_and_one_inside_another_repository_have_no_commit(tree, monkeypatch):
    assert setup_of(tree).version() == f"{RELEASE}.dev0"
    commit_all(tree.parent)
    assert setup_of(tree).version() == f"{RELEASE}.dev0"
    commit_all(tree)
    monkeypatch.setenv("PATH", str(tree))
    assert setup_of(tree).version() == f"{RELEASE}.dev0"


def test_the_variables_of_another_repositorys_hook_lead_nowhere(tree, tmp_path, monkeypatch):
    commit = commit_all(tree)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("other")
    commit_all(tmp_path / "other")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    assert setup_of(tree).version() == f"{RELEASE}.dev0+g{commit}"


def test_a_source_distribution_keeps_the_version_it_was_made_with(tree):
    commit_all(tree)
    (tree / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: megatron-dos\nVersion: 7.0\n\nVersion: 8.0\n")
    assert setup_of(tree).version() == "7.0"


def test_the_module_the_command_and_the_metadata_agree(tmp_path):
    code = (
        "import importlib.metadata, megatron_dos, megatron_dos.cli\n"
        "print(importlib.metadata.version('megatron-dos'), megatron_dos.__version__)\n"
        "megatron_dos.cli.main(['--version'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    first, command = done.stdout.splitlines()
    of_metadata, of_module = first.split()
    assert of_module == of_metadata
    assert command == f"megatron-dos {of_module}"
    assert of_module.split(".dev0")[0] == RELEASE


# ---- The long description --------------------------------------------------------------------------------------------


RELATIVE_LINK = re.compile(r"\[([^\]]+)\]\((?!\w+:)([^)]+)\)")


def test_the_long_description_has_no_relative_link():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert RELATIVE_LINK.search(readme)
    text = setup_of(ROOT).long_description(web=None)
    assert not RELATIVE_LINK.search(text)
    assert "[Megatron-LM](https://github.com/NVIDIA/Megatron-LM)" in text
    assert text == RELATIVE_LINK.sub(r"\1", readme)


def test_with_an_address_every_link_leads_to_a_file_there():
    web = "https://example.invalid/megatron-dos/blob/main/"
    text = setup_of(ROOT).long_description(web)
    targets = re.findall(r"\]\(https://example\.invalid/megatron-dos/blob/main/([^)#]*)", text)
    assert len(targets) == len(RELATIVE_LINK.findall((ROOT / "README.md").read_text(encoding="utf-8")))
    assert all((ROOT / target).is_file() for target in targets)


# ---- What the build refuses ------------------------------------------------------------------------------------------


@pytest.fixture
def refusal(tmp_path) -> Callable[..., str]:
    """Builds the extension outside the tree, after `before`, and returns the message that it must end with."""

    def build(before: str = "", **environment: str) -> str:
        code = f"import runpy, sys\n{before}\nrunpy.run_path('setup.py', run_name='__main__')"
        folders = [f"--build-lib={tmp_path}/lib", f"--build-temp={tmp_path}/temp"]
        done = subprocess.run(
            [sys.executable, "-c", code, "build_ext", *folders],
            cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 1
        printed = done.stdout + done.stderr
        assert "Traceback" not in printed
        assert not (tmp_path / "lib").exists()
        return printed[printed.index("megatron-dos cannot be built: ") :]

    return build


def test_without_a_compiler_the_build_says_which_package_to_install(refusal, tmp_path):
    message = refusal(PATH=str(tmp_path), CXX="g++")
    assert re.fullmatch(
        r"megatron-dos cannot be built: there is no C\+\+ compiler: 'g\+\+' is not on PATH\.\n"
        r"Install one \(.*apt-get install g\+\+;.*dnf install gcc-c\+\+.*CXX=/path/to/compiler\.\n",
        message,
    )


def test_a_compiler_that_knows_no_cpp_is_named_with_its_own_words(refusal, tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho \"cc: fatal error: cannot execute 'cc1plus'\" >&2\nexit 1\n")
    compiler.chmod(0o755)
    message = refusal(CXX=str(compiler))
    assert f"'{compiler}' does not compile C++: cc: fatal error: cannot execute 'cc1plus'\nInstall one" in message
    assert message.count("\n") == 2


def test_without_pythons_headers_the_build_says_which_package_to_install(tmp_path):
    name = "python{}.{}".format(*sys.version_info)
    with pytest.raises(SystemExit) as refused:
        setup_of(ROOT).check_headers([str(tmp_path)])
    message = str(refused.value)
    assert f"there is no Python.h for {sys.executable}, in {tmp_path}.\n" in message
    assert f"apt-get install {name}-dev; Fedora, RHEL: dnf install {name}-devel" in message


def test_without_pybind11_the_build_says_how_to_get_it(refusal):
    assert refusal("sys.modules['pybind11'] = None") == (
        "megatron-dos cannot be built: pybind11 is not installed.\n"
        "pip install 'pybind11>=2.12', or build without --no-build-isolation.\n"
    )


# ---- The source distribution -----------------------------------------------------------------------------------------


MADE = re.compile(
    r"(^|/)(\.git|\.venv[^/]*|\.cache|\.\w+_cache|\.hypothesis|build|dist|demo-output|__pycache__|[^/]+\.egg-info)(/|$)"
    r"|\.(so|pyc|o)$|/_version\.py$|^PKG-INFO$"
)


def sources() -> list[Path]:
    """The files of the source tree, relative; what is made in it is left out."""
    files = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    return [path for path in files if not MADE.search(str(path))]


@pytest.mark.slow
def test_a_source_distribution_installs_and_holds_tests_that_pass(tmp_path):
    tree, unpacked, installed = tmp_path / "tree", tmp_path / f"megatron_dos-{RELEASE}", tmp_path / "installed"
    for path in sources():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, tree / path)
    commit_all(tree)
    git(tree, "tag", f"v{RELEASE}")

    build = "from setuptools import build_meta; print(build_meta.build_sdist('..'))"
    made = subprocess.run([sys.executable, "-c", build], cwd=tree, capture_output=True, text=True, check=True)
    assert made.stdout.splitlines()[-1] == f"megatron_dos-{RELEASE}.tar.gz"
    with tarfile.open(tmp_path / f"megatron_dos-{RELEASE}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    assert {str(path) for path in sources() if not (unpacked / path).exists()} <= {".gitignore"}
    assert not (unpacked / "megatron_dos" / "_version.py").exists()

    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(installed), str(unpacked)], check=True, timeout=600)
    assert (installed / "megatron_dos" / "py.typed").is_file()
    assert (installed / "megatron_dos" / "patches" / "core_v0.19" / "hooks.diff").is_file()
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    show = "import megatron_dos; print(megatron_dos.__file__, megatron_dos.__version__)"
    shown = subprocess.run([sys.executable, "-c", show], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert shown.stdout.split() == [str(installed / "megatron_dos" / "__init__.py"), RELEASE]
    check = [sys.executable, "-m", "megatron_dos", "check", "--dry-run", "--stages", "kernels", "result.json"]
    done = subprocess.run(check, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert json.loads((tmp_path / "result.json").read_text())["build"] == {"built": False}
    # Not `python -m pytest`, which would put the unpacked sources, without the C++ module, before what is installed.
    some = ["tests/kernels/test_reference.py", "tests/program/test_partition.py", "tests/test_arguments.py"]
    tests = "import sys, pytest; sys.path.remove(''); sys.exit(pytest.main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", tests, "-q", "-p", "no:cacheprovider", *some],
        cwd=unpacked, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"^[1-9]\d+ passed", done.stdout, re.MULTILINE), done.stdout[-300:]


def test_metadata_name_authors_licence_and_links_that_exist():
    about = importlib.metadata.metadata("megatron-dos")
    assert about["Author"] == "The megatron-dos authors"
    assert about["License"] == "Apache-2.0"
    assert set(about.get_all("Project-URL")) == {
        "Published system, https://arxiv.org/abs/2410.21316",
        "Megatron-LM, https://github.com/NVIDIA/Megatron-LM",
    }
