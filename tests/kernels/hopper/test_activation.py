"""Quantisation to fp8 by the CUDA kernel for Hopper, on the emulated GPU, against its reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.kernels.hopper import program
from penstock.kernels.hopper.activation import quantize_e4m3, silu_mul_e4m3
from penstock.kernels.triton.activation import silu_mul_reference
from penstock.kernels.triton.norm import quantize_fp8_reference
from tests.kernels.hopper.emulated_gpu import available, emulated_kernel

pytestmark = pytest.mark.skipif(not available, reason="needs g++")


@pytest.fixture(autouse=True)
def emulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "kernel", emulated_kernel(tmp_path))


@pytest.mark.parametrize(("rows", "width", "scaled"), [(3, 2048 + 24, True), (2, 2048, False), (1, 8, True)])
def test_a_row_is_quantised_by_its_largest_value(rows: int, width: int, scaled: bool) -> None:
    torch.manual_seed(rows)
    gate_up = torch.randn(rows, 2 * width).bfloat16() * torch.tensor([0.1, 30.0, 1.0])[:rows, None].bfloat16()
    of_rows, of_channels = torch.rand(rows) + 0.5, torch.rand(2 * width) + 0.5
    wanted = silu_mul_reference(gate_up.float() * of_rows[:, None] * of_channels if scaled else gate_up)
    scales = torch.full((rows,), torch.nan)
    out = torch.full((rows, width), torch.nan).to(torch.float8_e4m3fn)
    silu_mul_e4m3(out, scales, gate_up, (of_rows, of_channels) if scaled else None)
    torch.testing.assert_close(scales, wanted.abs().amax(-1) / 448, rtol=1e-5, atol=0)
    # e4m3 has steps of an eighth above 2**-6, and of 2**-9 below.
    error = (out.float() * scales[:, None] - wanted).abs()
    assert (error <= torch.maximum(wanted.abs() / 16, scales[:, None] * 2**-10) * 1.001).all()


def test_a_row_as_it_is() -> None:
    torch.manual_seed(0)
    x, scales = torch.randn(2, 2056).bfloat16(), torch.full((2,), torch.nan)
    out = torch.full((2, 2056), torch.nan).to(torch.float8_e4m3fn)
    quantize_e4m3(out, scales, x)
    expected, expected_scales = quantize_fp8_reference(x)
    torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
    assert ((out.float() - expected.float()).abs() <= expected.float().abs() / 8).all()  # a quotient rounds either way
    assert (out.float() == expected.float()).float().mean() > 0.99
