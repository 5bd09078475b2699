"""Paged attention in plain torch: the reference for every other backend, and the fallback on any device.

Sequences that compute one token are batched: their keys are gathered into a padded [S, L] rectangle and masked.
The others are attended one by one. Shape suffixes as in base.py; G query heads per key/value head, L context tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from penstock.kernels.base import AttentionBatch, AttentionSpec

# A padded rectangle of gathered keys is split so that it stays near this many tokens.
_GATHER_TOKENS = 32_768


@dataclass(slots=True)
class _Decodes:
    """Consecutive sequences of one token each."""

    first: int
    last: int
    slots_SL: torch.Tensor
    hidden_SL: dict[int, torch.Tensor]  # by window: which positions may not be seen


@dataclass(slots=True)
class _Prefill:
    first: int  # its tokens in T
    last: int
    slots_L: torch.Tensor
    visible_TL: dict[int, torch.Tensor]  # by window


class ReferenceAttention:
    def __init__(
        self, spec: AttentionSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._spec = spec
        self._block_size = block_size
        shape = (spec.num_layers, num_blocks * block_size, spec.num_kv_heads, spec.head_dim)
        # Never initialised: on the CPU untouched pages cost no memory. Unwritten slots are masked, not read as numbers.
        self._keys = torch.empty(shape, dtype=dtype, device=device)
        self._values = torch.empty(shape, dtype=dtype, device=device)
        self._slots_T = torch.empty(0, dtype=torch.int64, device=device)
        self._decodes: list[_Decodes] = []
        self._prefills: list[_Prefill] = []

    def plan(self, batch: AttentionBatch) -> None:
        self._slots_T = batch.slots_T
        windows = set(self._spec.windows)
        self._decodes = self._plan_decodes(batch, windows)
        self._prefills = [
            self._plan_prefill(batch, index, windows) for index in range(batch.num_decodes, len(batch.contexts))
        ]

    def _plan_decodes(self, batch: AttentionBatch, windows: set[int]) -> list[_Decodes]:
        groups, first = [], 0
        while first < batch.num_decodes:
            longest, last = batch.contexts[first], first + 1
            while last < batch.num_decodes:
                longest_with = max(longest, batch.contexts[last])
                if longest_with * (last - first + 1) > _GATHER_TOKENS:
                    break
                longest, last = longest_with, last + 1
            positions_L = torch.arange(longest, device=batch.slots_T.device)
            contexts_S1 = batch.contexts_S[first:last, None]
            hidden = dict.fromkeys(windows, positions_L >= contexts_S1)
            for window in windows - {0}:
                hidden[window] = hidden[window] | (positions_L < contexts_S1 - window)
            slots_SL = self._slots(batch.tables_SM[first:last], positions_L)
            # Padding reads block 0, which may hold anything, NaN too: point it at the sequence's own first slot.
            slots_SL = torch.where(positions_L < contexts_S1, slots_SL, slots_SL[:, :1])
            groups.append(_Decodes(first, last, slots_SL, hidden))
            first = last
        return groups

    def _plan_prefill(self, batch: AttentionBatch, index: int, windows: set[int]) -> _Prefill:
        first, last = batch.query_starts[index], batch.query_starts[index + 1]
        context = batch.contexts[index]
        positions_L = torch.arange(context, device=batch.slots_T.device)
        queries_T1 = torch.arange(context - (last - first), context, device=batch.slots_T.device)[:, None]
        causal = positions_L <= queries_T1
        visible = {w: causal if w == 0 else causal & (positions_L > queries_T1 - w) for w in windows}
        slots_L = self._slots(batch.tables_SM[index : index + 1], positions_L)[0]
        return _Prefill(first, last, slots_L, visible)

    def _slots(self, tables_SM: torch.Tensor, positions_L: torch.Tensor) -> torch.Tensor:
        blocks_SL = tables_SM[:, positions_L // self._block_size].to(torch.int64)
        return blocks_SL * self._block_size + positions_L % self._block_size

    def run(self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
        keys, values = self._keys[layer], self._values[layer]
        keys[self._slots_T] = k_TKD
        values[self._slots_T] = v_TKD
        window = self._spec.windows[layer]
        out_THD = torch.empty_like(q_THD)
        for group in self._decodes:
            out_THD[group.first : group.last] = self._decode(
                q_THD[group.first : group.last], keys[group.slots_SL], values[group.slots_SL], group.hidden_SL[window]
            )
        for item in self._prefills:
            out_THD[item.first : item.last] = scaled_dot_product_attention(
                q_THD[item.first : item.last].transpose(0, 1)[None],
                keys[item.slots_L].transpose(0, 1)[None],
                values[item.slots_L].transpose(0, 1)[None],
                attn_mask=item.visible_TL[window],
                scale=self._spec.scale,
                enable_gqa=True,
            )[0].transpose(0, 1)
        return out_THD

    def _decode(
        self, q_SHD: torch.Tensor, k_SLKD: torch.Tensor, v_SLKD: torch.Tensor, hidden_SL: torch.Tensor
    ) -> torch.Tensor:
        spec = self._spec
        q_SKGD = q_SHD.view(len(q_SHD), spec.num_kv_heads, -1, spec.head_dim)
        scores_SKGL = torch.matmul(q_SKGD, k_SLKD.permute(0, 2, 3, 1)).float() * spec.scale
        scores_SKGL = scores_SKGL.masked_fill(hidden_SL[:, None, None, :], float("-inf"))
        weights = scores_SKGL.softmax(-1).to(v_SLKD.dtype)
        return torch.matmul(weights, v_SLKD.transpose(1, 2)).flatten(1, 2)


def torch_block_bytes(spec: AttentionSpec, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one KV block over all layers, keys and values."""
    return 2 * spec.num_layers * block_size * spec.num_kv_heads * spec.head_dim * dtype.itemsize
