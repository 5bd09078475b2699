"""A decode step of one sequence of a dense decoder in one persistent kernel on Hopper (`layers.cu`).

See docs/design/0010-persistent-decode-kernel.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock.kernels.hopper.decode import cache_map
from penstock.kernels.hopper.program import kernel

MOST_TOKENS = 2048  # of the context: longer ones were not timed
_LOG2_E = 1.4426950408889634
_HEAD_DIM = 128
_BLOCK_SIZE = 16
_SHARED_BYTES = 232448
# As in `layers.cu`:
_WARPS = 8
_MOST_PARTS = 8  # of the context
_REPLICAS = 4
_MOST_GROUP = 8  # heads that share keys and values
_MOST_INPUTS = 16384  # of a projection: they lie in shared memory


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The sizes that all layers have in common; the kernel is compiled for them."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_norm: bool
    fp8: bool


@dataclass(frozen=True, slots=True)
class StackedLayers:
    """A decoder as the kernel reads it: addresses of weights that others own, and memory that CTAs exchange by."""

    shape: LayerShape
    addresses: torch.Tensor  # int64 [layers, 12], as in `layers.cu`
    exchange: torch.Tensor
    embedding: torch.Tensor  # bfloat16 [vocabulary, hidden], as is the head
    norm: torch.Tensor  # bfloat16 [hidden], before the head
    head: torch.Tensor
    eps: float
    ctas: int  # one per SM: all must be resident at once


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values, bfloat16 [layers, N, K, B, D]; angles of the positions, cosines then sines."""

    keys: torch.Tensor
    values: torch.Tensor
    cos_sin: torch.Tensor
    scale: float
    window: int = 0


def fits(shape: LayerShape, head_dim: int, block_size: int, ctas: int) -> bool:
    """Whether the kernel can run such layers."""
    weight = 1 if shape.fp8 else 2
    mixed = shape.heads * _HEAD_DIM
    rows = (shape.hidden, shape.inner, mixed + 2 * shape.kv_heads * _HEAD_DIM)
    return (
        head_dim == _HEAD_DIM
        and block_size == _BLOCK_SIZE
        and shape.heads <= ctas
        and shape.heads <= _MOST_GROUP * shape.kv_heads
        and all(width * weight % 128 == 0 and width <= _MOST_INPUTS for width in (shape.hidden, shape.inner, mixed))
        and all(ctas <= count <= ctas * 32 * _WARPS for count in rows)  # each has some, and a thread for each
    )


def exchange_places(shape: LayerShape, ctas: int) -> int:
    """Places of 16 bits: the residual stream twice, queries, keys and values, parts of attention and their weights, the
    inner activations of the MLP, and the argmax of each CTA."""
    mixed, parts = shape.heads * _HEAD_DIM, min(ctas // shape.heads, _MOST_PARTS)
    qkv = mixed + 2 * shape.kv_heads * _HEAD_DIM
    places = 2 * shape.hidden + qkv + parts * mixed + shape.inner + 2 * parts * shape.heads + 2 * ctas
    places = -(-places // 4) * 4 + 4 * ctas
    return _REPLICAS * (-(-places // 64) * 64)


def slots_in_flight(shape: LayerShape, ctas: int) -> int:
    """Slots of 16 KiB that each CTA has in flight. In small layers the exchanged results would wait behind more."""
    mixed, kv = shape.heads * _HEAD_DIM, shape.kv_heads * _HEAD_DIM
    weights = shape.hidden * (2 * mixed + 2 * kv + 3 * shape.inner)
    return 2 if weights * (1 if shape.fp8 else 2) < ctas << 20 else 4


def stack_layers(
    shape: LayerShape,
    addresses: Sequence[Sequence[int]],
    embedding: torch.Tensor,
    norm: torch.Tensor,
    head: torch.Tensor,
    eps: float,
    ctas: int,
) -> StackedLayers:
    """`addresses` of each layer: attention norm, qkv, query norm, key norm, out, mlp norm, gate_up, down, then the
    scales of qkv, out, gate_up and down (any number where there are none)."""
    device = head.device
    exchange = torch.full((exchange_places(shape, ctas),), -1, dtype=torch.int16, device=device)  # unwritten
    stacked = torch.tensor(addresses, device=device)
    return StackedLayers(shape, stacked, exchange, embedding, norm, head, eps, ctas)


def decode_step(
    layers: StackedLayers,
    cache: KVCache,
    row: torch.Tensor,
    context: torch.Tensor,
    last_token_R: torch.Tensor,
    tables_RM: torch.Tensor,
    logits: torch.Tensor,
    chosen: torch.Tensor,
    *,
    num_layers: int | None = None,
) -> None:
    """From the last token of a row to `logits` [1, vocabulary] and their argmax, `chosen`, also put into the row.

    `row` and `context` (int32 [1]) are read on the device. A context of 0 is padding: nothing is written to the cache.
    """
    shape = layers.shape
    run = kernel(
        "layers.cu",
        "layers",
        HIDDEN=shape.hidden,
        INNER=shape.inner,
        HEADS=shape.heads,
        KV_HEADS=shape.kv_heads,
        HEAD_NORM=int(shape.head_norm),
        FP8=int(shape.fp8),
        CTAS=layers.ctas,
        IN_FLIGHT=slots_in_flight(shape, layers.ctas),
    )
    run(
        (layers.ctas,),
        32 * (_WARPS + 2),
        _SHARED_BYTES,
        cache_map(cache.keys),
        cache_map(cache.values),
        layers.addresses,
        len(layers.addresses) if num_layers is None else num_layers,
        layers.exchange,
        cache.keys,
        cache.values,
        cache.keys.shape[1],
        cache.cos_sin,
        layers.eps,
        cache.scale * _LOG2_E,
        cache.window,
        row,
        context,
        last_token_R,
        tables_RM,
        tables_RM.shape[1],
        layers.embedding,
        layers.norm,
        layers.head,
        len(layers.head),
        logits,
        chosen,
    )
