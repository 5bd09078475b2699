"""Which version of a model a user gets, and whose requests are shadowed: by hashes of keys, so it is the same in every
gateway and after every restart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from hashlib import blake2b


def assigned_version(key: str, weights: Mapping[str, float]) -> str:
    """The version of a user, or of whatever the key stands for. Users are shared out in proportion to the weights.

    Weighted rendezvous hashing: where one version's weight rises, users move to it and between no others, so those who
    are on a canary stay there as it grows.
    """
    scores = {
        version: weight / -math.log(_uniform(f"{len(version)}:{version}{key}"))
        for version, weight in weights.items()
        if weight > 0
    }
    return max(scores, key=lambda version: scores[version])


def is_shadowed(key: str, fraction: float) -> bool:
    """Whether this request, or all requests of this key, are among the fraction that is shadowed."""
    return _uniform(f"shadow:{key}") < fraction


def _uniform(text: str) -> float:
    """Above 0 and below 1."""
    return (int.from_bytes(blake2b(text.encode(), digest_size=6).digest(), "little") + 0.5) / 2**48
