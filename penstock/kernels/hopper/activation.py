"""SiLU(gate) * up, quantised, for Hopper: rows stay in registers between finding their largest value and using it."""

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
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    of_rows, of_channels = unscaled or (scales, scales)
    run = program.kernel("activation.cu", "silu_mul_e4m3", WIDTH=width, SCALED=int(unscaled is not None))
    run((rows,), _THREADS, _WARPS * 4, out, scales, gate_up, of_rows, of_channels, pdl=True)
    return out
