# SPDX-License-Identifier: Apache-2.0
"""Promises of the project as a whole: what imports what, and that README.md and docs/ say what the code does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import architecture_picture
import package_imports
import pytest
import readme_tables
from package_imports import imported_modules, room_of
from repository import ROOT

PACKAGE = ROOT / "megatron_dos"

LAYERS = {
    # Ground files.
    "version": {"_version"},
    "words": set(),
    "refusal": set(),
    "supported": set(),
    "files": set(),
    "wrapping": set(),
    # Rooms, each above those that it imports.
    "program": set(),
    "options": {"refusal"},
    "node": {"refusal", "words"},
    "kernels": {"node", "words"},
    "device": {"program"},
    "update": {"device", "kernels", "node", "program", "refusal", "words"},
    "checkpointing": {"files", "node", "refusal", "words", "wrapping"},
    "planning": {"program", "words"},
    "calibration": {"files", "kernels", "node", "planning", "version"},
    "observing": {"device", "files", "options", "planning", "program", "update", "words"},
    "adapter": {
        *("calibration", "checkpointing", "device", "kernels", "node", "observing", "options", "planning", "program"),
        *("update", "words", "wrapping"),
    },
    "gpu_check": {
        *("calibration", "cpu_emulation", "device", "kernels", "node", "planning", "program", "update", "version"),
        "words",
    },
    "cpu_emulation": set(),
    "patching": {"arguments", "optimizer", "options", "supported", "wrapping"},
    "commands": {
        *("arguments", "calibration", "files", "gpu_check", "kernels", "node", "observing", "options", "patching"),
        *("planning", "program", "supported", "words"),
    },
    # Doors.
    "arguments": {"options", "refusal"},
    "cli": {"commands", "patching"},
    "__main__": {"cli"},
    "optimizer": {
        *("adapter", "arguments", "checkpointing", "node", "observing", "options", "update"),
    },
}
"""Module or folder of the package -> the others that it may import. A program is a value of `schedule`; devices run
programs, so they know its types."""

HOOKS = ("adapter", "checkpointing", "commands", "cpu_emulation", "gpu_check", "optimizer", "patching")
KNOWS_NO_MEGATRON = tuple(part for part in LAYERS if part not in HOOKS)
KNOWS_NO_TORCH = ("program", "options", "planning", "arguments", "files", "words", "version", "supported")


def files_of(part: str) -> list[Path]:
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if room_of(path) == part]
    assert files, f"megatron_dos has no {part}: correct the table of this test"
    return files


class TestImports:
    @pytest.mark.parametrize("part", LAYERS)
    def test_lower_parts_import_no_higher_ones(self, part):
        known = {room_of(path) for path in PACKAGE.rglob("*.py")}
        for path in files_of(part):
            ours = {name.split(".")[1] for name in imported_modules(path) if name.startswith("megatron_dos.")}
            above = (ours & known) - LAYERS[part] - {part}
            assert not above, f"{path.relative_to(ROOT)} imports megatron_dos.{', '.join(sorted(above))}"

    def test_every_room_and_file_has_a_row(self):
        assert set(package_imports.rooms_between()) - {"_version"} == set(LAYERS)

    def test_no_two_files_import_each_other(self):
        assert package_imports.circles(package_imports.files_between()) == []
        assert package_imports.circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]

    def test_the_picture_is_that_of_the_code(self):
        picture = (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8")
        assert picture == architecture_picture.drawn(), "out of date: run `make picture`, commit"

    def test_no_file_is_long(self):
        lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
        assert {str(path): length for path, length in lengths.items() if length >= 500} == {}
        assert lengths[PACKAGE / "optimizer.py"] < 400

    @pytest.mark.parametrize("part", KNOWS_NO_MEGATRON)
    def test_only_the_hooks_know_megatron(self, part):
        for path in files_of(part):
            assert "megatron" not in {name.split(".")[0] for name in imported_modules(path)}, path

    @pytest.mark.parametrize("part", KNOWS_NO_TORCH)
    def test_plans_and_flags_know_no_torch(self, part):
        for path in files_of(part):
            assert "torch" not in {name.split(".")[0] for name in imported_modules(path)}, path

    def test_only_demo_tests_and_the_dry_run_of_the_check_use_the_cpu_emulation(self):
        users = {
            path.relative_to(ROOT)
            for folder in (PACKAGE, ROOT / "patches")
            for path in folder.rglob("*.py")
            if path.parent != PACKAGE / "cpu_emulation"
            if any(f"{name}.".startswith("megatron_dos.cpu_emulation.") for name in imported_modules(path))
        }
        assert users == {Path("megatron_dos/gpu_check/worker.py")}

    def test_import_needs_neither_megatron_nor_its_companions_nor_a_gpu(self):
        code = """
