"""Which products `hopper/gemm.py` takes over from cuBLAS and Triton, and how it cuts them into blocks.

A rule rather than a table. It follows what was fastest where the products of layers of Llama-3.1-8B and Qwen3-0.6B were
timed one after the other, at 16 to 512 rows on an H200; the limits on rows come from the same runs.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import torch

from penstock.kernels.hopper.gemm import STEP_BYTES, HopperConfig, padded_rows
from penstock.kernels.hopper.program import is_hopper

_LEAST_ROWS = 5  # fewer are vectors
_BLOCKS = 132  # the multiprocessors of an H200, one block each
_WHOLE, _HALF, _QUARTER = 224 << 10, 110 << 10, 54 << 10  # of a multiprocessor's shared memory, for stages


def hopper_config(x: torch.Tensor, weight: torch.Tensor) -> HopperConfig | None:
    """How to stream `weight` [N, K] for the rows of `x`, quantised or not yet; None where others are faster."""
    rows, (n, k) = len(x), weight.shape
    if x.dtype != torch.bfloat16 or weight.dtype not in (torch.bfloat16, torch.float8_e4m3fn):
        return None
    if not is_hopper(x.device) or n % 16 or k % 16 or not _LEAST_ROWS <= rows <= most_rows(n, k, weight.itemsize):
        return None
    return blocks_of(n, k, weight.itemsize, rows)


def most_rows(n: int, k: int, itemsize: int) -> int:
    """Beyond them cuBLAS is faster. In fp8 it has one kernel for scales of rows and channels, and that is slow."""
    if n >= 1 << 16:  # logits in float32, whose writing counts
        return 64
    if itemsize == 1:
        return 256
    if n * k >= 1 << 24:
        return 256 if n * k >= 1 << 25 else 224
    return 512 if _divides_rows(n, k) else 160


def blocks_of(n: int, k: int, itemsize: int, rows: int) -> HopperConfig:
    steps = -(-k * itemsize // STEP_BYTES)
    if rows > 160 and _divides_rows(n, k):
        return _divided_rows(n, steps, rows)
    tiles, padded = -(-n // 64), padded_rows(rows)
    if tiles <= 2 * _BLOCKS:
        splits = 1
        # More blocks until all multiprocessors have one, if that leaves each enough steps to be worth a block.
        while splits < 8 and tiles * splits * 2 <= _BLOCKS and steps >= splits * (8 if tiles * splits < 64 else 32):
            splits *= 2
        # What is over soon should leave room for the next product's block, which fetches its weight meanwhile.
        short = padded <= 32 and splits < 4 and steps <= 16 * splits
        return _config(64, splits, _HALF if short else _WHOLE, steps, padded)
    # Of many small blocks a multiprocessor has several; with more rows, larger ones read those rows less often.
    if padded <= 16:
        return _config(64, 1, _QUARTER, steps, padded)
    if padded <= 64:
        return _config(128, 1, _HALF if padded <= 32 else _WHOLE, steps, padded)
    return _config(256 if padded <= 192 else 128, 1, _WHOLE, steps, padded)


def _divides_rows(n: int, k: int) -> bool:
    """Whether the weight is still in the cache when the next block wants it, and its tiles are few."""
    return n * k < 1 << 24 and n <= 64 * _BLOCKS


@cache
def _divided_rows(n: int, steps: int, rows: int) -> HopperConfig:
    """The least that a block must fetch, and hand over where it shares a tile, with one block a multiprocessor."""
    cheapest: tuple[float, HopperConfig] | None = None
    for row_blocks, tile, splits in product(range(1, 9), (64, 128, 256), (1, 2)):
        if rows > 256 * row_blocks or -(-n // tile) * row_blocks * splits > _BLOCKS:
            continue
        padded = padded_rows(rows, row_blocks)
        if padded * max(1, tile // 128) > 384:  # more sums than registers
            continue
        cost = (tile + padded) * steps / splits + (tile * padded / 8 if splits > 1 else 0)
        if cheapest is None or cost < cheapest[0]:
            cheapest = cost, _config(tile, splits, _WHOLE, steps, padded, row_blocks)
    assert cheapest, "up to 512 rows, there are fewer tiles of 256 channels than multiprocessors"
    return cheapest[1]


def _config(tile: int, splits: int, ring: int, steps: int, padded: int, row_blocks: int = 1) -> HopperConfig:
    stages = ring // ((tile + padded) * STEP_BYTES)
    return HopperConfig(tile, min(stages, -(-steps // splits)), splits, row_blocks)
