"""Weight-streaming GEMMs for small batches on CUDA: out[rows, N] = x[rows, K] @ weight[N, K].T.

With few rows the time is that of reading the weight once, so what surrounds the GEMM is fused into it:
`stream_gemv` (1 to 4 rows, CUDA cores) has an RMSNorm prologue and SwiGLU and residual epilogues;
`stream_gemm` (up to 64 rows, tensor cores, the weight as the M side) has the epilogues.
Weights are bf16/fp16/fp32, or float8_e4m3fn with one float32 scale per output channel.
Larger batches belong to cuBLAS: `torch.mm` and `torch._scaled_mm`; on Hopper, from 2 rows on, to `hopper/`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from penstock.kernels.triton.overlap import overlaps_launches


@triton.jit
def gated(values, SIZE: tl.constexpr):
    """SiLU of the first half of the rows times the second half."""
    gate, up = tl.split(tl.permute(tl.reshape(values, [2, SIZE // 2, values.shape[1]]), [1, 2, 0]))
    return gate / (1 + tl.exp(-gate)) * up


@triton.jit(do_not_specialize=["rows_x"])
def _gemv_kernel(
    out, x, weight, scales, gain, residual, rows_x, N, K, eps, stride_x, stride_out,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    lanes = tl.arange(0, BLOCK_N)
    if GATED:
        HALF: tl.constexpr = BLOCK_N // 2
        columns = tl.program_id(0) * HALF + lanes % HALF
        real = columns < N // 2
        channels = columns + lanes // HALF * (N // 2)
    else:
        columns = tl.program_id(0) * BLOCK_N + lanes
        real = columns < N
        channels = columns
    depth = tl.arange(0, BLOCK_K)
    weight_rows = weight + channels.to(tl.int64)[:, None] * K
    acc = tl.zeros([ROWS, BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([ROWS, BLOCK_K], tl.float32)
    rows = tl.arange(0, ROWS)
    input_rows = x + tl.where(rows < rows_x, rows, 0)[:, None] * stride_x
    if STAGES == 0:
        # The first tile of the weight does not depend on the previous kernel: fetch it before waiting for the input.
        ahead = tl.load(weight_rows + depth[None, :], mask=real[:, None] & (depth < K)[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    for base in tl.range(0, K, BLOCK_K, num_stages=STAGES if STAGES > 0 else None):
        here = base + depth
        if STAGES == 0:
            tile = ahead
            later = here + BLOCK_K
            ahead = tl.load(weight_rows + later[None, :], mask=real[:, None] & (later < K)[None, :], other=0.0)
        else:
            tile = tl.load(weight_rows + here[None, :], mask=real[:, None] & (here < K)[None, :], other=0.0)
        values = tl.load(input_rows + here[None, :], mask=(here < K)[None, :], other=0.0).to(tl.float32)
        if NORM:
            squares += values * values
            values = values * tl.load(gain + here, mask=here < K, other=0.0).to(tl.float32)[None, :]
        acc += tile.to(tl.float32)[None, :, :] * values[:, None, :]
    result = tl.sum(acc, 2)  # [ROWS, BLOCK_N]
    if NORM:
        result = result * tl.rsqrt(tl.sum(squares, 1) / K + eps)[:, None]
    if SCALED:
        result = result * tl.load(scales + channels, mask=real, other=0.0)[None, :]
    if GATED:
        result = tl.trans(gated(tl.trans(result), BLOCK_N))
        columns = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        real = columns < N // 2
    into = rows[:, None] * stride_out + columns[None, :]
    written = (rows < rows_x)[:, None] & real[None, :]
    if ADD:
        result += tl.load(residual + into, mask=written, other=0.0).to(tl.float32)
    tl.store(out + into, result.to(out.dtype.element_ty), mask=written)


@triton.jit(do_not_specialize=["rows_x"])
def _skinny_kernel(
    out, x, weight, scales, x_scales, residual, partials, arrivals, rows_x, N, K, stride_x, stride_out,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, EVEN_K: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    split = tl.program_id(1)
    OUT_N: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    lanes = tl.arange(0, BLOCK_N)
    width = N // 2 if GATED else N
    columns = tile * OUT_N + lanes % OUT_N
    channels = tl.where(columns < width, columns, 0) + lanes // OUT_N * width  # lanes past the end repeat a real row
    rows = tl.arange(0, ROWS)
    x_real = rows < rows_x
    depth = tl.arange(0, BLOCK_K)
    share = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS) * BLOCK_K
    start = split * share
    stop = tl.minimum(start + share, K)
    weight_rows = weight + channels.to(tl.int64)[:, None] * K
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    input_rows = x + rows[:, None] * stride_x
    for base in tl.range(start, stop, BLOCK_K):
        here = base + depth
        if EVEN_K:
            w = tl.load(weight_rows + here[None, :])
            values = tl.load(input_rows + here[None, :], mask=x_real[:, None], other=0.0)
        else:
            w = tl.load(weight_rows + here[None, :], mask=(here < stop)[None, :], other=0.0)
            values = tl.load(input_rows + here[None, :], mask=x_real[:, None] & (here < stop)[None, :], other=0.0)
        acc = tl.dot(w, tl.trans(values), acc, input_precision="ieee")

    if SPLITS > 1:
        cells = tile * (BLOCK_N * ROWS) + lanes[:, None] * ROWS + rows[None, :]
        stride = tl.num_programs(0).to(tl.int64) * (BLOCK_N * ROWS)
        tl.store(partials + split * stride + cells, acc)
        tl.debug_barrier()  # all threads' partial sums precede the one arrival
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") != SPLITS - 1:
            return
        tl.store(arrivals + tile, 0)
        acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
        for part in tl.static_range(SPLITS):  # in a fixed order: the result does not depend on who came last
            acc += tl.load(partials + part * stride + cells, cache_modifier=".cg")
    if SCALED:
        acc = acc * tl.load(scales + channels)[:, None] * tl.load(x_scales + rows, mask=x_real, other=0.0)[None, :]
    if GATED:
        acc = gated(acc, BLOCK_N)
    columns = tile * OUT_N + tl.arange(0, OUT_N)
    real = (columns < width)[:, None] & x_real[None, :]
    into = rows[None, :] * stride_out + columns[:, None]
    if ADD:
        acc += tl.load(residual + into, mask=real, other=0.0).to(tl.float32)
    tl.store(out + into, acc.to(out.dtype.element_ty), mask=real)


@dataclass(frozen=True, slots=True)
class GemvConfig:
    block_n: int
    block_k: int
    num_warps: int
    stages: int  # 0: one tile ahead in registers, the first before the input is ready; else depth of the pipeline


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class SplitScratch:
    """Partial sums of split-K GEMMs. One scratch serves all GEMMs of a stream."""

    partials: torch.Tensor  # float32
    arrivals: torch.Tensor  # int32, zero between launches


def split_scratch(device: torch.device, cells: int = 1 << 22, tiles: int = 1 << 14) -> SplitScratch:
    """`cells` bounds splits * (N rounded up to tiles) * rows of the GEMMs that use it."""
    return SplitScratch(
        torch.empty(cells, dtype=torch.float32, device=device), torch.zeros(tiles, dtype=torch.int32, device=device)
    )


def stream_gemv(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    config: GemvConfig,
    scales: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Up to 4 rows of unquantised `x`. `norm` is (gain, eps) of an RMSNorm of `x`; `residual` may be `out`.

    `gated`: the first half of `weight` is the gate, the second half the up projection, and `out` has N / 2 columns.
    """
    rows, K = x.shape
    N = weight.shape[0]
    pdl = overlaps_launches()
    gain, eps = norm if norm else (x, 0.0)
    _gemv_kernel[(triton.cdiv(N, config.block_n),)](
        out, x, weight, scales if scales is not None else x, gain, residual if residual is not None else x,
        rows, N, K, eps, x.stride(0), out.stride(0),
        ROWS=triton.next_power_of_2(rows), BLOCK_N=config.block_n, BLOCK_K=config.block_k, STAGES=config.stages,
        NORM=norm is not None, GATED=gated, ADD=residual is not None, SCALED=scales is not None, PDL=pdl,
        num_warps=config.num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def stream_gemm(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    config: SkinnyConfig,
    scratch: SplitScratch,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Up to 64 rows of `x`, in the dtype of `weight`. For fp8, `scales` are (of the channels, of the rows), float32."""
    rows, K = x.shape
    N = weight.shape[0]
    tiles = triton.cdiv(N, config.block_n)
    padded = max(16, triton.next_power_of_2(rows))
    if config.splits > 1 and config.splits * tiles * config.block_n * padded > scratch.partials.numel():
        raise ValueError(f"scratch too small for {config.splits} splits of {N} x {rows}: enlarge split_scratch(cells)")
    pdl = overlaps_launches()
    w_scales, x_scales = scales if scales else (x, x)
    _skinny_kernel[tiles, config.splits](
        out, x, weight, w_scales, x_scales, residual if residual is not None else x,
        scratch.partials, scratch.arrivals, rows, N, K, x.stride(0), out.stride(0),
        ROWS=padded, BLOCK_N=config.block_n, BLOCK_K=config.block_k, SPLITS=config.splits,
        EVEN_K=K % config.block_k == 0,
        GATED=gated, ADD=residual is not None, SCALED=scales is not None, PDL=pdl,
        num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=pdl,
    )  # fmt: skip
    return out


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    x_scales: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same GEMM in plain torch and float32, with each fused operation as a separate one."""
    values = x.float()
    if norm is not None:
        values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + norm[1]) * norm[0].float()
    result = values @ weight.float().T
    if scales is not None:
        result = result * scales
    if x_scales is not None:
        result = result * x_scales[:, None]
    if gated:
        gate, up = result.chunk(2, -1)
        result = torch.nn.functional.silu(gate) * up
    return result if residual is None else result + residual.float()
