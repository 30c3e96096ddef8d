# SPDX-License-Identifier: Apache-2.0
"""How an engine updates: the options of its construction and of each step."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from megatron_dos.program.schedule import DEVICE_SLOTS, HOST_SLOTS

__all__ = ["EngineOptions"]


@dataclass(frozen=True)
class EngineOptions:
    """How an engine updates.

    Attributes:
        threads: worker threads of the CPU update.
        host_share: part of the elements in host memory that is updated on the CPU, 0 to 1; the rest of them is streamed
            through the device.
        stride: stream one subgroup in `stride` through the device instead; 0 for the share.
        resident_share: part of all elements whose states stay on the device, 0 to 1. Fixed when the engine is made.
        grads_as_fp32: send grads to the CPU as FP32, cast on the device; otherwise in their own dtype, cast by the
            CPU update. The bits of the result are the same.
        last_bucket_first: update the buckets in the order in which the next forward pass needs them.
        host_slots: staging slots of CPU subgroups; fewer where there are fewer subgroups. 0: the CPU reads grads and
            writes params where they are, in host memory.
        device_slots: staging slots of streamed subgroups, taken during the step.
        early_slots: host slots for grads that are sent before the step; fewer where there are fewer subgroups.
    """

    threads: int
    host_share: Fraction | float = 1
    stride: int = 0
    resident_share: Fraction | float = 0
    grads_as_fp32: bool = True
    last_bucket_first: bool = False
    host_slots: int = HOST_SLOTS
    device_slots: int = DEVICE_SLOTS
    early_slots: int = 0
