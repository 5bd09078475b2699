"""MoE routing and grouped GEMMs against the plain sum over pairs, through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

import tests.triton_interpreter  # noqa: F401  isort: skip

from penstock.kernels.triton.moe import (
    ExpertWeights,
    GroupConfig,
    group_config,
    mix_experts,
    mix_experts_reference,
    route,
)
from penstock.quantization.fp8 import quantize_channels


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("tokens", "experts", "choices", "width", "inner"),
    [(1, 5, 2, 40, 24), (9, 6, 3, 72, 20), (37, 3, 1, 33, 50)],  # nothing fills a tile; more experts than pairs
)
def test_mix_experts(tokens: int, experts: int, choices: int, width: int, inner: int, normed: bool) -> None:
    x, residual, scores = randn(tokens, width), randn(tokens, width, seed=1), randn(tokens, experts, seed=2)
    weights = ExpertWeights(
        randn(experts, 2 * inner, width) / 5, randn(experts, width, inner) / 5, None, choices, normed
    )
    expected = mix_experts_reference(residual, x, scores, weights)
    counts = torch.zeros(experts, dtype=torch.int32)
    for _ in range(2):  # the counts must be back at zero afterwards
        found = mix_experts(residual.clone(), x, scores, weights, counts, GroupConfig(16, 32, 32, 4, 2))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_experts_in_fp8() -> None:
    x, residual, scores = randn(5, 64), randn(5, 64, seed=1), randn(5, 4, seed=2)
    gate_up, down = (quantize_channels(randn(*shape) / 5) for shape in ((4, 48, 64), (4, 64, 24)))
    weights = ExpertWeights(gate_up.weight, down.weight, (gate_up.scales, down.scales), 2, True)
    expected = mix_experts_reference(residual, x, scores, weights)
    found = mix_experts(residual.clone(), x, scores, weights, torch.zeros(4, dtype=torch.int32))
    # What rounding the activations to e4m3 costs, and no more.
    assert float((found - expected).norm() / (expected - residual).norm()) < 0.06


def test_every_pair_has_one_row_of_a_tile_of_its_expert() -> None:
    tokens, experts, choices, config = 50, 7, 3, group_config(8, 7)
    scores = randn(tokens, experts)
    scores[:, 2] += 9  # a crowded expert
    routing = route(scores, choices, False, torch.zeros(experts, dtype=torch.int32), config)
    used = int(routing.num_tiles[0])
    tiles = routing.pairs.view(-1, config.rows)
    chosen = scores.topk(choices, -1).indices
    found = []
    for tile in range(used):
        size, expert = int(routing.tile_sizes[tile]), int(routing.tile_experts[tile])
        rows = tiles[tile, :size].tolist()
        assert all(expert in chosen[pair // choices] for pair in rows)
        found += rows
    assert sorted(found) == list(range(tokens * choices))
    sizes = chosen.flatten().bincount(minlength=experts)
    assert used == int((-(-sizes // config.rows)).sum()) <= len(routing.tile_experts)
