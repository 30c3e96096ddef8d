# SPDX-License-Identifier: Apache-2.0
"""Between Megatron and the engine: buffers, gradients, gathers, the inner optimizer."""
