"""Which products `hopper/gemm.py` takes over from cuBLAS and Triton, and how it cuts them into blocks.

A rule rather than a table. It follows what was fastest in whole decoding steps of Llama-3.1-8B and Qwen3-0.6B of 8 to
512 rows on an H200, where a product runs into the one before it and the one after; alone, other choices are.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import torch

from penstock.kernels.hopper.gemm import STEP_BYTES, HopperConfig, padded_rows
from penstock.kernels.hopper.program import is_hopper

_LEAST_ROWS = 2  # one is a vector
_LOGITS = 1 << 16  # channels: a vocabulary, and float32, whose writing counts
_BLOCKS = 132  # the multiprocessors of an H200, one block each
_WHOLE, _MOST, _HALF = 224 << 10, 148 << 10, 110 << 10  # of a multiprocessor's shared memory, for stages


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
    if n >= _LOGITS:
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
    if n >= _LOGITS:
        return _config(128, 1, _HALF if padded <= 32 else _WHOLE, steps, padded)
    if tiles > 2 * _BLOCKS:
        # Blocks that follow each other on a multiprocessor; wide ones read many rows less often.
        ring = _MOST if padded <= 128 else _WHOLE
        return _config(128 if padded <= 32 or padded > 192 else 256, 1, ring, steps, padded)
    splits = 1
    # More blocks until all multiprocessors have one, if that leaves each enough steps to be worth a block.
    while splits < 8 and tiles * splits * 2 <= _BLOCKS and steps >= splits * (8 if tiles * splits < 64 else 32):
        splits *= 2
    if splits == 1 and padded <= 96:
        return _wide(n, steps, padded)
    # What is over soon should leave room for the next product's block, which fetches its weight meanwhile.
    short = padded <= 32 and splits < 4 and steps <= 16 * splits
    ring = _HALF if short else _MOST if itemsize == 1 and padded <= 96 else _WHOLE
    return _config(64, splits, ring, steps, padded)


def _wide(n: int, steps: int, padded: int) -> HopperConfig:
    """Of 128 channels, so that rows are read half as often; two blocks may share them.

    A product that is over soon leaves half of the multiprocessors to the next, which fetches its weight meanwhile.
    """
    tiles, short = -(-n // 128), steps <= 16
    if 2 * tiles > (_BLOCKS // 2 if short else _BLOCKS):
        return _config(128, 1, _WHOLE, steps, padded)
    if short and padded <= 16:
        return _config(64, 1, _HALF, steps, padded)
    # Keys and values of so many sequences are worth room for attention, which fetches them meanwhile.
    return _config(128, 2, _WHOLE if short or padded < 96 else _MOST, steps, padded)


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
