"""Sampling kernels for CUDA (temperature, top-k, top-p, min-p, argmax) that do not sort the vocabulary.

`kernels/sampling_reference.py` defines what they compute. Thresholds of top-k and top-p are found digit by digit in the
order-preserving integer form of the logits: each pass counts (or sums the weight of) the tokens at or above the 15
candidates of the next hexadecimal digit. The passes read a short list: tokens far below the maximum are left out of it
where the rest provably holds the threshold. Passes and chunks depend on the vocabulary alone, so a row samples the
same token in any batch.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from penstock.kernels.triton.overlap import overlaps_launches

_CHUNK = 8192  # tokens per program
_BLOCK = 2048
_LOWEST = tl.constexpr(-2147483648)
_DEPTH = tl.constexpr(10.0)  # tokens this far below the maximum, in units of temperature, rarely matter


@triton.jit
def _ordered(x):
    """int32 whose signed order is that of the float32."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _max_kernel(peaks, logits, vocab, stride, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """peaks[row, chunk]: the largest logit of a chunk."""
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * CHUNK
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for base in range(begin, begin + CHUNK, BLOCK):
        tokens = base + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + tokens, mask=tokens < vocab, other=float("-inf"))
        best = tl.maximum(best, x.to(tl.float32))
    tl.store(peaks + row * tl.num_programs(1) + tl.program_id(1), tl.max(best, 0))


@triton.jit
def _row_peak(peaks, row, num_chunks, CHUNKS: tl.constexpr):
    chunks = tl.arange(0, CHUNKS)
    return tl.max(tl.load(peaks + row * num_chunks + chunks, mask=chunks < num_chunks, other=float("-inf")), 0)


@triton.jit
def _row_sum(values, row, num_chunks, CHUNKS: tl.constexpr):
    chunks = tl.arange(0, CHUNKS)
    return tl.sum(tl.load(values + row * num_chunks + chunks, mask=chunks < num_chunks, other=0.0), 0)


@triton.jit
def _weigh_kernel(
    masses, near_masses, near_counts, logits, peaks, temperatures, vocab, stride,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Per chunk: softmax weight of all tokens, weight and number of those near the maximum."""
    row = tl.program_id(0).to(tl.int64)
    num_chunks = tl.num_programs(1)
    peak = _row_peak(peaks, row, num_chunks, CHUNKS)
    inverse = 1.0 / tl.maximum(tl.load(temperatures + row), 1e-6)
    begin = tl.program_id(1) * CHUNK
    mass = tl.zeros([BLOCK], tl.float32)
    near_mass = tl.zeros([BLOCK], tl.float32)
    near_count = tl.zeros([BLOCK], tl.float32)
    for base in range(begin, begin + CHUNK, BLOCK):
        tokens = base + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + tokens, mask=tokens < vocab, other=float("-inf")).to(tl.float32)
        depth = (x - peak) * inverse
        weight = tl.exp(depth)
        mass += weight
        near_mass += tl.where(depth >= -_DEPTH, weight, 0.0)
        near_count += (depth >= -_DEPTH).to(tl.float32)
    at = row * num_chunks + tl.program_id(1)
    tl.store(masses + at, tl.sum(mass, 0))
    tl.store(near_masses + at, tl.sum(near_mass, 0))
    tl.store(near_counts + at, tl.sum(near_count, 0))


