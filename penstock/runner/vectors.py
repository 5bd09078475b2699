"""What executors that compute vectors have in common, and what is done to the vectors of a step before they are sent:
normalising, scores between 0 and 1, bytes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from penstock.core.errors import EngineFailure
from penstock.engine.executor import AdapterWeights, Step, TokenMask
from penstock.engine.step_work import KernelProbe

Floats = npt.NDArray[np.float32]


class VectorExecutor:
    """The part of an executor that does not depend on the model, where nothing is sampled."""

    runs_ahead = False
    verifies_drafts = False
    adapter_modules: Mapping[str, tuple[int, int]] = {}
    idle_seconds: float | None = None
    mask_memory: TokenMask | None = None
    kernel_probe: KernelProbe | None = None

    def prepare_adapter(self, adapter: AdapterWeights) -> None:
        """It computes without adapters."""

    def padded_tokens(self, tokens: int) -> int:
        return tokens

    def launch(self, step: Step) -> Step:
        return step

    def constrain(self, step: Step, masks: TokenMask) -> None:
        raise EngineFailure("a model that computes vectors samples nothing")

    def resample(self, step: Step, masks: Mapping[int, TokenMask]) -> list[int]:
        raise EngineFailure("a model that computes vectors samples nothing")


def packed_vectors(vectors_ND: Floats, *, normalize: bool = False, sigmoid: bool = False) -> list[bytes]:
    """Each as `Chunk.vector`; empty where not all of it are numbers."""
    exact_ND = vectors_ND.astype(np.float64)
    if normalize:
        exact_ND /= np.maximum(np.sqrt(np.square(exact_ND).sum(axis=1)), 1e-12)[:, None]
    if sigmoid:
        exact_ND = 1 / (1 + np.exp(-exact_ND))
    return [row.tobytes() if np.isfinite(row).all() else b"" for row in exact_ND.astype("<f4")]
