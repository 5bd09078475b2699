"""The kernel between the QKV projection and attention on CUDA; decode attention can do this by itself.

It does an optional RMSNorm of query and key heads, rotary embedding (RoPE) of the first `rotary` elements of
each (halves rotated against each other), and the write of keys and values into the paged cache.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.kernels.triton.overlap import overlaps_launches


@triton.jit
def _partner(D_PAD: tl.constexpr, ROTARY: tl.constexpr):
    """The element that each is rotated against; itself where nothing is rotated."""
    HALF: tl.constexpr = ROTARY // 2
    dims = tl.arange(0, D_PAD)
    return tl.where(dims < HALF, dims + HALF, tl.where(dims < ROTARY, dims - HALF, dims))


@triton.jit
def angles(cos_sin, position, D_PAD: tl.constexpr, ROTARY: tl.constexpr):
    """Cosine and signed sine of each element at a position, [1, D]; the sign is the one its partner enters with."""
    HALF: tl.constexpr = ROTARY // 2
    dims = tl.arange(0, D_PAD)[None, :]
    at = cos_sin + position * ROTARY + tl.where(dims < HALF, dims, dims - HALF)
    cos = tl.load(at, mask=dims < ROTARY, other=1.0).to(tl.float32)
    sin = tl.load(at + HALF, mask=dims < ROTARY, other=0.0).to(tl.float32)
    return cos, tl.where(dims < HALF, -sin, sin)


@triton.jit
def head_gains(gain, D: tl.constexpr, D_PAD: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr):
    """Gains of the RMSNorm of heads, at pointers [R, 1] or one for all: of each element, and of its partner."""
    here = 1.0
    partner = 1.0
    if NORM:
        dims = tl.arange(0, D_PAD)
        here = tl.load(gain + dims[None, :], mask=(dims < D)[None, :], other=0.0).to(tl.float32)
        partner = tl.load(gain + _partner(D_PAD, ROTARY)[None, :], mask=(dims < D)[None, :], other=0.0).to(tl.float32)
    return here, partner


@triton.jit
def with_partners(at, real, D_PAD: tl.constexpr, ROTARY: tl.constexpr):
    """The heads at `at` [R, 1], and the partner of each element: loaded again (from L1), not exchanged by threads."""
    value = tl.load(at + tl.arange(0, D_PAD)[None, :], mask=real, other=0.0)
    return value, tl.load(at + _partner(D_PAD, ROTARY)[None, :], mask=real, other=0.0)


@triton.jit
def rotated(heads, cos, sin, gains, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Heads `with_partners`, normalised if NORM, and rotated; float32."""
    value = heads[0].to(tl.float32)
    other = heads[1].to(tl.float32)
    if NORM:
        inverse = tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
        value = value * inverse * gains[0]
        other = other * inverse * gains[1]
    return value * cos + other * sin


@triton.jit
def _rope_kernel(
    qkv, q_weight, k_weight, cos_sin, positions, slots, k_cache, v_cache, eps,
    stride_qkv, stride_block, stride_head, stride_token,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_H: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)  # queries, then keys, then values
    dims = tl.arange(0, D_PAD)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    is_query = (heads < H)[:, None]
    is_key = ((heads >= H) & (heads < H + K))[:, None]
    is_value = ((heads >= H + K) & (heads < H + 2 * K))[:, None]
    real = (dims < D)[None, :]
    gains = head_gains(tl.where(is_query, q_weight, k_weight), D, D_PAD, ROTARY, NORM)
    if PDL:
        tl.extra.cuda.gdc_wait()
    cos, sin = angles(cos_sin, tl.load(positions + token), D_PAD, ROTARY)
    at = qkv + token * stride_qkv + heads[:, None] * D
    raw = with_partners(at, real & (is_query | is_key), D_PAD, ROTARY)
    rotated_heads = rotated(raw, cos, sin, gains, eps, D, NORM)
    values = tl.load(at + dims[None, :], mask=real & is_value, other=0.0).to(tl.float32)

    tl.debug_barrier()  # in place: both halves are read before either is overwritten
    tl.store(at + dims[None, :], rotated_heads.to(qkv.dtype.element_ty), mask=real & is_query)
    slot = tl.load(slots + token).to(tl.int64)
    stored = real & (slot >= 0)
    place = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_token
    k_at = k_cache + place + (heads - H)[:, None] * stride_head + dims[None, :]
    v_at = v_cache + place + (heads - H - K)[:, None] * stride_head + dims[None, :]
    tl.store(k_at, rotated_heads.to(k_cache.dtype.element_ty), mask=stored & is_key)
    tl.store(v_at, values.to(v_cache.dtype.element_ty), mask=stored & is_value)


def rope_and_cache(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
    *,
    norm_weights: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
    block_h: int | None = None,
) -> torch.Tensor:
    """Rotate, store keys and values, and return the queries as a view [T, H, D] of `qkv`, which is overwritten.

    `qkv` [T, (H + 2 K) * D]; `cos_sin` float32 [positions, rotary], cosines first; caches [N, K, B, D];
    `norm_weights` are the gains of query and key heads. A negative slot (padding) writes nothing.
    """
    K, B, D = k_cache.shape[1:]
    H = num_heads
    block_h = block_h or (16 if qkv.shape[0] >= 512 else 8)
    pdl = overlaps_launches()
    q_weight, k_weight = norm_weights if norm_weights else (cos_sin, cos_sin)
    _rope_kernel[qkv.shape[0], triton.cdiv(H + 2 * K, block_h)](
        qkv, q_weight, k_weight, cos_sin, positions_T, slots_T, k_cache, v_cache, eps,
        qkv.stride(0), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        H=H, K=K, D=D, D_PAD=triton.next_power_of_2(D), ROTARY=cos_sin.shape[1], BLOCK_SIZE=B, BLOCK_H=block_h,
        NORM=norm_weights is not None, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return qkv[:, : H * D].view(-1, H, D)


def rope_reference(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    positions_T: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    norm_weights: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values [T, heads, D] in float32."""
    H, K, rotary = num_heads, num_kv_heads, cos_sin.shape[1]
    q, k, v = qkv.float().view(qkv.shape[0], H + 2 * K, -1).split([H, K, K], 1)
    cos, sin = cos_sin[positions_T.long()][:, None].float().chunk(2, -1)

    def rotate(x: torch.Tensor, gain: torch.Tensor | None) -> torch.Tensor:
        if gain is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain.float()
        a, b, rest = x.split([rotary // 2, rotary // 2, x.shape[-1] - rotary], -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    q_gain, k_gain = norm_weights if norm_weights else (None, None)
    return rotate(q, q_gain), rotate(k, k_gain), v
