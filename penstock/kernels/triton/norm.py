"""RMSNorm for CUDA, with the residual addition before it and the fp8 quantisation after it in the same pass.

The output of an fp8 GEMM may come without the scales of its rows and channels, which are then applied first.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from penstock.kernels.hopper.activation import quantize_e4m3
from penstock.kernels.hopper.program import is_hopper
from penstock.kernels.triton.overlap import overlaps_launches

FP8_MAX = tl.constexpr(448.0)  # of e4m3


@dataclass(frozen=True, slots=True)
class GemmScales:
    """The scales that the output of an fp8 GEMM must still be multiplied by."""

    of_rows: torch.Tensor  # float32 [T]
    of_channels: torch.Tensor  # float32 [N]


@triton.jit
def store_quantized(values, out, scales, row, columns, real):
    """Store one row as e4m3 with its own scale, so that `out * scale` is close to `values`."""
    scale = tl.maximum(tl.max(tl.abs(values), 0), 1e-12) / FP8_MAX
    tl.store(out + columns, tl.clamp(values / scale, -FP8_MAX, FP8_MAX).to(out.dtype.element_ty), mask=real)
    tl.store(scales + row, scale)


@triton.jit
def _add_rms_norm_kernel(
    out, scales, x, of_rows, of_channels, residual, weight, width, eps, stride_x,
    BLOCK: tl.constexpr, ADD: tl.constexpr, SCALED: tl.constexpr, QUANTIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    real = columns < width
    gain = tl.load(weight + columns, mask=real, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    values = tl.load(x + row * stride_x + columns, mask=real, other=0.0).to(tl.float32)
    if SCALED:
        values = values * (tl.load(of_rows + row) * tl.load(of_channels + columns, mask=real, other=0.0))
    if ADD:
        values += tl.load(residual + row * width + columns, mask=real, other=0.0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)
        tl.store(residual + row * width + columns, rounded, mask=real)
        values = rounded.to(tl.float32)
    normed = values * tl.rsqrt(tl.sum(values * values, 0) / width + eps) * gain
    if QUANTIZE:
        store_quantized(normed, out + row * width, scales, row, columns, real)
    else:
        tl.store(out + row * width + columns, normed.to(out.dtype.element_ty), mask=real)


def add_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    unscaled: GemmScales | None = None,
    out: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise `x` [T, width], or `residual + x`, which then also replaces `residual`; `unscaled` is of `x`.

    With `scales` (float32 [T]) the result is float8_e4m3fn and `out * scales[:, None]` is the normalised row.
    """
    rows, width = x.shape
    if out is None:
        out = torch.empty((rows, width), dtype=x.dtype if scales is None else torch.float8_e4m3fn, device=x.device)
    block = triton.next_power_of_2(width)
    pdl = overlaps_launches()
    _add_rms_norm_kernel[(rows,)](
        out, scales if scales is not None else out, x,
        unscaled.of_rows if unscaled else x, unscaled.of_channels if unscaled else x,
        residual if residual is not None else x, weight, width, eps, x.stride(0),
        BLOCK=block, ADD=residual is not None, SCALED=unscaled is not None, QUANTIZE=scales is not None, PDL=pdl,
        num_warps=min(16, max(1, block // 512)), launch_pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit
def _quantize_kernel(out, scales, x, width, stride_x, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    real = columns < width
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    values = tl.load(x + row * stride_x + columns, mask=real, other=0.0).to(tl.float32)
    store_quantized(values, out + row * width, scales, row, columns, real)


def quantize_fp8(x: torch.Tensor, scales: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Rows of `x` [T, width] as float8_e4m3fn, each with its float32 scale."""
    rows, width = x.shape
    if out is None:
        out = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=x.device)
    if is_hopper(x.device) and x.dtype == torch.bfloat16 and width % 8 == 0 and x.is_contiguous():
        return quantize_e4m3(out, scales, x)
    block = triton.next_power_of_2(width)
    pdl = overlaps_launches()
    _quantize_kernel[(rows,)](
        out, scales, x, width, x.stride(0), BLOCK=block, PDL=pdl, num_warps=min(16, max(1, block // 256)),
        launch_pdl=pdl,
    )  # fmt: skip
    return out


def add_rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalised rows in float32, and the sum they were taken from in the dtype of `x`."""
    summed = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    values = summed.float()
    return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps) * weight.float(), summed


def quantize_fp8_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-row e4m3 and its float32 scale."""
    scales = x.float().abs().amax(-1).clamp_min(1e-12) / FP8_MAX.value
    quantized = (x.float() / scales[..., None]).clamp(-FP8_MAX.value, FP8_MAX.value)
    return quantized.to(torch.float8_e4m3fn), scales
