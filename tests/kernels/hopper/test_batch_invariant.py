"""Linear layers with `engine.deterministic`: a row has the same bits in any number of rows, on the emulated GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tests.triton_interpreter  # noqa: F401  isort: skip

from penstock.kernels import batch_invariant
from penstock.kernels.hopper import gemm, gemm_configs, persistent_gemm, program
from penstock.kernels.hopper.gemm import STEP_BYTES, padded_rows, shared_bytes
from penstock.kernels.hopper.gemm_configs import invariant_config, invariant_splits
from penstock.kernels.triton import norm as norms
from penstock.kernels.triton.gemm import linear_reference
from tests.kernels.hopper.emulated_gpu import available, emulated_kernel, emulated_tensor_map
from tests.kernels.hopper.gemm_inputs import draw_gemm_inputs

_SHARED_BYTES = 227 << 10  # that a CTA on Hopper may have
_ROWS = (1, 17, 70, 140)  # 70 go to the persistent kernel with SwiGLU, 140 always


@pytest.fixture
def emulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not available:
        pytest.skip("needs g++")
    kernel = emulated_kernel(tmp_path, resident=16)
    for module in (gemm, persistent_gemm):
        monkeypatch.setattr(module, "kernel", kernel)
        monkeypatch.setattr(module, "tensor_map", emulated_tensor_map)
    monkeypatch.setattr(program, "kernel", kernel)
    monkeypatch.setattr(norms, "is_hopper", lambda device: True)
    monkeypatch.setattr(gemm_configs, "_SMS", 8)
    monkeypatch.setattr(persistent_gemm, "_PAIRS", 2)
    monkeypatch.setattr(batch_invariant, "MOST_STREAMED", 64)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_rows_have_the_same_bits_in_any_batch(fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers in a row, with split-K, SwiGLU, residual, and the RMSNorm between them deferred in either way."""
    most, (inner, hidden, depth) = max(_ROWS), (160, 64, 1024)
    down, x, _ = draw_gemm_inputs(most, hidden, depth, fp8=fp8)
    gate_up, residual, _ = draw_gemm_inputs(most, 2 * inner, hidden, fp8=False)
    gain = torch.randn(hidden).bfloat16()
    norm = (gain, 1e-2)
    assert invariant_splits(hidden, depth, down.itemsize) > 1
    down_scales = gate_scales = None
    if fp8:
        x, down_scales, gate_scales = torch.randn(most, depth).bfloat16(), torch.rand(hidden), torch.rand(2 * inner)
        gate_up = gate_up.to(torch.float8_e4m3fn)

    def run(rows: int, most_deferred: int) -> list[torch.Tensor]:
        monkeypatch.setattr(batch_invariant, "_MOST_DEFERRED", most_deferred)
        summed = residual[:rows].clone()
        layer = batch_invariant.add_linear(summed, x[:rows], down, scales=down_scales, next_gain=gain)
        plain, gated = (
            batch_invariant.linear(summed, gate_up, scales=gate_scales, norm=norm, deferred=layer, gated=with_swiglu)
            for with_swiglu in (False, True)
        )
        return [summed, plain, gated]

    every = run(most, 1 << 17)
    expected = linear_reference(x, down.float() if fp8 else down, scales=down_scales, residual=residual)
    assert float((every[0] - expected).norm() / expected.norm()) < (5e-2 if fp8 else 4e-3)
    for found, gated in ((every[1], False), (every[2], True)):
        expected = linear_reference(every[0], gate_up.float(), scales=gate_scales, norm=norm, gated=gated)
        assert float((found - expected).norm() / expected.norm()) < (8e-2 if fp8 else 8e-3)
    for rows in _ROWS:
        for most_deferred in (1 << 17, 0) if rows == 17 else (1 << 17,):
            for found, whole in zip(run(rows, most_deferred), every, strict=True):
                assert torch.equal(found, whole[:rows]), (rows, most_deferred)


@given(
    n=st.integers(1, 10_000).map(lambda units: 16 * units),
    k=st.integers(1, 2_000).map(lambda units: 16 * units),
    itemsize=st.sampled_from([1, 2]),
    rows=st.integers(1, 4096),
)
def test_any_product_is_cut_into_blocks_that_fit(n: int, k: int, itemsize: int, rows: int) -> None:
    config, steps = invariant_config(n, k, itemsize, rows), -(-k * itemsize // STEP_BYTES)
    padded = padded_rows(rows, config.row_blocks)
    assert padded * config.row_blocks >= rows
    assert padded * max(1, config.tile // 128) <= 384  # accumulators in registers of two warpgroups
    assert 1 <= config.stages * config.splits < steps + config.splits
    assert shared_bytes(config, padded, gated=False) <= _SHARED_BYTES
    assert config.splits == invariant_splits(n, k, itemsize)
