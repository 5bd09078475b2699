"""Paged prefill attention for CUDA: ragged chunks of queries, causal over whatever the cache already holds.

A tile holds BLOCK_Q queries with all query heads of one key/value head, so short chunks still fill the tensor cores
and each key is loaded once per group.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from penstock.kernels.hopper.attention import INVARIANT_RANGE, prefill_on_hopper, suits_hopper
from penstock.kernels.triton.paged import LOG2_E, UNSEEN, attend, math_dtype


@triton.jit
def _sequence_of(tile, query_starts, num_seqs, origin, BLOCK_Q: tl.constexpr):
    """Largest s whose first tile, (query_starts[s] - origin) // BLOCK_Q + s, is not after `tile`."""
    low = 0
    high = num_seqs
    while high - low > 1:
        mid = (low + high) // 2
        if (tl.load(query_starts + mid) - origin) // BLOCK_Q + mid <= tile:
            low = mid
        else:
            high = mid
    return low


# Slices of a mixed batch start anywhere; without this each alignment and size of batch would be compiled again.
@triton.jit(
    do_not_specialize=["num_seqs", "stride_table"],
    do_not_specialize_on_alignment=["tables", "query_starts", "contexts"],
)
def _prefill_kernel(
    out, q, k_cache, v_cache, tables, query_starts, contexts, num_seqs, scale, window,
    stride_out, stride_q, stride_table, stride_block, stride_head, stride_token,
    GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, INVARIANT: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # late tiles see the most keys: start them first
    origin = tl.load(query_starts)
    seq = _sequence_of(tile, query_starts, num_seqs, origin, BLOCK_Q)
    begin = tl.load(query_starts + seq)
    count = tl.load(query_starts + seq + 1) - begin
    skip = (tile - (begin - origin) // BLOCK_Q - seq) * BLOCK_Q  # queries of this sequence in earlier tiles
    if skip >= count:
        return

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, D_PAD)
    query = skip + rows // GROUP
    last = tl.load(contexts + seq) - count + query  # the query's own position, the last token it sees
    top = tl.load(contexts + seq) - count + tl.minimum(skip + BLOCK_Q, count)  # one past the last position in the tile
    bottom = tl.load(contexts + seq) - count + skip
    real = ((rows < BLOCK_Q * GROUP) & (query < count))[:, None] & (dims < D)[None, :]
    places = (kv_head * GROUP + rows % GROUP)[:, None] * D + dims[None, :]
    tokens = (begin + query).to(tl.int64)[:, None]
    q_rows = tl.load(q + tokens * stride_q + places, mask=real, other=0.0)
    q_rows = q_rows.to(math_dtype(k_cache.dtype.element_ty))

    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], UNSEEN, tl.float32)
    k_head = k_cache + kv_head * stride_head
    v_head = v_cache + kv_head * stride_head
    table = tables + seq.to(tl.int64) * stride_table
    whole = 0
    if WINDOW:
        whole = tl.maximum(bottom - window + 1, 0) // BLOCK_N * BLOCK_N
    elif not INVARIANT:  # one loop for all tokens, compiled once, adds them in the same order for every query
        whole = (bottom + 1) // BLOCK_N * BLOCK_N  # every query of the tile sees all tokens before this
        acc, total, peak = attend(
            q_rows, acc, total, peak, k_head, v_head, table, 0, whole, last, window, scale, stride_block, stride_token,
            D, D_PAD, BLOCK_SIZE, BLOCK_N, False, False,
        )  # fmt: skip
    acc, total, peak = attend(
        q_rows, acc, total, peak, k_head, v_head, table, whole, top, last, window, scale, stride_block, stride_token,
        D, D_PAD, BLOCK_SIZE, BLOCK_N, True, WINDOW,
    )  # fmt: skip
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + tokens * stride_out + places, result.to(out.dtype.element_ty), mask=real)


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    rows: int
    block_n: int
    num_warps: int
    num_stages: int


def prefill_config(num_queries: int, num_heads: int, row_bytes: int = 256) -> PrefillConfig:
    """Tiles measured on an H200: large ones as soon as they occupy it. `row_bytes` is the size of a key of one head."""
    if row_bytes > 256:
        return PrefillConfig(32, 32, 8, 2)
    occupied = num_queries * num_heads // 256 >= 132
    return PrefillConfig(256, 64, 16, 5) if occupied else PrefillConfig(128, 128, 8, 5)


def prefill_attention(
    out_THD: torch.Tensor,
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables_SM: torch.Tensor,
    query_starts: torch.Tensor,
    contexts_S: torch.Tensor,
    *,
    num_queries: int,
    scale: float,
    window: int = 0,
    config: PrefillConfig | None = None,
    invariant: bool = False,
) -> None:
    """Attend `num_queries` ragged queries; sequence s owns rows query_starts[s] to query_starts[s + 1] (int32, device).

    The rows may start anywhere in `q_THD`, so a slice of a mixed batch's offsets works. Keys must be in the cache.
    `invariant`: the result of a query has the same bits, whatever else is computed and however its sequence is chunked.
    """
    if config is None and suits_hopper(q_THD, k_cache, window):
        key_range = INVARIANT_RANGE if invariant else 0
        prefill_on_hopper(
            out_THD, q_THD, k_cache, v_cache, tables_SM, query_starts, contexts_S, scale=scale, key_range=key_range
        )
        return
    H, D = q_THD.shape[1:]
    S = contexts_S.shape[0]
    K, B = k_cache.shape[1:3]
    group = H // K
    config = config or prefill_config(0 if invariant else num_queries, H, D * k_cache.itemsize)
    rows = max(config.rows, triton.next_power_of_2(group))
    block_q = rows // group
    _prefill_kernel[K, num_queries // block_q + S](
        out_THD, q_THD, k_cache, v_cache, tables_SM, query_starts, contexts_S, S, scale * LOG2_E, window,
        out_THD.stride(0), q_THD.stride(0), tables_SM.stride(0),
        k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        GROUP=group, BLOCK_Q=block_q, ROWS=rows, D=D, D_PAD=triton.next_power_of_2(D),
        BLOCK_SIZE=B, BLOCK_N=config.block_n, WINDOW=window > 0, INVARIANT=invariant,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
