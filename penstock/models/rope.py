"""Rotary position embedding: each pair of a head's values turns by an angle that grows with the position."""

from __future__ import annotations

import math

import torch

from penstock.models.config import FrequencyFactors, LinearScaling, Llama3Scaling, ModelConfig, YarnScaling


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Radians per position, one for each pair: [D / 2]. float32 throughout, as in training."""
    dim, theta, scaling = config.head_dim, config.rope_theta, config.rope_scaling
    base = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    match scaling:
        case None:
            return base
        case LinearScaling(factor):
            return base / factor
        case FrequencyFactors(factors):
            return base / torch.tensor(factors, device="cpu")
        case Llama3Scaling():
            return _llama3(base, scaling)
        case YarnScaling():
            return _yarn(base, scaling, dim, theta)


def _llama3(base: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    turns = scaling.original_max_position * base / (2 * math.pi)  # within the context of pretraining
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return base * kept + base / scaling.factor * (1 - kept)


def _yarn(base: torch.Tensor, scaling: YarnScaling, dim: int, theta: float) -> torch.Tensor:
    def pair_that_turns(times: float) -> float:
        """within the context of pretraining"""
        return dim * math.log(scaling.original_max_position / (times * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    span = last - first or 0.001
    stretched = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - first) / span).clamp(0, 1)
    return base / scaling.factor * stretched + base * (1 - stretched)


class Rotary:
    """The turn of one step's tokens, computed once and applied in each layer.

    Pair i of a head is its values i and i + D/2, so that the turned head is
    `x * cos + swap(x) * sin`, where swap exchanges the halves and sin is negative in the first.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.inverse_frequencies = inverse_frequencies(config)
        self.magnitude = config.rope_scaling.attention_factor if isinstance(config.rope_scaling, YarnScaling) else 1.0

    def at(self, positions_T: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and signed sin, [T, 1, D] each, to be shared by all heads."""
        if self.inverse_frequencies.device != positions_T.device:  # in the first step only
            self.inverse_frequencies = self.inverse_frequencies.to(positions_T.device)
        angles = positions_T[:, None, None].float() * self.inverse_frequencies
        cos, sin = angles.cos() * self.magnitude, angles.sin() * self.magnitude
        return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def rotate(x_THD: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cos, sin = turn
    return torch.addcmul(x_THD * cos, x_THD.roll(x_THD.shape[-1] // 2, dims=-1), sin)
