"""Linear layers on Hopper whose rows have the same bits in any batch: those of `linear.py`, for `engine.deterministic`.

Every element is one sum over K in wgmma's steps of 32 bytes, in as many parts as the weight's shape says, added in
order. How many rows there are decides only which tile and which kernel computes it: `hopper/gemm.py` up to some hundred
rows, `hopper/persistent_gemm.py` beyond. In bfloat16 the RMSNorm between two GEMMs is always deferred to the second.
"""

from __future__ import annotations

import torch

from penstock.kernels.hopper.gemm import DeferredNorm, defer_norms, empty_deferred_norm, hopper_gemm
from penstock.kernels.hopper.gemm_configs import divides_rows, invariant_config, invariant_splits
from penstock.kernels.hopper.persistent_gemm import (
    Epilogue,
    cheapest_tiling,
    compile_persistent_gemm,
    exact_tilings,
    persistent_gemm,
)
from penstock.kernels.triton.norm import add_rms_norm, quantize_fp8

LEAST_DEPTH = 512  # of K: what `persistent_gemm` has in flight, in fp8
MOST_STREAMED = 256  # rows that `hopper_gemm` takes; twice as many of a small weight
# The largest residual stream, in elements, for which the GEMM that adds to it also defers its RMSNorm.
_MOST_DEFERRED = 1 << 17

_Norm = tuple[torch.Tensor, float]


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    norm: _Norm | None = None,
    deferred: DeferredNorm | None = None,
    out: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """`norm(x) @ weight.T` as in `linear.py`; `gated`: with SwiGLU."""
    rows, channels = len(x), len(weight)
    if out is None:
        out = torch.empty((rows, channels // 2 if gated else channels), dtype=x.dtype, device=x.device)
    if norm and deferred:
        return _gemm(out, deferred.values, weight, norm=(deferred.squares, norm[1]), gated=gated)
    if scales is None:
        return _gemm(out, add_rms_norm(x, *norm) if norm else x, weight, gated=gated)
    x_scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    inputs = add_rms_norm(x, *norm, scales=x_scales) if norm else quantize_fp8(x, x_scales)
    return _gemm(out, inputs, weight, scales=(scales, x_scales), gated=gated)


def add_linear(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    next_gain: torch.Tensor | None = None,
) -> DeferredNorm | None:
    """`residual += x @ weight.T`. What is returned belongs to the layer with the next norm, whose weight is given."""
    if scales is not None:
        x_scales = torch.empty(len(x), dtype=torch.float32, device=x.device)
        _gemm(residual, quantize_fp8(x, x_scales), weight, scales=(scales, x_scales), add=True)
        return None
    if next_gain is None:
        _gemm(residual, x, weight, add=True)
        return None
    rows = len(residual)
    if rows > MOST_STREAMED or residual.numel() > _MOST_DEFERRED:
        _gemm(residual, x, weight, add=True)
        return defer_norms(residual, next_gain)
    deferred = empty_deferred_norm(residual)
    n, k = weight.shape
    config = invariant_config(n, k, weight.itemsize, rows)
    hopper_gemm(residual, x, weight, config=config, add=True, defers=(next_gain, deferred))
    return deferred


def compile_for_many_rows(weight: torch.Tensor, *, gated: bool = False, add: bool = False, norm: bool = False) -> None:
    """Compile the kernels for more than `MOST_STREAMED` rows. `norm`: a deferred RMSNorm comes in."""
    n, k = weight.shape
    fp8, splits = weight.dtype == torch.float8_e4m3fn, invariant_splits(n, k, weight.itemsize)
    epilogue = Epilogue(gated, add, exact_splits=splits)
    compile_persistent_gemm(exact_tilings(splits, fp8=fp8), epilogue, fp8=fp8, norm=norm and not fp8)


def _gemm(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    norm: _Norm | None = None,
    gated: bool = False,
    add: bool = False,
) -> torch.Tensor:
    rows, (n, k) = len(x), weight.shape
    most = 2 * MOST_STREAMED if divides_rows(n, k) and not gated else MOST_STREAMED
    if rows <= most or out.dtype == torch.float32:
        config = invariant_config(n, k, weight.itemsize, rows)
        return hopper_gemm(out, x, weight, config=config, scales=scales, norm=norm, gated=gated, add=add)
    splits = invariant_splits(n, k, weight.itemsize)
    tiling = cheapest_tiling(rows, n, exact_tilings(splits, fp8=scales is not None))
    return persistent_gemm(out, x, weight, tiling, Epilogue(gated, add, exact_splits=splits), scales, norm)
