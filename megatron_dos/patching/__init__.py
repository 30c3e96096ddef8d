# SPDX-License-Identifier: Apache-2.0
"""How Megatron comes to build this optimizer: patches on disk, hooks in memory."""
