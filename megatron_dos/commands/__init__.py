# SPDX-License-Identifier: Apache-2.0
"""The subcommands of `megatron-dos`, one a file: each has `add(commands)`, which declares it, and `run(options)`.

The command line imports all of them to list them, so none imports torch, numpy or Megatron before it runs.
"""

from __future__ import annotations

__all__ = ["CommandError"]


class CommandError(Exception):
    """What the user asked for cannot be done; the message says why and what to do instead, on one line."""
