"""Check and time the Triton kernels at full size on one GPU, against the device's limits and torch's own kernels.

    PYTHONPATH=. python3 benchmarks/gpu_kernels.py [--only decode prefill ...] [--json FILE]

Every variant runs inside a CUDA graph over rotating inputs larger than the L2 cache, so launch gaps are counted and
cache hits are not. Child processes compile all variants first, since compiling one by one would take minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import product

import torch
import triton

from penstock.kernels import attention_triton as attention
from penstock.kernels import linear_triton
from penstock.kernels.activation_triton import silu_mul, silu_mul_reference
from penstock.kernels.decode_plan_triton import decode_parts, plan_decode
from penstock.kernels.gemm_configs import stream_config
from penstock.kernels.gemm_triton import (
    GemvConfig,
    SkinnyConfig,
    SplitScratch,
    linear_reference,
    split_scratch,
    stream_gemm,
    stream_gemv,
)
from penstock.kernels.linear_triton import linear
from penstock.kernels.norm_triton import add_rms_norm, add_rms_norm_reference, quantize_fp8_reference
from penstock.kernels.prefill_triton import PrefillConfig, prefill_attention
from penstock.kernels.rope_triton import rope_and_cache, rope_reference
from penstock.kernels.sampling_reference import sample_reference
from penstock.kernels.sampling_triton import SamplingRows, argmax, sample, sampling_scratch

DEVICE = torch.device("cuda")
COPY_BYTES = 4.28e12  # measured bytes per second of the H200
MATRIX_FLOPS = {torch.bfloat16: 791e12, torch.float8_e4m3fn: 1448e12}
ROTATE_BYTES = 300e6  # five times the L2 cache
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
SHAPES = {  # N, K, what the small-batch kernels fold in
    "llama qkv": (6144, 4096, "norm"),
    "llama o": (4096, 4096, "add"),
    "llama gate_up": (28672, 4096, "gated"),
    "llama down": (4096, 14336, "add"),
    "llama head": (128256, 4096, "norm"),
    "qwen qkv": (4096, 1024, "norm"),
    "qwen o": (1024, 2048, "add"),
    "qwen gate_up": (6144, 1024, "gated"),
    "qwen down": (1024, 3072, "add"),
    "qwen head": (151936, 1024, "norm"),
}


@dataclass(slots=True)
class Variant:
    label: str
    run: Callable[[int], object]  # takes the index of the input set
    error: Callable[[], float] | None = (
        None  # relative error after run(0); None: timed only. A label with * is a peer's
    )


@dataclass(slots=True)
class Case:
    name: str
    floor_s: float  # what the device's limits allow
    sets: int
    variants: list[Variant]


def randn(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device=DEVICE, dtype=BF16 if dtype == FP8 else dtype) * scale).to(dtype)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    error = float((actual.double() - expected.double()).norm() / expected.double().norm())
    return error if math.isfinite(error) else math.inf


def sets_for(size: float) -> int:
    """How many input sets of `size` bytes outgrow the cache."""
    return int(min(64, max(1, math.ceil(ROTATE_BYTES / size))))


def make_cache(
    sequences: int, context: int, kv_heads: int, sets: int, dim: int = 128, block: int = 16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    columns = -(-context // block)
    blocks = sets * sequences * columns
    tables = torch.randperm(blocks, device=DEVICE).view(sets, sequences, columns).to(torch.int32)
    k, v = (randn(blocks, kv_heads, block, dim) for _ in range(2))
    return k, v, tables


def decode_case(heads: int, contexts: list[int], name: str) -> Case:
    sequences, longest = len(contexts), max(contexts)
    size = sum(contexts) * 8 * 128 * 4
    sets = sets_for(size)
    q = randn(sequences, heads, 128)
    out = torch.full_like(q, torch.nan)
    lengths = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)
    k, v, tables = make_cache(sequences, longest, 8, sets)

    @cache
    def expected() -> torch.Tensor:
        return attention.paged_attention_reference(q, k, v, tables[0], list(range(sequences + 1)), contexts, 0.09)

    def variant(config: attention.DecodeConfig, num_parts: int) -> Variant:
        scratch = attention.decode_scratch(sequences, heads, 8, 128, num_parts, DEVICE)
        plan = plan_decode(lengths, num_parts, config.block_n)

        def run(i: int) -> None:
            attention.decode_attention(out, q, k, v, tables[i], plan, scale=0.09, scratch=scratch, config=config)

        label = f"{config.block_n},{config.num_warps},{config.num_stages} x{num_parts}"
        return Variant(label, run, lambda: relative_error(out, expected()))

    auto = decode_parts(sequences, 8)
    shapes = [(32, 2, 4), (32, 2, 6), (32, 2, 8), (64, 4, 4), (64, 4, 6), (64, 4, 8), (128, 8, 4), (128, 8, 6)]
    configs = [attention.DecodeConfig(*shape) for shape in shapes]
    choices = sorted({sequences + 1, auto, 3 * sequences + 1}) if sequences > 16 else [auto]
    return Case(
        f"decode H{heads} {name}", size / COPY_BYTES, sets, [variant(c, n) for c, n in product(configs, choices)]
    )


def prefix_case(heads: int, sequences: int, shared: int, own: int) -> Case:
    context = shared + own
    k, v, tables = make_cache(sequences, context, 8, 1)
    tables[0, :, : shared // 16] = tables[0, 0, : shared // 16].clone()
    q = randn(sequences, heads, 128)
    out = torch.full_like(q, torch.nan)
    contexts = torch.full((sequences,), context, dtype=torch.int32, device=DEVICE)
    lengths = torch.full_like(contexts, shared)
    parts = decode_parts(sequences, 8)

    @cache
    def expected() -> torch.Tensor:
        return attention.paged_attention_reference(
            q, k, v, tables[0], list(range(sequences + 1)), [context] * sequences, 0.09
        )

    def variant(shape: tuple[int, int, int, int] | None, splits: int, inner: tuple[int, int, int]) -> Variant:
        scratch = attention.decode_scratch(sequences, heads, 8, 128, parts + splits * sequences, DEVICE)
        prefix = None
        if shape:
            config = attention.PrefixConfig(*shape)
            prefix = attention.SharedPrefix(tables[0, 0], lengths[:1], lengths, splits, config)
        plan = plan_decode(contexts, parts, inner[0], shared_S=lengths if prefix else None)

        def run(i: int) -> None:
            attention.decode_attention(
                out, q, k, v, tables[0], plan, scale=0.09, scratch=scratch, prefix=prefix,
                config=attention.DecodeConfig(*inner),
            )  # fmt: skip

        label = f"{shape} x{splits} {inner}" if shape else "* not shared"
        return Variant(label, run, lambda: relative_error(out, expected()))

    shapes = [(64, 64, 4, 3), (64, 64, 4, 5), (128, 64, 8, 3), (128, 64, 8, 5), (64, 128, 4, 3)]
    variants = [variant(*choice) for choice in product(shapes, (1, 2, 4), [(32, 2, 4), (64, 4, 4)])]
    floor = (shared + sequences * own) * 8 * 128 * 4 / COPY_BYTES
    floor += 4 * sequences * heads * shared * 128 / MATRIX_FLOPS[BF16]
    name = f"shared prefix H{heads} S{sequences} {shared}+{own}"
    return Case(name, floor, 1, [*variants, variant(None, 1, (64, 4, 4))])


def prefill_case(heads: int, sequences: int, count: int, context: int) -> Case:
    k, v, tables = make_cache(sequences, context, 8, 1)
    q = randn(sequences * count, heads, 128)
    out = torch.full_like(q, torch.nan)
    contexts = torch.full((sequences,), context, dtype=torch.int32, device=DEVICE)
    starts = torch.arange(sequences + 1, dtype=torch.int32, device=DEVICE) * count
    dense = [randn(sequences, h, count, 128) for h in (heads, 8, 8)]

    @cache
    def expected() -> torch.Tensor:
        return attention.paged_attention_reference(q, k, v, tables[0], starts.tolist(), [context] * sequences, 0.09)

    def variant(shape: tuple[int, int, int, int]) -> Variant:
        def run(i: int) -> None:
            prefill_attention(
                out, q, k, v, tables[0], starts, contexts, num_queries=sequences * count, scale=0.09,
                config=PrefillConfig(*shape),
            )  # fmt: skip

        return Variant(str(shape), run, lambda: relative_error(out, expected()))

    def library(name: str) -> Variant:
        def run(i: int) -> None:
            with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, name)):
                torch.nn.functional.scaled_dot_product_attention(*dense, is_causal=True, enable_gqa=True)

        return Variant(f"* {name}", run)

    shapes = [(64, 64, 4, 5), (128, 64, 4, 5), (128, 64, 8, 5), (128, 128, 8, 5), (256, 64, 8, 3), (256, 64, 8, 5),
              (256, 64, 16, 5), (256, 64, 16, 7)]  # fmt: skip
    variants = [variant(shape) for shape in shapes]
    if count == context:
        variants += [library("CUDNN_ATTENTION"), library("FLASH_ATTENTION")]
    visible = count * (context - count) + count * (count + 1) / 2
    floor = 4 * 128 * heads * sequences * visible / MATRIX_FLOPS[BF16]
    return Case(f"prefill H{heads} {sequences}x{count} of {context}", floor, 1, variants)


def norm_case(rows: int, width: int) -> Case:
    sets = sets_for(rows * width * 8)
    x, residual, weight = randn(rows, width), randn(sets, rows, width), randn(width)
    scales = torch.empty(rows, device=DEVICE)
    out = {dtype: torch.empty(rows, width, dtype=dtype, device=DEVICE) for dtype in (BF16, FP8)}
    expected = add_rms_norm_reference(x, weight, 1e-5)[0]

    def variant(dtype: torch.dtype, adds: bool) -> Variant:
        def run(i: int) -> None:
            add_rms_norm(
                x, weight, 1e-5, residual=residual[i] if adds else None, out=out[dtype],
                scales=scales if dtype == FP8 else None,
            )  # fmt: skip

        return Variant(
            f"{short(dtype)}{' add' if adds else ''}", run, None if adds else error(out[dtype], scales, expected)
        )

    return Case(
        f"norm {rows}x{width}", rows * width * 8 / COPY_BYTES, sets,
        [variant(*choice) for choice in product((BF16, FP8), (True, False))],
    )  # fmt: skip


def error(out: torch.Tensor, scales: torch.Tensor, expected: torch.Tensor) -> Callable[[], float]:
    """Rounding to e4m3 alone gives 2 to 3%, so that error is held to a fifth of what it is."""
    if out.dtype == FP8:
        return lambda: relative_error(out.float() * scales[:, None], expected) / 5
    return lambda: relative_error(out, expected)


def silu_case(rows: int, width: int) -> Case:
    sets = sets_for(rows * width * 6)
    gate_up = randn(sets, rows, 2 * width)
    scales = torch.empty(rows, device=DEVICE)
    expected = silu_mul_reference(gate_up[0])

    def variant(dtype: torch.dtype) -> Variant:
        out = torch.empty(rows, width, dtype=dtype, device=DEVICE)

        def run(i: int) -> None:
            silu_mul(gate_up[i], out=out, scales=scales if dtype == FP8 else None)

        return Variant(short(dtype), run, error(out, scales, expected))

    return Case(f"silu {rows}x{width}", rows * width * 6 / COPY_BYTES, sets, [variant(BF16), variant(FP8)])


def rope_case(rows: int, heads: int) -> Case:
    size = rows * (heads + 16) * 128 * 4
    sets = sets_for(size)
    qkv = randn(sets, rows, (heads + 16) * 128)
    k, v, _ = make_cache(rows, 16, 8, 1)
    cos_sin = torch.randn(4096, 128, device=DEVICE)
    positions = torch.arange(rows, device=DEVICE) % 4096
    slots = torch.arange(rows, device=DEVICE) * 16
    gains = (randn(128), randn(128))

    def variant(block_h: int, normed: bool) -> Variant:
        weights = gains if normed else None

        def run(i: int) -> torch.Tensor:
            return rope_and_cache(
                qkv[i], cos_sin, positions, slots, k, v, heads, norm_weights=weights, eps=1e-6, block_h=block_h
            )

        def fresh_error() -> float:
            torch.nn.init.normal_(qkv[0])
            q_ref, k_ref, v_ref = rope_reference(qkv[0], cos_sin, positions, heads, 8, weights, 1e-6)
            pairs = ((run(0), q_ref), (k[:rows, :, 0], k_ref), (v[:rows, :, 0], v_ref))
            return max(relative_error(actual, wanted) for actual, wanted in pairs)

        return Variant(f"heads {block_h}{' norm' if normed else ''}", run, fresh_error)

    variants = [variant(*choice) for choice in product((4, 8, 16), (False, True))]
    return Case(f"rope {rows} H{heads}", size / COPY_BYTES, sets, variants)


def gemv_configs(rows: int) -> list[GemvConfig]:
    choices = product((4, 8, 16), (256, 512, 1024, 2048), (4, 8), (0, 3, 4, 6))
    return [
        GemvConfig(n, k, warps, stages)
        for n, k, warps, stages in choices
        if n * k >= 2048 and 8 <= rows * n * k // (32 * warps) <= 32  # sums per thread
    ]


def skinny_configs(n: int, k: int, dtype: torch.dtype, rows: int) -> list[SkinnyConfig]:
    shapes = [(16, 256, 4, 4), (32, 128, 4, 6), (32, 256, 4, 4), (64, 64, 4, 6), (64, 128, 4, 4), (64, 128, 4, 6),
              (64, 256, 4, 3), (128, 64, 4, 5), (128, 128, 4, 3), (128, 128, 8, 5)]  # fmt: skip
    wanted = []
    for (block_n, depth, warps, stages), splits in product(shapes, (1, 2, 4, 8, 16)):
        block_k = depth * 2 // dtype.itemsize
        shared = stages * (block_n + max(16, rows)) * depth * 2
        resident = 132 * max(1, min(8, 220_000 // shared))
        programs = triton.cdiv(n, block_n) * splits
        fits = (splits == 1 or splits * n * max(16, rows) <= 1 << 22) and k // block_k >= 2 * splits
        fits = fits and shared < 228_000 and not (block_n < 64 and rows > 32)
        if fits and (splits == 1 or programs <= 2 * resident) and (programs >= 100 or splits == 16):
            wanted.append(SkinnyConfig(block_n, block_k, splits, warps, stages))
    return wanted


@cache
def scratch() -> SplitScratch:
    return split_scratch(DEVICE)


def gemm_case(name: str, dtype: torch.dtype, rows: int) -> Case:
    n, k, fold = SHAPES[name]
    size = n * k * dtype.itemsize
    sets = sets_for(size)
    weights = [randn(n, k, dtype=dtype, scale=k**-0.5 if dtype == BF16 else 1.0) for _ in range(sets)]
    columns = n // 2 if fold == "gated" else n
    x, residual, gain = randn(rows, k), randn(rows, columns) if fold == "add" else None, randn(k)
    x8, x_scales = quantize_fp8_reference(x)
    w_scales = torch.rand(n, device=DEVICE) * k**-0.5 if dtype == FP8 else None
    out = torch.full((rows, columns), torch.nan, dtype=BF16, device=DEVICE)
    norm = (gain, 1e-5) if fold != "add" else None
    inputs = x8 if dtype == FP8 else x

    @cache
    def expected(normed: bool) -> torch.Tensor:
        return linear_reference(
            x if normed else inputs, weights[0], scales=w_scales, norm=norm if normed else None, residual=residual,
            x_scales=x_scales if dtype == FP8 and not normed else None, gated=fold == "gated",
        )  # fmt: skip

    def gemv(c: GemvConfig) -> Variant:
        def run(i: int) -> None:
            stream_gemv(
                out, x, weights[i], config=c, scales=w_scales, norm=norm, gated=fold == "gated", residual=residual
            )

        label = f"gemv {c.block_n},{c.block_k},{c.num_warps},{c.stages}"
        return Variant(label, run, lambda: relative_error(out, expected(True)))

    def gemm(c: SkinnyConfig) -> Variant:
        scales = (w_scales, x_scales) if w_scales is not None else None

        def run(i: int) -> None:
            stream_gemm(
                out, inputs, weights[i], config=c, scratch=scratch(), scales=scales, gated=fold == "gated",
                residual=residual,
            )  # fmt: skip

        label = f"gemm {c.block_n},{c.block_k},{c.splits},{c.num_warps},{c.num_stages}"
        return Variant(label, run, lambda: relative_error(out, expected(False)))

    def library(i: int) -> None:
        if w_scales is None:
            torch.mm(x, weights[i].T)
        else:
            torch._scaled_mm(x8, weights[i].T, scale_a=x_scales[:, None], scale_b=w_scales[None], out_dtype=BF16)

    variants = [gemv(config) for config in gemv_configs(rows)] if rows <= 4 else []
    if rows > 1:
        variants += [gemm(config) for config in skinny_configs(n, k, dtype, rows)]
    return Case(
        f"{name} {short(dtype)} rows {rows}", size / COPY_BYTES, sets, [*variants, Variant("* cublas", library)]
    )


def short(dtype: torch.dtype) -> str:
    return {BF16: "bf16", FP8: "fp8", torch.float32: "fp32"}[dtype]


def sampling_case(rows: int, vocab: int, dtype: torch.dtype) -> Case:
    sets = min(4, sets_for(rows * vocab * dtype.itemsize))
    logits = [randn(rows, vocab, dtype=dtype, scale=3.0) for _ in range(sets)]
    work = sampling_scratch(rows, vocab, DEVICE)
    out = torch.zeros(rows, dtype=torch.int64, device=DEVICE)

    def variant(label: str, top_k: int, top_p: float) -> Variant:
        parameters = SamplingRows(
            temperature=torch.full((rows,), 0.8, device=DEVICE),
            seed=torch.arange(rows, device=DEVICE) * 7919,
            position=torch.arange(rows, device=DEVICE),
            top_k=torch.full((rows,), top_k, dtype=torch.int32, device=DEVICE),
            top_p=torch.full((rows,), top_p, device=DEVICE),
            min_p=torch.zeros(rows, device=DEVICE),
        )

        def run(i: int) -> None:
            sample(logits[i], out, parameters, work, any_top_k=top_k > 0, any_top_p=top_p < 1, any_min_p=False)

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
        Variant("argmax", lambda i: argmax(logits[i], out, work), greedy_mismatches),
        Variant("* torch argmax", lambda i: logits[i].argmax(-1)),
        variant("plain", 0, 1.0),
        variant("top-k", 40, 1.0),
        variant("top-p", 0, 0.9),
        variant("both", 40, 0.9),
    ]
    return Case(f"sampling {rows} {short(dtype)}", rows * vocab * dtype.itemsize / COPY_BYTES, sets, variants)


def step_case(model: str, dtype: torch.dtype, rows: int, context: int, most_layers: int = 64) -> Case:
    """A whole decoding step, every layer with weights of its own: what the kernels give together."""
    hidden, inner, heads, layers, vocab, normed = {
        "llama": (4096, 14336, 32, 32, 128256, False),
        "qwen": (1024, 3072, 16, 28, 151936, True),
    }[model]
    layers = min(layers, most_layers)

    def make_weight(n: int, k: int, dtype: torch.dtype = dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        if dtype == FP8:
            return randn(n, k, dtype=FP8), torch.full((n,), k**-0.5, device=DEVICE)
        return randn(n, k, scale=k**-0.5), None

    attention_width = heads * 128
    shapes = [(attention_width + 2048, hidden), (hidden, attention_width), (2 * inner, hidden), (hidden, inner)]
    weights = [[make_weight(*shape) for shape in shapes] for _ in range(layers)]
    head, gain, gains = make_weight(vocab, hidden, BF16)[0], randn(hidden), (randn(128), randn(128)) if normed else None
    size = sum(w.numel() * w.itemsize for layer in weights for w, _ in layer) + head.numel() * 2
    size += layers * rows * context * 4096
    caches = [make_cache(rows, context, 8, 1) for _ in range(layers)]
    cos_sin, contexts = (
        torch.randn(4096, 128, device=DEVICE),
        torch.full((rows,), context, dtype=torch.int32, device=DEVICE),
    )
    positions, embedded = contexts - 1, randn(rows, hidden)
    slots = [tables[0, :, -1] * 16 + (context - 1) % 16 for _, _, tables in caches]
    config = attention.decode_config(rows, 8)
    parts = decode_parts(rows, 8)
    work = attention.decode_scratch(rows, heads, 8, 128, parts, DEVICE)
    sampling = sampling_scratch(rows, vocab, DEVICE)
    tokens = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    turn = attention.Turn(cos_sin, gains, 1e-6)

    def step(turns: bool) -> None:
        x = embedded.clone()
        plan = plan_decode(contexts, parts, config.block_n)
        for layer, (k, v, tables), slot in zip(weights, caches, slots, strict=True):
            (qkv, qkv_s), (o, o_s), (gate_up, gate_up_s), (down, down_s) = layer
            y = linear(x, qkv, scratch(), scales=qkv_s, norm=(gain, 1e-5))
            if not turns:
                y = rope_and_cache(y, cos_sin, positions, slot, k, v, heads, norm_weights=gains, eps=1e-6)
            attended = torch.empty(rows, heads, 128, dtype=BF16, device=DEVICE)
            attention.decode_attention(
                attended, y, k, v, tables[0], plan, scale=0.09, scratch=work, config=config,
                turn=turn if turns else None,
            )  # fmt: skip
            linear(attended.flatten(1), o, scratch(), scales=o_s, residual=x)
            z = linear(x, gate_up, scratch(), scales=gate_up_s, norm=(gain, 1e-5), gated=True)
            linear(z, down, scratch(), scales=down_s, residual=x)
        argmax(linear(x, head, scratch(), norm=(gain, 1e-5), out_dtype=torch.float32), tokens, sampling)

    def variant(label: str, choose: Callable[[torch.Tensor, int], object], turns: bool = True) -> Variant:
        def run(i: int) -> None:
            linear_triton.stream_config = choose  # type: ignore[assignment]
            step(turns)

        return Variant(label, run)

    variants = [
        variant("table", stream_config),
        variant("rope apart", stream_config, turns=False),
        variant("* library only", lambda weight, rows: None),
    ]
    return Case(f"step {model} {short(dtype)} S{rows} ctx {context}", size / COPY_BYTES, 1, variants)


def gemm_section(*rows: int) -> list[Callable[[], Case]]:
    cases = product(SHAPES, (BF16, FP8), rows)
    return [partial(gemm_case, *c) for c in cases if c[1] == BF16 or not ("qwen" in c[0] or "head" in c[0])]


SECTIONS: dict[str, list[Callable[..., Case]]] = {
    "decode": [
        partial(decode_case, heads, contexts, name)
        for heads, (contexts, name) in product(
            (32, 16),
            [
                ([16384], "1 x 16384"),
                ([384], "1 x 384"),
                ([384] * 32, "32 x 384"),
                ([512 + i // 2 for i in range(512)], "512 x 512..768"),
                ([200 + (i * 769) % 1849 for i in range(192)], "192 x 200..2048"),
            ],
        )
    ],
    "prefix": [partial(prefix_case, heads, 256, 2048, 96) for heads in (32, 16)],
    "prefill": [
        partial(prefill_case, *batch)
        for batch in [(32, 2, 4096, 4096), (32, 16, 512, 512), (32, 1, 512, 16384), (16, 2, 4096, 4096)]
    ],
    "fused": [
        *(partial(norm_case, rows, width) for rows, width in [(1, 1024), (1, 4096), (32, 4096), (8192, 4096)]),
        *(partial(silu_case, rows, width) for rows, width in [(1, 3072), (1, 14336), (32, 14336), (8192, 14336)]),
        *(partial(rope_case, rows, heads) for rows, heads in [(1, 16), (1, 32), (32, 32), (8192, 32)]),
    ],
    "gemv": gemm_section(1),
    "gemm": gemm_section(4, 16, 32, 64),
    "step": [
        partial(step_case, *c)
        for c in [
            ("llama", BF16, 1, 256),
            ("llama", BF16, 32, 256),
            ("llama", FP8, 1, 256),
            ("llama", FP8, 32, 256),
            ("qwen", BF16, 1, 256),
            ("qwen", BF16, 32, 256),
        ]
    ],
    "sampling": [
        partial(sampling_case, rows, 128256, dtype) for rows, dtype in product((1, 32, 256), (torch.float32, BF16))
    ],
}


def seconds(run: Callable[[int], object], sets: int) -> float:
    """Median over replays of a graph that runs every input set, per launch."""
    for i in range(min(sets, 2)):
        run(i)
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    launches = sets if sets > 1 else 4
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            run(i % sets)
    graph.replay()
    times = []
    for _ in range(5):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3 / launches)
    return sorted(times)[2]


def compile_all(sections: list[str], jobs: int) -> None:
    arguments = [sys.executable, __file__, "--only", *sections]
    children = [
        subprocess.Popen([*arguments, "--compile-part", str(i), "--jobs", str(jobs)], env=dict(os.environ))
        for i in range(jobs)
    ]
    for child in children:
        child.wait()


def compile_part(sections: list[str], part: int, jobs: int) -> None:
    """Launch every jobs-th variant once, which leaves its binary in Triton's cache on disk."""
    count = 0
    for section in sections:
        for make in SECTIONS[section]:
            case = make(most_layers=1) if section == "step" else make()
            for variant in case.variants:
                count += 1
                if count % jobs != part or variant.label.startswith("*"):
                    continue
                try:
                    variant.run(0)
                except triton.runtime.errors.OutOfResources:
                    continue
    torch.cuda.synchronize()


