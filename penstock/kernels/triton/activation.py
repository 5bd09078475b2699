"""Elementwise kernels after a GEMM on CUDA: SwiGLU, optionally quantised to fp8 per token, and the residual addition.

The output of an fp8 GEMM may come without the scales of its rows and channels, which are then applied here.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.kernels.hopper.activation import silu_mul_e4m3
from penstock.kernels.hopper.program import is_hopper
from penstock.kernels.triton.norm import GemmScales, store_quantized
from penstock.kernels.triton.overlap import overlaps_launches


@triton.jit
def _silu_mul_kernel(
    out, scales, gate_up, of_rows, of_channels, width,
    BLOCK: tl.constexpr, QUANTIZE: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < width
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gate = tl.load(gate_up + row * 2 * width + columns, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=real, other=0.0).to(tl.float32)
    if SCALED:
        of_row = tl.load(of_rows + row)
        gate = gate * (of_row * tl.load(of_channels + columns, mask=real, other=0.0))
        up = up * (of_row * tl.load(of_channels + width + columns, mask=real, other=0.0))
    values = gate / (1 + tl.exp(-gate)) * up
    if QUANTIZE:
        store_quantized(values, out + row * width, scales, row, columns, real)
    else:
        tl.store(out + row * width + columns, values.to(out.dtype.element_ty), mask=real)


@triton.jit
def _add_scaled_kernel(residual, gemm_out, of_rows, of_channels, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < width
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    scales = tl.load(of_rows + row) * tl.load(of_channels + columns, mask=real, other=0.0)
    values = tl.load(gemm_out + row * width + columns, mask=real, other=0.0).to(tl.float32) * scales
    values += tl.load(residual + row * width + columns, mask=real, other=0.0).to(tl.float32)
    tl.store(residual + row * width + columns, values.to(residual.dtype.element_ty), mask=real)


def silu_mul(
    gate_up: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    unscaled: GemmScales | None = None,
) -> torch.Tensor:
    """`gate_up` [T, 2 * width], gate first. With `scales` (float32 [T]) the result is float8_e4m3fn."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        dtype = gate_up.dtype if scales is None else torch.float8_e4m3fn
        out = torch.empty((rows, width), dtype=dtype, device=gate_up.device)
    if scales is not None and is_hopper(gate_up.device) and gate_up.dtype == torch.bfloat16 and width % 8 == 0:
        return silu_mul_e4m3(out, scales, gate_up, (unscaled.of_rows, unscaled.of_channels) if unscaled else None)
    # A quantised row needs its maximum, so one program holds it whole.
    block = min(1024, triton.next_power_of_2(width)) if scales is None else triton.next_power_of_2(width)
    pdl = overlaps_launches()
    _silu_mul_kernel[rows, triton.cdiv(width, block)](
        out, scales if scales is not None else out, gate_up,
        unscaled.of_rows if unscaled else gate_up, unscaled.of_channels if unscaled else gate_up, width,
        BLOCK=block, QUANTIZE=scales is not None, SCALED=unscaled is not None, PDL=pdl,
        num_warps=min(16, max(1, block // 256)), launch_pdl=pdl,
    )  # fmt: skip
    return out


def add_scaled(residual: torch.Tensor, gemm_out: torch.Tensor, unscaled: GemmScales) -> torch.Tensor:
    """`residual += gemm_out * scales`, both [T, N]."""
    rows, width = residual.shape
    block, pdl = min(1024, triton.next_power_of_2(width)), overlaps_launches()
    _add_scaled_kernel[rows, triton.cdiv(width, block)](
        residual, gemm_out, unscaled.of_rows, unscaled.of_channels, width,
        BLOCK=block, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return residual


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, -1)
    return torch.nn.functional.silu(gate) * up
