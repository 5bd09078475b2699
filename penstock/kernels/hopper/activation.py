"""Quantisation to fp8 per row on Hopper, of plain rows or of SwiGLU; a row stays in registers meanwhile."""

from __future__ import annotations

import torch

from penstock.kernels.hopper import program

_THREADS = 256
_WARPS = 8


def silu_mul_e4m3(
    out: torch.Tensor,
    scales: torch.Tensor,
    gate_up: torch.Tensor,
    unscaled: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """`gate_up` is bfloat16 [T, 2 * width], gate first; `out` is float8_e4m3fn [T, width], `scales` float32 [T].

    `unscaled`: what rows and channels of `gate_up` must still be multiplied by.
    """
    of_rows, of_channels = unscaled or (scales, scales)
    run = _kernel(gate_up.shape[1] // 2, gated=True, scaled=unscaled is not None)
    run((len(gate_up),), _THREADS, _WARPS * 4, out, scales, gate_up, of_rows, of_channels, pdl=True)
    return out


def quantize_e4m3(out: torch.Tensor, scales: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`x` is bfloat16 [T, width], contiguous; `out` is float8_e4m3fn, `scales` float32 [T]."""
    run = _kernel(x.shape[1], gated=False, scaled=False)
    run((len(x),), _THREADS, _WARPS * 4, out, scales, x, scales, scales, pdl=True)
    return out


def _kernel(width: int, *, gated: bool, scaled: bool) -> program.Kernel:
    return program.kernel("activation.cu", "rows_to_e4m3", WIDTH=width, GATED=int(gated), SCALED=int(scaled))
