# SPDX-License-Identifier: Apache-2.0
"""What an update does and in which order: subgroups, programs of operations, timelines. No torch, no Megatron."""
