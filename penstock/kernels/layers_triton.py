"""All layers of a dense decoder for one decoding sequence in one launch on CUDA.

    norm · qkv | q/k norm · rope · cache write · attention | out + residual
    norm · gate_up · silu·mul | down + residual

The bars are barriers of the grid, 1 µs each, where a launch per phase loses 3 to 5. Each program streams a run of rows
of every weight, and has its first tiles on their way to registers when it waits. What a norm needs of the whole row is
left behind by those who wrote it: its input times the gain, and sums of squares, one per warp.
Docs: docs/design/0010-all-layers-in-one-launch.md.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from penstock.kernels.decode_heads_triton import attend_head
from penstock.kernels.decode_plan_triton import MOST_PARTS, plan_decode
from penstock.kernels.grid_triton import arrive_at_grid, await_grid, grid_start
from penstock.kernels.paged_triton import LOG2_E
from penstock.kernels.prefix_triton import DecodeScratch

# Addresses of a layer: attention norm, qkv, query norm, key norm, out, mlp norm, gate_up, down.
POINTERS = tl.constexpr(8)


@triton.jit
def _address(layer, number: tl.constexpr, like):
    return tl.multiple_of(tl.load(layer + number).to(like.dtype), 16)


@triton.jit
def _share(N: tl.constexpr):
    """The rows of a weight that this program streams."""
    share = tl.cdiv(N, tl.num_programs(0))
    first = tl.minimum(tl.program_id(0) * share, N)
    return first, tl.minimum(first + share, N)


@triton.jit
def _tile(words, row, stop, half, base, K: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr,
          WORDS: tl.constexpr):  # fmt: skip
    """[WARPS, ROWS, WORDS]: a piece of each of several rows for each warp, so that no sum crosses warps.

    `half` is how far the second half of the rows is behind the first, for gates and ups.
    """
    numbers = tl.arange(0, ROWS)[None, :, None]
    warps = tl.arange(0, WARPS)[:, None, None]
    depth = base + tl.arange(0, WORDS)[None, None, :]
    if half > 0:
        columns = row + numbers % (ROWS // 2) * WARPS + warps
        rows = columns + numbers // (ROWS // 2) * half
    else:
        columns = row + numbers * WARPS + warps
        rows = columns
    real = columns < stop
    if K % (2 * WORDS) != 0:
        real = real & (depth < K)
    return tl.load(words + rows * K + depth, mask=real, other=0, eviction_policy="evict_first")


@triton.jit
def _words(pointer):
    """bfloat16 travels in pairs: single ones would be picked apart where they are kept in registers."""
    if pointer.dtype.element_ty == tl.bfloat16:
        pointer = pointer.to(tl.pointer_type(tl.int32))
    return pointer


@triton.jit
def _bf16_pair(word):
    return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _inputs(x_words, base, K: tl.constexpr, WARPS: tl.constexpr, WORDS: tl.constexpr):
    at = base + tl.arange(0, WORDS)[None, None, :] + tl.zeros([WARPS, 1, 1], tl.int32)
    return tl.load(x_words + at, mask=at < K, other=0)


@triton.jit
def _fma(acc, tile, x):
    if tile.dtype == tl.float32:
        acc += tile * x
    else:
        low, high = _bf16_pair(tile)
        x_low, x_high = _bf16_pair(x)
        acc += low * x_low
        acc += high * x_high
    return acc


@triton.jit
def _project(
    out, x, weight, squares, eps, gained, gain, counter, due,
    N: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    WARPS: tl.constexpr, WORDS: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    """One phase: a projection of `x` [SIZE], complete once all programs have arrived.

    NORM: `x` is times the gain already, and `squares` has what is missing. GATED: the weight is the gate's N rows, then
    as many of the up projection. ADD: to `out`, leaving for the next norm `out` times `gain` and the squares; then
    ROWS * WARPS hold a program's share.
    """
    K: tl.constexpr = SIZE * weight.dtype.element_ty.primitive_bitwidth // 32
    CHUNKS: tl.constexpr = (K + 2 * WORDS - 1) // (2 * WORDS)
    WIDTH: tl.constexpr = ROWS * WARPS // 2 if GATED else ROWS * WARPS
    HALF: tl.constexpr = N if GATED else 0
    words = _words(weight)
    x_words = _words(x)
    first, stop = _share(N)
    steps = tl.cdiv(stop - first, WIDTH) * CHUNKS
    left = _tile(words, first, stop, HALF, 0, K, ROWS, WARPS, WORDS)
    right = _tile(words, first, stop, HALF, WORDS, K, ROWS, WARPS, WORDS)
    row = first + 1 // CHUNKS * WIDTH
    left_2 = _tile(words, row, stop, HALF, 1 % CHUNKS * (2 * WORDS), K, ROWS, WARPS, WORDS)
    right_2 = _tile(words, row, stop, HALF, 1 % CHUNKS * (2 * WORDS) + WORDS, K, ROWS, WARPS, WORDS)
    if ADD:  # rows that only this program ever writes
        columns = first + tl.arange(0, ROWS)[None, :] * WARPS + tl.arange(0, WARPS)[:, None]
        residual = tl.load(out + columns, mask=columns < stop, other=0.0).to(tl.float32)
        gains = tl.load(gain + columns, mask=columns < stop, other=0.0).to(tl.float32)
    await_grid(counter, due)

    x_left = _inputs(x_words, 0, K, WARPS, WORDS)
    x_right = _inputs(x_words, WORDS, K, WARPS, WORDS)
    if NORM:
        places = tl.arange(0, SQUARES // WORDS)[None, :, None] * WORDS + tl.arange(0, WORDS)[None, None, :]
        places += tl.zeros([WARPS, 1, 1], tl.int32)
        parts = tl.load(squares + places, mask=places < tl.num_programs(0) * WARPS, other=0.0)
        parts = tl.sum(parts, 1, keep_dims=True)
    acc = tl.zeros([WARPS, ROWS, WORDS], tl.float32)
    for step in range(0, steps):
        now_left, now_right, now_x_left, now_x_right = left, right, x_left, x_right
        left, right = left_2, right_2
        later = step + 2
        row = first + later // CHUNKS * WIDTH
        base = later % CHUNKS * (2 * WORDS)
        left_2 = _tile(words, row, stop, HALF, base, K, ROWS, WARPS, WORDS)
        right_2 = _tile(words, row, stop, HALF, base + WORDS, K, ROWS, WARPS, WORDS)
        base = (step + 1) % CHUNKS * (2 * WORDS)
        x_left = _inputs(x_words, base, K, WARPS, WORDS)
        x_right = _inputs(x_words, base + WORDS, K, WARPS, WORDS)
        acc = _fma(_fma(acc, now_left, now_x_left), now_right, now_x_right)
        if step % CHUNKS == CHUNKS - 1:
            row = first + step // CHUNKS * WIDTH
            warps = tl.arange(0, WARPS)[:, None]
            result = tl.sum(acc, 2)
            if NORM:
                result = result * tl.rsqrt(tl.sum(parts, 2) / SIZE + eps)
            if GATED:
                gate, up = tl.split(tl.permute(tl.reshape(result, [WARPS, 2, ROWS // 2]), (0, 2, 1)))
                result = gate / (1 + tl.exp(-gate)) * up
                columns = row + tl.arange(0, ROWS // 2)[None, :] * WARPS + warps
            else:
                columns = row + tl.arange(0, ROWS)[None, :] * WARPS + warps
            real = columns < stop
            if ADD:
                rounded = (result + residual).to(out.dtype.element_ty)
                tl.store(out + columns, rounded, mask=real)
                _leave_for_norm(gained, squares, rounded.to(tl.float32), gains, columns, real, WARPS)
            else:
                tl.store(out + columns, result.to(out.dtype.element_ty), mask=real)
            acc = tl.zeros([WARPS, ROWS, WORDS], tl.float32)
    arrive_at_grid(counter)


@triton.jit
def _leave_for_norm(gained, squares, values, gains, columns, real, WARPS: tl.constexpr):
    tl.store(gained + columns, (values * gains).to(gained.dtype.element_ty), mask=real)
    own = tl.sum(tl.where(real, values * values, 0.0), 1)
    tl.store(squares + tl.program_id(0) * WARPS + tl.arange(0, WARPS), own)


@triton.jit
def _first_norm(gained, squares, x, gain, counter, N: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr):
    first, stop = _share(N)
    columns = first + tl.arange(0, ROWS)[None, :] * WARPS + tl.arange(0, WARPS)[:, None]
    real = columns < stop
    values = tl.load(x + columns, mask=real, other=0.0).to(tl.float32)
    gains = tl.load(gain + columns, mask=real, other=0.0).to(tl.float32)
    _leave_for_norm(gained, squares, values, gains, columns, real, WARPS)
    arrive_at_grid(counter)


@triton.jit(
    do_not_specialize=["num_layers", "num_units", "stride_table"],
    do_not_specialize_on_alignment=["x", "tables"],
)
def _layers_kernel(
    x, gained, squares, qkv, attended, inner, layers, num_layers, counter, k_cache, v_cache, tables, plan,
    num_units, partial_out, partial_lse, arrivals, cos_sin, any_weight, any_gain, eps, scale,
    stride_table, stride_layer, stride_block, stride_head, stride_token,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILES: tl.constexpr,
    ROTARY: tl.constexpr, HEAD_NORM: tl.constexpr,
    QKV_ROWS: tl.constexpr, ADD_ROWS: tl.constexpr, GATE_UP_ROWS: tl.constexpr,
    WARPS: tl.constexpr, WORDS: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    KV_HEADS: tl.constexpr = HEADS // GROUP
    MIXED: tl.constexpr = HEADS * D
    QKV: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    due = grid_start(counter) + programs
    _first_norm(gained, squares, x, _address(layers, 0, any_gain), counter, HIDDEN, ADD_ROWS, WARPS)
    qkv_weight = _address(layers, 1, any_weight)
    for number in range(0, num_layers):
        layer = layers + number * POINTERS
        later = layers + tl.minimum(number + 1, num_layers - 1) * POINTERS
        cache = tl.cast(number, tl.int64) * stride_layer
        q_gain = _address(layer, 2, any_gain)
        k_gain = _address(layer, 3, any_gain)
        out_weight = _address(layer, 4, any_weight)
        mlp_gain = _address(layer, 5, any_gain)
        gate_up = _address(layer, 6, any_weight)
        down = _address(layer, 7, any_weight)
        later_gain = _address(later, 0, any_gain)
        later_qkv = _address(later, 1, any_weight)

        _project(
            qkv, gained, qkv_weight, squares, eps, gained, q_gain, counter, due,
            QKV, HIDDEN, QKV_ROWS, True, False, False, WARPS, WORDS, SQUARES,
        )  # fmt: skip
        due += programs

        awaited = False
        for unit in range(program, num_units, programs):
            attend_head(
                attended, qkv, k_cache + cache, v_cache + cache, tables, plan, unit // HEADS, unit % HEADS,
                partial_out, partial_lse, arrivals, cos_sin, q_gain, k_gain, eps, scale,
                stride_table, stride_block, stride_head, stride_token, counter, due,
                HEADS, GROUP, D, D_PAD, BLOCK_SIZE, TILES, 2 * WARPS, ROTARY, HEAD_NORM,
            )  # fmt: skip
            awaited = True
        if not awaited:
            await_grid(counter, due)
        arrive_at_grid(counter)
        due += programs

        _project(
            x, attended, out_weight, squares, eps, gained, mlp_gain, counter, due,
            HIDDEN, MIXED, ADD_ROWS, False, False, True, WARPS, WORDS, SQUARES,
        )  # fmt: skip
        due += programs
        _project(
            inner, gained, gate_up, squares, eps, gained, q_gain, counter, due,
            INNER, HIDDEN, GATE_UP_ROWS, True, True, False, WARPS, WORDS, SQUARES,
        )  # fmt: skip
        due += programs
        _project(
            x, inner, down, squares, eps, gained, later_gain, counter, due,
            HIDDEN, INNER, ADD_ROWS, False, False, True, WARPS, WORDS, SQUARES,
        )  # fmt: skip
        due += programs
        qkv_weight = later_qkv


@dataclass(frozen=True, slots=True)
class LayersConfig:
    """Rows of the projections' tiles for each warp, and how the kernel runs."""

    qkv: int
    add: int  # of out and down: with the warps, a program's share
    gate_up: int
    num_warps: int = 8
    words: int = 128  # of 4 bytes that each thread of a warp reads four of
    tiles: int = 2  # of 2 tokens for each warp that attention reads at a time

    @property
    def tokens(self) -> int:
        """What attention reads at a time."""
        return 2 * self.num_warps * self.tiles


