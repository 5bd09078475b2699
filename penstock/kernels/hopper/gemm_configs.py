"""Tile configs of the weight-streaming GEMM for Hopper, and for which shapes it is used instead of cuBLAS and Triton.

A rule, not a table. It follows what was fastest in whole decoding steps of Llama-3.1-8B and Qwen3-0.6B of 8 to 512 rows
on an H200, where a GEMM overlaps with the kernels before and after it; for a GEMM alone, other configs are fastest.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import torch

from penstock.kernels.hopper.gemm import (
    STEP_BYTES,
    GemmAdapters,
    HopperConfig,
    adapter_bytes,
    padded_rows,
    shared_bytes,
)
from penstock.kernels.hopper.program import is_hopper

_LEAST_ROWS = 2  # one is a vector
_LOGITS = 1 << 16  # channels: a vocabulary, and float32, whose writing counts
_SMS = 132  # SMs of an H200, one CTA each
_WHOLE, _MOST, _HALF = 224 << 10, 148 << 10, 110 << 10  # bytes of an SM's shared memory, for stages

_SHARED = 227 << 10  # bytes that a CTA may have
# LoRA adapters inside a GEMM: of more rows, kernels of their own are faster.
_MOST_ADAPTED_ROWS, _LEAST_STAGES = 128, 3
_ADAPTED = 176 << 10  # bytes for stages: the more of a weight is on its way, the longer adapters take to be read


def hopper_config(x: torch.Tensor, weight: torch.Tensor) -> HopperConfig | None:
    """The tile config for `weight` [N, K] and the rows of `x`, quantised or not yet; None where others are faster."""
    rows, (n, k) = len(x), weight.shape
    if x.dtype != torch.bfloat16 or weight.dtype not in (torch.bfloat16, torch.float8_e4m3fn):
        return None
    if not is_hopper(x.device) or n % 16 or k % 16 or not _LEAST_ROWS <= rows <= most_rows(n, k, weight.itemsize):
        return None
    return tile_config(n, k, weight.itemsize, rows)


def adapted_config(
    x: torch.Tensor, weight: torch.Tensor, adapters: GemmAdapters, *, gated: bool
) -> HopperConfig | None:
    """For tokens with LoRA adapters; None where the GEMM cannot add them."""
    config, rows = hopper_config(x, weight), len(x)
    if config is None or weight.itemsize == 1 or rows > _MOST_ADAPTED_ROWS:
        return None
    begins = [sum(adapters.outputs[:module]) for module in range(len(adapters.outputs))]
    if not gated and any(begin % config.tile for begin in begins):
        return None
    padded = padded_rows(rows)
    if config.tile == 256 and padded > 64:  # twice the accumulators, which helpers leave no registers for
        config = _config(128, 1, _WHOLE, -(-weight.shape[1] * weight.itemsize // STEP_BYTES), padded)
    room = _SHARED - adapter_bytes(config, padded, adapters, gated)
    while shared_bytes(config, padded, gated) > min(room, _ADAPTED):
        if config.stages <= _LEAST_STAGES:
            return None
        config = replace(config, stages=config.stages - 1)
    return config


def most_rows(n: int, k: int, itemsize: int) -> int:
    """Rows beyond which cuBLAS is faster. In fp8 it has one kernel for scales of rows and channels, a slow one."""
    if n >= _LOGITS:
        return 64
    if itemsize == 1:
        return 256
    if n * k >= 1 << 24:
        return 256 if n * k >= 1 << 25 else 224
    return 512 if divides_rows(n, k) else 160


def tile_config(n: int, k: int, itemsize: int, rows: int) -> HopperConfig:
    steps = -(-k * itemsize // STEP_BYTES)
    if rows > 160 and divides_rows(n, k):
        return _divided_rows(n, steps, rows)
    tiles, padded = -(-n // 64), padded_rows(rows)
    if n >= _LOGITS:
        return _config(128, 1, _HALF if padded <= 32 else _WHOLE, steps, padded)
    if tiles > 2 * _SMS:
        # Several CTAs per SM, one after the other; wide tiles read many rows less often.
        ring = _MOST if padded <= 128 else _WHOLE
        return _config(128 if padded <= 32 or padded > 192 else 256, 1, ring, steps, padded)
    splits = _splits(tiles, steps)
    if splits == 1 and padded <= 96:
        return _wide(n, steps, padded)
    # A short GEMM should leave room for a CTA of the next one, which prefetches its weight meanwhile.
    short = padded <= 32 and splits < 4 and steps <= 16 * splits
    ring = _HALF if short else _MOST if itemsize == 1 and padded <= 96 else _WHOLE
    return _config(64, splits, ring, steps, padded)


def _splits(tiles: int, steps: int) -> int:
    """More CTAs until all SMs have one, if that leaves each enough steps to be worth a CTA."""
    splits = 1
    while splits < 8 and tiles * splits * 2 <= _SMS and steps >= splits * (8 if tiles * splits < 64 else 32):
        splits *= 2
    return splits


def invariant_splits(n: int, k: int, itemsize: int) -> int:
    """Parts of K that are summed apart, for any number of rows: that of few rows, where it matters most."""
    return _splits(-(-n // 64), -(-k * itemsize // STEP_BYTES))


def invariant_config(n: int, k: int, itemsize: int, rows: int) -> HopperConfig:
    """As `tile_config`, but the splits, and so the order of every sum, depend on the weight alone."""
    steps, splits = -(-k * itemsize // STEP_BYTES), invariant_splits(n, k, itemsize)
    if 160 < rows <= 512 and divides_rows(n, k):
        return _divided_rows(n, steps, rows, (splits,))
    blocks = -(-rows // 256)
    config = tile_config(n, k, itemsize, -(-rows // blocks))
    if config.splits != splits or config.row_blocks > 1:
        config = _config(64, splits, _WHOLE, steps, padded_rows(rows, blocks))
    return replace(config, row_blocks=blocks)


def _wide(n: int, steps: int, padded: int) -> HopperConfig:
    """Tiles of 128 channels, so that rows are read half as often; two CTAs may share one (split-K).

    A short GEMM leaves half of the SMs to the next one, which prefetches its weight meanwhile.
    """
    tiles, short = -(-n // 128), steps <= 16
    if 2 * tiles > (_SMS // 2 if short else _SMS):
        return _config(128, 1, _WHOLE, steps, padded)
    if short and padded <= 16:
        return _config(64, 1, _HALF, steps, padded)
    # With so many sequences, attention gets room to prefetch their keys and values meanwhile.
    return _config(128, 2, _WHOLE if short or padded < 96 else _MOST, steps, padded)


def divides_rows(n: int, k: int) -> bool:
    """Whether the weight is still in L2 when the next CTA reads it, and its tiles are few."""
    return n * k < 1 << 24 and n <= 64 * _SMS


@cache
def _divided_rows(n: int, steps: int, rows: int, allowed: tuple[int, ...] = (1, 2)) -> HopperConfig:
    """The config whose CTAs read (and with split-K exchange) the fewest bytes, with one CTA per SM."""
    cheapest: tuple[float, HopperConfig] | None = None
    for row_blocks, tile, splits in product(range(1, 9), (64, 128, 256), allowed):
        if rows > 256 * row_blocks or -(-n // tile) * row_blocks * splits > _SMS:
            continue
        padded = padded_rows(rows, row_blocks)
        if padded * max(1, tile // 128) > 384:  # more accumulators than registers
            continue
        cost = (tile + padded) * steps / splits + (tile * padded / 8 if splits > 1 else 0)
        if cheapest is None or cost < cheapest[0]:
            cheapest = cost, _config(tile, splits, _WHOLE, steps, padded, row_blocks)
    assert cheapest, "up to 512 rows, there are fewer tiles of 256 channels than SMs"
    return cheapest[1]


def _config(tile: int, splits: int, ring: int, steps: int, padded: int, row_blocks: int = 1) -> HopperConfig:
    stages = ring // ((tile + padded) * STEP_BYTES)
    return HopperConfig(tile, min(stages, -(-steps // splits)), splits, row_blocks)
