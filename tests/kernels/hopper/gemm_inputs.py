"""Random inputs of a GEMM, for the tests of several kernels."""

from __future__ import annotations

import torch

from penstock.kernels.triton.norm import quantize_fp8_reference

Scales = tuple[torch.Tensor, torch.Tensor]


def draw_gemm_inputs(rows: int, n: int, k: int, *, fp8: bool) -> tuple[torch.Tensor, torch.Tensor, Scales | None]:
    """`weight` [n, k] and `x` [rows, k] in bfloat16; or in e4m3, with scales of channels and of rows."""
    torch.manual_seed(rows * n + k)
    weight, x = torch.randn(n, k), torch.randn(rows, k)
    if not fp8:
        return weight.bfloat16(), x.bfloat16(), None
    x, x_scales = quantize_fp8_reference(x)
    return weight.to(torch.float8_e4m3fn), x, (torch.rand(n), x_scales)
