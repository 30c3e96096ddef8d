"""Devices run programs: they decide when each operation runs, and know nothing of what it does."""

from megatron_dos.device.cuda import CudaDevice
from megatron_dos.device.host import HostDevice

__all__ = ["CudaDevice", "HostDevice"]
