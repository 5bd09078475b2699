"""Benchmark cases of attention: decode, shared-prefix (cascade) decode, prefill; and RoPE with the cache write."""

from __future__ import annotations

from functools import cache
from itertools import product

import torch

from gpu_cases.case import BF16, COPY_BYTES, DEVICE, MATRIX_FLOPS, Case, Variant, randn, relative_error, sets_for, short
from penstock.kernels.hopper.decode import StreamConfig, decode_stream
from penstock.kernels.hopper.program import is_hopper
from penstock.kernels.triton import decode as decode
from penstock.kernels.triton.decode_plan import decode_parts, plan_decode
from penstock.kernels.triton.paged import paged_attention_reference
from penstock.kernels.triton.prefill import PrefillConfig, prefill_attention
from penstock.kernels.triton.prefix import PrefixConfig, SharedPrefix
from penstock.kernels.triton.rope import rope_and_cache, rope_reference


def make_cache(
    sequences: int, context: int, kv_heads: int, sets: int, dtype: torch.dtype = BF16, dim: int = 128, block: int = 16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    columns = -(-context // block)
    blocks = sets * sequences * columns
    tables = torch.randperm(blocks, device=DEVICE).view(sets, sequences, columns).to(torch.int32)
    k, v = (randn(blocks, kv_heads, block, dim, dtype=dtype) for _ in range(2))
    return k, v, tables


def decode_case(heads: int, dtype: torch.dtype, contexts: list[int], name: str) -> Case:
    sequences, longest = len(contexts), max(contexts)
    size = sum(contexts) * 8 * 128 * 2 * dtype.itemsize
    sets = sets_for(size)
    q = randn(sequences, heads, 128)
    out = torch.full_like(q, torch.nan)
    lengths = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)
    k, v, tables = make_cache(sequences, longest, 8, sets, dtype)

    @cache
    def expected() -> torch.Tensor:
        return paged_attention_reference(q, k, v, tables[0], list(range(sequences + 1)), contexts, 0.09)

    def variant(config: decode.DecodeConfig, num_parts: int) -> Variant:
        scratch = decode.decode_scratch(sequences, heads, 8, 128, num_parts, DEVICE)
        plan = plan_decode(lengths, num_parts, config.block_n)

        def run(i: int) -> None:
            decode.decode_attention(out, q, k, v, tables[i], plan, scale=0.09, scratch=scratch, config=config)

        label = f"{config.block_n},{config.num_warps},{config.num_stages} x{num_parts}"
        return Variant(label, run, lambda: relative_error(out, expected()))

    def streamed(config: StreamConfig) -> Variant:
        division = config.division(sequences, 8)
        scratch = decode.decode_scratch(sequences, heads, 8, 128, division.parts, DEVICE)
        plan = division.plan(lengths)

        def run(i: int) -> None:
            decode_stream(out, q, k, v, tables[i], plan, scale=0.09, scratch=scratch, config=config)

        label = f"stream {config.stages},{config.tile} x{config.spare}"
        return Variant(label, run, lambda: relative_error(out, expected()))

    auto = decode_parts(sequences, 8)
    streams = [StreamConfig(*shape) for shape in ((3, 64, 1056), (6, 64, 528), (4, 128, 1056))]
    shapes = [(32, 2, 4), (64, 2, 4), (64, 4, 4), (64, 4, 6), (128, 4, 4), (128, 8, 4), (128, 8, 6)]
    configs = [decode.DecodeConfig(*shape) for shape in shapes]
    choices = sorted({sequences + 1, auto, 3 * sequences + 1}) if sequences > 16 else [auto]
    return Case(
        f"decode H{heads} {short(dtype)} {name}",
        size / COPY_BYTES,
        sets,
        [variant(c, n) for c, n in product(configs, choices)] + [streamed(c) for c in streams if is_hopper(DEVICE)],
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
        return paged_attention_reference(q, k, v, tables[0], list(range(sequences + 1)), [context] * sequences, 0.09)

    def variant(shape: tuple[int, int, int, int] | None, splits: int, inner: tuple[int, int, int]) -> Variant:
        scratch = decode.decode_scratch(sequences, heads, 8, 128, parts + splits * sequences, DEVICE)
        prefix = None
        if shape:
            config = PrefixConfig(*shape)
            prefix = SharedPrefix(tables[0, 0], lengths[:1], lengths, splits, config)
        plan = plan_decode(contexts, parts, inner[0], shared_S=lengths if prefix else None)

        def run(i: int) -> None:
            decode.decode_attention(
                out, q, k, v, tables[0], plan, scale=0.09, scratch=scratch, prefix=prefix,
                config=decode.DecodeConfig(*inner),
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
    dense_q, dense_k, dense_v = (randn(sequences, h, count, 128) for h in (heads, 8, 8))

    @cache
    def expected() -> torch.Tensor:
        return paged_attention_reference(q, k, v, tables[0], starts.tolist(), [context] * sequences, 0.09)

    def variant(shape: tuple[int, int, int, int] | None) -> Variant:
        def run(i: int) -> None:
            prefill_attention(
                out, q, k, v, tables[0], starts, contexts, num_queries=sequences * count, scale=0.09,
                config=PrefillConfig(*shape) if shape else None,
            )  # fmt: skip

        return Variant(str(shape or "as chosen"), run, lambda: relative_error(out, expected()))

    def library(name: str) -> Variant:
        def run(i: int) -> None:
            with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, name)):
                torch.nn.functional.scaled_dot_product_attention(
                    dense_q, dense_k, dense_v, is_causal=True, enable_gqa=True
                )

        return Variant(f"* {name}", run)

    shapes = [(64, 64, 4, 5), (128, 64, 4, 5), (128, 64, 8, 5), (128, 128, 8, 5), (256, 64, 8, 3), (256, 64, 8, 5),
              (256, 64, 16, 5), (256, 64, 16, 7)]  # fmt: skip
    variants = [variant(None), *(variant(shape) for shape in shapes)]
    if count == context:
        variants += [library("CUDNN_ATTENTION"), library("FLASH_ATTENTION")]
    visible = count * (context - count) + count * (count + 1) / 2
    floor = 4 * 128 * heads * sequences * visible / MATRIX_FLOPS[BF16]
    return Case(f"prefill H{heads} {sequences}x{count} of {context}", floor, 1, variants)


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
