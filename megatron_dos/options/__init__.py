# SPDX-License-Identifier: Apache-2.0
"""What can be set, and what is refused."""
