"""The weight-streaming product for Hopper, run on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.kernels.gemm_triton import linear_reference
from penstock.kernels.hopper import gemm
from penstock.kernels.hopper.gemm import StreamConfig, empty_gained, hopper_gemm
from penstock.kernels.norm_triton import quantize_fp8_reference
from tests.kernels.emulated_gpu import available, emulated_kernel, emulated_tensor_map

pytestmark = pytest.mark.skipif(not available, reason="needs g++")


@pytest.fixture
def emulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "kernel", emulated_kernel(tmp_path, resident=12))
    monkeypatch.setattr(gemm, "tensor_map", emulated_tensor_map)
    monkeypatch.setattr(gemm, "_weight_maps", {})


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("config", "rows", "n", "k", "kind", "fp8"),
    [
        (StreamConfig(64, 3), 13, 64, 320, "plain", False),
        (StreamConfig(128, 2), 5, 200, 192, "wide", False),  # a tile past the end, more steps than stages
        (StreamConfig(64, 2, splits=2), 9, 64, 320, "add", False),  # an odd number of steps for two blocks
        (StreamConfig(256, 2), 16, 256, 128, "gated", False),
        (StreamConfig(64, 2, splits=4), 16, 128, 256, "gated", False),
        (StreamConfig(128, 2, splits=3), 23, 128, 512, "plain", False),  # rows and steps are no multiples of 3
        (StreamConfig(128, 3, splits=2), 10, 128, 512, "add", True),
        (StreamConfig(64, 2), 16, 128, 384, "gated", True),
        (StreamConfig(256, 2), 150, 256, 128, "plain", True),  # registers are moved between warpgroups
    ],
)
def test_product_is_that_of_the_reference(
    config: StreamConfig, rows: int, n: int, k: int, kind: str, fp8: bool
) -> None:
    torch.manual_seed(rows * n + k)
    weight, x = torch.randn(n, k), torch.randn(rows + 1, k + 64)[:rows, :k]
    scales = x_scales = None
    if fp8:
        weight, scales, (x, x_scales) = weight.to(torch.float8_e4m3fn), torch.rand(n), quantize_fp8_reference(x)
    else:
        weight, x = weight.bfloat16(), x.bfloat16()
    width = n // 2 if kind == "gated" else n
    memory = torch.full((rows + 2, width + 8), torch.nan, dtype=torch.float32 if kind == "wide" else torch.bfloat16)
    out = memory[:rows, :width]
    residual = None
    if kind == "add":
        residual = torch.randn(rows, n).bfloat16()
        out.copy_(residual)
    both = None if scales is None or x_scales is None else (scales, x_scales)
    hopper_gemm(out, x, weight, config=config, scales=both, gated=kind == "gated", add=kind == "add")
    expected = linear_reference(x, weight, scales=scales, x_scales=x_scales, gated=kind == "gated", residual=residual)
    assert float((out.float() - expected).norm() / expected.norm()) < 4e-3
    assert memory[rows:].isnan().all()
    assert memory[:, width:].isnan().all()


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("first", "second"),
    [(StreamConfig(64, 2, splits=2), StreamConfig(64, 2)), (StreamConfig(256, 2), StreamConfig(128, 2))],
)
def test_norm_between_two_products(first: StreamConfig, second: StreamConfig) -> None:
    rows, width, depth, eps = 11, 256, 128, 1e-2
    torch.manual_seed(first.tile)
    residual, x = torch.randn(rows, width).bfloat16(), torch.randn(rows, depth).bfloat16()
    down, gate_up, gain = (torch.randn(*shape).bfloat16() for shape in ((width, depth), (128, width), (width,)))
    stream, out = residual.clone(), torch.empty(rows, 64, dtype=torch.bfloat16)
    gained = empty_gained(stream, first)
    hopper_gemm(stream, x, down, config=first, add=True, feeds=(gain, gained))
    hopper_gemm(out, gained.values, gate_up, config=second, norm=(gained.squares, eps), gated=True)
    expected = linear_reference(stream, gate_up, norm=(gain, eps), gated=True)
    assert float((stream.float() - linear_reference(x, down, residual=residual)).norm() / stream.float().norm()) < 4e-3
    assert float((out.float() - expected).norm() / expected.norm()) < 8e-3
