# SPDX-License-Identifier: Apache-2.0
"""A removed dependency is looked for with longer delays before the check fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT

PATIENCE = 600


def look(needed: float) -> dict:
    """What the check finds on a machine where only what is at least `needed` milliseconds late shows.

    Changes this process for good.
    """
    from megatron_dos.gpu_check import worker

    worker._prepare_imports(dry=True)
    import time

    from megatron_dos import cpu_emulation

    cpu_emulation.activate(force=True)
    from megatron_dos.device import HostDevice
    from megatron_dos.device.sim import SimDevice
    from megatron_dos.gpu_check import context, engine

    used = []

    def delays(context, device, seed, late, lateness=30.0):
        used.append(lateness)
        return SimDevice(seed=late, hold_back=late, check=False) if lateness >= needed else HostDevice()

    engine.Delays = delays
    run = context.Context(False, context.Sizes.dry(), time.monotonic() + PATIENCE, lambda result: None)
    engine._sensitivity(run)
    return {"used": used, "values": run.result["values"]["removed_dependencies"], "check": run.result["checks"][0]}


@pytest.mark.parametrize(("needed", "ok"), [(100, True), (1000, False)])
def test_longer_delays_come_before_a_failure(needed, ok):
    path = os.pathsep.join(map(str, (Path(__file__).parent, ROOT / "tests" / "helpers", ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", f"import json, test_check_sensitivity as t; print(json.dumps(t.look({needed})))"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["check"]["ok"] is ok
    kinds = found["values"]["kinds"]
    assert kinds >= 10
    assert found["values"]["seen"] == (kinds if ok else 0)
    if ok:
        assert found["values"]["longest_delay_ms"] == needed == max(found["used"])
    else:
        assert set(found["used"]) == {30, 100, 300}
