"""The dense decoder of `models/llama.py` by fused Triton kernels: seven launches a layer for any batch.

    norm · qkv   →   q/k norm · rope · cache write   →   attention   →   out + residual
    norm · gate_up · silu·mul   →   down + residual

T tokens, S sequences, C hidden size, H query heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from penstock.kernels.attention_triton import (
    SharedPrefix,
    decode_attention,
    decode_scratch,
    decode_splits,
)
from penstock.kernels.gemm_triton import split_scratch
from penstock.kernels.linear_triton import linear
from penstock.kernels.prefill_triton import prefill_attention
from penstock.kernels.rope_triton import rope_and_cache
from penstock.models.base import CausalLM
from penstock.models.config import ModelConfig
from penstock.models.layers import MLP, Linear
from penstock.models.llama import DecoderLayer, Llama
from penstock.models.rope import Rotary
from penstock.quantization.fp8 import quantize_channels
from penstock.runner.batch import Batch
from penstock.runner.row_state import RowState
from penstock.runner.transfer import to_device

Attend = Callable[[int, torch.Tensor], torch.Tensor]  # (layer, queries [T, H, D]) -> [T, H, D]


@dataclass(frozen=True, slots=True)
class _Projection:
    weight: torch.Tensor
    scales: torch.Tensor | None  # of the channels, for fp8
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: torch.Tensor
    qkv: _Projection
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    out: _Projection
    mlp_norm: torch.Tensor
    gate_up: _Projection
    down: _Projection


class FusedForward:
    """Weights, paged cache and scratch memory on one device. Not for use by two threads at once."""

    def __init__(
        self,
        model: Llama,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        max_seqs: int,
        max_model_len: int,
    ) -> None:
        spec = model.attention_spec
        self._spec = spec
        self._eps = config.norm_eps
        self._block_size = block_size
        self.max_model_len = max_model_len
        self.num_heads = spec.num_heads
        self._embedding = model.embedding
        self._norm = model.norm.weight
        self._head = _Projection(model.head.weight if model.head else model.embedding, None, None)
        self._layers = [_layer(layer) for layer in model.layers]
        self.device = model.embedding.device
        self._cos_sin = _cos_sin(model.rotary, max_model_len, self.device)
        cache = (spec.num_layers, num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
        self._keys = torch.empty(cache, dtype=model.embedding.dtype, device=self.device)
        self._values = torch.empty(cache, dtype=model.embedding.dtype, device=self.device)
        self._splits = split_scratch(self.device)
        parts = max(size * decode_splits(size, spec.num_kv_heads, max_model_len) for size in range(1, max_seqs + 1))
        slots = -(-parts // max_seqs) + 16  # a prefix that sequences share is at most 16 parts more
        self._decode_scratch = decode_scratch(
            max_seqs, spec.num_heads, spec.num_kv_heads, spec.head_dim, slots, self.device
        )

    def __call__(
        self, batch: Batch, state: RowState, logit_rows: npt.NDArray[np.int32]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        put = self._put
        tokens_T = put(batch.tokens_T)
        tokens_T = torch.where(tokens_T < 0, state.last_token_R[put(batch.rows_T).long()].int(), tokens_T)
        attend = self.attend_mixed(
            put(batch.tables_SM), put(batch.query_starts), put(batch.contexts_S), batch.num_decodes, len(batch.tokens_T)
        )
        x_TC = self.hidden(tokens_T, put(batch.positions_T), put(batch.slots_T), attend)
        if not len(logit_rows):  # chunks of prompts only
            return x_TC[:0], x_TC.new_empty(0, dtype=torch.int64)
        logits_RV = self.logits(x_TC[put(logit_rows).long()])
        return logits_RV, logits_RV.argmax(-1)

    def _put(self, values: npt.NDArray[np.int32]) -> torch.Tensor:
        return to_device(values, self.device)

    def warm_up(self) -> None:
        """Run a short prompt that writes nothing, so that the kernels of mixed steps are there."""
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
            zeros = torch.zeros(256, dtype=torch.int32, device=self.device)
            ends = torch.tensor([0, 256], dtype=torch.int32, device=self.device)
            attend = self.attend_mixed(zeros[None], ends, ends[1:], 0, len(zeros))
            self.logits(self.hidden(zeros, zeros, zeros - 1, attend)[:1])

    def clear_scratch(self) -> None:
        self._splits.arrivals.zero_()
        self._decode_scratch.arrivals.zero_()

    def hidden(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, slots_T: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """The residual stream after the last layer; the final norm belongs to `logits`."""
        x_TC = F.embedding(tokens_T, self._embedding)
        for number, layer in enumerate(self._layers):
            qkv = self._project(x_TC, layer.qkv, norm=layer.attention_norm)
            q_THD = rope_and_cache(
                qkv,
                self._cos_sin,
                positions_T,
                slots_T,
                self._keys[number],
                self._values[number],
                self._spec.num_heads,
                norm_weights=layer.head_norms,
                eps=self._eps,
            )
            mixed = attend(number, q_THD).flatten(1)
            x_TC = self._project(mixed, layer.out, residual=x_TC)
            inner = self._project(x_TC, layer.gate_up, norm=layer.mlp_norm, gated=True)
            x_TC = self._project(inner, layer.down, residual=x_TC)
        return x_TC

    def logits(self, x_RC: torch.Tensor) -> torch.Tensor:
        return self._project(x_RC, self._head, norm=self._norm)

    def _project(
        self,
        x: torch.Tensor,
        projection: _Projection,
        *,
        norm: torch.Tensor | None = None,
        gated: bool = False,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = linear(
            x,
            projection.weight,
            self._splits,
            scales=projection.scales,
            norm=(norm, self._eps) if norm is not None else None,
            gated=gated,
            residual=residual,
        )
        return out if projection.bias is None else out.add_(projection.bias)

    def attend_mixed(
        self,
        tables_SM: torch.Tensor,
        query_starts: torch.Tensor,
        contexts_S: torch.Tensor,
        num_decodes: int,
        num_tokens: int,
    ) -> Attend:
        """Attention of sequences that decode, then of those that compute several tokens."""
        decode = self.attend_decode(tables_SM[:num_decodes], contexts_S[:num_decodes])

        def attend(layer: int, q_THD: torch.Tensor) -> torch.Tensor:
            out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
            if num_decodes:
                out_THD[:num_decodes] = decode(layer, q_THD[:num_decodes])
            if num_tokens > num_decodes:
                prefill_attention(
                    out_THD,
                    q_THD,
                    self._keys[layer],
                    self._values[layer],
                    tables_SM[num_decodes:],
                    query_starts[num_decodes:],
                    contexts_S[num_decodes:],
                    num_queries=num_tokens - num_decodes,
                    scale=self._spec.scale,
                    window=self._spec.windows[layer],
                )
            return out_THD

        return attend

    def attend_decode(
        self, tables_SM: torch.Tensor, contexts_S: torch.Tensor, prefix: SharedPrefix | None = None
    ) -> Attend:
        splits = decode_splits(max(1, len(contexts_S)), self._spec.num_kv_heads, self.max_model_len)

        def attend(layer: int, q_SHD: torch.Tensor) -> torch.Tensor:
            out_SHD = torch.empty_like(q_SHD, memory_format=torch.contiguous_format)
            window = self._spec.windows[layer]
            decode_attention(
                out_SHD,
                q_SHD,
                self._keys[layer],
                self._values[layer],
                tables_SM,
                contexts_S,
                scale=self._spec.scale,
                splits=splits,
                scratch=self._decode_scratch,
                window=window,
                prefix=None if window else prefix,
            )
            return out_SHD

        return attend


def supports_fused(model: CausalLM, config: ModelConfig) -> TypeGuard[Llama]:
    """Dense, and without biases in the places where the kernels fold other work in."""
    return isinstance(model, Llama) and config.moe is None and not config.mlp_bias and not config.output_bias


def quantize_fp8(model: Llama) -> None:
    """Replace the weights of all layers by e4m3 with a scale per channel, one by one; embedding and head stay."""
    for layer in model.layers:
        assert isinstance(layer.mlp, MLP), "experts have no fused form"
        for module in (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down):
            quantized = quantize_channels(module.weight)
            module.weight = torch.nn.Parameter(quantized.weight, requires_grad=False)
            module.register_buffer("scales", quantized.scales)


def _projection(module: Linear) -> _Projection:
    return _Projection(module.weight, getattr(module, "scales", None), module.bias)


def _layer(layer: DecoderLayer) -> _Layer:
    assert isinstance(layer.mlp, MLP), "experts have no fused form"
    attention = layer.attention
    norms = (attention.q_norm.weight, attention.k_norm.weight) if attention.q_norm and attention.k_norm else None
    return _Layer(
        attention_norm=layer.attention_norm.weight,
        qkv=_projection(attention.qkv),
        head_norms=norms,
        out=_projection(attention.out),
        mlp_norm=layer.mlp_norm.weight,
        gate_up=_projection(layer.mlp.gate_up),
        down=_projection(layer.mlp.down),
    )


def _cos_sin(rotary: Rotary, positions: int, device: torch.device) -> torch.Tensor:
    """[positions, D]: cosines, then sines, of the angles of each pair."""
    angles = torch.arange(positions, device=device).float()[:, None] * rotary.inverse_frequencies.to(device)
    return torch.cat((angles.cos(), angles.sin()), -1) * rotary.magnitude
