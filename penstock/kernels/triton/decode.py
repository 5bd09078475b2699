"""Paged decode attention for CUDA (flash decoding): one query per sequence, long sequences split into parts.

`decode_plan.py` makes the parts. Attention over a shared prefix may come from `prefix.py`; it is merged with that over
the rest here (cascade attention). Shapes as in `paged.py`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from penstock.kernels.triton.decode_plan import FIELDS, Division, decode_parts
from penstock.kernels.triton.overlap import overlaps_launches
from penstock.kernels.triton.paged import LOG2_E, UNSEEN, attend, math_dtype
from penstock.kernels.triton.prefix import DecodeScratch, SharedPrefix, attend_prefix
from penstock.kernels.triton.rope import angles, head_gains, rotated, with_partners


@triton.jit
def _merge(
    acc, total, peak, partial_out, partial_lse, row, row_stride, parts, heads, real,
    HEADS: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Add the partial results in rows `row`, `row + row_stride`, ... to a running softmax of [heads, D]."""
    dims = tl.arange(0, acc.shape[1])
    for base in range(0, parts, STEP):
        part = base + tl.arange(0, STEP)
        live = real[:, None] & (part < parts)[None, :]
        at = (row + part * row_stride)[None, :] * HEADS + heads[:, None]
        lse = tl.load(partial_lse + at, mask=live, other=float("-inf"), cache_modifier=".cg")
        cells = at.to(tl.int64)[:, :, None] * D + dims[None, None, :]
        seen = (lse > UNSEEN)[:, :, None] & (dims < D)[None, None, :]  # an empty part holds no numbers
        values = tl.load(partial_out + cells, mask=seen, other=0.0, cache_modifier=".cg")
        new_peak = tl.maximum(peak, tl.max(lse, 1))
        weights = tl.exp2(lse - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None] + tl.sum(values * weights[:, :, None], 1)
        peak = new_peak
    return acc, total, peak


