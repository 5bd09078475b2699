"""A mixture of experts (MoE) for CUDA: top-k routing, grouped GEMMs over the chosen experts, weighted sum.

Every grid follows from the number of tokens alone, so a CUDA graph can hold it: tiles that no expert needs end at once.
T tokens, E experts, A choices per token, P = T * A pairs of a token and a chosen expert, C hidden size.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from penstock.kernels.triton.gemm import gated
from penstock.kernels.triton.norm import quantize_fp8
from penstock.kernels.triton.overlap import overlaps_launches

_PLACED = 256  # pairs per program


@triton.jit
def _choose_kernel(
    choices, weights, ranks, counts, scores, EXPERTS: tl.constexpr, PADDED: tl.constexpr, CHOICES: tl.constexpr,
    LANES: tl.constexpr, NORMED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token: its top-k experts with their softmax weights, and its rank among the tokens of each."""
    token = tl.program_id(0)
    experts = tl.arange(0, PADDED)
    lanes = tl.arange(0, LANES)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    left = tl.load(scores + token * EXPERTS + experts, mask=experts < EXPERTS, other=float("-inf")).to(tl.float32)
    peak = tl.max(left, 0)
    total = tl.sum(tl.exp(left - peak), 0)
    chosen = tl.zeros([LANES], tl.int32)
    weight = tl.zeros([LANES], tl.float32)
    for choice in tl.static_range(CHOICES):
        best = tl.max(left, 0)
        expert = tl.min(tl.where(left == best, experts, PADDED - 1), 0)  # the lowest wins a tie
        chosen = tl.where(lanes == choice, expert, chosen)
        weight = tl.where(lanes == choice, tl.exp(best - peak), weight)
        left = tl.where(experts == expert, float("-inf"), left)
    if NORMED:
        total = tl.sum(weight, 0)
    real = lanes < CHOICES
    rank = tl.atomic_add(counts + chosen, 1, mask=real)
    at = token * CHOICES + lanes
    tl.store(choices + at, chosen, mask=real)
    tl.store(weights + at, weight / total, mask=real)
    tl.store(ranks + at, rank, mask=real)


