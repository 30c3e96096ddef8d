# SPDX-License-Identifier: Apache-2.0
"""`python -m megatron_dos.cpu_emulation`: see `command`."""

from __future__ import annotations

from megatron_dos.cpu_emulation.command import main

if __name__ == "__main__":
    main()
