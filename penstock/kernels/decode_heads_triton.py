"""Decode attention of one query head over one part of a sequence by plain arithmetic, as a phase of a larger kernel.

Short contexts leave a program little to do, so what counts is how many times its warps wait for each other: each row of
lanes of a warp keeps a running softmax of its own, and they are merged once. Heads that share keys read them again,
from the L2 cache; long contexts belong to `decode_triton`. Shapes as in `paged_triton`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.decode_plan_triton import FIELDS, MOST_PARTS
from penstock.kernels.grid_triton import await_grid
from penstock.kernels.paged_triton import UNSEEN


@triton.jit
def _load_tokens(
    cache, table, base, end, stride_block, stride_token,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """[LANES, TILES, D] of the tokens from `base` on."""
    tokens = base + tl.arange(0, TILES)[None, :] * LANES + tl.arange(0, LANES)[:, None]
    dims = tl.arange(0, D_PAD)[None, None, :]
    # A reused block may hold another request's NaN past the end of this sequence: never load it.
    blocks = tl.load(table + tokens // BLOCK_SIZE, mask=tokens < end, other=0).to(tl.int64)
    places = (blocks * stride_block + tokens % BLOCK_SIZE * stride_token)[:, :, None] + dims
    inside = (tokens < end)[:, :, None] & (dims < D)
    k = tl.load(cache[0] + places, mask=inside, other=0.0)
    v = tl.load(cache[1] + places, mask=inside, other=0.0)
    return k, v, tokens


@triton.jit
def _partners(D_PAD: tl.constexpr, ROTARY: tl.constexpr, LANES: tl.constexpr):
    """Elements of a head [LANES, 1, D], and what each is rotated against; the same in each lane."""
    HALF: tl.constexpr = ROTARY // 2
    dims = tl.arange(0, D_PAD)[None, None, :] + tl.zeros([LANES, 1, 1], tl.int32)
    return dims, tl.where(dims < HALF, dims + HALF, tl.where(dims < ROTARY, dims - HALF, dims))


@triton.jit
def _turned(at, gain, turn, dims, partner, eps, D: tl.constexpr, NORM: tl.constexpr):
    """A head, normalised if NORM and rotated."""
    value = tl.load(at + dims, mask=dims < D, other=0.0).to(tl.float32)
    other = tl.load(at + partner, mask=dims < D, other=0.0).to(tl.float32)
    if NORM:
        inverse = tl.rsqrt(tl.sum(value * value, 2) / D + eps)[:, :, None]
        value = value * inverse * gain[0]
        other = other * inverse * gain[1]
    return value * turn[0] + other * turn[1]


@triton.jit
def _gains(gain, dims, partner, D: tl.constexpr, NORM: tl.constexpr):
    here = 1.0
    there = 1.0
    if NORM:
        here = tl.load(gain + dims, mask=dims < D, other=0.0).to(tl.float32)
        there = tl.load(gain + partner, mask=dims < D, other=0.0).to(tl.float32)
    return here, there


@triton.jit
def attend_head(
    out, qkv, k_cache, v_cache, tables, plan, number, head, partial_out, partial_lse, arrivals,
    cos_sin, q_gain, k_gain, eps, scale, stride_table, stride_block, stride_head, stride_token, counter, due,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILES: tl.constexpr, LANES: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """`number` in the plan. Waits for `qkv` until `counter` is at `due`; the last part to arrive merges them.

    The sequence's last part takes the new token from `qkv`, and one head of each group stores it.
    """
    KV_HEADS: tl.constexpr = HEADS // GROUP
    STEP: tl.constexpr = TILES * LANES
    entry = plan + number * FIELDS
    used = tl.load(entry)
    start = tl.load(entry + 1)
    stop = tl.load(entry + 2)
    context = tl.load(entry + 3)
    part = tl.load(entry + 4)
    first_part = tl.load(entry + 5)
    parts = tl.load(entry + 6)
    if used < 0:
        await_grid(counter, due)
    else:
        seq = used.to(tl.int64)
        kv_head = head // GROUP
        table = tables + seq * stride_table
        cache = (k_cache + kv_head * stride_head, v_cache + kv_head * stride_head)
        own = (part == parts - 1) & (stop > start)
        end = stop - own.to(tl.int32)
        last = tl.maximum(stop - 1, 0)
        block = tl.load(table + last // BLOCK_SIZE).to(tl.int64)
        k, v, tokens = _load_tokens(
            cache, table, start, end, stride_block, stride_token, D, D_PAD, BLOCK_SIZE, TILES, LANES
        )
        dims, partner = _partners(D_PAD, ROTARY, LANES)
        angle = cos_sin + tl.maximum(context - 1, 0) * ROTARY + dims % (ROTARY // 2)
        cos = tl.load(angle, mask=dims < ROTARY, other=1.0)
        sin = tl.load(angle + ROTARY // 2, mask=dims < ROTARY, other=0.0)
        turn = (cos, tl.where(dims < ROTARY // 2, -sin, sin))
        q_gains = _gains(q_gain, dims, partner, D, NORM)
        k_gains = _gains(k_gain, dims, partner, D, NORM)
        await_grid(counter, due)

        token = qkv + seq * ((HEADS + 2 * KV_HEADS) * D)
        q = _turned(token + head * D, q_gains, turn, dims, partner, eps, D, NORM)
        key = _turned(token + (HEADS + kv_head) * D, k_gains, turn, dims, partner, eps, D, NORM)
        value = tl.load(token + (HEADS + KV_HEADS + kv_head) * D + dims, mask=dims < D, other=0.0)
        key = key.to(k_cache.dtype.element_ty)
        value = value.to(tl.float32).to(v_cache.dtype.element_ty)
        fresh = own & (tl.arange(0, LANES)[:, None] == 0)
        stored = (fresh & (head % GROUP == 0))[:, :, None] & (dims < D)
        place = block * stride_block + last % BLOCK_SIZE * stride_token + dims
        tl.store(cache[0] + place, key, mask=stored)
        tl.store(cache[1] + place, value, mask=stored)

        peak = tl.where(fresh, tl.sum(q * key.to(tl.float32), 2) * scale, UNSEEN)  # [LANES, 1]
        total = tl.where(fresh, 1.0, 0.0)
        acc = tl.where(fresh[:, :, None], value.to(tl.float32), 0.0)  # [LANES, 1, D]
        for base in range(start, end, STEP):
            here_k, here_v, here = k, v, tokens
            k, v, tokens = _load_tokens(
                cache, table, base + STEP, end, stride_block, stride_token, D, D_PAD, BLOCK_SIZE, TILES, LANES
            )
            scores = tl.sum(here_k.to(tl.float32) * q, 2) * scale
            scores = tl.where(here < end, scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1, keep_dims=True))
            decay = tl.exp2(peak - new_peak)
            weights = tl.exp2(scores - new_peak)
            total = total * decay + tl.sum(weights, 1, keep_dims=True)
            acc = acc * decay[:, :, None] + tl.sum(weights[:, :, None] * here_v.to(tl.float32), 1, keep_dims=True)
            peak = new_peak

        highest = tl.max(tl.max(peak, 1), 0)
        factors = tl.exp2(peak - highest)
        whole = tl.sum(tl.sum(total * factors, 1), 0)
        result = tl.sum(tl.sum(acc * factors[:, :, None], 1), 0) / tl.where(whole > 0, whole, 1.0)
        flat = tl.arange(0, D_PAD)
        into = out + (seq * HEADS + head) * D + flat
        if parts == 1:
            tl.store(into, result.to(out.dtype.element_ty), mask=flat < D)
        else:
            row = tl.cast(number * HEADS + head, tl.int64)
            tl.store(partial_out + row * D + flat, result, mask=flat < D)
            tl.store(partial_lse + row, highest + tl.log2(whole))
            tl.debug_barrier()  # all threads' partial results precede the one arrival
            arrival = arrivals + seq * HEADS + head
            if tl.atomic_add(arrival, 1, sem="acq_rel") == parts - 1:
                tl.store(arrival, 0)
                lanes = tl.arange(0, MOST_PARTS)
                rows = ((first_part + lanes) * HEADS + head).to(tl.int64)
                some = lanes < parts
                lse = tl.load(partial_lse + rows, mask=some, other=float("-inf"), cache_modifier=".cg")
                results = tl.load(
                    partial_out + rows[:, None] * D + flat[None, :],
                    mask=some[:, None] & (flat < D)[None, :], other=0.0, cache_modifier=".cg",
                )  # fmt: skip
                weights = tl.exp2(lse - tl.max(lse, 0))
                merged = tl.sum(results * weights[:, None], 0) / tl.sum(weights, 0)
                tl.store(into, merged.to(out.dtype.element_ty), mask=flat < D)
