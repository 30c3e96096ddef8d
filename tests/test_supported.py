# SPDX-License-Identifier: Apache-2.0
"""One table of versions: the requirements of the package, the patches and the hooks agree with it."""

from __future__ import annotations

import importlib.metadata

import pytest

from megatron_dos import supported
from megatron_dos.patching import on_disk as patching
from megatron_dos.supported import MEGATRON, MEGATRON_PYTHON, PYTHON, TORCH, Versions


@pytest.mark.parametrize(
    ("version", "included"),
    [
        *(("1.9", False), ("2.3.9", False), ("2.4", True), ("2.4.0", True), ("2.4.1+cu121", True), ("2.10", True)),
        *(("2.4.0a0+f70bd71a48.nv24.6", True), ("2.99.1", True), ("3.0", False), ("3", False), ("", False)),
        ("of no version", False),
    ],
)
def test_versions_are_compared_by_number(version, included):
    assert Versions("torch", "2.4", "3.0").include(version) == included


def test_requirements_of_the_package_are_the_table():
    about = importlib.metadata.metadata("megatron-dos")
    required = [line.replace(" ", "").replace('"', "'") for line in about.get_all("Requires-Dist")]
    assert about["Requires-Python"] == PYTHON.specifier
    assert TORCH.requirement in required
    (megatron,) = (line for line in required if line.startswith("megatron-core"))
    wanted, _, condition = megatron.partition(";")
    assert set(wanted.removeprefix("megatron-core").split(",")) == set(MEGATRON.specifier.split(","))
    assert f"python_version>='{MEGATRON_PYTHON.least}'" in condition
    assert {"numpy", "psutil", "tqdm"} <= set(required)


def test_patches_are_for_megatrons_of_the_table():
    versions = [version for patch in patching.known_patches() for version in patch.versions]
    assert versions
    assert all(MEGATRON.include(version) for version in versions)
    least = supported._numbers(MEGATRON.least)
    assert any(supported._numbers(version)[: len(least)] == least for version in versions)
