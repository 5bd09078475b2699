"""Shared-prefix (cascade) decode attention: keys that many sequences share are read once for all their queries.

`decode.py` merges the partial results with those over the rest of each sequence.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from penstock.kernels.hopper.attention import prefix_on_hopper, suits_hopper
from penstock.kernels.triton.paged import LOG2_E, UNSEEN, attend, math_dtype


@triton.jit(do_not_specialize=["num_seqs"])
def _prefix_kernel(
    q, k_cache, v_cache, table, shared_len, partial_out, partial_lse, num_seqs, scale,
    stride_q, stride_block, stride_head, stride_token,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All queries of one key/value head against a piece of the shared prefix, read once for ROWS queries."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    length = tl.load(shared_len)
    share = tl.cdiv(tl.cdiv(length, BLOCK_N), tl.num_programs(2)) * BLOCK_N
    start = split * share
    stop = tl.minimum(start + share, length)

    rows = tile * ROWS + tl.arange(0, ROWS)
    seqs = rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    dims = tl.arange(0, D_PAD)
    real = (seqs < num_seqs)[:, None] & (dims < D)[None, :]
    q_rows = tl.load(q + (seqs * stride_q + heads * D)[:, None] + dims[None, :], mask=real, other=0.0)
    q_rows = q_rows.to(math_dtype(k_cache.dtype.element_ty))
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
class PrefixConfig:
    rows: int = 128
    block_n: int = 64
    num_warps: int = 8
    num_stages: int = 5


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """Partial results of parts and of a shared prefix. One scratch serves all layers, which run one after the other."""

    out: torch.Tensor  # float32 [rows * H * D]
    lse: torch.Tensor  # float32 [rows * H], base-2 logarithm of the softmax denominator
    arrivals: torch.Tensor  # int32 [S * K], zero between launches


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Blocks that the sequences with `lengths_S[s] > 0` have in common at the start of their tables."""

    table_M: torch.Tensor  # int32
    length: torch.Tensor  # int32 [1]
    lengths_S: torch.Tensor  # int32: `length` for members, 0 for the others
    splits: int
    config: PrefixConfig | None = None  # of the Triton kernel, which is used then


def prefix_splits(num_seqs: int, num_heads: int, max_prefix: int, programs: int = 132) -> int:
    tiles = -(-num_seqs * num_heads // PrefixConfig().rows)
    return max(1, min(programs // tiles, -(-max_prefix // 256), 16))


def attend_prefix(
    q_SHD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    prefix: SharedPrefix,
    scratch: DecodeScratch,
    scale: float,
    pdl: bool,
) -> None:
    if prefix.config is None and suits_hopper(q_SHD, k_cache):
        prefix_on_hopper(
            scratch.out, scratch.lse, q_SHD, k_cache, v_cache, prefix.table_M, prefix.length,
            splits=prefix.splits, scale=scale, pdl=pdl,
        )  # fmt: skip
        return
    S, H, D = q_SHD.shape
    K, B = k_cache.shape[1:3]
    config = prefix.config or PrefixConfig()
    _prefix_kernel[triton.cdiv(S * H // K, config.rows), K, prefix.splits](
        q_SHD, k_cache, v_cache, prefix.table_M, prefix.length, scratch.out, scratch.lse, S, scale * LOG2_E,
        q_SHD.stride(0), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        HEADS=H, GROUP=H // K, ROWS=config.rows, D=D, D_PAD=triton.next_power_of_2(D), BLOCK_SIZE=B,
        BLOCK_N=config.block_n, PDL=pdl,
        num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=pdl,
    )  # fmt: skip
