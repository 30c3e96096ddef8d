# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the kernel tests."""

import pytest

from megatron_dos import _cpp_adam


@pytest.fixture(params=_cpp_adam.supported_isas())
def isa(request):
    """Each instruction set of this CPU in turn."""
    before = _cpp_adam.isa()
    _cpp_adam.set_isa(request.param)
    yield request.param
    _cpp_adam.set_isa(before)
