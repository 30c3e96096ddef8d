# SPDX-License-Identifier: Apache-2.0
"""How long a step takes and what it needs, by calculation: machines, the virtual clock, the performance model."""
