"""Number formats of the native kernels, in numpy: the plain reference of what native/pack.cpp and native/ops.h do fast.

int8  weights as scale * (q - zero), q and zero in 0..255, per output; activations likewise per token
int4  weights as minimum + scale * q, q in 0..15, per 32 inputs; activations symmetric int8 per 32 values
KV    keys and values in bfloat16, or in symmetric int8 with a bfloat16 scale per token and head
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

GROUP = 32


def round_bfloat16(x: Floats) -> Floats:
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


def int8_round_trip(x: Floats) -> Floats:
    """Each row as it survives symmetric int8 with one scale."""
    peak = np.abs(x).max(axis=-1, keepdims=True)
    inverse = np.divide(np.float32(127), peak, out=np.zeros_like(peak), where=peak > 0)
    restored: Floats = np.rint(x * inverse) * (peak / np.float32(127))
    return restored


def int8_affine_round_trip(x: Floats) -> Floats:
    """Each row as it survives 256 levels between its smallest and its largest value and 0, one of which is 0."""
    low, high = np.minimum(x.min(axis=-1, keepdims=True), 0), np.maximum(x.max(axis=-1, keepdims=True), 0)
    scale = (high - low) / np.float32(255)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    zero = np.rint(-low * inverse)
    restored: Floats = (np.clip(np.rint(x * inverse) + zero, 0, 255) - zero) * scale
    return restored


def int8_cache_round_trip(x: Floats) -> Floats:
    """Each vector as it survives int8 whose scale is the smallest bfloat16 that covers its largest value."""
    scale = np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)
    stored = ((scale.view(np.uint32) + 0xFFFF) & np.uint32(0xFFFF0000)).view(np.float32)
    inverse = np.divide(np.float32(1), stored, out=np.zeros_like(stored), where=stored > 0)
    restored: Floats = np.rint(x * inverse) * stored
    return restored


def int8_group_round_trip(x: Floats) -> Floats:
    """The same with one scale per 32 values."""
    groups = _groups(x)
    return int8_round_trip(groups).reshape(len(x), -1)[:, : x.shape[1]]


def int4_round_trip(w: Floats) -> Floats:
    """Each row as it survives 4 bits per weight with a bfloat16 scale and minimum per 32."""
    last = w.shape[1] % GROUP
    whole = _int4_groups(w[:, : w.shape[1] - last].reshape(-1, GROUP)).reshape(len(w), -1)
    return np.concatenate((whole, _int4_groups(w[:, w.shape[1] - last :])), axis=1) if last else whole


def _int4_groups(groups: Floats) -> Floats:
    low, high = groups.min(axis=1, keepdims=True), groups.max(axis=1, keepdims=True)
    scale, minimum = round_bfloat16((high - low) / np.float32(15)), round_bfloat16(low)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    restored: Floats = minimum + scale * np.clip(np.rint((groups - minimum) * inverse), 0, 15)
    return restored


def _groups(x: Floats) -> Floats:
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % GROUP)))
    return padded.reshape(len(x), -1, GROUP)
