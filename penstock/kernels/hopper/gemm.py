"""Weight-streaming GEMMs on Hopper: out[rows, N] = x[rows, K] @ weight[N, K].T for 2 rows to some hundred.

`gemm.cu` computes in bfloat16, or in float8_e4m3fn with one float32 scale per output channel and one per row of `x`,
and has SwiGLU and residual epilogues. In bfloat16, tokens may have LoRA adapters (`adapters.cuh`).
The reference is `linear_reference` of `triton/gemm.py`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from penstock.kernels.hopper.program import TensorMap, kernel
from penstock.kernels.hopper.tensor_map import alternating, tensor_map

_ROWS = (16, 32, 64, 96, 128, 160, 192, 224, 256)  # compiled for
STEP_BYTES = 128
_SLOT = 64  # channels; as in deferred_norm.cuh


@dataclass(frozen=True, slots=True)
class HopperConfig:
    tile: int  # output channels of a CTA: 64, 128 or 256 (gated: half of them of the gate)
    stages: int  # steps of 128 bytes of K in flight
    splits: int = 1  # CTAs along K that share a tile (split-K); they are a cluster
    row_blocks: int = 1  # CTAs along the rows


@dataclass(frozen=True, slots=True)
class DeferredNorm:
    """A deferred RMSNorm of the residual stream: the GEMM that reads these rows divides by their root mean square."""

    values: torch.Tensor  # [T, C]: the residual stream times the gain
    squares: torch.Tensor  # float32 [slots, T]: sums of squares of the residual stream, each over some channels


@dataclass(frozen=True, slots=True)
class GemmAdapters:
    """The LoRA adapters of a GEMM: its modules' A and B in the slots, and the tokens grouped into tiles of one slot."""

    tiles: torch.Tensor  # int32 [tiles, 4]: slot (-1: no adapter), rank, first entry of the order, tokens (16 at most)
    order: torch.Tensor  # int32 [T]
    weights: torch.Tensor  # [slots, elements]
    a_offset: int  # elements per rank
    b_offset: int
    outputs: tuple[int, ...]  # of the modules
    most_rank: int
    partials: torch.Tensor  # int32 of `partials_shape`, ABSENT before the GEMM


class _Adapters(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("tiles", "order", "weights", "x", "partials")),
        ("slot_stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("a_offset", "b_offset", "num_tiles", "modules", "most_rank")),
        *((name, ctypes.c_int32) for name in ("inputs", "parts", "tokens", "workers", "second", "third")),
    ]


_NO_ADAPTERS = _Adapters()
_HELPER_WARPS, _COLUMNS = 8, 128  # that add adapters, and what each takes of x; as in adapters.cuh
ABSENT = -1  # a partial sum that is not there yet; the bits of a NaN; as in adapters.cuh
_LOST_SMS = 8  # in clusters, one SM of each GPC may be left over


