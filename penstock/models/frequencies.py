"""Rotary frequencies: how fast each pair of a head's values rotates with the position, with context scaling."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from penstock.models.config import FrequencyFactors, LinearScaling, Llama3Scaling, ModelConfig, YarnScaling

Floats = npt.NDArray[np.float32]


def inverse_frequencies(config: ModelConfig) -> Floats:
    """Radians per position, one for each pair: [D / 2]. float32 throughout, as in training."""
    dim, theta, scaling = config.head_dim, config.rope_theta, config.rope_scaling
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    base: Floats = np.float32(1) / np.power(np.float32(theta), exponents, dtype=np.float32)
    match scaling:
        case None:
            return base
        case LinearScaling(factor):
            return base / np.float32(factor)
        case FrequencyFactors(factors):
            return np.divide(base, np.array(factors, dtype=np.float32), dtype=np.float32)
        case Llama3Scaling():
            return _llama3(base, scaling)
        case YarnScaling():
            return _yarn(base, scaling, dim, theta)


def rope_magnitude(config: ModelConfig) -> float:
    """What YaRN multiplies the rotary cosines and sines by."""
    return config.rope_scaling.attention_factor if isinstance(config.rope_scaling, YarnScaling) else 1.0


def _llama3(base: Floats, scaling: Llama3Scaling) -> Floats:
    rotations = (
        np.float32(scaling.original_max_position) * base / np.float32(2 * math.pi)
    )  # within pretraining's context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((rotations - np.float32(low)) / np.float32(high - low)).clip(0, 1)
    scaled: Floats = base * kept + base / np.float32(scaling.factor) * (1 - kept)
    return scaled


def _yarn(base: Floats, scaling: YarnScaling, dim: int, theta: float) -> Floats:
    def pair_that_turns(times: float) -> float:
        """within the context of pretraining"""
        return dim * math.log(scaling.original_max_position / (times * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    span = last - first or 0.001
    stretched = ((np.arange(dim // 2, dtype=np.float32) - np.float32(first)) / np.float32(span)).clip(0, 1)
    scaled: Floats = base / np.float32(scaling.factor) * stretched + base * (1 - stretched)
    return scaled
