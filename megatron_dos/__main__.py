# SPDX-License-Identifier: Apache-2.0
"""`python -m megatron_dos`: the command `megatron-dos`, for environments whose scripts are not on PATH."""

from __future__ import annotations

import sys

from megatron_dos.cli import main

sys.exit(main())
