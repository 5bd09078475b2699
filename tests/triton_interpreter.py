"""Import this first in a kernel test. That kernels are interpreted at all is set in conftest.py."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def _patch_with_index(tensor: Any, scope: Any) -> None:
    """Triton 3.6 turns one-element arrays into ints in a way that numpy 2.4 no longer allows."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_with_index
