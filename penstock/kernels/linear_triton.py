"""One linear layer at any batch size on CUDA, by the fastest way measured for its shape.

A layer here is what stands around a projection too: the RMSNorm before it, SiLU(gate) * up or the residual after it.
Few rows stream the weight through `gemm_triton` and fold all that in; many rows go to cuBLAS with kernels around it.
"""

from __future__ import annotations

import torch

from penstock.kernels.activation_triton import silu_mul
from penstock.kernels.gemm_configs import stream_config
from penstock.kernels.gemm_triton import GemvConfig, SplitScratch, stream_gemm, stream_gemv
from penstock.kernels.norm_triton import add_rms_norm, quantize_fp8


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scratch: SplitScratch,
    *,
    scales: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`norm(x) @ weight.T`, then gated or added to `residual`, which is then overwritten and returned.

    `weight` [N, K] is in the dtype of `x`, or float8_e4m3fn with `scales` float32 [N]; `norm` is (gain, eps).
    The result is in the dtype of `x` unless `out_dtype` says float32, which a plain product may have.
    """
    rows, width = x.shape[0], weight.shape[0] // 2 if gated else weight.shape[0]
    config = stream_config(weight, rows)
    if config is None:
        return _by_library(x, weight, scales, norm, gated, residual, out_dtype)
    out = residual if residual is not None else torch.empty((rows, width), dtype=out_dtype or x.dtype, device=x.device)
    if isinstance(config, GemvConfig):
        return stream_gemv(out, x, weight, config=config, scales=scales, norm=norm, gated=gated, residual=residual)
    inputs, both_scales = _prepare(x, scales, norm)
    return stream_gemm(
        out, inputs, weight, config=config, scratch=scratch, scales=both_scales, gated=gated, residual=residual
    )


def _prepare(
    x: torch.Tensor, scales: torch.Tensor | None, norm: tuple[torch.Tensor, float] | None
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """The input normalised, and quantised where the weight is."""
    if scales is None:
        return (add_rms_norm(x, *norm) if norm else x), None
    x_scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    inputs = add_rms_norm(x, *norm, scales=x_scales) if norm else quantize_fp8(x, x_scales)
    return inputs, (scales, x_scales)


def _by_library(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    norm: tuple[torch.Tensor, float] | None,
    gated: bool,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    inputs, both_scales = _prepare(x, scales, norm)
    if both_scales is not None:
        of_channels, of_rows = both_scales
        result = torch._scaled_mm(
            inputs, weight.T, scale_a=of_rows[:, None], scale_b=of_channels[None], out_dtype=x.dtype
        )
    elif residual is not None:
        return torch.addmm(residual, inputs, weight.T, out=residual)
    elif out_dtype not in (None, x.dtype):
        return torch.mm(inputs, weight.T, out_dtype=out_dtype)
    else:
        result = torch.mm(inputs, weight.T)
    if residual is not None:
        return residual.add_(result)
    return silu_mul(result) if gated else result
