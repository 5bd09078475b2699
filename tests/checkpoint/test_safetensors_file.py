"""Our reader of safetensors against the library's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from penstock.checkpoint.safetensors_file import read_tensors
from penstock.core.errors import StartupError


def write(path: Path, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    save_file(tensors, path, metadata={"format": "pt"})
    return tensors


def test_every_float_format_is_read_exactly(tmp_path: Path) -> None:
    values = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    expected = write(
        tmp_path / "model.safetensors", a=values, b=values.bfloat16(), c=values.half(), d=torch.tensor(float("-inf"))
    )
    found = dict(read_tensors(tmp_path / "model.safetensors"))
    assert found.keys() == expected.keys()
    for name, array in found.items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, expected[name].float().numpy())


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write(path, codes=torch.zeros(3, dtype=torch.int32))
    with pytest.raises(StartupError, match="tensor codes has dtype I32; supported: F32, F16, BF16"):
        list(read_tensors(path))
    write(path, whole=torch.zeros(100))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StartupError, match="it ends before whole does"):
        list(read_tensors(path))
    path.write_bytes(b"\x08\0\0\0\0\0\0\0no json!")
    with pytest.raises(StartupError, match="cannot read"):
        list(read_tensors(path))
