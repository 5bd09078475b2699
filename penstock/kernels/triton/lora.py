"""LoRA adapters on a GPU: a module's output gets (x @ A.T) @ B.T added, with another A and B for every token.

Tokens are grouped into tiles of one adapter each (segmented GEMMs, SGMV). x @ A.T (shrink) sums over the inputs, and
what adds s @ B.T (expand) needs that sum. So a shrink leaves partial sums of columns, and the expand adds them up, in
order: the result depends on no batch. Shrinks are fused with what writes their input, wherever that is no GEMM:

    expand of down, or of out   +   RMSNorm, deferred to the next GEMM   +   shrink of q, k, v, or of gate, up
    expand of gate, up   +   SiLU * up   +   shrink of down

The adapter of a slot is stored with its own rank: A [modules, rank, inputs] and B [outputs, rank] of each layer and
projection, one after the other, so all offsets are proportional to the rank. Kernels go through the ranks 16 at a time,
so what a tile costs depends on its own adapter.

T tokens, R ranks at most.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from penstock.kernels.hopper.gemm import DeferredNorm
from penstock.kernels.triton.overlap import overlaps_launches

TILE_FIELDS = 4  # slot (-1: no adapter), rank, first entry of the order, number of tokens
RANK_STEP = 16  # ranks are padded to a multiple of it
_COLUMNS = 256  # of a program
_INNER_ELEMENTS = 1 << 13  # of a program for SwiGLU: tokens times columns
_PARTIALS_AT_ONCE = 1 << 12  # elements


@dataclass(frozen=True, slots=True)
class AdapterTiles:
    """The tokens of a step, grouped by adapter. Every token is in one tile."""

    order: torch.Tensor  # int32 [T]
    tiles: torch.Tensor  # int32 [tiles, TILE_FIELDS]; unused ones have no tokens
    rows: int  # tokens of a tile, at most


@dataclass(frozen=True, slots=True)
class LowRank:
    """A and B of one projection in all slots: some modules that read the same inputs."""

    weights: torch.Tensor  # [slots, elements]
    offset: int  # where they begin, in elements per rank
    inputs: int
    outputs: tuple[int, ...]  # of each module
    most_rank: int

    @property
    def b_offset(self) -> int:
        return self.offset + len(self.outputs) * self.inputs

    @property
    def end(self) -> int:
        return self.b_offset + sum(self.outputs)

    def within(self, weights: torch.Tensor) -> LowRank:
        """The same projection in another buffer."""
        return replace(self, weights=weights)

    def matrices(self, slot: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A [modules, rank, inputs] and B [outputs, rank] where a slot has an adapter of this rank."""
        a = self.weights[slot, rank * self.offset : rank * self.b_offset].view(len(self.outputs), rank, self.inputs)
        return a, self.weights[slot, rank * self.b_offset : rank * self.end].view(-1, rank)


@dataclass(frozen=True, slots=True)
class Shrunk:
    """x @ A.T as partial sums. Those of tokens without an adapter are undefined."""

    partials: torch.Tensor  # float32 [parts, T, modules * most_rank]
    squares: torch.Tensor | None = None  # float32 [parts, T], of x before RMSNorm: it is still to be divided by its RMS
    eps: float = 0.0


@triton.jit
def _tile_of(tiles, order, ROWS: tl.constexpr):
    """Slot, rank, tokens, and which of them are real."""
    tile = tiles + tl.program_id(0) * 4
    slot = tl.load(tile).to(tl.int64)
    rank = tl.multiple_of(tl.load(tile + 1), 16)
    rows = tl.arange(0, ROWS)
    real = rows < tl.load(tile + 3)
    tokens = tl.load(order + tl.load(tile + 2) + rows, mask=real, other=0)
    return slot, rank, tokens, real


@triton.jit
def _load_a(weights, rank, module, first, columns, inputs):
    """A of one module for some columns and 16 ranks, as [columns, 16]."""
    ranks = module * rank + first + tl.arange(0, 16)
    return tl.load(weights + ranks[None, :] * inputs + columns[:, None], mask=(columns < inputs)[:, None], other=0.0)


