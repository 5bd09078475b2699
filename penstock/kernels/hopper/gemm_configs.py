"""Which products `hopper/gemm.py` takes over from cuBLAS and Triton, and how it cuts them into blocks.

A rule rather than a table. It follows what was fastest where the products of layers of Llama-3.1-8B and Qwen3-0.6B were
timed one after the other, at 16 to 256 rows on an H200; the limits on rows come from the same runs.
"""

from __future__ import annotations

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
    return 224 if n * k >= 1 << 24 else 160


def blocks_of(n: int, k: int, itemsize: int, rows: int) -> HopperConfig:
    steps, padded = -(-k * itemsize // STEP_BYTES), padded_rows(rows)
    tiles = -(-n // 64)
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


def _config(tile: int, splits: int, ring: int, steps: int, padded: int) -> HopperConfig:
    stages = ring // ((tile + padded) * STEP_BYTES)
    return HopperConfig(tile, min(stages, -(-steps // splits)), splits)
