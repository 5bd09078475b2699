"""GEMMs for many rows on Hopper: x[rows, K] @ weight[N, K].T, or with a SwiGLU epilogue SiLU(gate) * up of its halves.

`persistent_gemm.cu` computes in bfloat16, or in float8_e4m3fn with one float32 scale per output channel and one per row
of `x`. The GEMM of cuBLAS is as fast, but writes gate and up for another kernel to read, and sums in an order that may
depend on the number of rows. The reference is `linear_reference` of `triton/gemm.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.kernels.hopper.program import Kernel, is_hopper, kernel
from penstock.kernels.hopper.tensor_map import alternating, tensor_map

_PAIRS = 66  # of CTAs, one CTA per SM of an H200
_HEIGHT = 128  # rows of a tile
_WIDTHS = (256, 224, 192)  # channels of a tile
_SPLIT_WIDTHS = (192, 160, 128, 64)  # where a second accumulator holds the sum of the parts of K that are done
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
_SPLIT_TILINGS = [Tiling(width, common_rows) for width in _SPLIT_WIDTHS for common_rows in (False, True)]


def swiglu_tiling(x: torch.Tensor, weight: torch.Tensor, *, streams: bool) -> Tiling | None:
    """The tile config for the rows of `x`, quantised or not yet; None where cuBLAS or `hopper/gemm.py` is faster."""
    rows, (n, k) = len(x), weight.shape
    if x.dtype != torch.bfloat16 or weight.dtype not in (torch.bfloat16, torch.float8_e4m3fn):
        return None
    if not is_hopper(x.device) or n % 16 or k % 16 or k * weight.itemsize < _STAGES * _STEP_BYTES:
        return None
    return best_tiling(rows, n, k, streams=streams)


def best_tiling(rows: int, n: int, k: int, *, streams: bool = False) -> Tiling | None:
    """None where much of the time is idle or padding: others are faster then, unless a launch less decides."""
    best = cheapest_tiling(rows, n, _TILINGS)
    useful = rows / _HEIGHT * n / (2 * _PAIRS) / _cost(best, rows, n)
    return best if useful > (0.75 if streams or n * k >= 1 << 24 else 0.5) else None


def exact_tilings(splits: int, *, fp8: bool) -> list[Tiling]:
    """For an epilogue with so many `exact_splits`. In fp8, scales take registers that the widest tile has not."""
    if splits == 1:
        return _TILINGS
    return _SPLIT_TILINGS[2:] if fp8 else _SPLIT_TILINGS


def cheapest_tiling(rows: int, n: int, tilings: list[Tiling]) -> Tiling:
    return min(tilings, key=lambda tiling: _cost(tiling, rows, n))


def _cost(tiling: Tiling, rows: int, n: int) -> int:
    """All pairs of CTAs take the same time for a tile, so what counts is the number of waves."""
    high, wide = tiling.pairs(rows, n)
    return -(-high * wide // _PAIRS) * (tiling.width + 29)  # finishing a tile takes as long as 29 channels


def shared_bytes(width: int) -> int:
    """The ring of stages, a part of a tile as it is written, scales of two tiles' channels, barriers."""
    ring = _STAGES * (_HEIGHT + width) * _STEP_BYTES
    return ring + _HEIGHT * (width // 32 | 1) * 16 + 8 * width + 16 * _STAGES + 16


@dataclass(frozen=True, slots=True)
class Epilogue:
    gated: bool = False  # SwiGLU: the first half of the weight is the gate, the second half the up projection
    add: bool = False  # `out` is added to
    # None: approximate where that does not matter for a result in e4m3 or bfloat16. Otherwise every number is rounded
    # as by `hopper_gemm` with so many splits: a row has the same bits, whichever of the two kernels computes it.
    exact_splits: int | None = None


def compile_persistent_gemm(tilings: list[Tiling], epilogue: Epilogue, *, fp8: bool, norm: bool = False) -> None:
    for tiling in tilings:
        _kernel(tiling, epilogue, fp8=fp8, norm=norm)


def compile_swiglu_gemms(*, fp8: bool) -> None:
    """Compile the kernel of `swiglu_gemm` for all tile configs."""
    compile_persistent_gemm(_TILINGS, Epilogue(gated=True), fp8=fp8)


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
    return persistent_gemm(out, x, weight, tiling, Epilogue(gated=True), scales)


def persistent_gemm(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    tiling: Tiling,
    epilogue: Epilogue,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
) -> torch.Tensor:
    """For fp8, `scales` are (of the channels, of the rows), float32.

    `norm`: `x` are the values of a `DeferredNorm`; (its squares in one slot, eps).
    """
    (rows, depth), n, step = x.shape, len(weight), _STEP_BYTES // x.itemsize
    high, wide = tiling.pairs(rows, n)
    # Each CTA of a pair copies half of what they share (multicast).
    heights, widths = (_HEIGHT // 2, tiling.width) if tiling.common_rows else (_HEIGHT, tiling.width // 2)
    if epilogue.gated:
        weight_map = tensor_map(alternating(weight), (widths // 16, 2, 8, step))
    else:
        weight_map = tensor_map(weight, (widths, step))
    of_channels, of_rows = scales or (x, norm[0] if norm else x)
    _kernel(tiling, epilogue, fp8=scales is not None, norm=norm is not None)(
        (min(high * wide, _PAIRS) * 2,), _THREADS, shared_bytes(tiling.width),
        tensor_map(x, (heights, step)), weight_map,
        out, of_channels, of_rows, rows, n // 2 if epilogue.gated else n, -(-depth // step), out.stride(0),
        high, wide, max(1, _BAND * high // rows), 1.0 / depth, norm[1] if norm else 0.0, pdl=True, cluster=2,
    )  # fmt: skip
    return out


def _kernel(tiling: Tiling, epilogue: Epilogue, *, fp8: bool, norm: bool) -> Kernel:
    return kernel(
        "persistent_gemm.cu", "persistent_gemm",
        TILE=tiling.width, STAGES=_STAGES, COMMON_ROWS=int(tiling.common_rows), FP8=int(fp8),
        GATED=int(epilogue.gated), ADD=int(epilogue.add), APPLIES_NORM=int(norm),
        SPLITS=epilogue.exact_splits or 1, EXACT=int(epilogue.exact_splits is not None),
    )  # fmt: skip
