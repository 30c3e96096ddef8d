# SPDX-License-Identifier: Apache-2.0
"""CPU quotas: of folders as the kernel lays them out, and of a real control group where this process may make one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dos.node import control_groups


@pytest.fixture
def tree(monkeypatch, tmp_path):
    """Makes the process a member of the groups of `lines`, below a folder in the place of /sys/fs/cgroup."""
    process, mount = tmp_path / "cgroup", tmp_path / "mount"
    mount.mkdir()
    monkeypatch.setattr(control_groups, "_MOUNT", mount)
    monkeypatch.setattr(control_groups, "_OF_PROCESS", process)

    def build(lines, files):
        process.write_text("\n".join(lines) + "\n")
        for name, text in files.items():
            (mount / name).parent.mkdir(parents=True, exist_ok=True)
            (mount / name).write_text(text + "\n")

    return build


def quotas():
    return sorted(control_groups.cpu_quotas().values())


def test_version_2_has_a_quota_on_any_group_up_to_the_root(tree):
    tree(
        ["0::/kubepods.slice/pod7.slice/rank"],
        {
            "kubepods.slice/cpu.max": "max 100000",
            "kubepods.slice/pod7.slice/cpu.max": "150000 100000",
            "kubepods.slice/pod7.slice/rank/cpu.max": "200000 50000",
            "kubepods.slice/other/cpu.max": "1000 100000",
        },
    )
    assert quotas() == [1.5, 4.0]


def test_a_container_with_a_namespace_of_its_own_sees_its_quota_at_the_root(tree):
    tree(["0::/"], {"cpu.max": "100000 100000"})
    assert quotas() == [1.0]


def test_version_1_has_a_tree_for_cpu_also_together_with_others(tree):
    tree(
        ["5:cpuset:/", "4:cpu,cpuacct:/docker/f00", "0::/docker/f00"],
        {
            "cpu/cpu.cfs_quota_us": "-1",
            "cpu/cpu.cfs_period_us": "100000",
            "cpu/docker/f00/cpu.cfs_quota_us": "800000",
            "cpu/docker/f00/cpu.cfs_period_us": "100000",
            "memory/docker/f00/cpu.cfs_quota_us": "1",
        },
    )
    assert quotas() == [8.0]


def test_version_1_in_a_container_that_does_not_see_its_own_path(tree):
    tree(["4:cpu:/docker/f00"], {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"})
    assert quotas() == [1.0]


def test_without_control_groups_there_is_no_quota(tree, monkeypatch, tmp_path):
    tree(["0::/"], {})
    assert quotas() == []
    monkeypatch.setattr(control_groups, "_OF_PROCESS", tmp_path / "missing")
    assert quotas() == []


def test_groups_are_those_of_this_process_up_to_the_root():
    groups = list(control_groups.control_groups("memory"))
    assert Path("/sys/fs/cgroup") in groups
    assert all(str(group).startswith("/sys/fs/cgroup") for group in groups)


def test_a_process_in_a_real_group_finds_its_quota(real_group):
    code = (
        "import os; open(os.environ['GROUP'] + '/cgroup.procs', 'w').write(str(os.getpid()));"
        "from megatron_dos.node import threads;"
        "print(threads.default_threads(), threads.source_of_threads().partition(';')[0])"
    )
    environment = {**os.environ, "GROUP": str(real_group), "LOCAL_WORLD_SIZE": "", "LOCAL_RANK": ""}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "1 container quota of 1 CPU"
