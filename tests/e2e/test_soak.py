# SPDX-License-Identifier: Apache-2.0
"""The soak in short: it passes as things are, and tells of what is wrong."""

from __future__ import annotations

import pytest
import soak

SHORT = ["--steps", "15", "--interval", "5"]


@pytest.mark.slow
def test_a_short_soak_passes(capsys):
    assert soak.main(SHORT) == 0
    printed = capsys.readouterr().out
    assert "3 checkpoints" in printed
    assert "all the same to the bit" in printed


@pytest.mark.slow
def test_runs_that_differ_and_memory_that_grows_are_faults(capsys, monkeypatch):
    monkeypatch.setattr(soak, "DISTURBED", [*soak.DISTURBED, "--adam-beta2", "0.96"])
    monkeypatch.setattr(soak, "GROWTH_LIMIT", -(2**40))
    assert soak.main(SHORT) == 1
    printed = capsys.readouterr().out
    assert "fault: losses" in printed
    assert "fault: resumed: the states of rank 1 differ" in printed
    assert "fault: the resident memory of rank 0 grew" in printed
    assert "soak: FAILED" in printed


def test_a_training_that_breaks_down_is_a_failure(capsys, monkeypatch):
    def broken(*arguments):
        raise soak.CaseFailure("rank 1 failed")

    monkeypatch.setattr(soak, "soak", broken)
    assert soak.main(SHORT) == 1
    assert "rank 1 failed" in capsys.readouterr().err


@pytest.mark.parametrize("given", [["--steps", "250"], ["--steps", "200"], ["--interval", "0"]])
def test_steps_and_interval_that_do_not_fit_are_refused(capsys, given):
    with pytest.raises(SystemExit):
        soak.main(given)
    assert "--interval" in capsys.readouterr().err