@triton.jit(do_not_specialize=["num_pairs"])
def _place_kernel(
    pairs, tile_experts, tile_sizes, num_tiles, choices, ranks, counts, num_pairs,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each pair to its row of a tile of its expert; the first pair of a tile describes it."""
    experts = tl.arange(0, PADDED)
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = pair < num_pairs
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    sizes = tl.load(counts + experts, mask=experts < EXPERTS, other=0)
    tiles = (sizes + ROWS - 1) // ROWS
    if tl.program_id(0) == 0:
        tl.store(num_tiles, tl.sum(tiles, 0))
    expert = tl.load(choices + pair, mask=real, other=0)
    rank = tl.load(ranks + pair, mask=real, other=0)
    tile = tl.gather(tl.cumsum(tiles, 0) - tiles, expert, 0) + rank // ROWS
    tl.store(pairs + tile * ROWS + rank % ROWS, pair, mask=real)
    first = real & (rank % ROWS == 0)
    tl.store(tile_experts + tile, expert, mask=first)
    tl.store(tile_sizes + tile, tl.minimum(tl.gather(sizes, expert, 0) - rank, ROWS), mask=first)


@triton.jit
def _grouped_kernel(
    out, x, weight, scales, x_scales, pair_weights, pairs, tile_experts, tile_sizes, num_tiles, N, K, stride_x,
    stride_out,
    CHOICES: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    GATED: tl.constexpr, WEIGHTED: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grouped GEMM: one tile of rows by some channels of their expert.

    Row p of `out` is of pair p; `x` has a row per CHOICES pairs.
    """
    tile = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if tile >= tl.load(num_tiles):
        return
    expert = tl.load(tile_experts + tile).to(tl.int64)
    rows = tl.arange(0, ROWS)
    real_rows = rows < tl.load(tile_sizes + tile)
    pair = tl.load(pairs + tile * ROWS + rows, mask=real_rows, other=0).to(tl.int64)
    source = pair // CHOICES

    OUT_N: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    lanes = tl.arange(0, BLOCK_N)
    width = N // 2 if GATED else N
    columns = tl.program_id(1) * OUT_N + lanes % OUT_N
    channels = tl.where(columns < width, columns, 0) + lanes // OUT_N * width  # lanes past the end repeat a real row
    weight_rows = weight + (expert * N + channels)[:, None] * K
    input_rows = x + source[:, None] * stride_x
    depth = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for base in tl.range(0, K, BLOCK_K):
        here = base + depth
        if EVEN_K:
            w = tl.load(weight_rows + here[None, :])
            values = tl.load(input_rows + here[None, :], mask=real_rows[:, None], other=0.0)
        else:
            w = tl.load(weight_rows + here[None, :], mask=(here < K)[None, :], other=0.0)
            values = tl.load(input_rows + here[None, :], mask=real_rows[:, None] & (here < K)[None, :], other=0.0)
        acc = tl.dot(w, tl.trans(values), acc, input_precision="ieee")
    if SCALED:
        acc = acc * tl.load(scales + expert * N + channels)[:, None]
        acc = acc * tl.load(x_scales + source, mask=real_rows, other=0.0)[None, :]
    if GATED:
        acc = gated(acc, BLOCK_N)
    if WEIGHTED:
        acc = acc * tl.load(pair_weights + pair, mask=real_rows, other=0.0)[None, :]
    columns = tl.program_id(1) * OUT_N + tl.arange(0, OUT_N)
    written = (columns < width)[:, None] & real_rows[None, :]
    tl.store(out + pair[None, :] * stride_out + columns[:, None], acc.to(out.dtype.element_ty), mask=written)


@triton.jit
def _combine_kernel(
    residual, mixed, counts, width, CHOICES: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add a token's pairs to its residual, in the order of choice; and leave the counts at zero."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < width
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.load(residual + token * width + columns, mask=real, other=0.0).to(tl.float32)
    for choice in tl.static_range(CHOICES):
        total += tl.load(mixed + (token * CHOICES + choice) * width + columns, mask=real, other=0.0).to(tl.float32)
    tl.store(residual + token * width + columns, total.to(residual.dtype.element_ty), mask=real)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        experts = tl.arange(0, PADDED)
        tl.store(counts + experts, tl.zeros([PADDED], tl.int32), mask=experts < EXPERTS)


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Of one layer. The first half of `gate_up` is the gate. Scales are float32, of the channels of fp8 weights."""

    gate_up: torch.Tensor  # [E, 2 * I, C]
    down: torch.Tensor  # [E, C, I]
    scales: tuple[torch.Tensor, torch.Tensor] | None  # [E, 2 * I] and [E, C]
    choices: int
    normed: bool  # the weights of the chosen experts sum to 1


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """Tile config of the grouped GEMM: `rows` pairs of one expert by `block_n` of its channels."""

    rows: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Routing:
    weights_P: torch.Tensor  # float32
    pairs: torch.Tensor  # int32 [tiles * rows]: the pair in each row of a tile
    tile_experts: torch.Tensor  # int32; those beyond `num_tiles`, like all below, are undefined
    tile_sizes: torch.Tensor  # int32: rows in use
    num_tiles: torch.Tensor  # int32, in the first element: how many tiles are in use
    config: GroupConfig


def group_config(pairs: int, experts: int, itemsize: int = 2) -> GroupConfig:
    """By the pairs that an expert gets on average. Few pairs: small tiles that stream the weights; many: large ones."""
    mean = pairs / experts
    if mean <= 24:
        return GroupConfig(16 if mean <= 8 else 32, 64, 256 // itemsize, 4, 4)
    return GroupConfig(64, 128, 128 // itemsize, 4, 4) if mean <= 96 else GroupConfig(128, 128, 128 // itemsize, 8, 4)


def route(scores_TE: torch.Tensor, choices: int, normed: bool, counts_E: torch.Tensor, config: GroupConfig) -> Routing:
    """`counts_E` (int32) is zero before; `mix_experts` leaves it so. The order within an expert is arbitrary."""
    tokens, experts = scores_TE.shape
    count = tokens * choices
    tiles = min(count, count // config.rows + experts)
    # One allocation for all; each part starts at 16 bytes, since other alignments would be compiled again.
    sizes = [-(-size // 4) * 4 for size in (count, count, tiles * config.rows, tiles, tiles, 1)]
    ints = torch.empty(sum(sizes), dtype=torch.int32, device=scores_TE.device)
    chosen, ranks, pairs, tile_experts, tile_sizes, num_tiles = ints.split(sizes)
    weights = torch.empty(count, dtype=torch.float32, device=scores_TE.device)
    padded, pdl = triton.next_power_of_2(experts), overlaps_launches()
    _choose_kernel[(tokens,)](
        chosen, weights, ranks, counts_E, scores_TE, EXPERTS=experts, PADDED=padded, CHOICES=choices,
        LANES=triton.next_power_of_2(choices), NORMED=normed, PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
    _place_kernel[(triton.cdiv(count, _PLACED),)](
        pairs, tile_experts, tile_sizes, num_tiles, chosen, ranks, counts_E, count, EXPERTS=experts, PADDED=padded,
        ROWS=config.rows, BLOCK=_PLACED, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return Routing(weights, pairs, tile_experts, tile_sizes, num_tiles, config)


def mix_experts(
    residual_TC: torch.Tensor,
    x_TC: torch.Tensor,
    scores_TE: torch.Tensor,
    experts: ExpertWeights,
    counts_E: torch.Tensor,
    config: GroupConfig | None = None,
) -> torch.Tensor:
    """Add to the residual what the experts that the router's scores choose make of `x_TC`, its normalised form."""
    tokens, width = x_TC.shape
    number, inner = experts.down.shape[0], experts.down.shape[2]
    config = config or group_config(tokens * experts.choices, number, experts.down.itemsize)
    routing = route(scores_TE, experts.choices, experts.normed, counts_E, config)
    inner_PI = torch.empty((tokens * experts.choices, inner), dtype=x_TC.dtype, device=x_TC.device)
    _grouped(inner_PI, x_TC, experts.gate_up, experts.scales and experts.scales[0], routing, experts.choices, gate=True)
    mixed_PC = torch.empty((tokens * experts.choices, width), dtype=x_TC.dtype, device=x_TC.device)
    _grouped(mixed_PC, inner_PI, experts.down, experts.scales and experts.scales[1], routing, 1, gate=False)
    block, pdl = min(1024, triton.next_power_of_2(width)), overlaps_launches()
    _combine_kernel[tokens, triton.cdiv(width, block)](
        residual_TC, mixed_PC, counts_E, width, CHOICES=experts.choices, EXPERTS=number,
        PADDED=triton.next_power_of_2(number), BLOCK=block, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return residual_TC


def _grouped(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    routing: Routing,
    choices: int,
    *,
    gate: bool,
) -> None:
    """The gate and up projection with its SwiGLU epilogue (`gate`), or the down projection, weighted by the router."""
    n, k = weight.shape[1:]
    config, pdl = routing.config, overlaps_launches()
    x_scales = routing.weights_P
    if scales is not None:
        x_scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
        x = quantize_fp8(x, x_scales)
    _grouped_kernel[len(routing.tile_experts), triton.cdiv(n, config.block_n)](
        out, x, weight, x_scales if scales is None else scales, x_scales, routing.weights_P, routing.pairs,
        routing.tile_experts, routing.tile_sizes, routing.num_tiles, n, k, x.stride(0), out.stride(0),
        CHOICES=choices, ROWS=config.rows, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        EVEN_K=k % config.block_k == 0, GATED=gate, WEIGHTED=not gate, SCALED=scales is not None, PDL=pdl,
        num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=pdl,
    )  # fmt: skip


def mix_experts_reference(
    residual_TC: torch.Tensor, x_TC: torch.Tensor, scores_TE: torch.Tensor, experts: ExpertWeights
) -> torch.Tensor:
    """The same function in float32, pair by pair."""
    gate_up, down = experts.gate_up.float(), experts.down.float()
    if experts.scales is not None:
        gate_up, down = gate_up * experts.scales[0][..., None], down * experts.scales[1][..., None]
    weights_TA, chosen_TA = scores_TE.float().softmax(-1).topk(experts.choices, -1)
    if experts.normed:
        weights_TA = weights_TA / weights_TA.sum(-1, keepdim=True)
    out = residual_TC.float().clone()
    for token, (weights, chosen) in enumerate(zip(weights_TA, chosen_TA.tolist(), strict=True)):
        for weight, expert in zip(weights, chosen, strict=True):
            gate, up = (gate_up[expert] @ x_TC[token].float()).chunk(2)
            out[token] += weight * (down[expert] @ (torch.nn.functional.silu(gate) * up))
    return out
