"""GEMM with a SwiGLU epilogue for many rows on Hopper: SiLU(gate) * up, where x[rows, K] @ weight[N, K].T is both.

`swiglu_gemm.cu` computes in bfloat16, or in float8_e4m3fn with one float32 scale per output channel and one per row of
`x`. The GEMM of cuBLAS is as fast, but writes gate and up for another kernel to read. The reference is
`linear_reference` of `triton/gemm.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.kernels.hopper.program import Kernel, is_hopper, kernel
from penstock.kernels.hopper.tensor_map import alternating, tensor_map

_PAIRS = 66  # of CTAs, one CTA per SM of an H200
_HEIGHT = 128  # rows of a tile
_WIDTHS = (256, 224, 192)  # channels of a tile
_STAGES = 4
_BAND = 2048  # rows whose tiles are next to each other in time: they stay in L2 while all channels pass by
_STEP_BYTES = 128
_THREADS = 384


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tiles of a GEMM for pairs of CTAs (clusters of two), which share either their channels or their rows."""

    width: int  # channels of a tile: half of them of the gate
    common_rows: bool

    def pairs(self, rows: int, channels: int) -> tuple[int, int]:
        """Number of pairs of tiles along rows and along channels."""
        height, width = (_HEIGHT, 2 * self.width) if self.common_rows else (2 * _HEIGHT, self.width)
        return -(-rows // height), -(-channels // width)


_TILINGS = [Tiling(width, common_rows) for width in _WIDTHS for common_rows in (False, True)]


def swiglu_tiling(x: torch.Tensor, weight: torch.Tensor, *, streams: bool) -> Tiling | None:
    """The tile config for the rows of `x`, quantised or not yet; None where cuBLAS or `hopper/gemm.py` is faster."""
    rows, (n, k) = len(x), weight.shape
    if x.dtype != torch.bfloat16 or weight.dtype not in (torch.bfloat16, torch.float8_e4m3fn):
        return None
    if not is_hopper(x.device) or n % 16 or k % 16 or k * weight.itemsize < _STAGES * _STEP_BYTES:
        return None
    return best_tiling(rows, n, k, streams=streams)


def best_tiling(rows: int, n: int, k: int, *, streams: bool = False) -> Tiling | None:
    """All pairs of CTAs take the same time for a tile, so what counts is the number of waves.

    Where much of that is idle or padding, others are faster, unless the GEMM is so small that a launch less decides.
    """

    def cost(tiling: Tiling) -> int:
        high, wide = tiling.pairs(rows, n)
        return -(-high * wide // _PAIRS) * (tiling.width + 29)  # finishing a tile takes as long as 29 channels

    best = min(_TILINGS, key=cost)
    useful = rows / _HEIGHT * n / (2 * _PAIRS) / cost(best)
    return best if useful > (0.75 if streams or n * k >= 1 << 24 else 0.5) else None


def shared_bytes(width: int) -> int:
    """The ring of stages, a part of a tile as it is written, scales of two tiles' channels, barriers."""
    ring = _STAGES * (_HEIGHT + width) * _STEP_BYTES
    return ring + _HEIGHT * (width // 32 | 1) * 16 + 8 * width + 16 * _STAGES + 16


def compile_swiglu_gemms(*, fp8: bool) -> None:
    """Compile the kernel for all tile configs."""
    for tiling in _TILINGS:
        _kernel(tiling, fp8)


def swiglu_gemm(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    tiling: Tiling,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """The first half of `weight` [N, K] is the gate, the second half the up projection; `out` has N / 2 columns.

    For fp8, `scales` are (of the channels, of the rows), float32.
    """
    (rows, depth), n, step = x.shape, len(weight), _STEP_BYTES // x.itemsize
    high, wide = tiling.pairs(rows, n)
    # Each CTA of a pair copies half of what they share (multicast).
    heights, widths = (_HEIGHT // 2, tiling.width) if tiling.common_rows else (_HEIGHT, tiling.width // 2)
    of_channels, of_rows = scales or (x, x)
    _kernel(tiling, scales is not None)(
        (min(high * wide, _PAIRS) * 2,), _THREADS, shared_bytes(tiling.width),
        tensor_map(x, (heights, step)), tensor_map(alternating(weight), (widths // 16, 2, 8, step)),
        out, of_channels, of_rows, rows, n // 2, -(-depth // step), out.stride(0),
        high, wide, max(1, _BAND * high // rows), pdl=True, cluster=2,
    )  # fmt: skip
    return out


def _kernel(tiling: Tiling, fp8: bool) -> Kernel:
    return kernel(
        "swiglu_gemm.cu", "swiglu_gemm",
        TILE=tiling.width, STAGES=_STAGES, COMMON_ROWS=int(tiling.common_rows), FP8=int(fp8),
    )  # fmt: skip
