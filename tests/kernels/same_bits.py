# SPDX-License-Identifier: Apache-2.0
"""The comparison of what two kernels make of a case."""

from __future__ import annotations

import numpy as np

from megatron_dos.gpu_check.cases import Case, bits


def assert_same_bits(actual: Case, expected: Case) -> None:
    """Every written array has the same bits."""
    for name, wanted in expected.arrays().items():
        got = bits(actual.arrays()[name])
        differ = np.flatnonzero(got != bits(wanted))
        if differ.size:
            at = differ[0]
            raise AssertionError(
                f"{name}: {differ.size} of {got.size} elements differ, the first at {at}: "
                f"{got[at]:#x} instead of {bits(wanted)[at]:#x}"
            )
