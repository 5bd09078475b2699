"""Benchmark cases of sampling, and of a whole decoding step."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch

from gpu_cases.case import BF16, COPY_BYTES, DEVICE, FP8, Case, Variant, randn, relative_error, sets_for, short
from gpu_cases.linear import scratch
from penstock.kernels import linear as linear_layers
from penstock.kernels.hopper.layers import KVCache, LayerShape, StackedLayers, decode_step, stack_layers
from penstock.kernels.hopper.program import is_hopper
from penstock.kernels.linear import add_linear, gated_linear, gemm_config, linear
from penstock.kernels.sampling_reference import sample_reference
from penstock.kernels.triton import decode as decode
from penstock.kernels.triton.argmax import argmax, argmax_scratch
from penstock.kernels.triton.decode_plan import decode_parts, plan_decode
from penstock.kernels.triton.gemm import linear_reference
from penstock.kernels.triton.paged import paged_attention_reference
from penstock.kernels.triton.rope import rope_and_cache, rope_reference
from penstock.kernels.triton.sampling import Sampled, SamplingInputs, SamplingRows, sample, sampling_scratch
from penstock.kernels.triton.sampling_row import FILTER, RANDOM, ROW


def sampling_case(rows: int, vocab: int, dtype: torch.dtype) -> Case:
    sets = min(4, sets_for(rows * vocab * dtype.itemsize))
    logits = [randn(rows, vocab, dtype=dtype, scale=3.0) for _ in range(sets)]
    work = sampling_scratch(rows, vocab, DEVICE)
    greedy_work = argmax_scratch(rows, vocab, DEVICE)
    out = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    numbers = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    unused = torch.zeros((rows, vocab), dtype=torch.float32, device=DEVICE)
    sampled = Sampled(out, unused[:, 0], unused, unused.int())

    def variant(label: str, top_k: int, top_p: float) -> Variant:
        params = np.zeros(rows, dtype=ROW)
        params["needs"] = RANDOM.value | (FILTER.value if top_k or top_p < 1 else 0)
        params["temperature"], params["top_k"], params["top_p"] = 0.8, top_k, top_p
        params["seed"] = np.arange(rows) * 7919
        words = torch.from_numpy(params.view(np.int32).reshape(rows, -1)).to(DEVICE)
        asked = SamplingRows(words, unused.short(), unused, unused.int(), out.clone())

        def run(i: int) -> None:
            sample(SamplingInputs(logits[i], numbers, numbers, numbers, unused.int()), asked, sampled, work)

        def mismatches() -> float:
            got = out[:8].tolist()
            wanted = [
                sample_reference(logits[0][r].cpu(), r * 7919, r, 0.8, top_k, top_p, 0.0) for r in range(len(got))
            ]
            return float(sum(a != b for a, b in zip(got, wanted, strict=True)))

        return Variant(label, run, mismatches)

    def greedy_mismatches() -> float:
        return float((logits[0].gather(1, out[:, None])[:, 0] != logits[0].amax(-1)).sum())

    variants = [
        Variant("argmax", lambda i: argmax(logits[i], out, greedy_work), greedy_mismatches),
        Variant("* torch argmax", lambda i: logits[i].argmax(-1)),
        variant("plain", 0, 1.0),
        variant("top-k", 40, 1.0),
        variant("top-p", 0, 0.9),
        variant("both", 40, 0.9),
    ]
    return Case(f"sampling {rows} {short(dtype)}", rows * vocab * dtype.itemsize / COPY_BYTES, sets, variants)


class _Decoder:
    """Layers with random weights of their own, a cache, and sequences of one length that decode."""

    _EPS = 1e-5
    _SCALE = 0.09
    _KV_HEADS, _HEAD_DIM, _BLOCK_SIZE = 8, 128, 16

    def __init__(self, model: str, dtype: torch.dtype, rows: int, context: int, most_layers: int) -> None:
        hidden, inner, heads, layers, vocab, normed = {
            "llama": (4096, 14336, 32, 32, 128256, False),
            "qwen": (1024, 3072, 16, 28, 151936, True),
        }[model]
        self.rows, self.heads, self.layers = rows, heads, min(layers, most_layers)
        self.dtype, self.shape = dtype, LayerShape(hidden, inner, heads, self._KV_HEADS, normed, dtype == FP8)
        width, kv_width = heads * self._HEAD_DIM, self._KV_HEADS * self._HEAD_DIM
        shapes = [(width + 2 * kv_width, hidden), (hidden, width), (2 * inner, hidden), (hidden, inner)]
        self.weights = [[self._weight(*shape) for shape in shapes] for _ in range(self.layers)]
        self.embedded, self.gain = randn(rows, hidden), randn(hidden)
        self.head = randn(vocab, hidden, scale=hidden**-0.5)
        self.gains = (randn(self._HEAD_DIM), randn(self._HEAD_DIM)) if normed else None
        blocks = -(-context // self._BLOCK_SIZE)
        self.keys, self.values = (
            randn(self.layers, rows * blocks, self._KV_HEADS, self._BLOCK_SIZE, self._HEAD_DIM) for _ in range(2)
        )
        self.tables = torch.randperm(rows * blocks, device=DEVICE).view(rows, blocks).to(torch.int32)
        self.cos_sin = torch.randn(4096, self._HEAD_DIM, device=DEVICE)
        self.contexts = torch.full((rows,), context, dtype=torch.int32, device=DEVICE)
        self.slots = self.tables[:, -1] * self._BLOCK_SIZE + (context - 1) % self._BLOCK_SIZE
        self.parts = decode_parts(rows, self._KV_HEADS)
        self.work = decode.decode_scratch(rows, heads, self._KV_HEADS, self._HEAD_DIM, self.parts, DEVICE)
        self.sampling = argmax_scratch(rows, vocab, DEVICE)
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
        self.logits = torch.empty(rows, vocab, device=DEVICE)

    def _weight(self, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.dtype == FP8:
            return randn(n, k, dtype=FP8), torch.full((n,), k**-0.5, device=DEVICE)
        return randn(n, k, scale=k**-0.5), None

    @property
    def bytes_read(self) -> int:
        """Weights, and keys and values, in a step."""
        weights = [weight for layer in self.weights for weight, _ in layer] + [self.head]
        kv = self.layers * int(self.contexts.sum()) * 2 * self._KV_HEADS * self._HEAD_DIM * 2
        return sum(weight.nbytes for weight in weights) + kv

    def step(self, *, fused_rope: bool = True, layers: int | None = None) -> None:
        """One kernel after the other; `fused_rope`: attention applies RoPE itself."""
        x, deferred, used = self.embedded.clone(), None, self.weights[:layers]
        config = decode.decode_config(self.rows, self._KV_HEADS)
        plan = plan_decode(self.contexts, self.parts, config.block_n)
        norm, rope = (self.gain, self._EPS), decode.Rope(self.cos_sin, self.gains, self._EPS)
        for number, layer in enumerate(used):
            (qkv, qkv_s), (o, o_s), (gate_up, gate_up_s), (down, down_s) = layer
            keys, values = self.keys[number], self.values[number]
            y = linear(x, qkv, scratch(), scales=qkv_s, norm=norm, deferred=deferred)
            if not fused_rope:
                y = rope_and_cache(
                    y, self.cos_sin, self.contexts - 1, self.slots, keys, values, self.heads, norm_weights=self.gains,
                    eps=self._EPS,
                )  # fmt: skip
            attended = torch.empty(self.rows, self.heads, self._HEAD_DIM, dtype=BF16, device=DEVICE)
            decode.decode_attention(
                attended, y, keys, values, self.tables, plan, scale=self._SCALE, scratch=self.work, config=config,
                rope=rope if fused_rope else None,
            )  # fmt: skip
            deferred = add_linear(x, attended.flatten(1), o, scratch(), scales=o_s, next_gain=self.gain)
            z = gated_linear(x, gate_up, scratch(), scales=gate_up_s, norm=norm, deferred=deferred)
            following = self.gain if number + 1 < len(used) else None
            deferred = add_linear(x, z, down, scratch(), scales=down_s, next_gain=following)
        argmax(linear(x, self.head, scratch(), norm=norm, out=self.logits), self.tokens, self.sampling)

    @cached_property
    def _stacked(self) -> StackedLayers:
        head_gains = self.gains or (self.gain, self.gain)
        addresses = [
            [t.data_ptr() for t in (self.gain, qkv, *head_gains, o, self.gain, gate_up, down)]
            + [(self.gain if scales is None else scales).data_ptr() for _, scales in layer]
            for layer in self.weights
            for (qkv, _), (o, _), (gate_up, _), (down, _) in [layer]
        ]
        programs = torch.cuda.get_device_properties(DEVICE).multi_processor_count
        return stack_layers(self.shape, addresses, self.embedded, self.gain, self.head, self._EPS, programs)

    def stacked_step(self, layers: int | None = None) -> None:
        """In one persistent kernel, of one sequence."""
        row, last_tokens = torch.zeros_like(self.contexts), torch.zeros_like(self.tokens)
        cache = KVCache(self.keys, self.values, self.cos_sin, self._SCALE)
        decode_step(
            self._stacked, cache, row, self.contexts, last_tokens, self.tables, self.logits, self.tokens,
            num_layers=layers,
        )  # fmt: skip

    def stacked_error(self) -> float:
        """Of the logits after two layers; rounding adds up over more."""
        self.stacked_step(layers=2)
        return relative_error(self.logits, self._reference(2))

    def _reference(self, layers: int) -> torch.Tensor:
        """Logits of one sequence, in float32; the cache has its last key and value already."""
        x, norm, ends = self.embedded.float(), (self.gain, self._EPS), [0, 1]
        for number, layer in enumerate(self.weights[:layers]):
            (qkv, qkv_s), (o, o_s), (gate_up, gate_up_s), (down, down_s) = layer
            y = linear_reference(x, qkv, scales=qkv_s, norm=norm)
            q, _, _ = rope_reference(
                y, self.cos_sin, self.contexts - 1, self.heads, self._KV_HEADS, self.gains, self._EPS
            )
            keys, values = self.keys[number].float(), self.values[number].float()
            attended = paged_attention_reference(
                q, keys, values, self.tables, ends, self.contexts.tolist(), self._SCALE
            )
            x = linear_reference(attended.flatten(1), o, scales=o_s, residual=x)
            inner = linear_reference(x, gate_up, scales=gate_up_s, norm=norm, gated=True)
            x = linear_reference(inner, down, scales=down_s, residual=x)
        return linear_reference(x, self.head, norm=norm)


def step_case(model: str, dtype: torch.dtype, rows: int, context: int, most_layers: int = 64) -> Case:
    """A whole decoding step, every layer with weights of its own."""
    decoder = _Decoder(model, dtype, rows, context, most_layers)

    def variant(
        label: str, choose: Callable[[torch.Tensor, torch.Tensor], object], *, fused_rope: bool = True
    ) -> Variant:
        def run(i: int) -> None:
            linear_layers.gemm_config = choose  # type: ignore[assignment]
            decoder.step(fused_rope=fused_rope)
            linear_layers.gemm_config = gemm_config

        return Variant(label, run)

    variants = [
        variant("table", gemm_config),
        variant("rope apart", gemm_config, fused_rope=False),
        variant("* library only", lambda x, weight: None),
    ]
    if rows == 1 and is_hopper(DEVICE):
        variants.append(Variant("one launch", lambda i: decoder.stacked_step(), decoder.stacked_error))
    name = f"step {model} {short(dtype)} S{rows} ctx {context}"
    return Case(name, decoder.bytes_read / COPY_BYTES, 1, variants)
