# SPDX-License-Identifier: Apache-2.0
"""How fast this machine is: measured, and kept for the next training."""
