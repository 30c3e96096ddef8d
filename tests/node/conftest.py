# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of what a machine has."""

import os

import pytest

from megatron_dos.node.control_groups import control_groups


@pytest.fixture
def real_group():
    """A control group below the one of this process, with a quota of one CPU."""
    for parent in control_groups("cpu"):
        group = parent / f"megatron-dos-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / "cpu.max").exists():
                (group / "cpu.max").write_text("100000 100000")
            else:
                (group / "cpu.cfs_quota_us").write_text("100000")
        except OSError:
            group.rmdir()
            continue
        yield group
        group.rmdir()
        return
    pytest.skip("this process may not make a control group with a CPU quota; folders laid out like them are tested")
