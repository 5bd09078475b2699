"""The interface of paged attention backends: the geometry of a model, and where a step's tokens lie in the KV cache.

Shape suffixes: T tokens of the step, S sequences, H query heads, K key/value heads, D head size,
N blocks of the pool, B tokens per block, M blocks in the longest table of the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The attention geometry of a model. `windows` has one entry per layer: tokens visible to a query, 0 for all."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    windows: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        return len(self.windows)


@dataclass(slots=True)
class AttentionBatch:
    """Where this step's tokens sit in the paged cache. The first `num_decodes` sequences compute one token each."""

    slots_T: torch.Tensor  # int64: block * block_size + offset where each token's key and value go
    tables_SM: torch.Tensor  # int32: block ids of each sequence, padded with 0
    query_starts: list[int]  # S + 1 offsets into T
    contexts: list[int]  # S: tokens of the sequence after this step; its last query sees them all
    num_decodes: int
    contexts_S: torch.Tensor  # int32, the same on the device


class AttentionBackend(Protocol):
    """Owns the paged keys and values of all layers."""

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare what all layers of one step share (masks, gather indices, split sizes)."""
        ...

    def run(self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
        """Write this step's keys and values into the cache, then attend causally over it. Returns [T, H, D]."""
        ...
