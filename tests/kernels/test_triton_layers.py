"""All layers in one launch against their parts' references, through Triton's interpreter: a grid of one program."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import tests.triton_interpreter  # noqa: F401  isort: skip

from penstock.kernels.decode_plan_triton import plan_decode
from penstock.kernels.decode_triton import decode_scratch
from penstock.kernels.gemm_triton import linear_reference
from penstock.kernels.layers_triton import LayersConfig, StackedLayers, decode_layers
from penstock.kernels.paged_triton import paged_attention_reference
from penstock.kernels.rope_triton import rope_reference

BLOCK, EPS, SCALE, LAYERS = 16, 1e-5, 0.3, 2


@dataclass(frozen=True)
class Weights:
    attention_norm: torch.Tensor
    qkv: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    out: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor

    def addresses(self) -> list[int]:
        norms, mlp = (self.q_norm, self.k_norm), (self.mlp_norm, self.gate_up, self.down)
        return [tensor.data_ptr() for tensor in (self.attention_norm, self.qkv, *norms, self.out, *mlp)]


@pytest.mark.parametrize(
    ("dtype", "tolerance", "normed", "context", "hidden", "inner", "heads"),
    [
        (torch.float32, 1e-5, True, 77, 48, 80, (4, 2)),  # three parts of two steps, two heads to a key head
        (torch.float32, 1e-5, False, 1, 48, 80, (3, 1)),  # the new token alone
        (torch.bfloat16, 3e-2, True, 40, 48, 80, (4, 2)),  # pairs in a word
    ],
)
def test_layers(
    dtype: torch.dtype, tolerance: float, normed: bool, context: int, hidden: int, inner: int, heads: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(0)
    (H, K), D = heads, 16

    def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    def weight(n: int, k: int) -> torch.Tensor:
        return randn(n, k, scale=k**-0.5)

    layers = [
        Weights(randn(hidden), weight((H + 2 * K) * D, hidden), randn(D), randn(D), weight(hidden, H * D),
                randn(hidden), weight(2 * inner, hidden), weight(hidden, inner))
        for _ in range(LAYERS)
    ]  # fmt: skip
    stacked = StackedLayers(
        addresses=torch.tensor([layer.addresses() for layer in layers]),
        any_weight=layers[0].qkv,
        any_gain=layers[0].attention_norm,
        hidden=hidden,
        inner=inner,
        heads=H,
        kv_heads=K,
        head_dim=D,
        head_norm=normed,
        eps=EPS,
        counter=torch.zeros(1, dtype=torch.int64),
        programs=1,
    )
    blocks = -(-context // BLOCK) + 2
    k_cache, v_cache = (randn(LAYERS, blocks, K, BLOCK, D) for _ in range(2))
    k_cache[:, -1], v_cache[:, -1] = torch.nan, torch.nan  # another request's
    table = torch.randperm(blocks - 1, generator=generator).int()[None]
    angles = torch.outer(torch.arange(256.0), torch.rand(D // 2, generator=generator))
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1)
    x = randn(1, hidden)
    expected, wide_k, wide_v = reference(x, layers, k_cache, v_cache, table, context, cos_sin, heads, normed)

    config = LayersConfig(qkv=32, add=32, gate_up=32, num_warps=2, words=16, tiles=4)
    plan = plan_decode(torch.tensor([context], dtype=torch.int32), 5, config.tokens)
    scratch = decode_scratch(1, H, H, D, len(plan), x.device)
    for launch in range(1, 3):  # neither the barriers nor the arrivals are reset in between
        found = decode_layers(
            x.clone(), stacked, k_cache, v_cache, table, plan,
            cos_sin=cos_sin, scale=SCALE, scratch=scratch, config=config,
        )  # fmt: skip
        assert int(stacked.counter) == launch * (5 * LAYERS + 1)
        assert not scratch.arrivals.any()
        for actual, wanted in ((found, expected), (k_cache[:, :-1], wide_k), (v_cache[:, :-1], wide_v)):
            assert float((actual.float() - wanted).norm() / wanted.norm()) < tolerance


def reference(
    x: torch.Tensor,
    layers: list[Weights],
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    context: int,
    cos_sin: torch.Tensor,
    heads: tuple[int, int],
    normed: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """In float32: the residual stream in the end, and both caches."""
    rows, keys, values = x.float(), k_cache[:, :-1].float(), v_cache[:, :-1].float()
    position = context - 1
    block, place = int(table[0, position // BLOCK]), position % BLOCK
    for number, layer in enumerate(layers):
        qkv = linear_reference(rows, layer.qkv, norm=(layer.attention_norm, EPS))
        norms = (layer.q_norm, layer.k_norm) if normed else None
        q, k, v = rope_reference(qkv, cos_sin, torch.tensor([position]), *heads, norms, EPS)
        keys[number, block, :, place], values[number, block, :, place] = k[0], v[0]
        mixed = paged_attention_reference(q, keys[number], values[number], table, [0, 1], [context], SCALE)
        rows = linear_reference(mixed.flatten(1), layer.out, residual=rows)
        inner = linear_reference(rows, layer.gate_up, norm=(layer.mlp_norm, EPS), gated=True)
        rows = linear_reference(inner, layer.down, residual=rows)
    return rows, keys, values
