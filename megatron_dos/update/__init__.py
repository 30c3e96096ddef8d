# SPDX-License-Identifier: Apache-2.0
"""The update itself: states, staging slots, operations and the engine that runs a step."""