@triton.jit
def _load_b(weights, rank, first, columns, real):
    """B for some outputs and 16 ranks, as [16, outputs]."""
    ranks = first + tl.arange(0, 16)
    return tl.load(weights + columns[None, :] * rank + ranks[:, None], mask=real[None, :], other=0.0)


@triton.jit
def _sum_partials(partials, parts, tokens, real, num_tokens, width, first, ROWS: tl.constexpr, AT_ONCE: tl.constexpr):
    """[ROWS, 16]: the columns from `first` on, of all parts."""
    ranks = first + tl.arange(0, 16)
    total = tl.zeros([ROWS, 16], tl.float32)
    for base in range(0, parts, AT_ONCE):
        part = base + tl.arange(0, AT_ONCE)
        at = (part[:, None] * num_tokens + tokens[None, :]) * width
        there = (part < parts)[:, None, None] & real[None, :, None]
        total += tl.sum(tl.load(partials + at[:, :, None] + ranks[None, None, :], mask=there, other=0.0), 0)
    return total


@triton.jit
def _rms_factor(squares, parts, tokens, real, num_tokens, width, eps, PARTS: tl.constexpr):
    part = tl.arange(0, PARTS)
    at = squares + part[:, None] * num_tokens + tokens[None, :]
    found = tl.load(at, mask=(part < parts)[:, None] & real[None, :], other=0.0)
    return tl.rsqrt(tl.sum(found, 0) / width + eps)


@triton.jit
def _multiply(a, b):
    return tl.dot(a.to(b.dtype), b, input_precision="ieee")


