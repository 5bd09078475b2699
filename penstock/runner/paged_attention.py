"""Paged attention of a step on CUDA; it owns the KV cache.

A step makes one `Attend` for all its layers: how decoding sequences are split into parts is planned once. T tokens, S
sequences, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from penstock.kernels.base import AttentionSpec
from penstock.kernels.hopper.attention import clear_counters
from penstock.kernels.hopper.decode import StreamConfig, decode_stream, stream_config, streams_decode
from penstock.kernels.triton.decode import DecodeConfig, Rope, decode_attention, decode_config, decode_scratch
from penstock.kernels.triton.decode_inputs import DecodeInputs
from penstock.kernels.triton.prefill import prefill_attention
from penstock.kernels.triton.prefix import SharedPrefix, prefix_splits
from penstock.kernels.triton.rope import rope_and_cache
from penstock.models.rope import Rotary
from penstock.runner.batch import Batch

MOST_DRAFTED = 64  # tokens of one sequence in a step of `attend_decode` with drafts

# (layer, its queries, keys and values as projected [T, (H + 2 K) * D]) -> [T, H, D], with the new ones in the cache
Attend = Callable[[int, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class MixedStep:
    """A `Batch` on the device, as far as attention reads it."""

    positions_T: torch.Tensor
    slots_T: torch.Tensor
    tables_SM: torch.Tensor
    query_starts: torch.Tensor
    contexts_S: torch.Tensor
    num_decodes: int
    num_queries: int  # of the other sequences, at most
    most_padding: int = 0  # tokens at the end that belong to no sequence, at most

    @classmethod
    def of(cls, batch: Batch, put: Callable[[npt.NDArray[np.int32]], torch.Tensor]) -> MixedStep:
        return cls(
            positions_T=put(batch.positions_T),
            slots_T=put(batch.slots_T),
            tables_SM=put(batch.tables_SM),
            query_starts=put(batch.query_starts),
            contexts_S=put(batch.contexts_S),
            num_decodes=batch.num_decodes,
            num_queries=len(batch.tokens_T) - batch.num_decodes,
        )


class PagedAttention:
    def __init__(
        self,
        spec: AttentionSpec,
        rotary: Rotary,
        head_norms: Sequence[tuple[torch.Tensor, torch.Tensor] | None],
        eps: float,
        *,
        num_blocks: int,
        block_size: int,
        max_seqs: int,
        max_model_len: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device,
        deterministic: bool = False,
    ) -> None:
        """`head_norms` are the gains of query and key heads of each layer that has them.

        `deterministic`: decode tokens take the kernel that prompts take, and its keys are divided by position, so that
        a token's attention has the same bits in any batch, however its sequence was chunked.
        """
        self._deterministic = deterministic
        self._one_each = torch.arange(max_seqs + 1, dtype=torch.int32, device=device)  # query starts of a decode step
        self._spec = spec
        self._head_norms = head_norms
        self._eps = eps
        self._block_size = block_size
        self._dtype = dtype
        self._kv_dtype = kv_dtype
        self._device = device
        self.cos_sin = _cos_sin(rotary, max_model_len, device)
        self.allocate(num_blocks)
        H, K = spec.num_heads, spec.num_kv_heads
        rotated = self.cos_sin.shape[1]
        self._streams = streams_decode(spec.head_dim, H // K, block_size, rotated, dtype, kv_dtype, device)
        sizes = range(1, max_seqs + 1)
        shared = max(size * prefix_splits(size, H, max_model_len) for size in sizes)
        parts = max(self._decode_config(size).division(size, K).parts for size in sizes)
        self._scratch = decode_scratch(max_seqs, H, K, spec.head_dim, parts + shared, device)

    def allocate(self, num_blocks: int) -> None:
        """Replace the KV cache: its contents and the CUDA graphs over it become invalid."""
        spec = self._spec
        shape = (spec.num_layers, num_blocks, spec.num_kv_heads, self._block_size, spec.head_dim)
        self.num_blocks = num_blocks
        self.keys = self.values = torch.empty(0)  # the old memory goes first
        self.keys = torch.empty(shape, dtype=self._kv_dtype, device=self._device)
        self.values = torch.empty(shape, dtype=self._kv_dtype, device=self._device)

    def clear_scratch(self) -> None:
        self._scratch.arrivals.zero_()
        clear_counters(self._device)

    def attend_mixed(self, step: MixedStep) -> Attend:
        """Attention of sequences that decode, then of those that compute several tokens."""
        if self._deterministic:
            return self._attend_invariant(step)
        decodes = step.num_decodes
        attend_decodes = self._divided(step.tables_SM[:decodes], step.contexts_S[:decodes]) if decodes else None

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            q_THD = self._turn(layer, qkv, step.positions_T, step.slots_T)
            out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
            if step.most_padding:  # nobody writes it, and experts are chosen by what it becomes
                out_THD[-step.most_padding :].zero_()
            if attend_decodes:
                attend_decodes(layer, out_THD[:decodes], q_THD[:decodes], None, None)
            if step.num_queries:
                prefill_attention(
                    out_THD,
                    q_THD,
                    self.keys[layer],
                    self.values[layer],
                    step.tables_SM[decodes:],
                    step.query_starts[decodes:],
                    step.contexts_S[decodes:],
                    num_queries=step.num_queries,
                    scale=self._spec.scale,
                    window=self._spec.windows[layer],
                )
            return out_THD

        return attend

    def attend_decode(
        self,
        inputs: DecodeInputs,
        contexts_S: torch.Tensor,
        prefix: SharedPrefix | None = None,
        *,
        drafts: bool = False,
    ) -> Attend:
        """Attention of sequences that all decode, with cascade attention where some share a prefix.

        `drafts`: an entry is a token, and several may be of one sequence, each with the context up to itself. So all of
        their keys and values are written before any of them attends.
        """
        spec = self._spec
        if self._deterministic:
            size = len(contexts_S)
            starts = self._one_each[: size + 1]
            return self._attend_invariant(
                MixedStep(inputs.positions_S, inputs.slots_S, inputs.tables_SM, starts, contexts_S, size, size)
            )
        attend_parts = self._divided(inputs.tables_SM, contexts_S, prefix, MOST_DRAFTED if drafts else 1)

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            out_SHD = qkv.new_empty((len(qkv), spec.num_heads, spec.head_dim))
            cascades = prefix is not None and not spec.windows[layer]
            if drafts or cascades:
                q_SHD = self._turn(layer, qkv, inputs.positions_S, inputs.slots_S)
                attend_parts(layer, out_SHD, q_SHD, None, prefix if cascades else None)
            else:
                attend_parts(layer, out_SHD, qkv, Rope(self.cos_sin, self._head_norms[layer], self._eps), None)
            return out_SHD

        return attend

    def _attend_invariant(self, step: MixedStep) -> Attend:
        """Attention of all sequences alike, whether they decode or compute several tokens."""
        spec, tokens = self._spec, len(step.positions_T)
        # Padding is zero in all layers: nobody writes it.
        out_THD = torch.zeros((tokens, spec.num_heads, spec.head_dim), dtype=self._dtype, device=self._device)

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            prefill_attention(
                out_THD,
                self._turn(layer, qkv, step.positions_T, step.slots_T),
                self.keys[layer],
                self.values[layer],
                step.tables_SM,
                step.query_starts,
                step.contexts_S,
                num_queries=tokens,
                scale=spec.scale,
                window=spec.windows[layer],
                invariant=True,
            )
            return out_THD

        return attend

    def _divided(
        self,
        tables_SM: torch.Tensor,
        contexts_S: torch.Tensor,
        prefix: SharedPrefix | None = None,
        new_tokens: int = 1,
    ) -> Callable[[int, torch.Tensor, torch.Tensor, Rope | None, SharedPrefix | None], None]:
        """Decode attention by one plan for all layers of the same window."""
        spec = self._spec
        config = self._decode_config(len(contexts_S), after_prefix=prefix is not None)
        division = config.division(len(contexts_S), spec.num_kv_heads)
        plans = {
            window: division.plan(
                contexts_S, window=window, shared_S=prefix.lengths_S if prefix and not window else None
            )
            for window in set(spec.windows)
        }

        def attend(
            layer: int, out_SHD: torch.Tensor, q: torch.Tensor, rope: Rope | None, prefix: SharedPrefix | None
        ) -> None:
            given = (out_SHD, q, self.keys[layer], self.values[layer], tables_SM, plans[spec.windows[layer]])
            scale, scratch = spec.scale, self._scratch
            if isinstance(config, StreamConfig):
                decode_stream(
                    *given,
                    scale=scale,
                    scratch=scratch,
                    config=config,
                    rope=rope,
                    prefix=prefix,
                    new_tokens=1 if rope else new_tokens,
                )
            else:
                decode_attention(*given, scale=scale, scratch=scratch, config=config, rope=rope, prefix=prefix)

        return attend

    def _decode_config(self, num_seqs: int, *, after_prefix: bool = False) -> StreamConfig | DecodeConfig:
        spec = self._spec
        if self._streams:
            return stream_config(num_seqs, spec.num_kv_heads)
        row_bytes = spec.head_dim * self.keys.itemsize
        return decode_config(num_seqs, spec.num_kv_heads, row_bytes, after_prefix=after_prefix)

    def _turn(self, layer: int, qkv: torch.Tensor, positions_T: torch.Tensor, slots_T: torch.Tensor) -> torch.Tensor:
        return rope_and_cache(
            qkv,
            self.cos_sin,
            positions_T,
            slots_T,
            self.keys[layer],
            self.values[layer],
            self._spec.num_heads,
            norm_weights=self._head_norms[layer],
            eps=self._eps,
            block_h=8 if self._deterministic else None,
        )


def _cos_sin(rotary: Rotary, positions: int, device: torch.device) -> torch.Tensor:
    """[positions, D]: cosines, then sines, of the angles of each pair."""
    angles = torch.arange(positions, device=device).float()[:, None] * rotary.inverse_frequencies.to(device)
    return torch.cat((angles.cos(), angles.sin()), -1) * rotary.magnitude