@triton.jit
def _store_merged(
    out, partial_out, partial_lse, own, parts, shared, num_seqs, splits, kv_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """All parts of a sequence, in rows from `own` on, and of its prefix, in every num_seqs-th row from `shared` on."""
    PADDED: tl.constexpr = triton.next_power_of_2(GROUP)
    group = tl.arange(0, PADDED)
    dims = tl.arange(0, D_PAD)
    heads = kv_head * GROUP + group
    acc = tl.zeros([PADDED, D_PAD], tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    peak = tl.full([PADDED], UNSEEN, tl.float32)
    acc, total, peak = _merge(
        acc, total, peak, partial_out, partial_lse, own, 1, parts, heads, group < GROUP, HEADS, D, STEP
    )
    acc, total, peak = _merge(
        acc, total, peak, partial_out, partial_lse, shared, num_seqs, splits, heads, group < GROUP, HEADS, D, STEP
    )
    merged = acc / tl.maximum(total, 1e-30)[:, None]
    real = (group < GROUP)[:, None] & (dims < D)[None, :]
    tl.store(out + heads[:, None] * D + dims[None, :], merged.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["stride_table", "num_seqs", "prefix_splits"], do_not_specialize_on_alignment=["tables"])
def _decode_kernel(
    out, q, k_cache, v_cache, tables, plan, partial_out, partial_lse, arrivals, cos_sin, q_gain, k_gain, eps, scale,
    num_seqs, prefix_splits, stride_out, stride_q, stride_table, stride_block, stride_head, stride_token,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr,
    PREFIX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One key/value head of one part of a sequence; the last part to arrive merges them.

    With ROTARY, `q` holds queries, keys and values as projected. The sequence's last part takes the new token from
    there and stores it; it is where the softmax starts.
    """
    kv_head = tl.program_id(0)
    entry = plan + tl.program_id(1) * FIELDS
    # What does not come from the kernel before this one is read ahead of the wait.
    seq = tl.load(entry)
    start = tl.load(entry + 1)
    stop = tl.load(entry + 2)
    context = tl.load(entry + 3)
    part = tl.load(entry + 4)
    parts = tl.load(entry + 6)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if seq < 0:
        return
    table = tables + seq.to(tl.int64) * stride_table
    k_head = k_cache + kv_head * stride_head
    v_head = v_cache + kv_head * stride_head
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, D_PAD)
    heads = kv_head * GROUP + rows
    real = (rows < GROUP)[:, None] & (dims < D)[None, :]
    places = heads[:, None] * D + dims[None, :]
    MATH: tl.constexpr = math_dtype(k_cache.dtype.element_ty)
    if ROTARY > 0:
        cos, sin = angles(cos_sin, tl.maximum(context - 1, 0), D_PAD, ROTARY)
        q_gains = head_gains(q_gain, D, D_PAD, ROTARY, NORM)
        k_gains = head_gains(k_gain, D, D_PAD, ROTARY, NORM)
        last = tl.maximum(stop - 1, 0)
        block = tl.load(table + last // BLOCK_SIZE).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()

    if ROTARY > 0:
        own = (part == parts - 1) & (stop > start)
        fresh = own & (dims < D)[None, :]
        token = q + seq.to(tl.int64) * stride_q
        # All loads before any arithmetic: loads are issued in the order that is written here.
        raw_q = with_partners(token + heads[:, None] * D, real, D_PAD, ROTARY)
        raw_k = with_partners(token + (HEADS + kv_head) * D + tl.zeros([1, 1], tl.int32), fresh, D_PAD, ROTARY)
        value = tl.load(token + (HEADS + HEADS // GROUP + kv_head) * D + dims[None, :], mask=fresh, other=0.0)
        q_rows = rotated(raw_q, cos, sin, q_gains, eps, D, NORM).to(MATH)
        key = rotated(raw_k, cos, sin, k_gains, eps, D, NORM).to(k_cache.dtype.element_ty)
        value = value.to(tl.float32).to(v_cache.dtype.element_ty)
        place = block * stride_block + last % BLOCK_SIZE * stride_token + dims[None, :]
        tl.store(k_head + place, key, mask=fresh)
        tl.store(v_head + place, value, mask=fresh)
        score = tl.sum(q_rows.to(tl.float32) * key.to(tl.float32), 1) * scale
        peak = tl.where(own, score, UNSEEN)
        total = tl.where(own, 1.0, 0.0) + tl.zeros([ROWS], tl.float32)
        acc = value.to(tl.float32) + tl.zeros([ROWS, D_PAD], tl.float32)
        end = stop - own.to(tl.int32)
    else:
        q_rows = tl.load(q + seq.to(tl.int64) * stride_q + places, mask=real, other=0.0).to(MATH)
        peak = tl.full([ROWS], UNSEEN, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, D_PAD], tl.float32)
        end = stop
    acc, total, peak = attend(
        q_rows, acc, total, peak, k_head, v_head, table,
        start, end, tl.zeros([ROWS], tl.int32) + (end - 1), 0, scale, stride_block, stride_token,
        D, D_PAD, BLOCK_SIZE, BLOCK_N, True, False,
    )  # fmt: skip
    result = acc / tl.where(total > 0, total, 1.0)[:, None]

    prefixed = False
    if PREFIX:
        prefixed = tl.load(entry + 7) > 0
    if (parts == 1) & (not prefixed):
        tl.store(out + seq.to(tl.int64) * stride_out + places, result.to(out.dtype.element_ty), mask=real)
    else:
        own_rows = prefix_splits * num_seqs  # partial results of the prefix come first
        row = (own_rows + tl.program_id(1)) * HEADS
        tl.store(partial_out + row.to(tl.int64) * D + places, result, mask=real)
        tl.store(partial_lse + row + heads, peak + tl.log2(total), mask=rows < GROUP)
        tl.debug_barrier()  # all threads' partial results precede the one arrival
        arrival = arrivals + seq * tl.num_programs(0) + kv_head
        if tl.atomic_add(arrival, 1, sem="acq_rel") == parts - 1:
            tl.store(arrival, 0)
            first_row = own_rows + tl.load(entry + 5)
            splits = tl.where(prefixed, prefix_splits, 0)
            _store_merged(
                out + seq.to(tl.int64) * stride_out, partial_out, partial_lse, first_row, parts, seq, num_seqs, splits,
                kv_head, HEADS, GROUP, D, D_PAD, STEP,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Tile shape of the decode kernel."""

    block_n: int
    num_warps: int = 4
    num_stages: int = 4

    def division(self, num_seqs: int, num_kv_heads: int) -> Division:
        return Division(decode_parts(num_seqs, num_kv_heads), self.block_n)


@dataclass(frozen=True, slots=True)
class Rope:
    """What attention applies to projected queries and keys: RMSNorm of each head, where a model has it, and RoPE."""

    cos_sin: torch.Tensor  # float32 [positions, rotary], cosines first
    norm_weights: tuple[torch.Tensor, torch.Tensor] | None  # of query and key heads
    eps: float


def decode_config(
    num_seqs: int, num_kv_heads: int, row_bytes: int = 256, *, after_prefix: bool = False
) -> DecodeConfig:
    """Tiles measured on an H200: larger while a program must hide latency alone, small once the device is full.

    `row_bytes` is the size of one key of one head; beyond 256 a large tile would not fit, and up to 128, which is fp8,
    fewer warps convert more. After a shared prefix there is little left of each sequence to read.
    """
    programs = num_seqs * num_kv_heads
    if row_bytes <= 128 and programs >= 132:
        return DecodeConfig(64, 2, 4) if programs >= 1024 else DecodeConfig(128, 4, 4)
    if row_bytes > 256 or (programs >= 1024 and after_prefix):
        return DecodeConfig(32, 2, 4)
    return DecodeConfig(128, 8, 4) if 132 <= programs < 1024 else DecodeConfig(64, 4, 4)


def decode_scratch(
    num_seqs: int, num_heads: int, num_kv_heads: int, head_dim: int, rows: int, device: torch.device
) -> DecodeScratch:
    """`rows` is parts of the plan, and sequences times splits of a shared prefix, at most."""
    return DecodeScratch(
        torch.empty(rows * num_heads * head_dim, dtype=torch.float32, device=device),
        torch.empty(rows * num_heads, dtype=torch.float32, device=device),
        torch.zeros(num_seqs * num_kv_heads, dtype=torch.int32, device=device),
    )


def decode_attention(
    out_SHD: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables_SM: torch.Tensor,
    plan: torch.Tensor,
    *,
    scale: float,
    scratch: DecodeScratch,
    config: DecodeConfig,
    rope: Rope | None = None,
    prefix: SharedPrefix | None = None,
) -> None:
    """One query per sequence over its cached keys. Rows with context 0 (padding of a CUDA graph) give zeros.

    `plan` is by `plan_decode`, with the tile of `config`, and no kernel may write it while others run beside it.
    With `rope`, `q` is [S, (H + 2 K) * D] as projected, and the new keys and values are stored on the way; otherwise
    it is [S, H, D], ready to use, and they are in the cache. With `prefix`, its tokens are read once for all sequences.
    """
    S, H, D = out_SHD.shape
    K, B = k_cache.shape[1:3]
    group = H // K
    pdl = overlaps_launches()
    if prefix is not None:
        if rope is not None:
            raise ValueError("queries over a shared prefix must be rotated before, by rope_and_cache")
        attend_prefix(q, k_cache, v_cache, prefix, scratch, scale, pdl)
    q_gain, k_gain = rope.norm_weights if rope and rope.norm_weights else (q, q)
    _decode_kernel[K, len(plan)](
        out_SHD, q, k_cache, v_cache, tables_SM, plan, scratch.out, scratch.lse, scratch.arrivals,
        rope.cos_sin if rope else scratch.lse, q_gain, k_gain, rope.eps if rope else 0.0, scale * LOG2_E,
        S, prefix.splits if prefix else 0, out_SHD.stride(0), q.stride(0), tables_SM.stride(0),
        k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        HEADS=H, GROUP=group, ROWS=max(16, triton.next_power_of_2(group)), D=D, D_PAD=triton.next_power_of_2(D),
        BLOCK_SIZE=B, BLOCK_N=config.block_n, STEP=2 * config.num_warps,
        ROTARY=rope.cos_sin.shape[1] if rope else 0, NORM=rope is not None and rope.norm_weights is not None,
        PREFIX=prefix is not None, PDL=pdl, num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=pdl,
    )  # fmt: skip
