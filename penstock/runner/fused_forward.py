"""The dense decoder of `models/llama.py` by fused Triton kernels: five launches a layer for one decoding sequence.

    norm · qkv   →   q/k norm · rope · cache write · attention   →   out + residual
    norm · gate_up · silu·mul   →   down + residual

Larger batches take the norm, and the largest silu·mul, out of the products; steps with prompts take out rope as well.

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
    Turn,
    decode_attention,
    decode_config,
    decode_scratch,
    prefix_splits,
)
from penstock.kernels.decode_inputs_triton import DecodeInputs
from penstock.kernels.decode_plan_triton import decode_parts, plan_decode
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

# (layer, its queries, keys and values as projected [T, (H + 2 K) * D]) -> [T, H, D], with the new ones in the cache
Attend = Callable[[int, torch.Tensor], torch.Tensor]


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


@dataclass(frozen=True, slots=True)
class _MixedStep:
    """A `Batch` on the device, as far as attention reads it."""

    positions_T: torch.Tensor
    slots_T: torch.Tensor
    tables_SM: torch.Tensor
    query_starts: torch.Tensor
    contexts_S: torch.Tensor
    num_decodes: int

    @classmethod
    def of(cls, batch: Batch, put: Callable[[npt.NDArray[np.int32]], torch.Tensor]) -> _MixedStep:
        return cls(
            positions_T=put(batch.positions_T),
            slots_T=put(batch.slots_T),
            tables_SM=put(batch.tables_SM),
            query_starts=put(batch.query_starts),
            contexts_S=put(batch.contexts_S),
            num_decodes=batch.num_decodes,
        )


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
        self.embedding = model.embedding
        self._norm = model.norm.weight
        self._head = _Projection(model.head.weight if model.head else model.embedding, None, None)
        self._layers = [_layer(layer) for layer in model.layers]
        self.device = model.embedding.device
        self._cos_sin = _cos_sin(model.rotary, max_model_len, self.device)
        cache = (spec.num_layers, num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
        self._keys = torch.empty(cache, dtype=model.embedding.dtype, device=self.device)
        self._values = torch.empty(cache, dtype=model.embedding.dtype, device=self.device)
        self._splits = split_scratch(self.device)
        shared = max(size * prefix_splits(size, spec.num_heads, max_model_len) for size in range(1, max_seqs + 1))
        rows = decode_parts(max_seqs, spec.num_kv_heads) + shared
        self._decode_scratch = decode_scratch(
            max_seqs, spec.num_heads, spec.num_kv_heads, spec.head_dim, rows, self.device
        )

    def __call__(
        self, batch: Batch, state: RowState, logit_rows: npt.NDArray[np.int32]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        put = self._put
        tokens_T = put(batch.tokens_T)
        tokens_T = torch.where(tokens_T < 0, state.last_token_R[put(batch.rows_T).long()].int(), tokens_T)
        x_TC = F.embedding(tokens_T, self.embedding)
        x_TC = self.hidden(x_TC, self._attend_mixed(_MixedStep.of(batch, put)))
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
            step = _MixedStep(zeros, zeros - 1, zeros[None], ends, ends[1:], num_decodes=0)
            x_TC = F.embedding(zeros, self.embedding)
            self.logits(self.hidden(x_TC, self._attend_mixed(step), self.distinct_layers)[:1])

    def clear_scratch(self) -> None:
        self._splits.arrivals.zero_()
        self._decode_scratch.arrivals.zero_()

    @property
    def distinct_layers(self) -> int:
        """The first layers that use every kernel there is; they differ in their windows at most."""
        windows = self._spec.windows
        return max(windows.index(window) for window in set(windows)) + 1

    def hidden(self, x_TC: torch.Tensor, attend: Attend, layers: int | None = None) -> torch.Tensor:
        """From embeddings to the residual stream after the last layer; the final norm belongs to `logits`."""
        for number, layer in enumerate(self._layers[:layers]):
            qkv = self._project(x_TC, layer.qkv, norm=layer.attention_norm)
            mixed = attend(number, qkv).flatten(1)
            x_TC = self._project(mixed, layer.out, residual=x_TC)
            inner = self._project(x_TC, layer.gate_up, norm=layer.mlp_norm, gated=True)
            x_TC = self._project(inner, layer.down, residual=x_TC)
        return x_TC

    def logits(self, x_RC: torch.Tensor) -> torch.Tensor:
        """In float32: rounded to bfloat16, likely tokens would tie."""
        return self._project(x_RC, self._head, norm=self._norm, out_dtype=torch.float32)

    def _project(
        self,
        x: torch.Tensor,
        projection: _Projection,
        *,
        norm: torch.Tensor | None = None,
        gated: bool = False,
        residual: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        out = linear(
            x,
            projection.weight,
            self._splits,
            scales=projection.scales,
            norm=(norm, self._eps) if norm is not None else None,
            gated=gated,
            residual=residual,
            out_dtype=out_dtype,
        )
        return out if projection.bias is None else out.add_(projection.bias)

    def _attend_mixed(self, step: _MixedStep) -> Attend:
        """Attention of sequences that decode, then of those that compute several tokens."""
        decodes = step.num_decodes
        attend_decodes = self._divided(step.tables_SM[:decodes], step.contexts_S[:decodes]) if decodes else None
        prompts = len(step.positions_T) - decodes

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            q_THD = self._turn(layer, qkv, step.positions_T, step.slots_T)
            out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
            if attend_decodes:
                attend_decodes(layer, out_THD[:decodes], q_THD[:decodes], None, None)
            if prompts:
                prefill_attention(
                    out_THD,
                    q_THD,
                    self._keys[layer],
                    self._values[layer],
                    step.tables_SM[decodes:],
                    step.query_starts[decodes:],
                    step.contexts_S[decodes:],
                    num_queries=prompts,
                    scale=self._spec.scale,
                    window=self._spec.windows[layer],
                )
            return out_THD

        return attend

    def attend_decode(
        self, inputs: DecodeInputs, contexts_S: torch.Tensor, prefix: SharedPrefix | None = None
    ) -> Attend:
        """Attention of sequences that all decode, over a prefix that some of them share where there is one."""
        spec = self._spec
        attend_parts = self._divided(inputs.tables_SM, contexts_S, prefix)

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            out_SHD = qkv.new_empty((len(qkv), spec.num_heads, spec.head_dim))
            if prefix is not None and not spec.windows[layer]:
                q_SHD = self._turn(layer, qkv, inputs.positions_S, inputs.slots_S)
                attend_parts(layer, out_SHD, q_SHD, None, prefix)
            else:
                turn = Turn(self._cos_sin, self._layers[layer].head_norms, self._eps)
                attend_parts(layer, out_SHD, qkv, turn, None)
            return out_SHD

        return attend

    def _divided(
        self, tables_SM: torch.Tensor, contexts_S: torch.Tensor, prefix: SharedPrefix | None = None
    ) -> Callable[[int, torch.Tensor, torch.Tensor, Turn | None, SharedPrefix | None], None]:
        """Decode attention by one plan for all layers of the same window."""
        spec = self._spec
        row_bytes = spec.head_dim * self._keys.itemsize
        config = decode_config(len(contexts_S), spec.num_kv_heads, row_bytes, after_prefix=prefix is not None)
        parts = decode_parts(len(contexts_S), spec.num_kv_heads)
        plans = {
            window: plan_decode(
                contexts_S,
                parts,
                config.block_n,
                window=window,
                shared_S=prefix.lengths_S if prefix and not window else None,
            )
            for window in set(spec.windows)
        }

        def attend(
            layer: int, out_SHD: torch.Tensor, q: torch.Tensor, turn: Turn | None, prefix: SharedPrefix | None
        ) -> None:
            decode_attention(
                out_SHD,
                q,
                self._keys[layer],
                self._values[layer],
                tables_SM,
                plans[spec.windows[layer]],
                scale=spec.scale,
                scratch=self._decode_scratch,
                config=config,
                turn=turn,
                prefix=prefix,
            )

        return attend

    def _turn(self, layer: int, qkv: torch.Tensor, positions_T: torch.Tensor, slots_T: torch.Tensor) -> torch.Tensor:
        return rope_and_cache(
            qkv,
            self._cos_sin,
            positions_T,
            slots_T,
            self._keys[layer],
            self._values[layer],
            self._spec.num_heads,
            norm_weights=self._layers[layer].head_norms,
            eps=self._eps,
        )


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
