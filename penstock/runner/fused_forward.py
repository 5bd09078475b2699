"""The forward pass of dense and MoE decoders on CUDA by fused kernels: five launches a layer for a small decode batch.

    norm · qkv   →   q/k norm · rope · cache write · attention   →   out + residual
    norm · gate_up · silu·mul   →   down + residual

Larger batches run the norm, and the largest silu·mul, as kernels of their own; steps with prompts also rope.
On Hopper a GEMM may defer the RMSNorm to the next GEMM instead, and a decode step of one sequence is one persistent
kernel. The plain form of these models is in `models/llama.py` and `models/moe.py`.

T tokens, S sequences, C hidden size, H query heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeGuard

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from penstock.kernels import batch_invariant
from penstock.kernels.batch_invariant import LEAST_DEPTH
from penstock.kernels.hopper.gemm import ABSENT, GemmAdapters, partials_shape
from penstock.kernels.hopper.layers import (
    MOST_TOKENS,
    KVCache,
    LayerShape,
    StackedLayers,
    decode_step,
    fits,
    stack_layers,
)
from penstock.kernels.hopper.persistent_gemm import compile_swiglu_gemms
from penstock.kernels.hopper.program import is_hopper
from penstock.kernels.linear import Deferred, QuantizedRows, add_linear, adds_adapters, gated_linear, linear
from penstock.kernels.triton.gemm import split_scratch
from penstock.kernels.triton.lora import AdapterTiles, LowRank, Shrunk, add_and_shrink, expand, shrink, swiglu
from penstock.kernels.triton.moe import mix_experts
from penstock.kernels.triton.norm import add_rms_norm
from penstock.models.base import CausalLM
from penstock.models.config import ModelConfig
from penstock.models.llama import Llama
from penstock.runner.batch import Batch
from penstock.runner.device_adapters import Adapted, AdapterShape
from penstock.runner.fused_layers import Dense, FusedLayer, fused_layer
from penstock.runner.paged_attention import Attend, MixedStep, PagedAttention
from penstock.runner.row_state import RowState
from penstock.runner.transfer import to_device


@dataclass(frozen=True, slots=True)
class _LayerLora:
    """What the GEMMs of a layer get besides: `adapters`, or nothing."""

    qkv: dict[str, GemmAdapters]
    out: dict[str, GemmAdapters]
    gate_up: dict[str, GemmAdapters]
    down: dict[str, GemmAdapters]


_NO_LORA = _LayerLora({}, {}, {}, {})


class FusedForward:
    """Weights, attention and scratch memory on one device. Not for use by two threads at once."""

    def __init__(
        self,
        model: Llama,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        max_seqs: int,
        max_model_len: int,
        kv_dtype: torch.dtype | None = None,
        deterministic: bool = False,
    ) -> None:
        """`kv_dtype` is that of the model, or float8_e4m3fn without scales: what is beyond 448 is stored as that.

        `deterministic`: the logits of a token have the same bits in any batch, for models that
        `deterministic_problem` has nothing against.
        """
        spec = model.attention_spec
        self._spec = spec
        self._eps = config.norm_eps
        self.max_model_len = max_model_len
        self.num_heads = spec.num_heads
        self.embedding = model.embedding
        self._norm = model.norm.weight
        self._head = model.head.weight if model.head else model.embedding
        self._layers = [fused_layer(layer) for layer in model.layers]
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.device = model.embedding.device
        self.attention = PagedAttention(
            spec,
            model.rotary,
            [layer.head_norms for layer in self._layers],
            self._eps,
            num_blocks=num_blocks,
            block_size=block_size,
            max_seqs=max_seqs,
            max_model_len=max_model_len,
            dtype=model.embedding.dtype,
            kv_dtype=kv_dtype or model.embedding.dtype,
            device=self.device,
            deterministic=deterministic,
        )
        self.deterministic = deterministic
        self._splits = split_scratch(self.device)
        self._linear: Callable[..., torch.Tensor] = partial(linear, scratch=self._splits)
        self._gated_linear: Callable[..., torch.Tensor | QuantizedRows] = partial(gated_linear, scratch=self._splits)
        self._add_linear: Callable[..., Deferred | None] = partial(add_linear, scratch=self._splits)
        if deterministic:
            self._linear, self._add_linear = batch_invariant.linear, batch_invariant.add_linear
            self._gated_linear = partial(batch_invariant.linear, gated=True)
        self._stacked = self._stack(config) if is_hopper(self.device) and not deterministic else None
        self._experts = config.moe.num_experts if config.moe else 0

    def __call__(
        self, batch: Batch, state: RowState, logit_rows: npt.NDArray[np.int32]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x_TC = self.step_hidden(batch, state)
        if not len(logit_rows):  # chunks of prompts only
            return x_TC[:0], x_TC.new_empty(0, dtype=torch.int64)
        logits_RV = self.logits(x_TC[self._put(logit_rows).long()])
        return logits_RV, logits_RV.argmax(-1)

    def step_hidden(self, batch: Batch, state: RowState, adapted: Adapted | None = None) -> torch.Tensor:
        """The residual stream of every token of a step, without a CUDA graph."""
        put = self._put
        tokens_T = put(batch.tokens_T)
        tokens_T = torch.where(tokens_T < 0, state.last_token_R[put(batch.rows_T).long()].int(), tokens_T)
        attend = self.attention.attend_mixed(MixedStep.of(batch, put))
        x_TC = F.embedding(tokens_T, self.embedding)
        return self._adapted_hidden(x_TC, attend, adapted, None) if adapted else self.hidden(x_TC, attend)

    def _put(self, values: npt.NDArray[np.int32]) -> torch.Tensor:
        return to_device(values, self.device)

    def warm_up(self) -> None:
        """Run a short prompt that writes nothing, so that the kernels of mixed steps are there."""
        zeros = torch.zeros(256, dtype=torch.int32, device=self.device)
        ends = torch.tensor([0, 256], dtype=torch.int32, device=self.device)
        step = MixedStep(zeros, zeros - 1, zeros[None], ends, ends[1:], num_decodes=0, num_queries=256)
        x_TC = F.embedding(zeros, self.embedding)
        self.logits(self.hidden(x_TC, self.attention.attend_mixed(step), self.distinct_layers)[:1])

    @property
    def compile_tasks(self) -> list[Callable[[], object]]:
        """Calls, in any order and at the same time, after which all kernels are there that no graph bucket needs."""
        dense = next((layer for layer in self._layers if isinstance(layer.mlp, Dense)), None)
        if dense is None or not is_hopper(self.device):
            return [self.warm_up]
        assert isinstance(dense.mlp, Dense)
        gate_up = dense.mlp.gate_up
        if not self.deterministic:
            return [self.warm_up, partial(compile_swiglu_gemms, fp8=gate_up.scales is not None)]
        compiled = batch_invariant.compile_for_many_rows
        return [
            self.warm_up,
            partial(compiled, dense.qkv.weight),
            partial(compiled, dense.qkv.weight, norm=True),
            partial(compiled, dense.out.weight, add=True),
            partial(compiled, dense.mlp.down.weight, add=True),
            partial(compiled, gate_up.weight, gated=True, norm=True),
        ]

    @property
    def adapter_shapes(self) -> list[AdapterShape]:
        spec, hidden = self._spec, self.embedding.shape[1]
        heads, kv_heads = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        mlps = [layer.mlp for layer in self._layers]
        inner = [len(mlp.gate_up.weight) // 2 if isinstance(mlp, Dense) else None for mlp in mlps]
        return [AdapterShape(hidden, (heads, kv_heads, kv_heads), width) for width in inner]

    def clear_scratch(self) -> None:
        self._splits.arrivals.zero_()
        self.attention.clear_scratch()

    @property
    def distinct_layers(self) -> int:
        """The first layers that use every kernel there is.

        They differ in their windows and experts at most, and in whether a deferred RMSNorm comes in and goes out.
        """
        kinds = [(window, type(layer.mlp)) for window, layer in zip(self._spec.windows, self._layers, strict=True)]
        return max(kinds.index(kind) for kind in set(kinds)) + 2

    def stacks(self, size: int, longest: int) -> bool:
        """Whether such a decode step can run in one persistent kernel."""
        return self._stacked is not None and size == 1 and longest <= MOST_TOKENS

    def decode_stacked(
        self,
        row: torch.Tensor,
        context: torch.Tensor,
        last_token_R: torch.Tensor,
        tables_RM: torch.Tensor,
        logits: torch.Tensor,
        chosen: torch.Tensor,
        layers: int | None = None,
    ) -> None:
        """A decode step of one sequence in one persistent kernel: its logits and the argmax, also put into its row."""
        attention, spec = self.attention, self._spec
        assert self._stacked is not None
        cache = KVCache(attention.keys, attention.values, attention.cos_sin, spec.scale, spec.windows[0])
        decode_step(self._stacked, cache, row, context, last_token_R, tables_RM, logits, chosen, num_layers=layers)

    def hidden(
        self, x_TC: torch.Tensor, attend: Attend, layers: int | None = None, adapted: Adapted | None = None
    ) -> torch.Tensor:
        """From embeddings to the residual stream after the last layer; the final norm belongs to `logits`."""
        lora = [_NO_LORA] * len(self._layers) if adapted is None else self._gemm_adapters(x_TC, adapted)
        if adapted is not None and lora is None:
            return self._adapted_hidden(x_TC, attend, adapted, layers)
        assert lora is not None
        # Not shared by steps that are warmed up side by side: wrong counts would lead outside the tiles.
        counts_E = torch.zeros(self._experts, dtype=torch.int32, device=self.device) if self._experts else None
        deferred: Deferred | None = None
        used = self._layers[:layers]
        for number, layer in enumerate(used):
            norm, (qkv, out), low = (layer.attention_norm, self._eps), (layer.qkv, layer.out), lora[number]
            projected = self._linear(x_TC, qkv.weight, scales=qkv.scales, norm=norm, deferred=deferred, **low.qkv)
            if qkv.bias is not None:
                projected.add_(qkv.bias)
            mixed = attend(number, projected).flatten(1)
            next_gain = layer.mlp_norm if isinstance(layer.mlp, Dense) else None
            deferred = self._add_linear(x_TC, mixed, out.weight, scales=out.scales, next_gain=next_gain, **low.out)
            following = used[number + 1].attention_norm if number + 1 < len(used) else None
            deferred = self._feed_forward(x_TC, layer, counts_E, deferred, following, low)
        return x_TC

    def _gemm_adapters(self, x_TC: torch.Tensor, adapted: Adapted) -> list[_LayerLora] | None:
        """LoRA adapters as the GEMMs add them themselves; None where one of them cannot."""
        partials, found = _partials(adapted, len(x_TC)), []
        for layer, low in zip(self._layers, adapted.layers, strict=True):
            weights = [layer.qkv.weight, layer.out.weight]
            if isinstance(layer.mlp, Dense):
                weights += [layer.mlp.gate_up.weight, layer.mlp.down.weight]
            lora = [_NO_LORA.qkv] * 4
            for place, (one, weight) in enumerate(zip(low.projections, weights, strict=True)):
                of_gemm = _of_gemm(one, adapted.tiles, next(partials))
                if not adds_adapters(x_TC, weight, of_gemm, gated=place == 2):
                    return None
                lora[place] = {"adapters": of_gemm}
            found.append(_LayerLora(*lora))
        return found

    def _adapted_hidden(self, x_TC: torch.Tensor, attend: Attend, adapted: Adapted, layers: int | None) -> torch.Tensor:
        """With LoRA adapters that stand between the GEMMs, which therefore leave out their epilogues."""
        counts_E = torch.zeros(self._experts, dtype=torch.int32, device=self.device) if self._experts else None
        tiles, added = adapted.tiles, None
        for number, (layer, low) in enumerate(zip(self._layers[:layers], adapted.layers, strict=False)):
            norm, (qkv, out), mlp = (layer.attention_norm, self._eps), (layer.qkv, layer.out), layer.mlp
            deferred, shrunk = _started(x_TC, tiles, added, low.qkv, norm)
            projected = self._linear(x_TC, qkv.weight, scales=qkv.scales, norm=norm, deferred=deferred)
            if qkv.bias is not None:
                projected.add_(qkv.bias)
            expand(projected, shrunk, low.qkv, tiles)
            mixed = attend(number, projected).flatten(1)
            added = (shrink(mixed, low.out, tiles), low.out)
            self._add_linear(x_TC, mixed, out.weight, scales=out.scales)
            if not isinstance(mlp, Dense):
                add_and_shrink(x_TC, tiles, added, None)
                self._feed_forward(x_TC, layer, counts_E, None, None, _NO_LORA)
                added = None
                continue
            assert low.gate_up is not None and low.down is not None  # noqa: PT018
            norm = (layer.mlp_norm, self._eps)
            deferred, shrunk = _started(x_TC, tiles, added, low.gate_up, norm)
            gate_up = self._linear(x_TC, mlp.gate_up.weight, scales=mlp.gate_up.scales, norm=norm, deferred=deferred)
            inner, inner_shrunk = swiglu(gate_up, shrunk, low.gate_up, low.down, tiles)
            added = (inner_shrunk, low.down)
            self._add_linear(x_TC, inner, mlp.down.weight, scales=mlp.down.scales)
        if added is not None:
            add_and_shrink(x_TC, tiles, added, None)
        return x_TC

    def _feed_forward(
        self,
        x_TC: torch.Tensor,
        layer: FusedLayer,
        counts_E: torch.Tensor | None,
        deferred: Deferred | None,
        next_gain: torch.Tensor | None,
        low: _LayerLora,
    ) -> Deferred | None:
        """Adds the MLP to the residual stream; may leave a part of that, or of the next norm, deferred."""
        norm, mlp = (layer.mlp_norm, self._eps), layer.mlp
        if isinstance(mlp, Dense):
            gate_up, down = mlp.gate_up, mlp.down
            inner = self._gated_linear(
                x_TC, gate_up.weight, scales=gate_up.scales, norm=norm, deferred=deferred, **low.gate_up
            )
            return self._add_linear(x_TC, inner, down.weight, scales=down.scales, next_gain=next_gain, **low.down)
        assert counts_E is not None
        normed = add_rms_norm(x_TC, *norm)
        scores_TE = torch.empty((len(x_TC), len(mlp.router)), dtype=torch.float32, device=x_TC.device)
        self._linear(normed, mlp.router, out=scores_TE)
        mix_experts(x_TC, normed, scores_TE, mlp.experts, counts_E)
        return None

    def logits(self, x_RC: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """In float32: rounded to bfloat16, likely tokens would tie."""
        if out is None:
            out = torch.empty((len(x_RC), len(self._head)), dtype=torch.float32, device=x_RC.device)
        return self._linear(x_RC, self._head, norm=(self._norm, self._eps), out=out)

    def final_norm(self, x_RC: torch.Tensor, out: torch.Tensor) -> None:
        add_rms_norm(x_RC, self._norm, self._eps, out=out)

    def _stack(self, config: ModelConfig) -> StackedLayers | None:
        """For the kernel that runs whole steps: dense layers, alike, without biases, weights in bfloat16 or fp8."""
        layers, keys = self._layers, self.attention.keys
        first = layers[0]
        alike = len(set(config.windows)) == 1 and all(isinstance(layer.mlp, Dense) for layer in layers)
        numbers = {self._head.dtype, keys.dtype}
        if not alike or first.qkv.bias is not None or numbers != {torch.bfloat16}:
            return None
        shape = LayerShape(
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_norm=first.head_norms is not None,
            fp8=first.qkv.scales is not None,
        )
        ctas = torch.cuda.get_device_properties(keys.device).multi_processor_count
        if not fits(shape, config.head_dim, keys.shape[3], ctas):
            return None

        def addresses(layer: FusedLayer) -> list[int]:
            mlp, unused = layer.mlp, layer.attention_norm
            assert isinstance(mlp, Dense)
            norms = layer.head_norms or (unused, unused)
            projections = (layer.qkv, layer.out, mlp.gate_up, mlp.down)
            qkv, out, gate_up, down = (projection.weight for projection in projections)
            scales = [unused if projection.scales is None else projection.scales for projection in projections]
            tensors = (layer.attention_norm, qkv, *norms, out, layer.mlp_norm, gate_up, down, *scales)
            return [tensor.data_ptr() for tensor in tensors]

        return stack_layers(
            shape,
            [addresses(layer) for layer in layers],
            self.embedding,
            self._norm,
            self._head,
            config.norm_eps,
            ctas,
        )


def _partials(adapted: Adapted, tokens: int) -> Iterator[torch.Tensor]:
    """For the GEMMs of a step in turn; all are cleared at once."""
    lows = [low for layer in adapted.layers for low in layer.projections]
    shapes = [partials_shape(tokens, low.inputs, len(low.outputs), low.most_rank) for low in lows]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    cleared = torch.full((sum(sizes),), ABSENT, dtype=torch.int32, device=adapted.tiles.order.device)
    return (part.view(shape) for part, shape in zip(cleared.split(sizes), shapes, strict=True))


def _of_gemm(low: LowRank, tiles: AdapterTiles, partials: torch.Tensor) -> GemmAdapters:
    places = low.weights, low.offset, low.b_offset, low.outputs, low.most_rank
    return GemmAdapters(tiles.tiles, tiles.order, *places, partials)


def _started(
    x_TC: torch.Tensor,
    tiles: AdapterTiles,
    added: tuple[Shrunk, LowRank] | None,
    following: LowRank,
    norm: tuple[torch.Tensor, float],
) -> tuple[Deferred, Shrunk]:
    found = add_and_shrink(x_TC, tiles, added, (following, *norm))
    assert found is not None
    return found


def supports_fused(model: CausalLM, config: ModelConfig) -> TypeGuard[Llama]:
    """Without biases in the places where the kernels fold other work in."""
    return isinstance(model, Llama) and not config.mlp_bias and not config.output_bias


def deterministic_problem(model: Llama, config: ModelConfig) -> str | None:
    """Why this model on this device cannot give every token the same bits in any batch; None if it can."""
    if config.moe:
        return "models with experts are not covered: their grouped GEMMs depend on the batch"
    if not is_hopper(model.embedding.device):
        return "needs a Hopper GPU (compute capability 9.0), whose GEMM kernels sum in a fixed order"
    if model.embedding.dtype != torch.bfloat16:
        return f"needs dtype bfloat16, not {str(model.embedding.dtype).removeprefix('torch.')}"
    sizes = (config.hidden_size, config.intermediate_size, config.vocab_size, config.num_heads * config.head_dim)
    if any(size % 16 for size in sizes) or min(sizes) < LEAST_DEPTH:
        return f"needs sizes of layers and vocabulary that are multiples of 16 and at least {LEAST_DEPTH}"
    return None
