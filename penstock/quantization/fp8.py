"""Weights in e4m3 with one scale per output channel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

E4M3_MAX = 448.0


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    weight: torch.Tensor  # float8_e4m3fn [..., N, K]
    scales: torch.Tensor  # float32 [..., N]: weight * scales[..., None] is close to the original


def quantize_channels(weight: torch.Tensor) -> Fp8Weight:
    scales = weight.abs().amax(-1).float().clamp_min(1e-12) / E4M3_MAX
    return Fp8Weight((weight / scales[..., None].to(weight.dtype)).to(torch.float8_e4m3fn), scales)
