"""The GEMM with a SwiGLU epilogue for Hopper, on the emulated GPU, against its reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tests.triton_interpreter  # noqa: F401  isort: skip

from penstock.kernels.hopper import persistent_gemm as module
from penstock.kernels.hopper.persistent_gemm import Tiling, best_tiling, shared_bytes, swiglu_gemm
from penstock.kernels.triton.gemm import linear_reference
from tests.kernels.hopper.emulated_gpu import available, emulated_kernel, emulated_tensor_map
from tests.kernels.hopper.gemm_inputs import draw_gemm_inputs

_SHARED_BYTES = 227 << 10  # that a CTA on Hopper may have


@pytest.mark.skipif(not available, reason="needs g++")
@pytest.mark.parametrize(
    ("tiling", "rows", "n", "k", "fp8"),
    [
        (Tiling(64, common_rows=False), 300, 176, 320, False),  # rows, channels and steps end within tiles
        (Tiling(96, common_rows=True), 300, 208, 256, False),  # the last pair has one tile of channels
        (Tiling(64, common_rows=False), 600, 272, 512, True),  # two bands, more tiles than CTAs
        (Tiling(64, common_rows=True), 140, 208, 640, True),
    ],
)
def test_gemm_is_that_of_the_reference(
    tiling: Tiling, rows: int, n: int, k: int, fp8: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "kernel", emulated_kernel(tmp_path, resident=4))
    monkeypatch.setattr(module, "tensor_map", emulated_tensor_map)
    monkeypatch.setattr(module, "_PAIRS", 2)
    monkeypatch.setattr(module, "_BAND", 256)
    weight, x, scales = draw_gemm_inputs(rows, n, k, fp8=fp8)
    memory = torch.full((rows + 2, n // 2 + 8), torch.nan, dtype=torch.bfloat16)
    out = memory[:rows, : n // 2]
    swiglu_gemm(out, x, weight, tiling, scales)
    of_channels, of_rows = scales or (None, None)
    expected = linear_reference(x, weight, scales=of_channels, x_scales=of_rows, gated=True)
    assert float((out.float() - expected).norm() / expected.norm()) < 4e-3
    assert memory[rows:].isnan().all()
    assert memory[:, n // 2 :].isnan().all()


@given(rows=st.integers(257, 20_000), n=st.integers(1, 4_000).map(lambda units: 16 * units))
def test_a_tiling_covers_everything_and_fits(rows: int, n: int) -> None:
    tiling = best_tiling(rows, n, 4096)
    if tiling is None:
        return
    high, wide = tiling.pairs(rows, n)
    assert high * wide * 2 * 128 * tiling.width >= rows * n
    assert shared_bytes(tiling.width) <= _SHARED_BYTES


def test_tilings_of_common_products_are_those_measured_best() -> None:
    llama = [best_tiling(rows, 28672, 4096) for rows in (320, 512, 640, 1024, 8192)]
    assert llama == [None, Tiling(224, False), Tiling(224, True), Tiling(256, False), Tiling(256, False)]
    qwen = [best_tiling(rows, 6144, 1024) for rows in (320, 512, 640, 1024, 8192)]
    assert qwen == [Tiling(192, False), Tiling(192, False), Tiling(256, True), Tiling(192, False), Tiling(256, False)]
    streamed = [best_tiling(rows, 28672, 4096, streams=True) for rows in (96, 128, 192, 256)]
    assert streamed == [None, Tiling(224, True), None, Tiling(224, False)]
    assert best_tiling(384, 6144, 1024, streams=True) is None