@triton.jit(do_not_specialize=["num_tokens"])
def _residual_kernel(
    x, values, squares, partials, shrunk, gain, b_weights, a_weights, b_offset, a_offset, slot_stride, tiles, order,
    num_tokens, width, parts,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, R: tl.constexpr, MODULES: tl.constexpr, AT_ONCE: tl.constexpr,
    EXPAND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x += expand(shrunk) for a tile and some columns; then, if MODULES, the RMSNorm but for its factor, and shrink."""
    slot, rank, tokens, real = _tile_of(tiles, order, ROWS)
    part = tl.program_id(1)
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    within = columns < width
    adapted = slot >= 0
    slot = tl.maximum(slot, 0)
    a = a_weights + slot * slot_stride + rank.to(tl.int64) * a_offset
    b = b_weights + slot * slot_stride + rank.to(tl.int64) * b_offset
    inputs = tl.where(adapted, width, 0)
    if EXPAND:
        b0 = _load_b(b, rank, 0, columns, within & adapted)
    if MODULES > 0:
        gains = tl.load(gain + columns, mask=within, other=0.0).to(tl.float32)
        a0 = _load_a(a, rank, 0, 0, columns, inputs)
        a1 = _load_a(a, rank, 1, 0, columns, inputs)
        if MODULES > 2:
            a2 = _load_a(a, rank, 2, 0, columns, inputs)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    cells = tokens[:, None] * width + columns[None, :]
    both = real[:, None] & within[None, :]
    summed = tl.load(x + cells, mask=both, other=0.0).to(tl.float32)
    if EXPAND:  # noqa: SIM102  only this one is decided when the kernel is compiled
        if adapted:
            summed += _multiply(_sum_partials(shrunk, parts, tokens, real, num_tokens, R, 0, ROWS, AT_ONCE), b0)
            for first in range(16, rank, 16):
                low = _sum_partials(shrunk, parts, tokens, real, num_tokens, R, first, ROWS, AT_ONCE)
                summed += _multiply(low, _load_b(b, rank, first, columns, within))
            tl.store(x + cells, summed.to(x.dtype.element_ty), mask=both)
            summed = summed.to(x.dtype.element_ty).to(tl.float32)
    if MODULES > 0:
        tl.store(squares + part * num_tokens + tokens, tl.sum(summed * summed, 1), mask=real)
        scaled = (summed * gains[None, :]).to(x.dtype.element_ty)
        tl.store(values + cells, scaled, mask=both)
        if adapted:
            into = partials + (part * num_tokens + tokens)[:, None] * (MODULES * R) + tl.arange(0, 16)[None, :]
            tl.store(into, _multiply(scaled, a0), mask=real[:, None])
            tl.store(into + R, _multiply(scaled, a1), mask=real[:, None])
            if MODULES > 2:
                tl.store(into + 2 * R, _multiply(scaled, a2), mask=real[:, None])
            for first in range(16, rank, 16):
                for module in tl.static_range(MODULES):
                    found = _multiply(scaled, _load_a(a, rank, module, first, columns, width))
                    tl.store(into + module * R + first, found, mask=real[:, None])


@triton.jit(do_not_specialize=["num_tokens"])
def _shrink_kernel(
    partials, x, a_weights, a_offset, slot_stride, tiles, order, num_tokens, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    slot, rank, tokens, real = _tile_of(tiles, order, ROWS)
    part = tl.program_id(1)
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    adapted = slot >= 0
    a = a_weights + tl.maximum(slot, 0) * slot_stride + rank.to(tl.int64) * a_offset
    a0 = _load_a(a, rank, 0, 0, columns, tl.where(adapted, width, 0))
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if adapted:
        both = real[:, None] & (columns < width)[None, :]
        found = tl.load(x + tokens[:, None] * width + columns[None, :], mask=both, other=0.0)
        into = partials + (part * num_tokens + tokens)[:, None] * R + tl.arange(0, 16)[None, :]
        tl.store(into, _multiply(found, a0), mask=real[:, None])
        for first in range(16, rank, 16):
            tl.store(into + first, _multiply(found, _load_a(a, rank, 0, first, columns, width)), mask=real[:, None])


@triton.jit(do_not_specialize=["num_tokens"])
def _expand_kernel(
    out, shrunk, squares, b_weights, b_offset, slot_stride, tiles, order, num_tokens, inputs, parts, eps,
    FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Three modules beside each other in `out`, with so many outputs, which all read an input after its RMSNorm."""
    slot, rank, tokens, real = _tile_of(tiles, order, ROWS)
    place = tl.program_id(1)
    TILES_1: tl.constexpr = (FIRST + COLUMNS - 1) // COLUMNS
    TILES_2: tl.constexpr = TILES_1 + (SECOND + COLUMNS - 1) // COLUMNS
    module = (place >= TILES_1).to(tl.int32) + (place >= TILES_2).to(tl.int32)
    before = tl.where(module == 0, 0, tl.where(module == 1, TILES_1, TILES_2))
    begin = tl.where(module == 0, 0, tl.where(module == 1, FIRST, FIRST + SECOND))
    end = tl.where(module == 0, FIRST, tl.where(module == 1, FIRST + SECOND, FIRST + SECOND + THIRD))
    columns = begin + (place - before) * COLUMNS + tl.arange(0, COLUMNS)
    within = columns < end
    adapted = slot >= 0
    b = b_weights + tl.maximum(slot, 0) * slot_stride + rank.to(tl.int64) * b_offset
    b0 = _load_b(b, rank, 0, columns, within & adapted)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if adapted:
        cells = tokens[:, None] * (FIRST + SECOND + THIRD) + columns[None, :]
        both = real[:, None] & within[None, :]
        summed = tl.load(out + cells, mask=both, other=0.0).to(tl.float32)
        factor = _rms_factor(squares, parts, tokens, real, num_tokens, inputs, eps, PARTS)[:, None]
        low = _sum_partials(shrunk, parts, tokens, real, num_tokens, 3 * R, module * R, ROWS, AT_ONCE)
        summed += _multiply(low * factor, b0)
        for first in range(16, rank, 16):
            low = _sum_partials(shrunk, parts, tokens, real, num_tokens, 3 * R, module * R + first, ROWS, AT_ONCE)
            summed += _multiply(low * factor, _load_b(b, rank, first, columns, within))
        tl.store(out + cells, summed.to(out.dtype.element_ty), mask=both)


@triton.jit(do_not_specialize=["num_tokens"])
def _swiglu_kernel(
    inner, partials, gate_up, shrunk, squares, b_weights, a_weights, b_offset, a_offset, slot_stride, tiles, order,
    num_tokens, inputs, width, parts, eps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """SiLU(gate + its expand) * (up + its expand), and the shrink of that."""
    slot, rank, tokens, real = _tile_of(tiles, order, ROWS)
    part = tl.program_id(1)
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    within = columns < width
    adapted = slot >= 0
    slot = tl.maximum(slot, 0)
    a = a_weights + slot * slot_stride + rank.to(tl.int64) * a_offset
    b = b_weights + slot * slot_stride + rank.to(tl.int64) * b_offset
    b_gate = _load_b(b, rank, 0, columns, within & adapted)
    b_up = _load_b(b, rank, 0, width + columns, within & adapted)
    a0 = _load_a(a, rank, 0, 0, columns, tl.where(adapted, width, 0))
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    cells = tokens[:, None] * (2 * width) + columns[None, :]
    both = real[:, None] & within[None, :]
    gate = tl.load(gate_up + cells, mask=both, other=0.0).to(tl.float32)
    up = tl.load(gate_up + cells + width, mask=both, other=0.0).to(tl.float32)
    if adapted:
        factor = _rms_factor(squares, parts, tokens, real, num_tokens, inputs, eps, PARTS)[:, None]
        low = _sum_partials(shrunk, parts, tokens, real, num_tokens, 2 * R, 0, ROWS, AT_ONCE)
        gate += _multiply(low * factor, b_gate)
        low = _sum_partials(shrunk, parts, tokens, real, num_tokens, 2 * R, R, ROWS, AT_ONCE)
        up += _multiply(low * factor, b_up)
        for first in range(16, rank, 16):
            low = _sum_partials(shrunk, parts, tokens, real, num_tokens, 2 * R, first, ROWS, AT_ONCE)
            gate += _multiply(low * factor, _load_b(b, rank, first, columns, within))
            low = _sum_partials(shrunk, parts, tokens, real, num_tokens, 2 * R, R + first, ROWS, AT_ONCE)
            up += _multiply(low * factor, _load_b(b, rank, first, width + columns, within))
    result = (gate / (1 + tl.exp(-gate)) * up).to(inner.dtype.element_ty)
    tl.store(inner + tokens[:, None] * width + columns[None, :], result, mask=both)
    if adapted:
        into = partials + (part * num_tokens + tokens)[:, None] * R + tl.arange(0, 16)[None, :]
        tl.store(into, _multiply(result, a0), mask=real[:, None])
        for first in range(16, rank, 16):
            tl.store(into + first, _multiply(result, _load_a(a, rank, 0, first, columns, width)), mask=real[:, None])


def add_and_shrink(
    x: torch.Tensor,
    tiles: AdapterTiles,
    added: tuple[Shrunk, LowRank] | None,
    following: tuple[LowRank, torch.Tensor, float] | None,
) -> tuple[DeferredNorm, Shrunk] | None:
    """Adds what a projection gives to the residual stream `x` [T, C]. `following` are the modules that read it after an
    RMSNorm, with its gain and eps: of them the deferred norm and the shrink are returned."""
    T, C = x.shape
    low = following[0] if following else added[1] if added else None
    assert low is not None, "there is nothing to do"
    modules = len(low.outputs) if following else 0
    gain, eps = following[1:] if following else (x, 0.0)
    R, parts = low.most_rank, triton.cdiv(C, _COLUMNS)
    values = torch.empty_like(x) if following else x
    squares = _float32(x, parts, T) if following else x
    partials = _float32(x, parts, T, modules * R) if following else x
    shrunk, source = added or (Shrunk(x), low)
    pdl = overlaps_launches()
    _residual_kernel[len(tiles.tiles), parts](
        x, values, squares, partials, shrunk.partials, gain, low.weights, low.weights, source.b_offset, low.offset,
        low.weights.stride(0), tiles.tiles, tiles.order, T, C, len(shrunk.partials),
        ROWS=tiles.rows, COLUMNS=_COLUMNS, R=R, MODULES=modules, AT_ONCE=_at_once(tiles), EXPAND=added is not None,
        PDL=pdl, num_warps=8, launch_pdl=pdl,
    )  # fmt: skip
    return (DeferredNorm(values, squares), Shrunk(partials, squares, eps)) if following else None


def shrink(x: torch.Tensor, low: LowRank, tiles: AdapterTiles) -> Shrunk:
    """Of one module whose input `x` [T, inputs] comes without a norm."""
    T, inputs = x.shape
    parts, pdl = triton.cdiv(inputs, _COLUMNS), overlaps_launches()
    partials = _float32(x, parts, T, low.most_rank)
    _shrink_kernel[len(tiles.tiles), parts](
        partials, x, low.weights, low.offset, low.weights.stride(0), tiles.tiles, tiles.order, T, inputs,
        ROWS=tiles.rows, COLUMNS=_COLUMNS, R=low.most_rank, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return Shrunk(partials)


def expand(out: torch.Tensor, shrunk: Shrunk, low: LowRank, tiles: AdapterTiles) -> None:
    """Adds what three modules give, beside each other in `out` [T, outputs of all]."""
    assert shrunk.squares is not None
    first, second, third = low.outputs
    places = sum(triton.cdiv(width, _COLUMNS) for width in low.outputs)
    parts, pdl = len(shrunk.partials), overlaps_launches()
    _expand_kernel[len(tiles.tiles), places](
        out, shrunk.partials, shrunk.squares, low.weights, low.b_offset, low.weights.stride(0), tiles.tiles,
        tiles.order, len(out), low.inputs, parts, shrunk.eps, FIRST=first, SECOND=second, THIRD=third,
        ROWS=tiles.rows, COLUMNS=_COLUMNS, R=low.most_rank, PARTS=triton.next_power_of_2(parts),
        AT_ONCE=_at_once(tiles), PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


def swiglu(
    gate_up: torch.Tensor,
    shrunk: Shrunk,
    low: LowRank,
    down: LowRank,
    tiles: AdapterTiles,
) -> tuple[torch.Tensor, Shrunk]:
    """SiLU(gate) * up [T, I] with what the adapters give to both, and its shrink for the down projection."""
    assert shrunk.squares is not None
    T, I = len(gate_up), low.outputs[0]  # noqa: E741
    inner = torch.empty((T, I), dtype=gate_up.dtype, device=gate_up.device)
    columns = _INNER_ELEMENTS // tiles.rows
    into = _float32(gate_up, triton.cdiv(I, columns), T, down.most_rank)
    parts, pdl = len(shrunk.partials), overlaps_launches()
    _swiglu_kernel[len(tiles.tiles), len(into)](
        inner, into, gate_up, shrunk.partials, shrunk.squares, low.weights, down.weights, low.b_offset, down.offset,
        low.weights.stride(0), tiles.tiles, tiles.order, T, low.inputs, I, parts, shrunk.eps,
        ROWS=tiles.rows, COLUMNS=columns, R=low.most_rank, PARTS=triton.next_power_of_2(parts),
        AT_ONCE=_at_once(tiles), PDL=pdl, num_warps=8, launch_pdl=pdl,
    )  # fmt: skip
    return inner, Shrunk(into)


def _float32(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _at_once(tiles: AdapterTiles) -> int:
    return _PARTIALS_AT_ONCE // (tiles.rows * RANK_STEP)
