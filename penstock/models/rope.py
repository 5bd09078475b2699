"""Rotary position embedding: each pair of a head's values is rotated by an angle that grows with the position."""

from __future__ import annotations

import torch

from penstock.models.config import ModelConfig
from penstock.models.frequencies import inverse_frequencies, rope_magnitude


class Rotary:
    """Cosines and sines of the positions of a step, computed once and applied in each layer.

    Pair i of a head is its values i and i + D/2, so that the rotated head is
    `x * cos + swap(x) * sin`, where swap exchanges the halves and sin is negative in the first.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.inverse_frequencies = torch.from_numpy(inverse_frequencies(config))
        self.magnitude = rope_magnitude(config)

    def at(self, positions_T: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and signed sin, [T, 1, D] each, to be shared by all heads."""
        if self.inverse_frequencies.device != positions_T.device:  # in the first step only
            self.inverse_frequencies = self.inverse_frequencies.to(positions_T.device)
        angles = positions_T[:, None, None].float() * self.inverse_frequencies
        cos, sin = angles.cos() * self.magnitude, angles.sin() * self.magnitude
        return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def rotate(x_THD: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cos, sin = cos_sin
    return torch.addcmul(x_THD * cos, x_THD.roll(x_THD.shape[-1] // 2, dims=-1), sin)
