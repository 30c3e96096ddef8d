# SPDX-License-Identifier: Apache-2.0
"""What this machine has: processors, GPUs, host memory, the ranks that share it."""