@triton.jit
def _list_kernel(
    listed, lengths, masses, near_masses, near_counts, logits, peaks, temperatures, top_ks, top_ps, vocab, stride,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """listed[row, chunk]: the logits near the maximum, in order; all logits where those do not reach the threshold."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    num_chunks = tl.num_programs(1)
    peak = _row_peak(peaks, row, num_chunks, CHUNKS)
    inverse = 1.0 / tl.maximum(tl.load(temperatures + row), 1e-6)
    top_k = tl.load(top_ks + row)
    if top_k > 0:
        near = _row_sum(near_counts, row, num_chunks, CHUNKS) >= top_k
    else:
        wanted = tl.load(top_ps + row) * _row_sum(masses, row, num_chunks, CHUNKS)
        near = _row_sum(near_masses, row, num_chunks, CHUNKS) >= wanted
    deepest = tl.where(near, -_DEPTH, float("-inf"))
    into = listed + (row * num_chunks + chunk) * CHUNK
    length = 0
    for base in range(chunk * CHUNK, (chunk + 1) * CHUNK, BLOCK):
        tokens = base + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + tokens, mask=tokens < vocab, other=float("-inf")).to(tl.float32)
        kept = (tokens < vocab) & ((x - peak) * inverse >= deepest)
        places = length + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(into + places, x, mask=kept)
        length += tl.sum(kept.to(tl.int32), 0)
    tl.store(lengths + row * num_chunks + chunk, length)


@triton.jit
def _refine(
    prefixes, sums, first_sums, masses, targets, floors, row, num_chunks, shift,
    CHUNKS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Append to the row's prefix the largest digit whose tokens still reach the target."""
    digits = tl.arange(0, 16)
    chunks = tl.arange(0, CHUNKS)
    real = chunks < num_chunks
    at = (row * num_chunks + chunks) * 16
    reached = tl.sum(tl.load(sums + at[:, None] + digits[None, :], mask=real[:, None], other=0.0), 0)
    target = tl.load(targets + row).to(tl.float32)
    if WEIGHTED:  # a share of what top-k left, all of which is listed, or of everything
        within = tl.sum(tl.load(first_sums + at, mask=real, other=0.0), 0)
        everything = _row_sum(masses, row, num_chunks, CHUNKS)
        target *= tl.where(tl.load(floors + row) > _LOWEST, within, everything)
    digit = tl.sum(((reached >= target) & (digits > 0)).to(tl.int32), 0)
    return tl.load(prefixes + row) + (digit << shift)


@triton.jit
def _count_kernel(
    sums, listed, lengths, prefixes, old_prefixes, old_sums, first_sums, masses, targets, floors, peaks, temperatures,
    shift,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, FIRST: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """sums[row, chunk, d]: count or softmax weight of the tokens at or above the prefix with digit d appended."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    num_chunks = tl.num_programs(1)
    if FIRST:
        prefix = _LOWEST + tl.zeros([], tl.int32)
    else:
        prefix = _refine(
            old_prefixes, old_sums, first_sums, masses, targets, floors, row, num_chunks, shift + 4, CHUNKS, WEIGHTED
        )
    if chunk == 0:
        tl.store(prefixes + row, prefix)
    if WEIGHTED:
        peak = _row_peak(peaks, row, num_chunks, CHUNKS)
        inverse = 1.0 / tl.maximum(tl.load(temperatures + row), 1e-6)
        floor = tl.load(floors + row)
    digits = tl.arange(0, 16)
    candidates = prefix + (digits << shift)
    acc = tl.zeros([BLOCK, 16], tl.float32)
    length = tl.load(lengths + row * num_chunks + chunk)
    begin = listed + (row * num_chunks + chunk) * CHUNK
    for base in range(0, length, BLOCK):
        places = base + tl.arange(0, BLOCK)
        x = tl.load(begin + places, mask=places < length, other=float("-inf"))
        keys = _ordered(x)
        weight = (places < length).to(tl.float32)
        if WEIGHTED:
            weight = tl.where(keys >= floor, tl.exp((x - peak) * inverse), 0.0)
        acc += tl.where(keys[:, None] >= candidates[None, :], weight[:, None], 0.0)
    tl.store(sums + (row * num_chunks + chunk) * 16 + digits, tl.sum(acc, 0))


@triton.jit
def _threshold_kernel(
    thresholds, prefixes, sums, first_sums, masses, targets, floors, num_chunks, shift,
    CHUNKS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """The last digit; rows whose filter is off keep the threshold they came with."""
    row = tl.program_id(0).to(tl.int64)
    threshold = _refine(prefixes, sums, first_sums, masses, targets, floors, row, num_chunks, shift, CHUNKS, WEIGHTED)
    target = tl.load(targets + row)
    before = _LOWEST + tl.zeros([], tl.int32)
    if WEIGHTED:
        before = tl.load(floors + row)
        on = target < 1
    else:
        on = target > 0
    tl.store(thresholds + row, tl.where(on, tl.maximum(threshold, before), before))


@triton.jit(do_not_specialize_on_alignment=["places"])
def _sample_kernel(
    out, last_tokens, places, best_scores, best_tokens, arrivals, logits, temperatures, seeds, positions, min_ps,
    thresholds, peaks, vocab, stride,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, RANDOM: tl.constexpr, FILTERED: tl.constexpr,
    FEED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    num_chunks = tl.num_programs(1)
    chunks = tl.arange(0, CHUNKS)
    lanes = tl.arange(0, BLOCK)
    begin = chunk * CHUNK
    if PDL:
        tl.extra.cuda.gdc_wait()
    temperature = 0.0
    if RANDOM:
        temperature = tl.load(temperatures + row)
        seed = tl.load(seeds + row)
        position = tl.load(positions + row).to(tl.uint32)
    if FILTERED:
        threshold = tl.load(thresholds + row)
        peak = _row_peak(peaks, row, num_chunks, CHUNKS)
        unlikely = peak + temperature * tl.log(tl.load(min_ps + row))  # -inf when min_p is 0
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    chosen = begin + lanes
    for base in range(begin, begin + CHUNK, BLOCK):
        tokens = base + lanes
        x = tl.load(logits + row * stride + tokens, mask=tokens < vocab, other=float("-inf")).to(tl.float32)
        score = x
        if RANDOM:  # noqa: SIM102  one is known when compiling
            if temperature > 0:
                groups = (base // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
                zeros = groups * 0
                a, b, c, d = tl.philox(seed, groups, zeros + position, zeros, zeros)
                words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
                uniform = ((words >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2**-23
                score = x / temperature - tl.log(-tl.log(uniform))
                if FILTERED:
                    score = tl.where((_ordered(x) >= threshold) & (x >= unlikely), score, float("-inf"))
        better = score > best
        best = tl.where(better, score, best)
        chosen = tl.where(better, tokens, chosen)
    top = tl.max(best, 0)
    at = row * num_chunks
    tl.store(best_scores + at + chunk, top)
    tl.store(best_tokens + at + chunk, tl.min(tl.where(best == top, chosen, 0x7FFFFFFF), 0))
    tl.debug_barrier()  # the chunk's result precedes its arrival
    if tl.atomic_add(arrivals + row, 1, sem="acq_rel") == num_chunks - 1:
        tl.store(arrivals + row, 0)
        real = chunks < num_chunks
        scores = tl.load(best_scores + at + chunks, mask=real, other=float("-inf"), cache_modifier=".cg")
        tokens = tl.load(best_tokens + at + chunks, mask=real, other=0x7FFFFFFF, cache_modifier=".cg")
        winner = tl.min(tl.where(scores == tl.max(scores, 0), tokens, 0x7FFFFFFF), 0)
        tl.store(out + row, winner.to(out.dtype.element_ty))
        if FEED:
            tl.store(last_tokens + tl.load(places + row), winner.to(last_tokens.dtype.element_ty))


@dataclass(frozen=True, slots=True)
class SamplingScratch:
    """Work space for up to as many rows as it was made for; all sampling of a stream may share it.

    `listed` is the large one: four bytes for each logit.
    """

    listed: torch.Tensor  # float32 [S * chunks * CHUNK]
    lengths: torch.Tensor  # int32 [S * chunks]
    masses: torch.Tensor  # float32 [3, S * chunks]: of all tokens, of those near the maximum, and their number
    sums: torch.Tensor  # float32 [passes, S * chunks * 16]
    prefixes: torch.Tensor  # int32 [passes, S]
    thresholds: torch.Tensor  # int32 [2, S]
    peaks: torch.Tensor  # float32 [S * chunks]
    scores: torch.Tensor  # float32 [S * chunks]
    tokens: torch.Tensor  # int32 [S * chunks]
    arrivals: torch.Tensor  # int32 [S], zero between launches


def sampling_scratch(num_rows: int, vocab: int, device: torch.device) -> SamplingScratch:
    cells = num_rows * triton.cdiv(vocab, _CHUNK)

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return SamplingScratch(
        listed=torch.empty(cells * _CHUNK, dtype=torch.float32, device=device),
        lengths=make(cells, dtype=torch.int32),
        masses=make(3, cells),
        sums=make(8, cells * 16),
        prefixes=make(8, num_rows, dtype=torch.int32),
        thresholds=make(2, num_rows, dtype=torch.int32),
        peaks=make(cells),
        scores=make(cells),
        tokens=make(cells, dtype=torch.int32),
        arrivals=make(num_rows, dtype=torch.int32),
    )


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters of each row, on the device. Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off."""

    temperature: torch.Tensor  # float32
    seed: torch.Tensor  # int64
    position: torch.Tensor  # int32 or int64
    top_k: torch.Tensor  # int32
    top_p: torch.Tensor  # float32
    min_p: torch.Tensor  # float32


def argmax(
    logits: torch.Tensor,
    out: torch.Tensor,
    scratch: SamplingScratch,
    feed: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Greedy tokens of [S, V] logits; the lowest token wins a tie.

    `feed` is (last tokens of all rows [R], rows [S]): the token of each goes to its row as well.
    """
    _launch_sample(logits, out, scratch, None, filtered=False, feed=feed)
    return out


def sample(
    logits: torch.Tensor,
    out: torch.Tensor,
    rows: SamplingRows,
    scratch: SamplingScratch,
    *,
    any_top_k: bool,
    any_top_p: bool,
    any_min_p: bool,
) -> torch.Tensor:
    """Sample each row of [S, V] logits. The flags say which filters any row uses; passes nobody needs are skipped."""
    filtered = any_top_k or any_top_p or any_min_p
    if filtered:
        _prepare(logits, rows, scratch, lists=any_top_k or any_top_p)
        if any_top_k:
            _search(logits, rows.top_k, rows, scratch, weighted=False)
        if any_top_p:
            _search(logits, rows.top_p, rows, scratch, weighted=True)
        else:
            scratch.thresholds[1].copy_(scratch.thresholds[0])
    _launch_sample(logits, out, scratch, rows, filtered)
    return out


def _prepare(logits: torch.Tensor, rows: SamplingRows, scratch: SamplingScratch, lists: bool) -> None:
    S, V = logits.shape
    chunks = triton.cdiv(V, _CHUNK)
    shape = {"CHUNK": _CHUNK, "BLOCK": _BLOCK, "num_warps": 4}
    scratch.thresholds.fill_(_LOWEST.value)
    _max_kernel[S, chunks](scratch.peaks, logits, V, logits.stride(0), **shape)
    if not lists:
        return
    shape["CHUNKS"] = triton.next_power_of_2(chunks)
    _weigh_kernel[S, chunks](*scratch.masses, logits, scratch.peaks, rows.temperature, V, logits.stride(0), **shape)
    _list_kernel[S, chunks](
        scratch.listed, scratch.lengths, *scratch.masses, logits, scratch.peaks, rows.temperature, rows.top_k,
        rows.top_p, V, logits.stride(0), **shape,
    )  # fmt: skip


def _search(
    logits: torch.Tensor, targets: torch.Tensor, rows: SamplingRows, scratch: SamplingScratch, weighted: bool
) -> None:
    """Threshold of top-k into scratch.thresholds[0], or of top-p within it into scratch.thresholds[1]."""
    S, V = logits.shape
    chunks = triton.cdiv(V, _CHUNK)
    padded = triton.next_power_of_2(chunks)
    passes = 8 if logits.dtype == torch.float32 else 4  # 16-bit logits have four digits
    floors = scratch.thresholds[0]
    for i in range(passes):
        before = max(i - 1, 0)
        _count_kernel[S, chunks](
            scratch.sums[i], scratch.listed, scratch.lengths, scratch.prefixes[i], scratch.prefixes[before],
            scratch.sums[before], scratch.sums[0], scratch.masses[0], targets, floors, scratch.peaks, rows.temperature,
            28 - 4 * i,
            CHUNK=_CHUNK, BLOCK=512, CHUNKS=padded, FIRST=i == 0, WEIGHTED=weighted, num_warps=8,
        )  # fmt: skip
    _threshold_kernel[(S,)](
        scratch.thresholds[int(weighted)], scratch.prefixes[passes - 1], scratch.sums[passes - 1], scratch.sums[0],
        scratch.masses[0], targets, floors, chunks, 32 - 4 * passes, CHUNKS=padded, WEIGHTED=weighted, num_warps=1,
    )  # fmt: skip


def _launch_sample(
    logits: torch.Tensor,
    out: torch.Tensor,
    scratch: SamplingScratch,
    rows: SamplingRows | None,
    filtered: bool,
    feed: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    S, V = logits.shape
    chunks = triton.cdiv(V, _CHUNK)
    unused = scratch.scores
    last_tokens, places = feed or (out, out)
    pdl = overlaps_launches()
    _sample_kernel[S, chunks](
        out, last_tokens, places, scratch.scores, scratch.tokens, scratch.arrivals, logits,
        rows.temperature if rows else unused, rows.seed if rows else unused, rows.position if rows else unused,
        rows.min_p if rows else unused, scratch.thresholds[1], scratch.peaks, V, logits.stride(0),
        CHUNK=_CHUNK, BLOCK=_BLOCK, CHUNKS=triton.next_power_of_2(chunks), RANDOM=rows is not None, FILTERED=filtered,
        FEED=feed is not None, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
