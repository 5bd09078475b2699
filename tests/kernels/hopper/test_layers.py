"""A decode step in one persistent kernel, on the emulated GPU with all CTAs at once, against its parts' references."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import tests.triton_interpreter  # noqa: F401  isort: skip

from penstock.engine.executor import NOT_A_NUMBER
from penstock.kernels.hopper import decode
from penstock.kernels.hopper import layers as hopper_layers
from penstock.kernels.hopper.layers import (
    KVCache,
    LayerShape,
    StackedLayers,
    decode_step,
    exchange_places,
    fits,
    slots_in_flight,
    stack_layers,
)
from penstock.kernels.triton.gemm import linear_reference
from penstock.kernels.triton.paged import paged_attention_reference
from penstock.kernels.triton.rope import rope_reference
from penstock.quantization.fp8 import quantize_channels
from tests.kernels.hopper import emulated_gpu

BLOCK, D, EPS, SCALE, LAYERS, CTAS, VOCAB = 16, 128, 1e-5, 0.3, 2, 4, 333
LLAMA = LayerShape(hidden=4096, inner=14336, heads=32, kv_heads=8, head_norm=False, fp8=False)


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
    scales: tuple[torch.Tensor, ...] | None = None  # of qkv, out, gate_up and down

    def addresses(self) -> list[int]:
        norms, mlp = (self.q_norm, self.k_norm), (self.mlp_norm, self.gate_up, self.down)
        tensors = (self.attention_norm, self.qkv, *norms, self.out, *mlp, *(self.scales or [self.q_norm] * 4))
        return [tensor.data_ptr() for tensor in tensors]

    def in_fp8(self) -> Weights:
        quantized = [quantize_channels(weight) for weight in (self.qkv, self.out, self.gate_up, self.down)]
        qkv, out, gate_up, down = (one.weight for one in quantized)
        scales = tuple(one.scales for one in quantized)
        return replace(self, qkv=qkv, out=out, gate_up=gate_up, down=down, scales=scales)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder: Path = tmp_path_factory.mktemp("cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "tensor_map", emulated_gpu.emulated_tensor_map)
        patch.setattr(hopper_layers, "kernel", emulated_gpu.emulated_kernel(folder, resident=CTAS))
        yield


PLAIN = LayerShape(hidden=256, inner=384, heads=2, kv_heads=1, head_norm=False, fp8=False)
NORMED = LayerShape(hidden=192, inner=320, heads=4, kv_heads=2, head_norm=True, fp8=False)
QUANTIZED = replace(PLAIN, heads=4, fp8=True)


@pytest.mark.skipif(not emulated_gpu.available, reason="no g++")
@pytest.mark.parametrize(
    ("shape", "cases"),
    [
        # (context, window): the new token alone, two passes, two parts, a window
        (PLAIN, [(1, 0), (2, 0), (177, 0), (290, 0), (333, 100)]),
        (NORMED, [(40, 0)]),
        (QUANTIZED, [(1, 0), (140, 0)]),
    ],
)
def test_layers(emulated: None, shape: LayerShape, cases: list[tuple[int, int]]) -> None:
    generator = torch.Generator().manual_seed(0)
    H, K, hidden, inner = shape.heads, shape.kv_heads, shape.hidden, shape.inner

    def randn(*sides: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*sides, generator=generator) * scale).to(torch.bfloat16)

    def weight(n: int, k: int) -> torch.Tensor:
        return randn(n, k, scale=k**-0.5)

    layers = [
        Weights(randn(hidden), weight((H + 2 * K) * D, hidden), randn(D), randn(D), weight(hidden, H * D),
                randn(hidden), weight(2 * inner, hidden), weight(hidden, inner))
        for _ in range(LAYERS)
    ]  # fmt: skip
    if shape.fp8:
        layers = [layer.in_fp8() for layer in layers]
    assert fits(shape, D, BLOCK, CTAS)
    embedding, norm, head = randn(VOCAB, hidden), randn(hidden), weight(VOCAB, hidden)
    head[300] = head[200]  # a tie
    addresses = [layer.addresses() for layer in layers]
    stacked = stack_layers(shape, addresses, embedding, norm, head, EPS, CTAS)
    for context, window in cases:  # what one launch leaves behind must do for the next
        blocks = -(-context // BLOCK) + 2
        k_cache, v_cache = (randn(LAYERS, blocks, K, BLOCK, D) for _ in range(2))
        tables = torch.stack([torch.randperm(blocks - 1, generator=generator).int() for _ in range(2)])
        angles = torch.outer(torch.arange(512.0), torch.rand(D // 2, generator=generator))
        cos_sin = torch.cat([angles.cos(), angles.sin()], -1)
        last_token = torch.tensor([-1, context % VOCAB])
        cache = KVCache(k_cache, v_cache, cos_sin, SCALE, window)
        expected, wide_k, wide_v = reference(stacked, layers, cache, int(last_token[1]), tables[1:], context)
        k_cache[:, -1], v_cache[:, -1] = torch.nan, torch.nan  # another request's
        logits, chosen = torch.full((1, VOCAB), torch.nan), torch.empty(1, dtype=torch.int64)
        row, length = torch.tensor([1, context], dtype=torch.int32).split(1)
        decode_step(stacked, cache, row, length, last_token, tables, logits, chosen)
        for actual, wanted in ((logits, expected), (k_cache[:, :-1], wide_k), (v_cache[:, :-1], wide_v)):
            assert float((actual.float() - wanted).norm() / wanted.norm()) < 1e-2
        assert chosen.tolist() == logits.argmax(-1).tolist() == last_token[1:].tolist()
        assert last_token[0] == -1


@pytest.mark.skipif(not emulated_gpu.available, reason="no g++")
def test_says_that_no_logit_is_a_number(emulated: None) -> None:
    weight = torch.ones(2 * PLAIN.inner, PLAIN.hidden, dtype=torch.bfloat16)
    stacked = stack_layers(PLAIN, [[weight.data_ptr()] * 12], weight, weight[0] * torch.nan, weight, EPS, CTAS)
    caches = [torch.zeros((1, 2, 1, BLOCK, D), dtype=torch.bfloat16) for _ in range(2)]
    tables, row, length = torch.ones((1, 2), dtype=torch.int32), *torch.tensor([[0], [1]], dtype=torch.int32)
    last_token, chosen = torch.tensor([5]), torch.empty(1, dtype=torch.int64)
    logits = torch.empty(1, len(weight))
    cache = KVCache(caches[0], caches[1], torch.ones((16, D)), SCALE)
    decode_step(stacked, cache, row, length, last_token, tables, logits, chosen)
    assert logits.isnan().all()
    assert chosen.tolist() == [NOT_A_NUMBER]
    assert last_token.tolist() == [0], "the next step, which is under way, reads it"


@pytest.mark.skipif(not emulated_gpu.available, reason="no g++")
def test_padding_writes_nothing(emulated: None) -> None:
    weight = torch.ones(2 * PLAIN.inner, PLAIN.hidden, dtype=torch.bfloat16)
    stacked = stack_layers(PLAIN, [[weight.data_ptr()] * 12], weight, weight[0], weight, EPS, CTAS)
    caches = [torch.full((1, 2, 1, BLOCK, D), 7.0, dtype=torch.bfloat16) for _ in range(2)]
    tables, zero = torch.zeros((1, 2), dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    cache = KVCache(caches[0], caches[1], torch.ones((16, D)), SCALE)
    last_token = torch.tensor([5])
    chosen = torch.empty(1, dtype=torch.int64)
    decode_step(stacked, cache, zero, zero, last_token, tables, torch.empty(1, len(weight)), chosen)
    assert all(bool((cache == 7).all()) for cache in caches)
    assert last_token.tolist() == [0]  # of equal logits, the first


def test_which_layers_fit() -> None:
    assert fits(LLAMA, 128, 16, 132)
    assert fits(replace(LLAMA, fp8=True), 128, 16, 132)
    assert not fits(LLAMA, 64, 16, 132)
    assert not fits(LLAMA, 128, 32, 132)
    assert not fits(replace(LLAMA, inner=28672), 128, 16, 132)  # more inputs than shared memory holds
    assert not fits(replace(LLAMA, hidden=128), 128, 16, 132)  # some CTA would have no row
    assert not fits(replace(LLAMA, hidden=4096 + 64, fp8=True), 128, 16, 132)


def test_small_layers_ask_less_of_memory_at_once() -> None:
    assert slots_in_flight(LLAMA, 132) == slots_in_flight(replace(LLAMA, fp8=True), 132) == 4
    assert (
        slots_in_flight(LayerShape(hidden=1024, inner=3072, heads=16, kv_heads=8, head_norm=True, fp8=False), 132) == 2
    )


def test_exchange_grows_with_the_parts_of_a_context() -> None:
    assert exchange_places(LLAMA, 132) - exchange_places(LLAMA, 100) >= 32 * D


def reference(
    stacked: StackedLayers, layers: list[Weights], cache: KVCache, token: int, table: torch.Tensor, context: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """In float32: logits, and both caches."""
    shape, cos_sin = stacked.shape, cache.cos_sin
    rows, keys, values = (
        stacked.embedding[token][None].float(),
        cache.keys[:, :-1].float(),
        cache.values[:, :-1].float(),
    )
    position = context - 1
    block, place = int(table[0, position // BLOCK]), position % BLOCK
    for number, layer in enumerate(layers):
        scales = layer.scales or (None,) * 4
        qkv = linear_reference(rows, layer.qkv, scales=scales[0], norm=(layer.attention_norm, EPS))
        norms = (layer.q_norm, layer.k_norm) if shape.head_norm else None
        q, k, v = rope_reference(qkv, cos_sin, torch.tensor([position]), shape.heads, shape.kv_heads, norms, EPS)
        keys[number, block, :, place], values[number, block, :, place] = k[0], v[0]
        mixed = paged_attention_reference(
            q, keys[number], values[number], table, [0, 1], [context], cache.scale, cache.window
        )
        rows = linear_reference(mixed.flatten(1), layer.out, scales=scales[1], residual=rows)
        inner = linear_reference(rows, layer.gate_up, scales=scales[2], norm=(layer.mlp_norm, EPS), gated=True)
        rows = linear_reference(inner, layer.down, scales=scales[3], residual=rows)
    return linear_reference(rows, stacked.head, norm=(stacked.norm, EPS)), keys, values
