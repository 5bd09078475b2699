"""Tile configs of the weight-streaming GEMMs in Triton, tuned on an H200 with `benchmarks/gpu_kernels.py`.

They are stored, not autotuned at start-up. A shape that is not listed gets a rule that is within a few percent.
"""

from __future__ import annotations

import torch

from penstock.kernels.triton.gemm import GemvConfig, SkinnyConfig

# (dtype, N, K) -> (most rows, tiles) in ascending order; None and what lies beyond the last belong to cuBLAS.
_MEASURED: dict[tuple[str, int, int], tuple[tuple[int, GemvConfig | SkinnyConfig | None], ...]] = {
    ("bf16", 6144, 4096): (
        (1, GemvConfig(4, 1024, 4, 3)),
        (4, None),
        (16, SkinnyConfig(64, 64, 2, 4, 6)),
    ),  # llama qkv
    ("fp8", 6144, 4096): (
        (1, GemvConfig(16, 512, 8, 3)),
        (4, SkinnyConfig(64, 128, 4, 4, 6)),
        (64, SkinnyConfig(64, 128, 2, 4, 6)),
    ),  # llama qkv
    ("bf16", 4096, 4096): (
        (1, GemvConfig(4, 512, 4, 0)),
        (4, SkinnyConfig(128, 128, 4, 8, 5)),
        (32, SkinnyConfig(64, 128, 2, 4, 6)),
    ),  # llama o
    ("fp8", 4096, 4096): (
        (1, GemvConfig(4, 1024, 4, 3)),
        (32, SkinnyConfig(64, 256, 2, 4, 6)),
        (64, SkinnyConfig(64, 256, 2, 4, 4)),
    ),  # llama o
    ("bf16", 28672, 4096): (
        (1, GemvConfig(8, 512, 4, 4)),
        (4, SkinnyConfig(128, 128, 1, 8, 5)),
        (32, SkinnyConfig(64, 128, 1, 4, 4)),
        (64, SkinnyConfig(128, 64, 1, 4, 5)),
    ),  # llama gate_up
    ("fp8", 28672, 4096): (
        (4, SkinnyConfig(128, 256, 1, 8, 5)),
        (32, SkinnyConfig(64, 256, 1, 4, 4)),
        (64, SkinnyConfig(128, 128, 1, 4, 5)),
    ),  # llama gate_up
    ("bf16", 4096, 14336): (
        (1, GemvConfig(8, 512, 4, 3)),
        (4, None),
        (64, SkinnyConfig(64, 128, 2, 4, 6)),
    ),  # llama down
    ("fp8", 4096, 14336): (
        (1, GemvConfig(8, 1024, 8, 3)),
        (64, SkinnyConfig(64, 256, 2, 4, 6)),
    ),  # llama down
    ("bf16", 128256, 4096): (
        (1, GemvConfig(16, 256, 4, 4)),
        (4, SkinnyConfig(128, 128, 1, 8, 5)),
        (16, SkinnyConfig(64, 128, 1, 4, 4)),
        (64, SkinnyConfig(128, 64, 1, 4, 5)),
    ),  # llama head
    ("bf16", 4096, 1024): (
        (1, GemvConfig(8, 512, 4, 0)),
        (32, SkinnyConfig(64, 128, 2, 4, 6)),
    ),  # qwen qkv
    ("bf16", 1024, 2048): (
        (1, GemvConfig(4, 2048, 8, 0)),
        (4, GemvConfig(4, 1024, 8, 0)),
        (16, SkinnyConfig(64, 128, 8, 4, 6)),
        (32, SkinnyConfig(32, 128, 8, 4, 6)),
    ),  # qwen o
    ("bf16", 6144, 1024): (
        (1, GemvConfig(8, 256, 4, 0)),
        (16, SkinnyConfig(64, 64, 4, 4, 6)),
        (32, SkinnyConfig(32, 128, 1, 4, 6)),
    ),  # qwen gate_up
    ("bf16", 1024, 3072): (
        (1, GemvConfig(4, 2048, 8, 0)),
        (16, SkinnyConfig(64, 128, 8, 4, 6)),
        (32, SkinnyConfig(32, 128, 8, 4, 6)),
        (64, SkinnyConfig(64, 128, 8, 4, 4)),
    ),  # qwen down
    ("bf16", 151936, 1024): (
        (1, GemvConfig(16, 256, 4, 3)),
        (4, SkinnyConfig(128, 128, 1, 8, 5)),
        (16, SkinnyConfig(128, 128, 1, 4, 3)),
        (32, SkinnyConfig(64, 128, 1, 4, 4)),
    ),  # qwen head
}


def triton_config(weight: torch.Tensor, rows: int) -> GemvConfig | SkinnyConfig | None:
    """The tile config for `weight` [N, K] and so many rows; None where cuBLAS is faster."""
    n, k = weight.shape
    measured = _MEASURED.get(("fp8" if weight.dtype == torch.float8_e4m3fn else "bf16", n, k))
    if measured is not None:
        return next((config for most, config in measured if rows <= most), None)
    if rows > 32:
        return None
    if rows == 1 and weight.dtype != torch.float8_e4m3fn:
        return GemvConfig(8, 512, 4, 3)
    tiles = -(-n // 64)
    splits = next((s for s in (1, 2, 4, 8) if tiles * s >= 128), 8)
    block_k = 256 // weight.dtype.itemsize
    return SkinnyConfig(64, block_k, min(splits, max(1, k // block_k)), 4, 4)