@dataclass(frozen=True, slots=True)
class StackedLayers:
    """Addresses of the weights of all layers, whoever keeps those, and what the layers have in common."""

    addresses: torch.Tensor  # int64 [layers, POINTERS]
    any_weight: torch.Tensor
    any_gain: torch.Tensor
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    head_norm: bool
    eps: float
    counter: torch.Tensor  # int64, of the grid's barriers
    programs: int  # as many as run at once


def layers_config(layers: StackedLayers) -> LayersConfig:
    """As measured on an H200: two tiles of 32 to 64 KiB ahead of each program keep the memory busy."""
    warps = 8
    share = -(-layers.hidden // layers.programs)
    return LayersConfig(
        qkv=4,
        add=triton.next_power_of_2(-(-share // warps)),
        gate_up=8 if layers.inner >= 64 * layers.programs else 4,
        num_warps=warps,
    )


def plan_layers(layers: StackedLayers, contexts_S: torch.Tensor, window: int, config: LayersConfig) -> torch.Tensor:
    """At most one part of a head for each program."""
    parts = max(1, min(layers.programs // layers.heads, MOST_PARTS.value))
    return plan_decode(contexts_S, parts + 1, config.tokens, window=window)


def decode_layers(
    x: torch.Tensor,
    layers: StackedLayers,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables_SM: torch.Tensor,
    plan: torch.Tensor,
    *,
    cos_sin: torch.Tensor,
    scale: float,
    scratch: DecodeScratch,
    config: LayersConfig,
    num_layers: int | None = None,
) -> torch.Tensor:
    """`x` [1, hidden] becomes the residual stream after the last layer. Caches are [layers, N, K, B, D].

    `plan` is by `plan_layers`, and `scratch` holds its parts for each query head.
    """
    H, K, D = layers.heads, layers.kv_heads, layers.head_dim
    gained, qkv, attended, inner = (
        torch.empty(width, dtype=x.dtype, device=x.device)
        for width in (layers.hidden, (H + 2 * K) * D, H * D, layers.inner)
    )
    squares = torch.empty(layers.programs * config.num_warps, dtype=torch.float32, device=x.device)
    _layers_kernel[(layers.programs,)](
        x, gained, squares, qkv, attended, inner, layers.addresses,
        len(layers.addresses) if num_layers is None else num_layers, layers.counter,
        k_cache, v_cache, tables_SM, plan, (len(plan) - 1) * H, scratch.out, scratch.lse, scratch.arrivals,
        cos_sin, layers.any_weight, layers.any_gain, layers.eps, scale * LOG2_E,
        tables_SM.stride(0), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), k_cache.stride(3),
        HIDDEN=layers.hidden, INNER=layers.inner, HEADS=H, GROUP=H // K,
        D=D, D_PAD=triton.next_power_of_2(D), BLOCK_SIZE=k_cache.shape[3], TILES=config.tiles,
        ROTARY=cos_sin.shape[1], HEAD_NORM=layers.head_norm,
        QKV_ROWS=config.qkv, ADD_ROWS=config.add, GATE_UP_ROWS=config.gate_up,
        WARPS=config.num_warps, WORDS=config.words,
        SQUARES=max(config.words, triton.next_power_of_2(layers.programs * config.num_warps)),
        num_warps=config.num_warps,
    )  # fmt: skip
    return x
