"""Benchmark cases of GEMMs and what stands around them: norm, activation, few and many rows, MoE."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property, partial
from itertools import product

import torch
import triton

from gpu_cases.case import (
    BF16,
    COPY_BYTES,
    DEVICE,
    FP8,
    MATRIX_FLOPS,
    Case,
    Variant,
    randn,
    relative_error,
    sets_for,
    short,
)
from penstock.kernels.hopper.gemm import empty_deferred_norm, hopper_gemm
from penstock.kernels.hopper.gemm_configs import tile_config
from penstock.kernels.hopper.persistent_gemm import best_tiling, swiglu_gemm
from penstock.kernels.hopper.program import is_hopper
from penstock.kernels.triton.activation import silu_mul, silu_mul_reference
from penstock.kernels.triton.gemm import (
    GemvConfig,
    SkinnyConfig,
    SplitScratch,
    linear_reference,
    split_scratch,
    stream_gemm,
    stream_gemv,
)
from penstock.kernels.triton.moe import ExpertWeights, GroupConfig, mix_experts, mix_experts_reference
from penstock.kernels.triton.norm import (
    GemmScales,
    add_rms_norm,
    add_rms_norm_reference,
    quantize_fp8,
    quantize_fp8_reference,
)
from penstock.quantization.fp8 import quantize_channels

SHAPES = {  # N, K, what the small-batch kernels fuse
    "llama qkv": (6144, 4096, "norm"),
    "llama o": (4096, 4096, "add"),
    "llama gate_up": (28672, 4096, "gated"),
    "llama down": (4096, 14336, "add"),
    "llama head": (128256, 4096, "norm"),
    "qwen qkv": (4096, 1024, "norm"),
    "qwen o": (1024, 2048, "add"),
    "qwen gate_up": (6144, 1024, "gated"),
    "qwen down": (1024, 3072, "add"),
    "qwen head": (151936, 1024, "norm"),
}


def norm_case(rows: int, width: int) -> Case:
    sets = sets_for(rows * width * 8)
    x, residual, weight = randn(rows, width), randn(sets, rows, width), randn(width)
    scales = torch.empty(rows, device=DEVICE)
    out = {dtype: torch.empty(rows, width, dtype=dtype, device=DEVICE) for dtype in (BF16, FP8)}
    expected = add_rms_norm_reference(x, weight, 1e-5)[0]

    def variant(dtype: torch.dtype, adds: bool) -> Variant:
        def run(i: int) -> None:
            add_rms_norm(
                x, weight, 1e-5, residual=residual[i] if adds else None, out=out[dtype],
                scales=scales if dtype == FP8 else None,
            )  # fmt: skip

        return Variant(
            f"{short(dtype)}{' add' if adds else ''}", run, None if adds else error(out[dtype], scales, expected)
        )

    return Case(
        f"norm {rows}x{width}", rows * width * 8 / COPY_BYTES, sets,
        [variant(*choice) for choice in product((BF16, FP8), (True, False))],
    )  # fmt: skip


def error(out: torch.Tensor, scales: torch.Tensor, expected: torch.Tensor) -> Callable[[], float]:
    """Rounding to e4m3 alone gives 2 to 3%, so that error is held to a fifth of what it is."""
    if out.dtype == FP8:
        return lambda: relative_error(out.float() * scales[:, None], expected) / 5
    return lambda: relative_error(out, expected)


def silu_case(rows: int, width: int) -> Case:
    sets = sets_for(rows * width * 6)
    gate_up = randn(sets, rows, 2 * width)
    scales = torch.empty(rows, device=DEVICE)
    expected = silu_mul_reference(gate_up[0])

    def variant(dtype: torch.dtype) -> Variant:
        out = torch.empty(rows, width, dtype=dtype, device=DEVICE)

        def run(i: int) -> None:
            silu_mul(gate_up[i], out=out, scales=scales if dtype == FP8 else None)

        return Variant(short(dtype), run, error(out, scales, expected))

    return Case(f"silu {rows}x{width}", rows * width * 6 / COPY_BYTES, sets, [variant(BF16), variant(FP8)])


def gemv_configs(rows: int) -> list[GemvConfig]:
    choices = product((4, 8, 16), (256, 512, 1024, 2048), (4, 8), (0, 3, 4, 6))
    return [
        GemvConfig(n, k, warps, stages)
        for n, k, warps, stages in choices
        if n * k >= 2048 and 8 <= rows * n * k // (32 * warps) <= 32  # sums per thread
    ]


def skinny_configs(n: int, k: int, dtype: torch.dtype, rows: int) -> list[SkinnyConfig]:
    shapes = [(16, 256, 4, 4), (32, 128, 4, 6), (32, 256, 4, 4), (64, 64, 4, 6), (64, 128, 4, 4), (64, 128, 4, 6),
              (64, 256, 4, 3), (128, 64, 4, 5), (128, 128, 4, 3), (128, 128, 8, 5)]  # fmt: skip
    wanted = []
    for (block_n, depth, warps, stages), splits in product(shapes, (1, 2, 4, 8, 16)):
        block_k = depth * 2 // dtype.itemsize
        shared = stages * (block_n + max(16, rows)) * depth * 2
        resident = 132 * max(1, min(8, 220_000 // shared))
        programs = triton.cdiv(n, block_n) * splits
        fits = (splits == 1 or splits * n * max(16, rows) <= 1 << 22) and k // block_k >= 2 * splits
        fits = fits and shared < 228_000 and not (block_n < 64 and rows > 32)
        if fits and (splits == 1 or programs <= 2 * resident) and (programs >= 100 or splits == 16):
            wanted.append(SkinnyConfig(block_n, block_k, splits, warps, stages))
    return wanted


@cache
def scratch() -> SplitScratch:
    return split_scratch(DEVICE)


class _Gemm:
    """A projection with what the kernels of few rows fuse, at one number of rows, and the ways to compute it."""

    def __init__(self, name: str, dtype: torch.dtype, rows: int) -> None:
        n, k, fold = SHAPES[name]
        self.n, self.k, self.rows, self.dtype = n, k, rows, dtype
        self.bytes, self.gated = n * k * dtype.itemsize, fold == "gated"
        self.sets = sets_for(self.bytes)
        scale = k**-0.5 if dtype == BF16 else 1.0
        self.weights = [randn(n, k, dtype=dtype, scale=scale) for _ in range(self.sets)]
        columns = n // 2 if self.gated else n
        self.x, self.norm = randn(rows, k), (randn(k), 1e-5) if fold != "add" else None
        self.residual = randn(rows, columns) if fold == "add" else None
        x8, x_scales = quantize_fp8_reference(self.x)
        self.inputs = x8 if dtype == FP8 else self.x
        self.scales = (torch.rand(n, device=DEVICE) * k**-0.5, x_scales) if dtype == FP8 else None
        self.out = torch.full((rows, columns), torch.nan, dtype=BF16, device=DEVICE)

    @cached_property
    def normed(self) -> torch.Tensor:
        """What kernels must give that normalise `x` themselves, and take it as it is."""
        return linear_reference(
            self.x, self.weights[0], scales=self.scales and self.scales[0], norm=self.norm, residual=self.residual,
            gated=self.gated,
        )  # fmt: skip

    @cached_property
    def plain(self) -> torch.Tensor:
        """And those that do not, and take it quantised where the weight is."""
        of_channels, of_rows = self.scales or (None, None)
        return linear_reference(
            self.inputs, self.weights[0], scales=of_channels, x_scales=of_rows, residual=self.residual,
            gated=self.gated,
        )  # fmt: skip

    def gemv(self, config: GemvConfig) -> Variant:
        def run(i: int) -> None:
            stream_gemv(
                self.out, self.x, self.weights[i], config=config, scales=self.scales and self.scales[0],
                norm=self.norm, gated=self.gated, residual=self.residual,
            )  # fmt: skip

        label = f"gemv {config.block_n},{config.block_k},{config.num_warps},{config.stages}"
        return Variant(label, run, lambda: relative_error(self.out, self.normed))

    def gemm(self, config: SkinnyConfig) -> Variant:
        def run(i: int) -> None:
            stream_gemm(
                self.out, self.inputs, self.weights[i], config=config, scratch=scratch(), scales=self.scales,
                gated=self.gated, residual=self.residual,
            )  # fmt: skip

        label = f"gemm {config.block_n},{config.block_k},{config.splits},{config.num_warps},{config.num_stages}"
        return Variant(label, run, lambda: relative_error(self.out, self.plain))

    def hopper(self) -> Variant:
        config = tile_config(self.n, self.k, self.dtype.itemsize, self.rows)
        into = torch.full_like(self.out, torch.nan)

        def run(i: int) -> None:
            hopper_gemm(
                into, self.inputs, self.weights[i], config=config, scales=self.scales, gated=self.gated,
                add=self.residual is not None,
            )  # fmt: skip

        def error() -> float:
            if self.residual is not None:
                into.copy_(self.residual)
                run(0)
            return relative_error(into, self.plain)

        return Variant(f"hopper {config.tile},{config.stages},{config.splits}", run, error)

    def library(self, i: int) -> None:
        if self.scales is None:
            torch.mm(self.x, self.weights[i].T)
        else:
            of_channels, of_rows = self.scales
            torch._scaled_mm(
                self.inputs, self.weights[i].T, scale_a=of_rows[:, None], scale_b=of_channels[None], out_dtype=BF16
            )


def gemm_case(name: str, dtype: torch.dtype, rows: int) -> Case:
    gemm = _Gemm(name, dtype, rows)
    variants = [gemm.gemv(config) for config in gemv_configs(rows)] if rows <= 4 else []
    if 1 < rows <= 64:
        variants += [gemm.gemm(config) for config in skinny_configs(gemm.n, gemm.k, dtype, rows)]
    if rows > 1 and is_hopper(DEVICE):
        variants.append(gemm.hopper())
    variants.append(Variant("* cublas", gemm.library))
    return Case(f"{name} {short(dtype)} rows {rows}", gemm.bytes / COPY_BYTES, gemm.sets, variants)


def deferred_norm_case(rows: int, width: int, depth: int) -> Case:
    """Two GEMMs on Hopper with an RMSNorm between them, which the first defers and the second applies."""
    sets = sets_for(4 * width * depth)
    pairs = [(randn(width, depth, scale=depth**-0.5), randn(2 * depth, width, scale=width**-0.5)) for _ in range(sets)]
    x, residual, gain = randn(rows, depth), randn(rows, width), randn(width)
    stream, out = residual.clone(), torch.full((rows, depth), torch.nan, dtype=BF16, device=DEVICE)
    first, second = tile_config(width, depth, 2, rows), tile_config(2 * depth, width, 2, rows)

    def run(i: int) -> None:
        down, gate_up = pairs[i]
        deferred = empty_deferred_norm(stream)
        hopper_gemm(stream, x, down, config=first, add=True, defers=(gain, deferred))
        hopper_gemm(out, deferred.values, gate_up, config=second, norm=(deferred.squares, 1e-5), gated=True)

    def error() -> float:
        stream.copy_(residual)
        run(0)
        summed = linear_reference(x, pairs[0][0], residual=residual).to(BF16)
        return relative_error(out, linear_reference(summed, pairs[0][1], norm=(gain, 1e-5), gated=True))

    variants = [Variant("deferred", run, error)] if is_hopper(DEVICE) else []
    return Case(f"norm between GEMMs {rows}x{width}", 6 * width * depth / COPY_BYTES, sets, variants)


def swiglu_case(name: str, dtype: torch.dtype, rows: int) -> Case:
    """SwiGLU of many rows; fp8 quantised again for the GEMM that follows."""
    n, k, _ = SHAPES[name]
    sets = sets_for(n * k * dtype.itemsize)
    weights = [randn(n, k, dtype=dtype, scale=k**-0.5 if dtype == BF16 else 1.0) for _ in range(sets)]
    x, inner_scales = randn(rows, k), torch.empty(rows, device=DEVICE)
    scales = x_scales = None
    if dtype == FP8:
        scales, (x, x_scales) = torch.rand(n, device=DEVICE) * k**-0.5, quantize_fp8_reference(x)
    out = torch.full((rows, n // 2), torch.nan, dtype=BF16, device=DEVICE)
    quantized, one = torch.empty(rows, n // 2, dtype=dtype, device=DEVICE), torch.ones((), device=DEVICE)
    tiling = best_tiling(rows, n, k)

    def ours(i: int) -> None:
        assert tiling is not None
        swiglu_gemm(out, x, weights[i], tiling, None if scales is None or x_scales is None else (scales, x_scales))
        if dtype == FP8:
            quantize_fp8(out, inner_scales, quantized)

    def library(i: int) -> None:
        if scales is None or x_scales is None:
            silu_mul(torch.mm(x, weights[i].T))
        else:
            gate_up = torch._scaled_mm(x, weights[i].T, scale_a=one, scale_b=one, out_dtype=BF16, use_fast_accum=True)
            silu_mul(gate_up, out=quantized, scales=inner_scales, unscaled=GemmScales(x_scales, scales))

    def error() -> float:
        return relative_error(out, linear_reference(x, weights[0], scales=scales, x_scales=x_scales, gated=True))

    variants = [Variant(f"tiles of {tiling.width}", ours, error)] if tiling and is_hopper(DEVICE) else []
    floor = 2 * rows * n * k / MATRIX_FLOPS[dtype]
    return Case(f"{name} gated {short(dtype)} rows {rows}", floor, sets, [*variants, Variant("* cublas", library)])


def gemm_section(*rows: int) -> list[Callable[[], Case]]:
    cases = product(SHAPES, (BF16, FP8), rows)
    return [partial(gemm_case, *c) for c in cases if c[1] == BF16 or not ("qwen" in c[0] or "head" in c[0])]


def moe_case(tokens: int, dtype: torch.dtype) -> Case:
    """One layer of Qwen3-30B-A3B: 8 of 128 experts of 768."""
    experts, choices, width, inner = 128, 8, 2048, 768

    def make() -> ExpertWeights:
        gate_up, down = (randn(experts, *shape, scale=0.02) for shape in ((2 * inner, width), (width, inner)))
        if dtype == BF16:
            return ExpertWeights(gate_up, down, None, choices, True)
        quantized = [quantize_channels(weight) for weight in (gate_up, down)]
        scales = (quantized[0].scales, quantized[1].scales)
        return ExpertWeights(quantized[0].weight, quantized[1].weight, scales, choices, True)

    weights = [make(), make()]  # each several times the cache
    x, residual, scores = randn(tokens, width), torch.zeros(tokens, width, device=DEVICE), randn(tokens, experts)
    counts = torch.zeros(experts, dtype=torch.int32, device=DEVICE)

    def variant(shape: tuple[int, int, int, int, int]) -> Variant:
        def run(i: int) -> None:
            mix_experts(residual, x, scores, weights[i], counts, GroupConfig(*shape))

        def error() -> float:
            """Against the first tokens; rounding the activations to e4m3 alone gives 3 to 5%."""
            few = slice(0, 8)
            expected = mix_experts_reference(torch.zeros_like(residual[few]), x[few], scores[few], weights[0])
            found = mix_experts(torch.zeros_like(residual), x, scores, weights[0], counts, GroupConfig(*shape))[few]
            return relative_error(found, expected) / (1 if dtype == BF16 else 8)

        return Variant(",".join(map(str, shape)), run, error)

    deep = 256 // dtype.itemsize
    tiles = [(64, deep, 4, 4), (128, deep // 2, 4, 4), (128, deep // 2, 8, 4), (128, deep, 8, 3)]
    variants = [variant((rows, *tile)) for rows, tile in product((16, 32, 64, 128), tiles)]
    pairs = tokens * choices
    active = experts * (1 - (1 - 1 / experts) ** pairs)
    floor = max(active * dtype.itemsize / COPY_BYTES, pairs * 2 / MATRIX_FLOPS[dtype]) * 3 * inner * width
    return Case(f"experts {short(dtype)} tokens {tokens}", floor, 2, variants)
