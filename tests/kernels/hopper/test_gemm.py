"""The weight-streaming GEMM for Hopper, on the emulated GPU, against its reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tests.triton_interpreter  # noqa: F401  isort: skip

from penstock.kernels import linear as linear_layers
from penstock.kernels.hopper import gemm
from penstock.kernels.hopper.gemm import (
    ABSENT,
    STEP_BYTES,
    GemmAdapters,
    HopperConfig,
    hopper_gemm,
    padded_rows,
    partials_shape,
    shared_bytes,
)
from penstock.kernels.hopper.gemm_configs import most_rows, tile_config
from penstock.kernels.lora_reference import lora_reference
from penstock.kernels.triton.gemm import linear_reference, split_scratch
from penstock.kernels.triton.lora import LowRank
from penstock.runner.batch import Ints
from penstock.runner.device_adapters import grouped
from tests.kernels.hopper.emulated_gpu import available, emulated_kernel, emulated_tensor_map
from tests.kernels.hopper.gemm_inputs import draw_gemm_inputs

_SHARED_BYTES = 227 << 10  # that a CTA on Hopper may have


@pytest.fixture
def emulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not available:
        pytest.skip("needs g++")
    monkeypatch.setattr(gemm, "kernel", emulated_kernel(tmp_path, resident=12))
    monkeypatch.setattr(gemm, "tensor_map", emulated_tensor_map)
    monkeypatch.setattr(gemm, "resident_ctas", lambda device: 12)


def close(actual: object, expected: torch.Tensor, error: float) -> None:
    assert isinstance(actual, torch.Tensor)
    assert float((actual.float() - expected).norm() / expected.norm()) < error


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("config", "rows", "n", "k", "kind", "fp8"),
    [
        (HopperConfig(128, 2), 2, 200, 192, "wide", False),  # a tile past the end, more steps than stages
        (HopperConfig(64, 2, splits=2), 9, 64, 320, "add", False),  # an odd number of steps for two CTAs
        (HopperConfig(256, 2), 16, 256, 384, "gated", True),
        (HopperConfig(64, 2, splits=4), 16, 128, 256, "gated", False),
        (HopperConfig(128, 2, splits=3), 23, 128, 512, "plain", False),  # rows and steps are no multiples of 3
        (HopperConfig(128, 3, splits=2), 10, 128, 512, "add", True),
        (HopperConfig(256, 2), 150, 256, 128, "plain", True),  # registers are moved between warpgroups
        (HopperConfig(64, 2, splits=2, row_blocks=3), 39, 96, 256, "add", True),  # the third has seven rows
        (HopperConfig(128, 2, row_blocks=2), 20, 160, 128, "wide", False),
    ],
)
def test_gemm_is_that_of_the_reference(config: HopperConfig, rows: int, n: int, k: int, kind: str, fp8: bool) -> None:
    weight, x, scales = draw_gemm_inputs(rows, n, k, fp8=fp8)
    width = n // 2 if kind == "gated" else n
    memory = torch.full((rows + 2, width + 8), torch.nan, dtype=torch.float32 if kind == "wide" else torch.bfloat16)
    out = memory[:rows, :width]
    residual = None
    if kind == "add":
        residual = torch.randn(rows, n).bfloat16()
        out.copy_(residual)
    gated = kind == "gated"
    hopper_gemm(out, x, weight, config=config, scales=scales, gated=gated, add=kind == "add")
    of_channels, of_rows = scales or (None, None)
    expected = linear_reference(x, weight, scales=of_channels, x_scales=of_rows, gated=gated, residual=residual)
    close(out, expected, 4e-3)
    assert memory[rows:].isnan().all()
    assert memory[:, width:].isnan().all()


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("rows", "first", "second"),
    [
        (11, HopperConfig(256, 2), HopperConfig(64, 2, splits=2)),
        (21, HopperConfig(64, 2, splits=2, row_blocks=2), HopperConfig(128, 2, row_blocks=2)),
    ],
)
def test_deferred_norm_between_two_gemms(
    rows: int, first: HopperConfig, second: HopperConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    width, depth, norm_eps = 256, 128, 1e-2
    torch.manual_seed(0)
    residual, x = torch.randn(rows, width).bfloat16(), torch.randn(rows, depth).bfloat16()
    down, gate_up, gain = (torch.randn(*shape).bfloat16() for shape in ((width, depth), (128, width), (width,)))
    monkeypatch.setattr(linear_layers, "hopper_config", lambda x, weight: first if weight is down else second)
    stream, scratch, norm = residual.clone(), split_scratch(torch.device("cpu"), 1, 1), (gain, norm_eps)
    deferred = linear_layers.add_linear(stream, x, down, scratch, next_gain=gain)
    close(stream, linear_reference(x, down, residual=residual), 4e-3)
    gated = linear_layers.gated_linear(stream, gate_up, scratch, norm=norm, deferred=deferred)
    close(gated, linear_reference(stream, gate_up, norm=norm, gated=True), 8e-3)
    plain = linear_layers.linear(stream, gate_up, scratch, norm=norm, deferred=deferred)
    close(plain, linear_reference(stream, gate_up, norm=norm), 8e-3)


RANKS = (16, 32, 16)  # of the slots


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("config", "rows", "outputs", "k", "kind"),
    [
        (HopperConfig(64, 2, splits=2), 9, (128, 64, 64), 1344, "plain"),  # units past the end
        (HopperConfig(128, 3), 37, (100,), 576, "add"),  # several tiles of one slot, a tile past the end
        (HopperConfig(256, 2), 16, (128, 128), 384, "gated"),
        (HopperConfig(128, 2, splits=2), 23, (96, 96), 256, "gated"),
        (HopperConfig(128, 2), 20, (128, 128, 128), 256, "norm"),
        (HopperConfig(64, 2), 75, (64,), 9328, "add"),  # more partial sums than are read at once
    ],
)
def test_tokens_have_lora_adapters(
    config: HopperConfig, rows: int, outputs: tuple[int, ...], k: int, kind: str
) -> None:
    n, gated = sum(outputs), kind == "gated"
    weight, x, _ = draw_gemm_inputs(rows, n, k, fp8=False)
    low, slots = draw_low_rank(k, outputs), np.random.default_rng(rows).integers(-1, len(RANKS), rows).astype(np.int32)
    out = torch.randn(rows, n // 2 if gated else n).bfloat16()
    residual, plain = out.float(), x.float() @ weight.float().T
    squares = x.float().square().sum(1)[None] if kind == "norm" else None
    norm = (squares, 1e-2) if squares is not None else None
    adapters = gemm_adapters(low, slots)
    hopper_gemm(out, x, weight, config=config, norm=norm, gated=gated, add=kind == "add", adapters=adapters)
    expected = plain + lora_reference(x, low, slots.tolist(), list(RANKS))
    if squares is not None:
        expected *= torch.rsqrt(squares[0] / k + 1e-2)[:, None]
    if gated:
        gate, up = expected.chunk(2, 1)
        expected = torch.nn.functional.silu(gate) * up
    close(out, expected + residual if kind == "add" else expected, 8e-3)


@pytest.mark.usefixtures("emulated")
def test_a_token_that_is_not_a_number_keeps_nobody_waiting() -> None:
    """CTAs wait for sums that are written as NaN at first."""
    weight, x, _ = draw_gemm_inputs(5, 64, 128, fp8=False)
    low, slots = draw_low_rank(128, (64,)), np.array([0, 1, 1, -1, 2], dtype=np.int32)
    x.view(torch.int16)[2] = -1  # a NaN that is all ones
    out = torch.empty(5, 64).bfloat16()
    hopper_gemm(out, x, weight, config=HopperConfig(64, 2), adapters=gemm_adapters(low, slots))
    assert out.isnan().all(1).tolist() == [False, False, True, False, False]


def draw_low_rank(k: int, outputs: tuple[int, ...]) -> LowRank:
    offset = 16  # elements per rank, of a projection before
    elements = 32 * (offset + len(outputs) * k + sum(outputs))
    low = LowRank(torch.zeros(len(RANKS), elements).bfloat16(), offset, k, outputs, 32)
    for slot, rank in enumerate(RANKS):
        a, b = low.matrices(slot, rank)
        a.copy_(torch.randn(a.shape) / k**0.5)
        b.copy_(torch.randn(b.shape) * k**0.5 / rank**0.5)
    return low


def gemm_adapters(low: LowRank, slots: Ints) -> GemmAdapters:
    tiles = grouped(slots, np.array(RANKS, dtype=np.int32), len(RANKS))
    partials = torch.full(partials_shape(len(slots), low.inputs, len(low.outputs), 32), ABSENT, dtype=torch.int32)
    return GemmAdapters(
        torch.from_numpy(tiles.tiles), torch.from_numpy(tiles.order), low.weights, low.offset, low.b_offset,
        low.outputs, low.most_rank, partials,
    )  # fmt: skip


@given(
    n=st.integers(1, 10_000).map(lambda units: 16 * units),
    k=st.integers(1, 2_000).map(lambda units: 16 * units),
    itemsize=st.sampled_from([1, 2]),
    rows=st.integers(2, 512),
)
def test_any_product_is_cut_into_blocks_that_fit(n: int, k: int, itemsize: int, rows: int) -> None:
    rows = min(rows, most_rows(n, k, itemsize))
    config, steps = tile_config(n, k, itemsize, rows), -(-k * itemsize // STEP_BYTES)
    padded = padded_rows(rows, config.row_blocks)
    assert padded * config.row_blocks >= rows
    assert padded * max(1, config.tile // 128) <= 384  # accumulators in registers of two warpgroups
    assert 1 <= config.stages * config.splits < steps + config.splits
    assert shared_bytes(config, padded, gated=False) <= _SHARED_BYTES
    assert config.splits == 1 or -(-n // config.tile) * config.row_blocks * config.splits <= 132


def test_tile_configs_of_common_shapes_are_those_measured_best() -> None:
    def blocks(n: int, k: int, itemsize: int, *rows: int) -> list[tuple[int, ...]]:
        configs = [tile_config(n, k, itemsize, number) for number in rows]
        return [(config.tile, config.stages, config.splits, config.row_blocks) for config in configs]

    assert blocks(4096, 14336, 2, 32, 160) == [(64, 18, 2, 1), (64, 8, 2, 1)]
    assert blocks(4096, 14336, 1, 32, 96, 160) == [(64, 12, 2, 1), (64, 7, 2, 1), (64, 8, 2, 1)]
    assert blocks(6144, 4096, 2, 32, 64, 96, 128) == [(128, 11, 2, 1), (128, 9, 2, 1), (128, 5, 2, 1), (64, 9, 1, 1)]
    assert blocks(28672, 4096, 1, 16, 32, 64, 96, 192, 224) == [
        (128, 8, 1, 1), (128, 7, 1, 1), (256, 3, 1, 1), (256, 3, 1, 1), (256, 4, 1, 1), (128, 5, 1, 1),
    ]  # fmt: skip
    assert blocks(128256, 4096, 2, 32, 64) == [(128, 5, 1, 1), (128, 9, 1, 1)]
    assert blocks(1024, 2048, 2, 32, 128, 384) == [(64, 8, 4, 1), (64, 8, 4, 1), (64, 11, 2, 4)]
    assert blocks(4096, 1024, 2, 16, 32, 96, 128) == [(64, 11, 1, 1), (128, 8, 2, 1), (128, 8, 2, 1), (64, 9, 1, 1)]
    assert blocks(4096, 1024, 2, 256, 512) == [(64, 9, 1, 2), (128, 7, 1, 4)]
    assert blocks(6144, 1024, 2, 32, 192, 512) == [(128, 11, 1, 1), (128, 8, 1, 2), (128, 4, 1, 2)]
