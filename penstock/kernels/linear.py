"""One linear layer at any batch size on CUDA, by the fastest way measured for its shape.

A layer here is what stands around a projection too: the RMSNorm before it, SiLU(gate) * up or the residual after it.
Few rows stream the weight through `triton/gemm.py`, on Hopper some hundred of them through `hopper/gemm.py`, and
fold in what they can; many rows go to cuBLAS with kernels around it, on Hopper SiLU(gate) * up to
`hopper/gated_product.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from penstock.kernels.hopper.gated_product import gated_product, gated_tiling
from penstock.kernels.hopper.gemm import GainedRows, HopperConfig, empty_gained, hopper_gemm
from penstock.kernels.hopper.gemm_configs import hopper_config
from penstock.kernels.triton.activation import add_scaled, silu_mul
from penstock.kernels.triton.gemm import GemvConfig, SkinnyConfig, SplitScratch, stream_gemm, stream_gemv
from penstock.kernels.triton.gemm_configs import stream_config
from penstock.kernels.triton.norm import ProductScales, add_rms_norm, quantize_fp8

# Numbers of the residual stream up to which products on Hopper begin and finish the RMSNorm between them. It saves two
# small kernels a layer (Qwen3-0.6B, 64 rows: 19.3 instead of 21.2 µs); with more numbers it costs more than it saves.
_MOST_GAINED = 1 << 17


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """An activation on its way from one fp8 product to the next."""

    values: torch.Tensor  # float8_e4m3fn [T, K]
    scales: torch.Tensor  # float32 [T]


@dataclass(frozen=True, slots=True)
class Addend:
    """An fp8 product that the RMSNorm after it adds to the residual stream, on its way through that."""

    product: torch.Tensor  # [T, C]
    scales: ProductScales


Begun = GainedRows | Addend  # an RMSNorm of the residual stream, by the product before it


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scratch: SplitScratch,
    *,
    scales: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    begun: Begun | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`norm(x) @ weight.T`.

    `weight` [N, K] is in the dtype of `x`, or float8_e4m3fn with `scales` float32 [N]; `norm` is (gain, eps), and
    `begun` what `add_linear` gave for it.
    The result is in the dtype of `x`, or goes to `out`, which may be float32 where the weight is not fp8.
    """
    config = product_config(x, weight)
    if config is None:
        inputs, x_scales = _prepare(x, scales, norm, begun)
        if scales is None and out is not None and out.dtype != x.dtype:
            return torch.mm(inputs, weight.T, out_dtype=out.dtype, out=out)
        if scales is None:
            return torch.mm(inputs, weight.T, out=out)
        return _scaled_product(inputs, weight, x_scales[:, None], scales[None], x.dtype)
    if out is None:
        out = torch.empty((len(x), len(weight)), dtype=x.dtype, device=x.device)
    if isinstance(config, GemvConfig):
        assert not isinstance(begun, Addend), "products of so few rows add to the residual themselves"
        return stream_gemv(out, x, weight, config=config, scales=scales, norm=norm)
    if isinstance(config, HopperConfig) and isinstance(begun, GainedRows) and norm and scales is None:
        return hopper_gemm(out, begun.values, weight, config=config, norm=(begun.squares, norm[1]))
    inputs, x_scales = _prepare(x, scales, norm, begun)
    both = None if scales is None else (scales, x_scales)
    if isinstance(config, HopperConfig):
        return hopper_gemm(out, inputs, weight, config=config, scales=both)
    return stream_gemm(out, inputs, weight, config=config, scratch=scratch, scales=both)


