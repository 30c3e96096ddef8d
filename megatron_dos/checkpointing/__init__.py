# SPDX-License-Identifier: Apache-2.0
"""States on file: what is handed out to savers, what loads may leave behind, the formats."""
