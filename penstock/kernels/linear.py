"""Linear layers on CUDA: each call picks the GEMM kernel that was measured fastest for its shape.

A call includes what stands around the GEMM: the RMSNorm before it, and the SwiGLU epilogue or the residual addition
after it. Few rows stream the weight through `triton/gemm.py`, on Hopper up to some hundred rows through
`hopper/gemm.py`; these kernels fuse most of that. Many rows go to cuBLAS with separate kernels around it, and on Hopper
the gate and up projections to `hopper/persistent_gemm.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from penstock.kernels.hopper.gemm import DeferredNorm, GemmAdapters, HopperConfig, empty_deferred_norm, hopper_gemm
from penstock.kernels.hopper.gemm_configs import adapted_config, hopper_config
from penstock.kernels.hopper.persistent_gemm import swiglu_gemm, swiglu_tiling
from penstock.kernels.triton.activation import add_scaled, silu_mul
from penstock.kernels.triton.gemm import GemvConfig, SkinnyConfig, SplitScratch, stream_gemm, stream_gemv
from penstock.kernels.triton.gemm_configs import triton_config
from penstock.kernels.triton.norm import GemmScales, add_rms_norm, quantize_fp8

# The largest residual stream, in elements, for which GEMMs on Hopper defer the RMSNorm between them. That saves two
# small kernels a layer (Qwen3-0.6B, 64 rows: 19.3 instead of 21.2 µs); with more elements it costs more.
_MOST_DEFERRED = 1 << 17


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """An activation that is already quantised for the fp8 GEMM that reads it."""

    values: torch.Tensor  # float8_e4m3fn [T, K]
    scales: torch.Tensor  # float32 [T]


@dataclass(frozen=True, slots=True)
class DeferredAdd:
    """The output of an fp8 GEMM, which the next RMSNorm kernel scales and adds to the residual stream."""

    gemm_out: torch.Tensor  # [T, C]
    scales: GemmScales


Deferred = DeferredNorm | DeferredAdd  # what a GEMM leaves to the layer that normalises the residual stream next


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scratch: SplitScratch,
    *,
    scales: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    deferred: Deferred | None = None,
    out: torch.Tensor | None = None,
    adapters: GemmAdapters | None = None,
) -> torch.Tensor:
    """`norm(x) @ weight.T`.

    `weight` [N, K] is in the dtype of `x`, or float8_e4m3fn with `scales` float32 [N]; `norm` is (gain, eps), and
    `deferred` what `add_linear` returned for that norm.
    The result is in the dtype of `x`, or goes to `out`, which may be float32 where the weight is not fp8.
    `adapters` are LoRA adapters that `adds_adapters` says it can add; so in the functions below.
    """
    config = adapted_config(x, weight, adapters, gated=False) if adapters else gemm_config(x, weight)
    if config is None:
        inputs, x_scales = _prepare(x, scales, norm, deferred)
        if scales is None and out is not None and out.dtype != x.dtype:
            return torch.mm(inputs, weight.T, out_dtype=out.dtype, out=out)
        if scales is None:
            return torch.mm(inputs, weight.T, out=out)
        return _scaled_gemm(inputs, weight, x_scales[:, None], scales[None], x.dtype)
    if out is None:
        out = torch.empty((len(x), len(weight)), dtype=x.dtype, device=x.device)
    if isinstance(config, GemvConfig):
        assert not isinstance(deferred, DeferredAdd), "a GEMV adds to the residual itself"
        return stream_gemv(out, x, weight, config=config, scales=scales, norm=norm)
    if isinstance(config, HopperConfig) and isinstance(deferred, DeferredNorm) and norm and scales is None:
        squares = (deferred.squares, norm[1])
        return hopper_gemm(out, deferred.values, weight, config=config, norm=squares, adapters=adapters)
    inputs, x_scales = _prepare(x, scales, norm, deferred)
    both = None if scales is None else (scales, x_scales)
    if isinstance(config, HopperConfig):
        return hopper_gemm(out, inputs, weight, config=config, scales=both, adapters=adapters)
    return stream_gemm(out, inputs, weight, config=config, scratch=scratch, scales=both)


def gated_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scratch: SplitScratch,
    *,
    scales: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float],
    deferred: Deferred | None = None,
    adapters: GemmAdapters | None = None,
) -> torch.Tensor | QuantizedRows:
    """SwiGLU: SiLU(gate) * up, where `norm(x) @ weight.T` is gate, then up. With fp8 weights it may be quantised."""
    config = adapted_config(x, weight, adapters, gated=True) if adapters else gemm_config(x, weight)
    tiling = None if adapters else swiglu_tiling(x, weight, streams=config is not None)
    if config is None or tiling:
        inputs, x_scales = _prepare(x, scales, norm, deferred)
        if tiling:
            out = torch.empty((len(x), len(weight) // 2), dtype=x.dtype, device=x.device)
            return swiglu_gemm(out, inputs, weight, tiling, None if scales is None else (scales, x_scales))
        if scales is None:
            return silu_mul(torch.mm(inputs, weight.T))
        unscaled, inner_scales = GemmScales(x_scales, scales), torch.empty_like(x_scales)
        gate_up = _unscaled_gemm(inputs, weight, x.dtype)
        return QuantizedRows(silu_mul(gate_up, scales=inner_scales, unscaled=unscaled), inner_scales)
    out = torch.empty((len(x), len(weight) // 2), dtype=x.dtype, device=x.device)
    if isinstance(config, GemvConfig):
        assert not isinstance(deferred, DeferredAdd), "a GEMV adds to the residual itself"
        return stream_gemv(out, x, weight, config=config, scales=scales, norm=norm, gated=True)
    if isinstance(config, HopperConfig) and isinstance(deferred, DeferredNorm) and scales is None:
        squares = (deferred.squares, norm[1])
        return hopper_gemm(out, deferred.values, weight, config=config, norm=squares, gated=True, adapters=adapters)
    inputs, x_scales = _prepare(x, scales, norm, deferred)
    both_scales = None if scales is None else (scales, x_scales)
    if isinstance(config, HopperConfig):
        return hopper_gemm(out, inputs, weight, config=config, scales=both_scales, gated=True, adapters=adapters)
    return stream_gemm(out, inputs, weight, config=config, scratch=scratch, scales=both_scales, gated=True)


def add_linear(
    residual: torch.Tensor,
    x: torch.Tensor | QuantizedRows,
    weight: torch.Tensor,
    scratch: SplitScratch,
    *,
    scales: torch.Tensor | None = None,
    next_gain: torch.Tensor | None = None,
    adapters: GemmAdapters | None = None,
) -> Deferred | None:
    """`residual += x @ weight.T`.

    `next_gain` is the weight of the RMSNorm that follows. With it, a part of this addition or of that norm may be
    deferred: what is returned must be passed to the layer with that norm, and until then `residual` may lack the sum.
    """
    config = adapted_config(residual, weight, adapters, gated=False) if adapters else gemm_config(residual, weight)
    if isinstance(x, torch.Tensor) and isinstance(config, GemvConfig):
        stream_gemv(residual, x, weight, config=config, scales=scales, residual=residual)
        return None
    inputs, x_scales = (x.values, x.scales) if isinstance(x, QuantizedRows) else _prepare(x, scales, None)
    both = None if scales is None else (scales, x_scales)
    if isinstance(config, HopperConfig):
        if next_gain is None or scales is not None or residual.numel() > _MOST_DEFERRED:
            hopper_gemm(residual, inputs, weight, config=config, scales=both, add=True, adapters=adapters)
            return None
        deferred, gain = empty_deferred_norm(residual), next_gain
        hopper_gemm(residual, inputs, weight, config=config, add=True, defers=(gain, deferred), adapters=adapters)
        return deferred
    if isinstance(config, SkinnyConfig):
        stream_gemm(residual, inputs, weight, config=config, scratch=scratch, scales=both, residual=residual)
    elif scales is None:
        torch.addmm(residual, inputs, weight.T, out=residual)
    else:
        addition = DeferredAdd(_unscaled_gemm(inputs, weight, residual.dtype), GemmScales(x_scales, scales))
        if next_gain is not None:
            return addition
        add_scaled(residual, addition.gemm_out, addition.scales)
    return None


def adds_adapters(x: torch.Tensor, weight: torch.Tensor, adapters: GemmAdapters, *, gated: bool = False) -> bool:
    """Whether the GEMM for these rows can add LoRA adapters itself."""
    return adapted_config(x, weight, adapters, gated=gated) is not None


def gemm_config(x: torch.Tensor, weight: torch.Tensor) -> GemvConfig | SkinnyConfig | HopperConfig | None:
    """The tile config of the kernel that streams the weight for these rows; None where cuBLAS is faster."""
    return hopper_config(x, weight) or triton_config(weight, len(x))


def _prepare(
    x: torch.Tensor,
    scales: torch.Tensor | None,
    norm: tuple[torch.Tensor, float] | None,
    deferred: Deferred | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The input, normalised and, where the weight is fp8, quantised; and its scales (anything without fp8)."""
    x_scales = None if scales is None else torch.empty(len(x), dtype=torch.float32, device=x.device)
    if norm and isinstance(deferred, DeferredAdd):
        inputs = add_rms_norm(deferred.gemm_out, *norm, residual=x, unscaled=deferred.scales, scales=x_scales)
    elif norm:
        inputs = add_rms_norm(x, *norm, scales=x_scales)
    else:
        inputs = x if x_scales is None else quantize_fp8(x, x_scales)
    return inputs, x if x_scales is None else x_scales


def _unscaled_gemm(inputs: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An fp8 GEMM whose scales are left to the next kernel.

    Without scales of rows and channels cuBLAS has a kernel for every size: at 192 rows it takes a quarter less time.
    Unscaled sums of e4m3 products are far below the largest bfloat16.
    """
    one = _one(inputs.device)
    return _scaled_gemm(inputs, weight, one, one, dtype)


def _scaled_gemm(
    inputs: torch.Tensor, weight: torch.Tensor, of_rows: torch.Tensor, of_channels: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """An fp8 GEMM with fast accumulation in the tensor cores, as in our own kernels: 6% faster than float32 sums."""
    return torch._scaled_mm(
        inputs, weight.T, scale_a=of_rows, scale_b=of_channels, out_dtype=dtype, use_fast_accum=True
    )


@cache
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones((), dtype=torch.float32, device=device)
