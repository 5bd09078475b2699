"""Common parts of the paged attention kernels for CUDA, and their reference in plain torch.

Layout of the cache, per layer, keys and values apart: [N, K, B, D]. A block's tokens of one head are contiguous
(4 KiB at 16 x 128 bf16), so one program streams long runs.

Shape suffixes as in `base`: T tokens, S sequences, H query heads, K key/value heads, D head size, N blocks, B tokens
per block.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

LOG2_E = math.log2(math.e)
UNSEEN = tl.constexpr(-1.0e30)  # finite stand-in for -inf: a row that saw no key yet must not produce NaN


@triton.constexpr_function
def math_dtype(cache):
    """The dtype of the matmuls: e4m3 becomes float16, which holds each of its values, by a single instruction."""
    return tl.float16 if cache == tl.float8e4nv else cache


@triton.jit
def attend(
    q, acc, total, peak, k_head, v_head, table, start, stop, last, window, scale, stride_block, stride_token,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Online softmax of the rows of `q` over tokens [start, stop). Row r sees tokens up to `last[r]` if MASKED.

    Keys and values enter in the dtype of `q`, which is `math_dtype` of the cache.
    """
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
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if MASKED:
            visible = tokens[None, :] <= last[:, None]
            if WINDOW:
                visible = visible & (tokens[None, :] > last[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
        decay = tl.exp2(peak - new_peak)
        weights = tl.exp2(scores * scale - new_peak[:, None])
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * decay[:, None], input_precision="ieee")
        peak = new_peak
    return acc, total, peak


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
            c.index_select(0, blocks).float().transpose(0, 1).flatten(1, 2)[:, :context].repeat_interleave(group, 0)
            for c in (k_cache, v_cache)
        )
        scores = torch.einsum("qhd,hkd->hqk", q_THD[rows].float(), k) * scale
        last = torch.arange(context - (rows.stop - rows.start), context, device=q_THD.device)[:, None]
        tokens = torch.arange(context, device=q_THD.device)[None]
        hidden = (tokens > last) | ((tokens <= last - window) if window else False)
        out[rows] = torch.einsum("hqk,hkd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
    return out
