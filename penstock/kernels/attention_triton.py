"""Paged attention for CUDA: split-KV decode, and decode over a prefix that many sequences share.

Layout of the cache, per layer, keys and values apart: [N, K, B, D]. A block's tokens of one head are contiguous
(4 KiB at 16 x 128 bf16), so one program streams long runs. Prefill over the same cache is in `prefill_triton`.

Shape suffixes as in `base`: S sequences, H query heads, K key/value heads, D head size, N blocks, B tokens per block.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from penstock.kernels.overlap_triton import overlaps_launches

LOG2_E = math.log2(math.e)
UNSEEN = tl.constexpr(-1.0e30)  # finite stand-in for -inf: a row that saw no key yet must not produce NaN


@triton.jit
def attend(
    q, acc, total, peak, k_head, v_head, table, start, stop, last, window, scale, stride_block, stride_token,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Online softmax of the rows of `q` over tokens [start, stop). Row r sees tokens up to `last[r]` if MASKED."""
    dims = tl.arange(0, D_PAD)
    for base in tl.range(start, stop, BLOCK_N):
        tokens = base + tl.arange(0, BLOCK_N)
        if MASKED:
            blocks = tl.load(table + tokens // BLOCK_SIZE, mask=tokens < stop, other=0).to(tl.int64)
        else:
            blocks = tl.load(table + tokens // BLOCK_SIZE).to(tl.int64)
        places = (blocks * stride_block + (tokens % BLOCK_SIZE) * stride_token)[:, None] + dims[None, :]
        if MASKED:
            # A reused block may hold another request's NaN past the end of this sequence: never load it.
            inside = (tokens < stop)[:, None] & (dims < D)[None, :]
            k = tl.load(k_head + places, mask=inside, other=0.0)
            v = tl.load(v_head + places, mask=inside, other=0.0)
        elif D == D_PAD:
            k = tl.load(k_head + places)
            v = tl.load(v_head + places)
        else:
            k = tl.load(k_head + places, mask=(dims < D)[None, :], other=0.0)
            v = tl.load(v_head + places, mask=(dims < D)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            visible = tokens[None, :] <= last[:, None]
            if WINDOW:
                visible = visible & (tokens[None, :] > last[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
        decay = tl.exp2(peak - new_peak)
        weights = tl.exp2(scores * scale - new_peak[:, None])
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        peak = new_peak
    return acc, total, peak


@triton.jit
def _merge(
    partial_out, partial_lse, head, slot_stride, begin, end,
    GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Weighted mean of the partial results [begin, end) of GROUP heads; rows are padded to a power of two."""
    PADDED: tl.constexpr = triton.next_power_of_2(GROUP)
    STEP: tl.constexpr = SLOTS if SLOTS < 16 else 16
    group = tl.arange(0, PADDED)
    dims = tl.arange(0, D_PAD)
    slots = tl.arange(0, SLOTS)
    live = (group < GROUP)[:, None] & ((slots >= begin) & (slots < end))[None, :]
    at = slots[None, :] * slot_stride + head + group[:, None]
    lse = tl.load(partial_lse + at, mask=live, other=float("-inf"), cache_modifier=".cg")
    peak = tl.maximum(tl.max(lse, 1), UNSEEN)
    total = tl.sum(tl.exp2(lse - peak[:, None]), 1)
    acc = tl.zeros([PADDED, D_PAD], tl.float32)
    for base in tl.static_range(0, SLOTS, STEP):
        slots = base + tl.arange(0, STEP)
        live = (group < GROUP)[:, None] & ((slots >= begin) & (slots < end))[None, :]
        at = slots[None, :] * slot_stride + head + group[:, None]
        lse = tl.load(partial_lse + at, mask=live, other=float("-inf"), cache_modifier=".cg")
        cells = at.to(tl.int64)[:, :, None] * D + dims[None, None, :]
        seen = (lse > UNSEEN)[:, :, None] & (dims < D)[None, None, :]  # an empty part holds no numbers
        parts = tl.load(partial_out + cells, mask=seen, other=0.0, cache_modifier=".cg")
        acc += tl.sum(parts * tl.exp2(lse - peak[:, None])[:, :, None], 1)
    return acc / tl.maximum(total, 1e-30)[:, None]


@triton.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["tables", "contexts", "shared"])
def _decode_kernel(
    out, q, k_cache, v_cache, tables, contexts, shared, partial_out, partial_lse, arrivals, scale, window,
    stride_out, stride_q, stride_table, stride_block, stride_head, stride_token,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, PREFIX_SPLITS: tl.constexpr,
    SLOTS: tl.constexpr, WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    seq = tl.program_id(2)
    table = tables + seq.to(tl.int64) * stride_table
    k_head = k_cache + kv_head * stride_head
    v_head = v_cache + kv_head * stride_head
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    context = tl.load(contexts + seq)
    first = 0
    if PREFIX_SPLITS > 0:
        first = tl.load(shared + seq)
    prefixed = first > 0
    if WINDOW:
        first = tl.maximum(first, context - window)
    # Whole tiles, evenly over the splits; a short context uses fewer of them.
    share = tl.maximum(tl.cdiv(tl.cdiv(context - first, BLOCK_N), SPLITS), 1) * BLOCK_N
    active = tl.maximum(tl.cdiv(context - first, share), 1)
    if split >= active:
        return
    start = first + split * share
    stop = tl.minimum(start + share, context)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, D_PAD)
    heads = kv_head * GROUP + rows
    real = (rows < GROUP)[:, None] & (dims < D)[None, :]
    places = heads[:, None] * D + dims[None, :]
    q_rows = tl.load(q + seq * stride_q + places, mask=real, other=0.0)
    acc, total, peak = attend(
        q_rows, tl.zeros([ROWS, D_PAD], tl.float32), tl.zeros([ROWS], tl.float32), tl.full([ROWS], UNSEEN, tl.float32),
        k_head, v_head, table,
        start, stop, tl.zeros([ROWS], tl.int32) + (stop - 1), 0, scale, stride_block, stride_token,
        D, D_PAD, BLOCK_SIZE, BLOCK_N, True, False,
    )  # fmt: skip
    result = acc / tl.where(total > 0, total, 1.0)[:, None]

    if (active == 1) & ((PREFIX_SPLITS == 0) | (not prefixed)):
        tl.store(out + seq * stride_out + places, result.to(out.dtype.element_ty), mask=real)
    else:
        slot_stride = tl.num_programs(2) * HEADS
        row_base = (PREFIX_SPLITS + split) * slot_stride + seq * HEADS
        tl.store(partial_out + row_base.to(tl.int64) * D + places, result, mask=real)
        tl.store(partial_lse + row_base + heads, peak + tl.log2(total), mask=rows < GROUP)
        tl.debug_barrier()  # all threads' partial results precede the one arrival
        arrival = arrivals + seq * tl.num_programs(0) + kv_head
        if tl.atomic_add(arrival, 1, sem="acq_rel") == active - 1:
            tl.store(arrival, 0)
            begin = PREFIX_SPLITS
            if prefixed:
                begin = 0
            merged = _merge(
                partial_out, partial_lse, seq * HEADS + kv_head * GROUP, slot_stride, begin, PREFIX_SPLITS + active,
                GROUP, D, D_PAD, SLOTS,
            )  # fmt: skip
            group = tl.arange(0, merged.shape[0])
            into = out + seq * stride_out + (kv_head * GROUP + group)[:, None] * D + dims[None, :]
            tl.store(into, merged.to(out.dtype.element_ty), mask=(group < GROUP)[:, None] & (dims < D)[None, :])


@triton.jit(do_not_specialize=["num_seqs"])
def _prefix_kernel(
    q, k_cache, v_cache, table, shared_len, partial_out, partial_lse, num_seqs, scale,
    stride_q, stride_block, stride_head, stride_token,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, PREFIX_SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All queries of one key/value head against a piece of the shared prefix, read once for ROWS queries."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    length = tl.load(shared_len)
    share = tl.cdiv(tl.cdiv(length, BLOCK_N), PREFIX_SPLITS) * BLOCK_N
    start = split * share
    stop = tl.minimum(start + share, length)

    rows = tile * ROWS + tl.arange(0, ROWS)
    seqs = rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    dims = tl.arange(0, D_PAD)
    real = (seqs < num_seqs)[:, None] & (dims < D)[None, :]
    q_rows = tl.load(q + (seqs * stride_q + heads * D)[:, None] + dims[None, :], mask=real, other=0.0)
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], UNSEEN, tl.float32)
    k_head = k_cache + kv_head * stride_head
    v_head = v_cache + kv_head * stride_head
    whole = start + tl.maximum(stop - start, 0) // BLOCK_N * BLOCK_N
    last = tl.zeros([ROWS], tl.int32) + (stop - 1)
    acc, total, peak = attend(
        q_rows, acc, total, peak, k_head, v_head, table, start, whole, last, 0, scale, stride_block, stride_token,
        D, D_PAD, BLOCK_SIZE, BLOCK_N, False, False,
    )  # fmt: skip
    acc, total, peak = attend(
        q_rows, acc, total, peak, k_head, v_head, table, whole, stop, last, 0, scale, stride_block, stride_token,
        D, D_PAD, BLOCK_SIZE, BLOCK_N, True, False,
    )  # fmt: skip
    into = (split * num_seqs + seqs) * HEADS + heads
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(partial_out + into.to(tl.int64)[:, None] * D + dims[None, :], result, mask=real)
    tl.store(partial_lse + into, peak + tl.log2(total), mask=seqs < num_seqs)


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Tile shape of the decode kernel; the number of splits is planned per batch size."""

    block_n: int
    num_warps: int = 4
    num_stages: int = 4


@dataclass(frozen=True, slots=True)
class PrefixConfig:
    rows: int = 64
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """Partial results of the splits. One scratch serves all layers, since they run one after the other."""

    out: torch.Tensor  # float32 [slots * S * H * D]
    lse: torch.Tensor  # float32 [slots * S * H], base-2 logarithm of the softmax denominator
    arrivals: torch.Tensor  # int32 [S * K], zero between launches


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Blocks that the sequences with `lengths_S[s] > 0` have in common at the start of their tables."""

    table_M: torch.Tensor  # int32
    length: torch.Tensor  # int32 [1]
    lengths_S: torch.Tensor  # int32: `length` for members, 0 for the others
    splits: int
    config: PrefixConfig = PrefixConfig()


def decode_splits(num_seqs: int, num_kv_heads: int, max_context: int, programs: int = 264) -> int:
    """Splits that keep the device busy: `programs` is what runs at once (2 on each of 132 multiprocessors).

    The number is part of a captured graph; each launch uses as many splits as its contexts fill.
    """
    return _power_of_two(min(programs // (num_seqs * num_kv_heads), -(-max_context // 64), 32))


def decode_config(num_seqs: int, num_kv_heads: int, row_bytes: int = 256) -> DecodeConfig:
    """Tiles measured on an H200: larger while a program must hide latency alone, small once the device is full.

    `row_bytes` is the size of one key of one head; beyond 256 a large tile would not fit.
    """
    programs = num_seqs * num_kv_heads
    if programs >= 1024 or row_bytes > 256:
        return DecodeConfig(32, 2, 4)
    return DecodeConfig(64, 4, 4) if programs < 132 else DecodeConfig(128, 8, 4)


def prefix_splits(num_seqs: int, num_heads: int, max_prefix: int, programs: int = 264) -> int:
    tiles = -(-num_seqs * num_heads // PrefixConfig().rows)
    return _power_of_two(min(programs // tiles, -(-max_prefix // 256), 16))


def _power_of_two(value: int) -> int:
    """The largest one up to `value`: each number of splits is a kernel of its own, so there should be few."""
    return 1 << max(0, value.bit_length() - 1)


def decode_scratch(
    num_seqs: int, num_heads: int, num_kv_heads: int, head_dim: int, slots: int, device: torch.device
) -> DecodeScratch:
    """`slots` is decode splits plus prefix splits, at most."""
    rows = slots * num_seqs * num_heads
    return DecodeScratch(
        torch.empty(rows * head_dim, dtype=torch.float32, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
        torch.zeros(num_seqs * num_kv_heads, dtype=torch.int32, device=device),
    )


def decode_attention(
    out_SHD: torch.Tensor,
    q_SHD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables_SM: torch.Tensor,
    contexts_S: torch.Tensor,
    *,
    scale: float,
    splits: int,
    scratch: DecodeScratch,
    window: int = 0,
    prefix: SharedPrefix | None = None,
    config: DecodeConfig | None = None,
) -> None:
    """One query per sequence over its cached keys. Rows with context 0 (padding of a captured batch) give zeros.

    With `prefix`, its tokens are read once for all sequences and each sequence reads only what follows.
    """
    S, H, D = q_SHD.shape
    K, B = k_cache.shape[1:3]
    group = H // K
    pdl = overlaps_launches()
    config = config or decode_config(S, K, D * k_cache.itemsize)
    prefix_slots = 0
    if prefix is not None:
        if window:
            raise ValueError("a shared prefix cannot serve sliding-window layers: call without `prefix` there")
        prefix_slots = prefix.splits
        _launch_prefix(q_SHD, k_cache, v_cache, prefix, scratch, scale, pdl)
    _decode_kernel[K, splits, S](
        out_SHD, q_SHD, k_cache, v_cache, tables_SM, contexts_S, prefix.lengths_S if prefix else contexts_S,
        scratch.out, scratch.lse, scratch.arrivals, scale * LOG2_E, window,
        out_SHD.stride(0), q_SHD.stride(0), tables_SM.stride(0),
        k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        HEADS=H, GROUP=group, ROWS=max(16, triton.next_power_of_2(group)), D=D, D_PAD=triton.next_power_of_2(D),
        BLOCK_SIZE=B, BLOCK_N=config.block_n, SPLITS=splits, PREFIX_SPLITS=prefix_slots,
        SLOTS=triton.next_power_of_2(splits + prefix_slots), WINDOW=window > 0, PDL=pdl,
        num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=pdl,
    )  # fmt: skip


def _launch_prefix(
    q_SHD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    prefix: SharedPrefix,
    scratch: DecodeScratch,
    scale: float,
    pdl: bool,
) -> None:
    S, H, D = q_SHD.shape
    K, B = k_cache.shape[1:3]
    config = prefix.config
    rows = min(config.rows, max(16, triton.next_power_of_2(S * H // K)))
    _prefix_kernel[triton.cdiv(S * H // K, rows), K, prefix.splits](
        q_SHD, k_cache, v_cache, prefix.table_M, prefix.length, scratch.out, scratch.lse, S, scale * LOG2_E,
        q_SHD.stride(0), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        HEADS=H, GROUP=H // K, ROWS=rows, D=D, D_PAD=triton.next_power_of_2(D), BLOCK_SIZE=B,
        BLOCK_N=config.block_n, PREFIX_SPLITS=prefix.splits, PDL=pdl,
        num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=pdl,
    )  # fmt: skip


def paged_attention_reference(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables_SM: torch.Tensor,
    query_starts: list[int],
    contexts: list[int],
    scale: float,
    window: int = 0,
) -> torch.Tensor:
    """Ragged causal attention over the paged cache in float32, one sequence at a time. Decode is one query each."""
    out = torch.zeros_like(q_THD, dtype=torch.float32)
    group = q_THD.shape[1] // k_cache.shape[1]
    for s, context in enumerate(contexts):
        rows = slice(query_starts[s], query_starts[s + 1])
        if rows.start == rows.stop or context == 0:
            continue
        blocks = tables_SM[s, : triton.cdiv(context, k_cache.shape[2])].long()
        k, v = (
            c[blocks].transpose(0, 1).flatten(1, 2)[:, :context].float().repeat_interleave(group, 0)
            for c in (k_cache, v_cache)
        )
        scores = torch.einsum("qhd,hkd->hqk", q_THD[rows].float(), k) * scale
        last = torch.arange(context - (rows.stop - rows.start), context, device=q_THD.device)[:, None]
        tokens = torch.arange(context, device=q_THD.device)[None]
        hidden = (tokens > last) | ((tokens <= last - window) if window else False)
        out[rows] = torch.einsum("hqk,hkd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
    return out