def partials_shape(rows: int, inputs: int, modules: int, most_rank: int) -> tuple[int, int, int]:
    """Of the low-rank sums of some columns each."""
    return -(-inputs // (_COLUMNS * _HELPER_WARPS)), rows, modules * most_rank


def padded_rows(rows: int, row_blocks: int = 1) -> int:
    """Rows of one CTA."""
    return next(size for size in _ROWS if rows <= size * row_blocks)


def adapter_bytes(config: HopperConfig, rows: int, adapters: GemmAdapters, gated: bool) -> int:
    """Shared memory for LoRA adapters: tiles, what is added to the sums, low-rank sums, order and tiles of the rows."""
    added = max(rows * (config.tile + 4), _HELPER_WARPS * 16 * 16) * 4
    shrunk = (2 if gated else 1) * rows * 2 * (adapters.most_rank + 4)
    return 16 * len(adapters.tiles) + added + shrunk + 2 * 4 * rows


def shared_bytes(config: HopperConfig, rows: int, gated: bool) -> int:
    """The ring of stages, reused for the sums in the epilogue; two barriers per stage; a float per row."""
    ring = config.stages * (config.tile + rows) * STEP_BYTES
    laid = config.tile // 2 if gated and config.splits == 1 else config.tile
    return max(ring, rows * (laid + 4) * 4) + 16 * config.stages + 4 * rows


def empty_deferred_norm(x: torch.Tensor) -> DeferredNorm:
    """Memory that a GEMM fills, for the residual stream `x`."""
    rows, width = x.shape
    slots = -(-width // _SLOT)
    values = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    return DeferredNorm(values, torch.empty((slots, rows), dtype=torch.float32, device=x.device))


def defer_norms(x: torch.Tensor, gain: torch.Tensor) -> DeferredNorm:
    """Defer the RMSNorm of the rows `x` [T, C]; `x` stays as it is."""
    rows, width = x.shape
    norm = DeferredNorm(torch.empty_like(x), torch.empty((1, rows), dtype=torch.float32, device=x.device))
    padded = -(-width // 1024) * 1024  # to whole CTAs
    kernel("deferred_norm.cu", "defer_norms")(
        (rows,), 256, padded // _SLOT * 4, x, gain, norm.values, norm.squares, width, padded, pdl=True
    )
    return norm


def hopper_gemm(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    config: HopperConfig,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
    add: bool = False,
    defers: tuple[torch.Tensor, DeferredNorm] | None = None,
    adapters: GemmAdapters | None = None,
) -> torch.Tensor:
    """For fp8, `scales` are (of the channels, of the rows), float32. `add`: `out` is added to.

    `gated`: the first half of `weight` is the gate, the second half the up projection, and `out` has N / 2 columns.
    `norm`: `x` are the values of a `DeferredNorm`; (its squares, eps).
    `defers`: (gain, memory to fill) for a deferred RMSNorm of `out`. Both in bfloat16 only, as are `adapters`.
    """
    rows, depth = x.shape
    padded, step = padded_rows(rows, config.row_blocks), STEP_BYTES // x.itemsize
    columns = len(weight) // 2 if gated else len(weight)
    width = config.tile // 2 if gated else config.tile
    blocks = -(-columns // width) * config.row_blocks * config.splits
    groups = 1 if config.tile == 64 else 2  # warpgroups that multiply
    crowded = config.tile // 64 // groups * padded > 256
    others = 32 * (1 + _HELPER_WARPS + bool(norm)) if adapters else 128 if crowded or norm else 32  # threads
    program = kernel(
        "gemm.cu", "gemm", ROWS=padded, TILE=config.tile, STAGES=config.stages, SPLITS=config.splits,
        FP8=int(scales is not None), GATED=int(gated), ADD=int(add), WIDE=int(out.dtype == torch.float32),
        APPLIES_NORM=int(norm is not None), DEFERS_NORM=int(defers is not None),
        LORA=int(adapters is not None),
    )  # fmt: skip
    of_channels, of_rows = scales or (x, norm[0] if norm else x)
    gain, deferred = defers or (x, DeferredNorm(x, x))
    shared, lora = shared_bytes(config, padded, gated), _NO_ADAPTERS
    if adapters:
        shared += adapter_bytes(config, padded, adapters, gated)
        lora = _adapters(adapters, x, blocks)
    program(
        (blocks,), groups * 128 + others, shared,
        _weight_map(weight, config.tile, step, gated), tensor_map(x, (padded, step)),
        out, of_channels, of_rows, gain, deferred.values, deferred.squares, lora, rows, config.row_blocks,
        columns, -(-depth // step), out.stride(0), len(of_rows), 1.0 / depth, norm[1] if norm else 0.0,
        pdl=True, cluster=config.splits,
    )  # fmt: skip
    return out


def resident_ctas(device: torch.device) -> int:
    """CTAs of one GEMM that are resident together for certain, so that others may wait for them."""
    return torch.cuda.get_device_properties(device).multi_processor_count - _LOST_SMS


def _adapters(of: GemmAdapters, x: torch.Tensor, blocks: int) -> _Adapters:
    assert x.is_contiguous()
    assert of.partials.shape == partials_shape(len(x), x.shape[1], len(of.outputs), of.most_rank)
    first, second = (*of.outputs, 1 << 30, 1 << 30)[:2]
    return _Adapters(
        *(tensor.data_ptr() for tensor in (of.tiles, of.order, of.weights, x, of.partials)),
        of.weights.stride(0), of.a_offset, of.b_offset, len(of.tiles), len(of.outputs),
        of.most_rank, x.shape[1], len(of.partials), len(x), min(blocks, resident_ctas(x.device)), first,
        min(first + second, 1 << 30),
    )  # fmt: skip


def _weight_map(weight: torch.Tensor, tile: int, step: int, gated: bool) -> TensorMap:
    if gated:
        return tensor_map(alternating(weight), (tile // 16, 2, 8, step))
    return tensor_map(weight, (tile, step))
