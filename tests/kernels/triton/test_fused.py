"""Norm, rotary embedding, activation and small GEMMs against their references, through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

import tests.triton_interpreter  # noqa: F401  isort: skip

from penstock.kernels.linear import DeferredAdd, add_linear, gated_linear, linear
from penstock.kernels.triton.activation import add_scaled, silu_mul, silu_mul_reference
from penstock.kernels.triton.gemm import (
    GemvConfig,
    SkinnyConfig,
    linear_reference,
    split_scratch,
    stream_gemm,
    stream_gemv,
)
from penstock.kernels.triton.norm import (
    GemmScales,
    add_rms_norm,
    add_rms_norm_reference,
    quantize_fp8,
    quantize_fp8_reference,
)
from penstock.kernels.triton.rope import rope_and_cache, rope_reference

CPU = torch.device("cpu")


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


def typical_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """e4m3 keeps 3 bits after the leading one. A median, since the interpreter loses the carry of some roundings."""
    return float(((actual - expected).abs() / expected.abs()).median())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("adds", [False, True])
def test_norm(adds: bool, dtype: torch.dtype) -> None:
    x, weight = randn(3, 200, dtype=dtype), randn(200, dtype=dtype)
    residual = randn(3, 200, seed=1, dtype=dtype) if adds else None
    expected, summed = add_rms_norm_reference(x, weight, 1e-5, residual)
    close(add_rms_norm(x, weight, 1e-5, residual=residual), expected, 1e-5 if dtype == torch.float32 else 2e-3)
    if residual is not None:
        assert torch.equal(residual, summed)


def test_quantised_rows_come_back() -> None:
    x, weight, scales = randn(3, 200), randn(200), torch.empty(3)
    expected, _ = add_rms_norm_reference(x, weight, 1e-5)
    quantised = add_rms_norm(x, weight, 1e-5, scales=scales)
    close(scales, quantize_fp8_reference(expected)[1], 1e-6)
    assert typical_error(quantised.float() * scales[:, None], expected) < 0.04
    assert typical_error(quantize_fp8(x, scales).float() * scales[:, None], x) < 0.04
    gate_up = randn(3, 2 * 150)
    quantised = silu_mul(gate_up, scales=scales)
    assert typical_error(quantised.float() * scales[:, None], silu_mul_reference(gate_up)) < 0.04


def test_silu_mul() -> None:
    gate_up = randn(3, 2 * 1100)
    close(silu_mul(gate_up), silu_mul_reference(gate_up), 1e-5)


def test_scales_left_out_of_a_product_are_applied_after_it() -> None:
    rows, width = 3, 1100
    gemm_out, unscaled = randn(rows, 2 * width), GemmScales(randn(rows).abs(), randn(2 * width).abs())
    scaled = gemm_out * unscaled.of_rows[:, None] * unscaled.of_channels
    close(silu_mul(gemm_out, unscaled=unscaled), silu_mul_reference(scaled), 1e-5)
    scales = torch.empty(rows)
    quantised = silu_mul(gemm_out, scales=scales, unscaled=unscaled)
    assert typical_error(quantised.float() * scales[:, None], silu_mul_reference(scaled)) < 0.04
    residual, weight = randn(rows, 2 * width, seed=1), randn(2 * width)
    summed = residual.clone()
    assert add_scaled(summed, gemm_out, unscaled) is summed
    close(summed, residual + scaled, 1e-5)
    normed, _ = add_rms_norm_reference(scaled, weight, 1e-5, residual)
    close(add_rms_norm(gemm_out, weight, 1e-5, residual=residual, unscaled=unscaled), normed, 1e-5)
    close(residual, summed, 1e-6)


@pytest.mark.parametrize(("heads", "dim", "rotary", "normed"), [((5, 2), 32, 32, True), ((4, 4), 48, 24, False)])
def test_rope_and_cache(heads: tuple[int, int], dim: int, rotary: int, normed: bool) -> None:
    (h, k), tokens, block = heads, 4, 16
    qkv = randn(tokens, (h + 2 * k) * dim)
    angles = torch.outer(torch.arange(64).float(), torch.rand(rotary // 2, generator=torch.Generator().manual_seed(5)))
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1)
    positions, slots = torch.tensor([0, 17, 40, 63]), torch.tensor([35, 16, -1, 47])
    weights = (randn(dim, seed=1), randn(dim, seed=2)) if normed else None
    k_cache, v_cache = (torch.full((4, k, block, dim), 9.0) for _ in range(2))
    q_ref, k_ref, v_ref = rope_reference(qkv, cos_sin, positions, h, k, weights, 1e-6)
    q = rope_and_cache(qkv, cos_sin, positions, slots, k_cache, v_cache, h, norm_weights=weights, eps=1e-6)
    close(q, q_ref, 1e-5)
    for cache, expected in ((k_cache, k_ref), (v_cache, v_ref)):
        written = cache.transpose(1, 2).flatten(0, 1)
        close(written[[35, 16, 47]], expected[[0, 1, 3]], 1e-5)
        untouched = torch.ones(len(written), dtype=torch.bool)
        untouched[[35, 16, 47]] = False
        assert (written[untouched] == 9).all()


@pytest.mark.parametrize(("stages", "rows"), [(0, 1), (3, 3)])
@pytest.mark.parametrize(
    ("normed", "gated", "adds", "fp8"), [(False,) * 4, (True, True, False, False), (True, True, True, True)]
)
def test_gemv(stages: int, rows: int, normed: bool, gated: bool, adds: bool, fp8: bool) -> None:
    n, k = 54, 300  # neither fills its tiles
    x, weight = randn(rows, k), randn(n, k) / 10
    scales = None
    if fp8:
        weight, scales = quantize_fp8_reference(weight)
    norm = (randn(k, seed=1), 1e-5) if normed else None
    columns = n // 2 if gated else n
    residual = randn(rows, columns) if adds else None
    expected = linear_reference(x, weight, scales=scales, norm=norm, gated=gated, residual=residual)
    out = residual if residual is not None else torch.full((rows, columns), torch.nan)
    stream_gemv(
        out, x, weight, config=GemvConfig(16, 128, 4, stages), scales=scales, norm=norm, gated=gated, residual=residual
    )
    close(out, expected)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("gated", "adds", "fp8"), [(False, False, False), (True, False, False), (False, True, True)])
def test_gemm(splits: int, gated: bool, adds: bool, fp8: bool) -> None:
    n, k, rows = 120, 300, 5
    x, weight, scales = randn(rows, k), randn(n, k) / 10, None
    if fp8:
        (x, x_scales), (weight, w_scales) = quantize_fp8_reference(x), quantize_fp8_reference(weight)
        scales = (w_scales, x_scales)
    columns = n // 2 if gated else n
    residual = randn(rows, columns) if adds else None
    expected = linear_reference(
        x, weight, scales=scales and scales[0], x_scales=scales and scales[1], gated=gated, residual=residual
    )
    scratch = split_scratch(CPU, 1 << 14, 16)
    for _ in range(2):  # the arrival counters must be back at zero after a launch
        out = torch.full((rows, columns), torch.nan)
        config = SkinnyConfig(64, 64, splits, 4, 2)
        stream_gemm(out, x, weight, config=config, scratch=scratch, scales=scales, gated=gated, residual=residual)
        close(out, expected)


def test_gemm_refuses_a_scratch_that_its_splits_would_overrun() -> None:
    with pytest.raises(ValueError, match="split_scratch"):
        stream_gemm(
            torch.empty(4, 128), randn(4, 64), randn(128, 64), config=SkinnyConfig(64, 64, 2, 4, 2),
            scratch=split_scratch(CPU, 64, 4),
        )  # fmt: skip


@pytest.mark.parametrize("rows", [1, 9, 70])  # GEMV, GEMM, cuBLAS
def test_linear_layers_are_the_same_function_at_every_batch_size(rows: int) -> None:
    n, k, scratch = 96, 128, split_scratch(CPU, 1 << 16, 16)
    x, weight, norm = randn(rows, k), randn(n, k) / 10, (randn(k, seed=1), 1e-5)
    residual, out = randn(rows, n), torch.full((rows, n), torch.nan)
    close(linear(x, weight, scratch, norm=norm), linear_reference(x, weight, norm=norm))
    assert linear(x, weight, scratch, out=out) is out
    close(out, linear_reference(x, weight))
    gated = gated_linear(x, weight, scratch, norm=norm)
    assert isinstance(gated, torch.Tensor), "only fp8 weights quantise the output"
    close(gated, linear_reference(x, weight, norm=norm, gated=True))
    expected = linear_reference(x, weight, residual=residual)
    add_linear(residual, x, weight, scratch)
    close(residual, expected)


def test_an_fp8_product_of_many_rows_is_added_by_the_norm_after_it() -> None:
    rows, width, inner = 80, 64, 48
    scratch = split_scratch(torch.device("cpu"))
    residual, x, gain = randn(rows, width), randn(rows, inner), randn(width)
    down, down_scales = quantize_fp8_reference(randn(width, inner))
    after, after_scales = quantize_fp8_reference(randn(32, width, seed=1))

    def stream(next_gain: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        summed = residual.clone()
        deferred = add_linear(summed, x, down, scratch, scales=down_scales, next_gain=next_gain)
        assert isinstance(deferred, DeferredAdd) == (next_gain is not None)
        return linear(summed, after, scratch, scales=after_scales, norm=(gain, 1e-5), deferred=deferred), summed

    (fused, fused_sum), (apart, apart_sum) = stream(gain), stream(None)
    close(fused_sum, apart_sum, 1e-6)
    close(fused, apart, 1e-6)