import sys
class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("megatron", "apex", "transformer_engine"):
            raise ImportError(name + " must not be needed")
sys.meta_path.insert(0, Forbid())
import megatron_dos, megatron_dos.arguments, megatron_dos.update.engine
import torch
assert not torch.cuda.is_initialized()
"""
        result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def text() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


class TestReadme:
    @pytest.mark.parametrize("page", readme_tables.PAGES, ids=lambda page: page.name)
    def test_tables_are_those_of_the_code(self, page):
        text = page.read_text(encoding="utf-8")
        assert readme_tables.with_tables(page, text) == text, f"{page.name} is out of date: run `make readme`, commit"

    def test_make_commands_exist(self, text):
        code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))
        named = set(re.findall(r"\bmake ([a-z][a-z-]*)", code))
        targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
        assert {"demo", "test"} <= named
        assert named <= targets

    def test_paths_exist(self, text):
        named = set(re.findall(r"\]\(([^)#:]+)\)", text)) | set(re.findall(r"`((?:\w[\w.-]*/)+[\w.-]*)`", text))
        outside = ("demo-output/", "build/", "megatron/")  # outputs of a run, and Megatron's own tree
        assert not {path for path in named if not path.startswith(outside) and not (ROOT / path).exists()}

    def test_every_page_of_docs_is_in_the_index(self, text):
        index = text.split("## Documentation")[1].split("\n## ")[0]
        pages = {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}
        assert pages <= set(re.findall(r"\]\(([^)]+)\)", index))

    @pytest.mark.parametrize("page", readme_tables.PAGES, ids=lambda page: page.name)
    def test_links_lead_to_sections_that_exist(self, page):
        links = re.findall(r"\]\(([^):]*?)(?:#([^)]+))?\)", page.read_text(encoding="utf-8"))
        assert links
        for path, section in links:
            target = page.parent / path if path else page
            assert target.exists(), path
            if section:
                titles = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
                assert section in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, section

    def test_lost_markers_are_an_error(self):
        with pytest.raises(ValueError, match=r"README\.md needs the markers"):
            readme_tables.with_tables(ROOT / "README.md", "no markers here")


def test_every_make_target_explains_itself():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split())
    explained = set(re.findall(r"^([a-z][a-z-]*):.*## \S", makefile, re.MULTILINE))
    assert phony == explained


def test_changelog_has_the_version_or_unreleased_work_on_top():
    from megatron_dos.version import RELEASE

    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings
    assert headings[0] in ("Unreleased", RELEASE)


def test_every_source_file_names_its_licence():
    folders = ("megatron_dos", "patches", "cpp_adam", "scripts", "tests")
    kinds = (".py", ".sh", ".cpp", ".h", ".mk")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in kinds]
    files += [ROOT / "setup.py", ROOT / "Makefile", ROOT / "scripts" / "gpu_check", ROOT / ".ci" / "run"]
    lacking = [
        str(path.relative_to(ROOT))
        for path in files
        if "SPDX-License-Identifier: Apache-2.0" not in "".join(path.read_text(encoding="utf-8").splitlines()[:2])
    ]
    assert not lacking
