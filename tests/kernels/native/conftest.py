"""The instruction sets of the native kernels, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import pytest

from penstock.core.errors import StartupError
from penstock.kernels.native import bindings


@pytest.fixture(params=get_args(bindings.Isa))
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    best = bindings.isa()
    try:
        bindings.set_isa(request.param)
    except StartupError:
        pytest.skip(f"no {request.param} here")
    yield request.param
    bindings.set_isa(best)
