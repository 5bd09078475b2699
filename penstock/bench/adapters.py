"""LoRA adapters with random weights for benchmarks, of which only sizes matter. They change every linear layer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from penstock.core.request import Adapter
from penstock.engine.executor import AdapterWeights

RANK = 16


def adapter_of(number: int) -> Adapter:
    return Adapter(digest=f"random adapter {number}", folder="")


class RandomAdapters:
    """Each is drawn when it is first asked for."""

    def __init__(self, modules: Mapping[str, tuple[int, int]], rank: int = RANK) -> None:
        self._modules = modules
        self._rank = rank
        self._drawn: dict[str, AdapterWeights] = {}

    def get(self, adapter: Adapter, /) -> AdapterWeights:
        if adapter.digest not in self._drawn:
            self._drawn[adapter.digest] = self._draw(adapter.digest)
        return self._drawn[adapter.digest]

    def _draw(self, digest: str) -> AdapterWeights:
        rng, rank = np.random.default_rng(list(digest.encode())), self._rank

        def normal(rows: int, columns: int, size: float) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
            return rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(size)

        modules = {
            name: (normal(rank, inputs, inputs**-0.5), normal(outputs, rank, 0.02))
            for name, (inputs, outputs) in self._modules.items()
        }
        return AdapterWeights(digest, rank, modules)
