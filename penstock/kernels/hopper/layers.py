"""All layers of a dense decoder for one decoding sequence in one launch on Hopper (`layers.cu`).

Docs: docs/design/0010-all-layers-in-one-launch.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

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
_MOST_INPUTS = 16384  # of a projection: they lie in shared memory


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What the layers have in common; the kernel is compiled for it."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_norm: bool
    fp8: bool


@dataclass(frozen=True, slots=True)
class StackedLayers:
    """Addresses of the weights of all layers, whoever keeps those, and where programs leave results for each other."""

    shape: LayerShape
    addresses: torch.Tensor  # int64 [layers, 12], as in `layers.cu`
    exchange: torch.Tensor
    eps: float
    programs: int  # one for each multiprocessor: all must run at once


def fits(shape: LayerShape, head_dim: int, block_size: int, programs: int) -> bool:
    """Whether the kernel can run such layers."""
    weight = 1 if shape.fp8 else 2
    mixed = shape.heads * _HEAD_DIM
    rows = (shape.hidden, shape.inner, mixed + 2 * shape.kv_heads * _HEAD_DIM)
    return (
        head_dim == _HEAD_DIM
        and block_size == _BLOCK_SIZE
        and shape.heads <= programs
        and all(width * weight % 128 == 0 and width <= _MOST_INPUTS for width in (shape.hidden, shape.inner, mixed))
        and all(programs <= count <= programs * 32 * _WARPS for count in rows)  # each has some, and a thread for each
    )


def exchange_places(shape: LayerShape, programs: int) -> int:
    """Of 16 bits: the residual stream twice, queries, keys and values, parts of attention and their weights, and the
    inside of the feed-forward."""
    mixed, parts = shape.heads * _HEAD_DIM, min(programs // shape.heads, _MOST_PARTS)
    qkv = mixed + 2 * shape.kv_heads * _HEAD_DIM
    places = 2 * shape.hidden + qkv + parts * mixed + shape.inner + 2 * parts * shape.heads + 2 * programs
    return _REPLICAS * (-(-places // 64) * 64)


def slots_under_way(shape: LayerShape, programs: int) -> int:
    """Slots of 16 KiB that each program asks of memory at once. What small layers hand over waits behind them."""
    mixed, kv = shape.heads * _HEAD_DIM, shape.kv_heads * _HEAD_DIM
    weights = shape.hidden * (2 * mixed + 2 * kv + 3 * shape.inner)
    return 2 if weights * (1 if shape.fp8 else 2) < programs << 20 else 4


def stack_layers(
    shape: LayerShape, addresses: Sequence[Sequence[int]], eps: float, device: torch.device, programs: int
) -> StackedLayers:
    """`addresses` of each layer: attention norm, qkv, query norm, key norm, out, mlp norm, gate_up, down, then the
    scales of qkv, out, gate_up and down (any number where there are none)."""
    exchange = torch.full((exchange_places(shape, programs),), -1, dtype=torch.int16, device=device)  # unwritten
    return StackedLayers(shape, torch.tensor(addresses, device=device), exchange, eps, programs)


def decode_layers(
    x: torch.Tensor,
    layers: StackedLayers,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table_M: torch.Tensor,
    context: torch.Tensor,
    *,
    cos_sin: torch.Tensor,
    scale: float,
    window: int = 0,
    num_layers: int | None = None,
) -> torch.Tensor:
    """`x` [1, hidden] becomes the residual stream after the last layer. Caches are [layers, N, K, B, D].

    A context of 0 is padding: nothing is written to the cache.
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
        PROGRAMS=layers.programs,
        UNDERWAY=slots_under_way(shape, layers.programs),
    )
    run(
        (layers.programs,),
        32 * (_WARPS + 2),
        _SHARED_BYTES,
        x,
        layers.addresses,
        len(layers.addresses) if num_layers is None else num_layers,
        layers.exchange,
        k_cache,
        v_cache,
        k_cache.shape[1],
        table_M,
        context,
        cos_sin,
        layers.eps,
        scale * _LOG2_E,
        window,
    )
    return x
