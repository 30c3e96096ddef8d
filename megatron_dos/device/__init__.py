# SPDX-License-Identifier: Apache-2.0
"""Devices run programs: they decide when each operation runs, and know nothing of what it does."""

from megatron_dos.device.cuda import CudaDevice
from megatron_dos.device.host import HostDevice
from megatron_dos.device.protocol import Device

__all__ = ["CudaDevice", "Device", "HostDevice"]
