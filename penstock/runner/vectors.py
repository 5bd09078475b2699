"""What is done to the vectors of a step before they are sent: normalising, scores between 0 and 1, bytes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


def packed_vectors(vectors_ND: Floats, *, normalize: bool = False, sigmoid: bool = False) -> list[bytes]:
    """Each as `Chunk.vector`."""
    exact_ND = vectors_ND.astype(np.float64)
    if normalize:
        exact_ND /= np.maximum(np.sqrt(np.square(exact_ND).sum(axis=1)), 1e-12)[:, None]
    if sigmoid:
        exact_ND = 1 / (1 + np.exp(-exact_ND))
    return [row.tobytes() for row in exact_ND.astype("<f4")]
