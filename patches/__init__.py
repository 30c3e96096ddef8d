# SPDX-License-Identifier: Apache-2.0
"""The patches for Megatron trees, one folder per set of trees whose hooked files are the same.

Each folder holds `hooks.diff`, a unified diff, and `manifest.json`: the Megatron versions it was made for, and the
SHA-256 of each file before and after. `scripts/make_patch.py` writes both, `megatron_dos.patching` reads them.
"""