def measure(sections: list[str]) -> list[dict[str, object]]:
    results: list[dict[str, object]] = []
    for section in sections:
        for make in SECTIONS[section]:
            case = make()
            for variant in case.variants:
                entry: dict[str, object] = {"section": section, "case": case.name, "variant": variant.label}
                try:
                    variant.run(0)
                    entry["error"] = variant.error() if variant.error else None
                    entry["us"] = seconds(variant.run, case.sets) * 1e6
                    entry["share"] = case.floor_s * 1e6 / float(entry["us"])
                except (RuntimeError, ValueError, TypeError, triton.runtime.errors.OutOfResources) as failure:
                    entry["failed"] = str(failure).splitlines()[0][:100]
                results.append(entry)
    return results


def print_table(results: list[dict[str, object]]) -> None:
    """Best variant of each case, the library's time beside it, and everything that failed or is wrong."""
    by_case: dict[str, list[dict[str, object]]] = {}
    for entry in results:
        by_case.setdefault(str(entry["case"]), []).append(entry)
        wrong = isinstance(entry.get("error"), float | int) and float(entry["error"]) > 1e-2
        if wrong or ("failed" in entry and "OutOfResources" not in str(entry["failed"])):
            print("BAD", entry["case"], "|", entry["variant"], "|", entry.get("failed", entry.get("error")))
    for name, entries in by_case.items():
        timed = sorted((e for e in entries if "us" in e), key=lambda e: float(e["us"]))  # type: ignore[arg-type]
        ours = [e for e in timed if not str(e["variant"]).startswith("*")]
        theirs = [e for e in timed if str(e["variant"]).startswith("*")]
        shown = ours[:2] + theirs[:2] if len(ours) > 8 else timed
        print(name, *(f"| {e['variant']}: {e['us']:.1f} us {e['share']:.0%}" for e in shown))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=list(SECTIONS), choices=list(SECTIONS))
    parser.add_argument("--json")
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--compile-part", type=int)
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.compile_part is not None:
        compile_part(options.only, options.compile_part, options.jobs)
        return
    begin = time.perf_counter()
    compile_all(options.only, options.jobs)
    compiled = time.perf_counter()
    results = measure(options.only)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file)
    print_table(results)
    print(f"compiled in {compiled - begin:.0f} s, measured in {time.perf_counter() - compiled:.0f} s")


if __name__ == "__main__":
    main()
