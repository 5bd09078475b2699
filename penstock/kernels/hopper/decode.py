"""Paged decode attention on Hopper in CUDA C++, for the head sizes of most models; `triton/decode.py` has the rest.

A CTA is one warp, which has its first keys and values in flight before the QKV projection ahead of it has ended. Many
small CTAs even out that some SMs get half the bandwidth of others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.kernels.hopper.program import TensorMap, is_hopper, kernel
from penstock.kernels.hopper.tensor_map import tensor_map
from penstock.kernels.triton.decode import Rope
from penstock.kernels.triton.decode_plan import Division
from penstock.kernels.triton.overlap import overlaps_launches
from penstock.kernels.triton.paged import LOG2_E
from penstock.kernels.triton.prefix import DecodeScratch, SharedPrefix, attend_prefix

_HEAD_DIM, _BLOCK_SIZE, _MOST_GROUP = 128, 16, 8
_QUERIES = 8 * (_HEAD_DIM * 2 + 16)  # bytes of shared memory


@dataclass(frozen=True, slots=True)
class StreamConfig:
    stages: int  # KV blocks that a CTA has in flight
    tile: int  # tokens; of a `Division`
    spare: int  # CTAs, more than one for each head of each sequence

    def division(self, num_seqs: int, num_kv_heads: int) -> Division:
        return Division(num_seqs + -(-self.spare // num_kv_heads), self.tile)


def stream_config(num_seqs: int, num_kv_heads: int) -> StreamConfig:
    """Measured in whole steps on an H200: few sequences want many CTAs at once, more of them long runs of tokens.

    Parts of a sequence are small enough to end together.
    """
    programs = num_seqs * num_kv_heads
    if programs < 512:
        return StreamConfig(3, 64, 1056)
    return StreamConfig(6, 64, 528) if programs < 3072 else StreamConfig(4, 128, 1056)


def streams_decode(
    head_dim: int,
    group: int,
    block_size: int,
    rotary: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether this kernel supports such a model and cache."""
    fits = head_dim == _HEAD_DIM and group <= _MOST_GROUP and block_size == _BLOCK_SIZE and rotary % 4 == 0
    return fits and dtype == torch.bfloat16 and kv_dtype in (dtype, torch.float8_e4m3fn) and is_hopper(device)


def cache_map(cache: torch.Tensor) -> TensorMap:
    """Boxes are the tokens of one head of one block, in parts that are as wide as the swizzle."""
    width = 128 // cache.itemsize
    parts = cache.view(-1, _HEAD_DIM // width, width).transpose(0, 1)
    return tensor_map(parts, (_HEAD_DIM // width, _BLOCK_SIZE, width))


def decode_stream(
    out_SHD: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables_SM: torch.Tensor,
    plan: torch.Tensor,
    *,
    scale: float,
    scratch: DecodeScratch,
    config: StreamConfig,
    rope: Rope | None = None,
    prefix: SharedPrefix | None = None,
    new_tokens: int = 1,
) -> None:
    """`decode_attention` by a plan of `config`. `new_tokens`: how many of a sequence the step may compute, at most.

    The kernel reads the plan, the tables and older tokens before the kernels ahead of it have ended. A step therefore
    begins with kernels that let no other start early: those write the plan and the tables.
    """
    S, H = out_SHD.shape[:2]
    K = k_cache.shape[1]
    if prefix is not None:
        if rope is not None:
            raise ValueError("queries over a shared prefix must be rotated before, by rope_and_cache")
        attend_prefix(q, k_cache, v_cache, prefix, scratch, scale, overlaps_launches())
    gains = rope.norm_weights if rope else None
    q_gain, k_gain = gains or (q, q)
    run = kernel(
        "decode.cu",
        "decode",
        GROUP=H // K,
        KV_HEADS=K,
        ROTARY=rope.cos_sin.shape[1] if rope else 0,
        NORM=int(gains is not None),
        FP8=int(k_cache.dtype == torch.float8_e4m3fn),
        STAGES=config.stages,
        NEW=new_tokens,
    )
    slot = 2 * _BLOCK_SIZE * _HEAD_DIM * k_cache.itemsize + 8  # keys and values of a block, and a barrier
    run(
        (K, len(plan)), 32, config.stages * slot + _QUERIES,
        cache_map(k_cache), cache_map(v_cache), out_SHD, q, k_cache, v_cache, tables_SM, plan,
        scratch.out, scratch.lse, scratch.arrivals, rope.cos_sin if rope else scratch.lse, q_gain, k_gain,
        rope.eps if rope else 0.0, scale * LOG2_E, S, prefix.splits if prefix else 0,
        out_SHD.stride(0), q.stride(0), tables_SM.stride(0), pdl=True,
    )  # fmt: skip
