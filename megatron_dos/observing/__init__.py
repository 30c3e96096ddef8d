# SPDX-License-Identifier: Apache-2.0
"""What real steps say: times, figures, the tuner of the GPU's share, traces."""