def gated_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scratch: SplitScratch,
    *,
    scales: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float],
    begun: Begun | None = None,
) -> torch.Tensor | QuantizedRows:
    """SiLU(gate) * up, where the first half of `norm(x) @ weight.T` is the gate. Rows of fp8 may come quantised."""
    config = product_config(x, weight)
    tiling = gated_tiling(x, weight, streams=config is not None)
    if config is None or tiling:
        inputs, x_scales = _prepare(x, scales, norm, begun)
        if tiling:
            out = torch.empty((len(x), len(weight) // 2), dtype=x.dtype, device=x.device)
            return gated_product(out, inputs, weight, tiling, None if scales is None else (scales, x_scales))
        if scales is None:
            return silu_mul(torch.mm(inputs, weight.T))
        unscaled, inner_scales = ProductScales(x_scales, scales), torch.empty_like(x_scales)
        product = _unscaled_product(inputs, weight, x.dtype)
        return QuantizedRows(silu_mul(product, scales=inner_scales, unscaled=unscaled), inner_scales)
    out = torch.empty((len(x), len(weight) // 2), dtype=x.dtype, device=x.device)
    if isinstance(config, GemvConfig):
        assert not isinstance(begun, Addend), "products of so few rows add to the residual themselves"
        return stream_gemv(out, x, weight, config=config, scales=scales, norm=norm, gated=True)
    if isinstance(config, HopperConfig) and isinstance(begun, GainedRows) and scales is None:
        return hopper_gemm(out, begun.values, weight, config=config, norm=(begun.squares, norm[1]), gated=True)
    inputs, x_scales = _prepare(x, scales, norm, begun)
    both_scales = None if scales is None else (scales, x_scales)
    if isinstance(config, HopperConfig):
        return hopper_gemm(out, inputs, weight, config=config, scales=both_scales, gated=True)
    return stream_gemm(out, inputs, weight, config=config, scratch=scratch, scales=both_scales, gated=True)


def add_linear(
    residual: torch.Tensor,
    x: torch.Tensor | QuantizedRows,
    weight: torch.Tensor,
    scratch: SplitScratch,
    *,
    scales: torch.Tensor | None = None,
    next_gain: torch.Tensor | None = None,
) -> Begun | None:
    """`residual += x @ weight.T`. With the gain of the RMSNorm that follows, that one is begun too where it can be.

    What is returned then, the layer with that norm must be given; until it has run, `residual` may lack the sum.
    """
    config = product_config(residual, weight)
    if isinstance(x, torch.Tensor) and isinstance(config, GemvConfig):
        stream_gemv(residual, x, weight, config=config, scales=scales, residual=residual)
        return None
    inputs, x_scales = (x.values, x.scales) if isinstance(x, QuantizedRows) else _prepare(x, scales, None)
    both = None if scales is None else (scales, x_scales)
    if isinstance(config, HopperConfig):
        if next_gain is None or scales is not None or residual.numel() > _MOST_GAINED:
            hopper_gemm(residual, inputs, weight, config=config, scales=both, add=True)
            return None
        gained = empty_gained(residual, config)
        hopper_gemm(residual, inputs, weight, config=config, add=True, feeds=(next_gain, gained))
        return gained
    if isinstance(config, SkinnyConfig):
        stream_gemm(residual, inputs, weight, config=config, scratch=scratch, scales=both, residual=residual)
    elif scales is None:
        torch.addmm(residual, inputs, weight.T, out=residual)
    else:
        addend = Addend(_unscaled_product(inputs, weight, residual.dtype), ProductScales(x_scales, scales))
        if next_gain is not None:
            return addend
        add_scaled(residual, addend.product, addend.scales)
    return None


def product_config(x: torch.Tensor, weight: torch.Tensor) -> GemvConfig | SkinnyConfig | HopperConfig | None:
    """How to stream the weight for these rows; None where cuBLAS is faster."""
    return hopper_config(x, weight) or stream_config(weight, len(x))


def _prepare(
    x: torch.Tensor,
    scales: torch.Tensor | None,
    norm: tuple[torch.Tensor, float] | None,
    begun: Begun | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The input normalised, and quantised where the weight is; and then, its scales."""
    x_scales = None if scales is None else torch.empty(len(x), dtype=torch.float32, device=x.device)
    if norm and isinstance(begun, Addend):
        inputs = add_rms_norm(begun.product, *norm, residual=x, unscaled=begun.scales, scales=x_scales)
    elif norm:
        inputs = add_rms_norm(x, *norm, scales=x_scales)
    else:
        inputs = x if x_scales is None else quantize_fp8(x, x_scales)
    return inputs, x if x_scales is None else x_scales


def _unscaled_product(inputs: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Without the scales of rows and channels cuBLAS has a kernel for every size: at 192 rows it takes a quarter less.

    Sums of products of e4m3 numbers are far from the largest bfloat16.
    """
    one = _one(inputs.device)
    return _scaled_product(inputs, weight, one, one, dtype)


def _scaled_product(
    inputs: torch.Tensor, weight: torch.Tensor, of_rows: torch.Tensor, of_channels: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Sums stay in the matrix units, as in our own kernels: that takes 6% less than adding them up in float32."""
    return torch._scaled_mm(
        inputs, weight.T, scale_a=of_rows, scale_b=of_channels, out_dtype=dtype, use_fast_accum=True
    )


@cache
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones((), dtype=torch.float32, device=device)
