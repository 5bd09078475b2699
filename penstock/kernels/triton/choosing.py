"""The second kernel of sampling (`sampling.py`): a program per row, which finds the token to sample."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.triton.sampling_row import (
    ADJUST,
    ALTERNATIVES,
    CHECKED,
    FILTER,
    LOGPROBS,
    LOWEST,
    MIN_P,
    MOST_COUNTED,
    NO_TOKEN,
    NOT_A_NUMBER,
    PENALTIES,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    UNDECIDED,
    WORDS,
    noise,
    noise_of,
    ordered,
    read_float,
    read_seed,
    weights,
)  # fmt: skip

_FEW_SPANS = tl.constexpr(8)  # tokens are listed for min-p if at most one of so many spans reaches it
_CHECKED = tl.constexpr(CHECKED)
_ROUNDED = tl.constexpr(1.0001)  # by less than this factor masses are off that are added in another order


@triton.jit
def _total(masses, span_peaks, peak, inverse, SPANS: tl.constexpr, CHUNKS: tl.constexpr):
    """The mass of all chunks, each of which was summed relative to its own peak."""
    chunk_peaks = tl.max(tl.reshape(span_peaks, [CHUNKS, SPANS // CHUNKS]), 1)
    return tl.sum(masses * weights(chunk_peaks, peak, inverse), 0)


@triton.jit
def _mass_above(values, x, peak, inverse, vocab, TILE: tl.constexpr):
    """Of all tokens with a larger logit than x."""
    lanes = tl.arange(0, TILE)
    acc = tl.zeros([TILE], tl.float32)
    for base in range(0, vocab, TILE):
        tokens = base + lanes
        y = tl.load(values + tokens, mask=tokens < vocab, other=float("-inf"))
        acc += tl.where(y > x, tl.exp((y - peak) * inverse), 0.0)
    return tl.sum(acc, 0)


@triton.jit
def _best(scores, tokens):
    """The highest score, and the lowest token that has it."""
    best = tl.max(scores, 0)
    return best, tl.min(tl.where(scores == best, tokens, NO_TOKEN), 0)


@triton.jit
def _choose_among_spans(
    scores, tokens, values, floor, top_p, total, peak, inverse, temperature, seed, position, vocab,
    SPANS: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The best score of a kept token. `scores` and `tokens` are the best of each span; floor is a key of `ordered`."""
    spans = tl.arange(0, SPANS)
    best, token = _best(scores, tokens)
    kept = 0
    while kept == 0:
        token = tl.minimum(token, vocab - 1)  # where no score is a number, there is no such token
        x = tl.load(values + token)
        if ordered(x) >= floor:
            kept = 1
            if top_p < 1:  # noqa: SIM102  Triton evaluates both sides of `and`
                if _mass_above(values, x, peak, inverse, vocab, TILE) >= top_p * total:
                    kept = 0
                    floor = ordered(x) + 1
        if kept == 0:
            span = token // SPAN
            within = span * SPAN + tl.arange(0, SPAN)
            y = tl.load(values + within, mask=within < vocab, other=float("-inf"))
            rescored = y / temperature + noise(seed, position, span * SPAN, SPAN)
            best, next_token = _best(tl.where(ordered(y) >= floor, rescored, float("-inf")), within)
            scores = tl.where(spans == span, best, scores)
            tokens = tl.where(spans == span, next_token, tokens)
            best, token = _best(scores, tokens)
            if not (best > float("-inf")):
                kept = 1
    return token


@triton.jit
def _list_tokens(listed, spans_listed, keys, floor, values, vocab, num_spans,
                 SPANS: tl.constexpr, SPAN: tl.constexpr, AT_ONCE: tl.constexpr):  # fmt: skip
    """The tokens that reach the floor, in order. Returns how many. `keys` are those of the spans' peaks."""
    spans = tl.arange(0, SPANS)
    reach = (spans < num_spans) & (keys >= floor)
    count = tl.sum(reach.to(tl.int32), 0)
    tl.store(spans_listed + tl.cumsum(reach.to(tl.int32), 0) - 1, spans, mask=reach)
    tl.debug_barrier()
    length = 0
    lanes = tl.arange(0, AT_ONCE * SPAN)
    for base in range(0, count, AT_ONCE):
        there = base + lanes // SPAN < count
        span = tl.load(spans_listed + base + lanes // SPAN, mask=there, other=0)
        tokens = span * SPAN + lanes % SPAN
        x = tl.load(values + tokens, mask=there & (tokens < vocab), other=float("-inf"))
        kept = there & (tokens < vocab) & (ordered(x) >= floor)
        tl.store(listed + length + tl.cumsum(kept.to(tl.int32), 0) - 1, tokens, mask=kept)
        length += tl.sum(kept.to(tl.int32), 0)
    tl.debug_barrier()
    return length


@triton.jit
def _with_bit(found, step):
    """The next candidate of a search from the lowest int32 up: the sign first, then bit after bit."""
    return tl.where(step == 0, 0, found + (1 << (31 - tl.maximum(step, 1))))


@triton.jit
def _kth_largest(keys, k):
    """The largest key that at least k keys reach, bit by bit; the lowest there is if there are fewer."""
    found = LOWEST + tl.zeros([], tl.int32)
    for step in range(32):
        candidate = _with_bit(found, step)
        found = tl.where(tl.sum((keys >= candidate).to(tl.int32), 0) >= k, candidate, found)
    return found


@triton.jit
def _kth_largest_listed(listed, length, values, k, AT_ONCE: tl.constexpr):
    lanes = tl.arange(0, AT_ONCE)
    found = LOWEST + tl.zeros([], tl.int32)
    for step in range(32):
        candidate = _with_bit(found, step)
        reached = 0
        for base in range(0, length, AT_ONCE):
            tokens = tl.load(listed + base + lanes, mask=base + lanes < length, other=0)
            keys = ordered(tl.load(values + tokens))
            reached += tl.sum(((keys >= candidate) & (base + lanes < length)).to(tl.int32), 0)
        found = tl.where(reached >= k, candidate, found)
    return found


@triton.jit
def _listed_mass(listed, length, values, floor, peak, inverse, AT_ONCE: tl.constexpr):
    """Of the listed tokens that reach a key."""
    lanes = tl.arange(0, AT_ONCE)
    acc = tl.zeros([AT_ONCE], tl.float32)
    for base in range(0, length, AT_ONCE):
        there = base + lanes < length
        x = tl.load(values + tl.load(listed + base + lanes, mask=there, other=0))
        acc += tl.where(there & (ordered(x) >= floor), weights(x, peak, inverse), 0.0)
    return tl.sum(acc, 0)


@triton.jit
def _choose_listed(
    listed, length, values, floor, top_p, total, peak, inverse, temperature, seed, position, AT_ONCE: tl.constexpr
):
    """The best score of a kept token among those that are listed; floor is a key of `ordered`."""
    lanes = tl.arange(0, AT_ONCE)
    token, kept = 0, 0
    while kept == 0:
        best = tl.full([AT_ONCE], float("-inf"), tl.float32)
        chosen = tl.full([AT_ONCE], NO_TOKEN, tl.int32)
        for base in range(0, length, AT_ONCE):
            there = base + lanes < length
            tokens = tl.load(listed + base + lanes, mask=there, other=0)
            x = tl.load(values + tokens)
            score = x / temperature + noise_of(seed, position, tokens)
            better = there & (ordered(x) >= floor) & (score > best)
            best = tl.where(better, score, best)
            chosen = tl.where(better, tokens, chosen)
        top, token = _best(best, chosen)
        kept = 1
        if (top > float("-inf")) & (top_p < 1):
            key = ordered(tl.load(values + token))
            if _listed_mass(listed, length, values, key + 1, peak, inverse, AT_ONCE) >= top_p * total:
                kept = 0
                floor = key + 1
    return token


@triton.jit
def _store_alternatives(
    values_out, tokens_out, logits, peaks, lse, count, vocab, SPANS: tl.constexpr, SPAN: tl.constexpr
):
    """The most probable tokens in order, and of equal ones the lowest first. `peaks` are those of the spans."""
    spans = tl.arange(0, SPANS)
    last, last_token = float("inf"), -1
    for number in range(count):
        _, span = _best(peaks, spans)
        span = tl.minimum(span, SPANS - 1)
        tokens = span * SPAN + tl.arange(0, SPAN)
        x = tl.load(logits + tokens, mask=tokens < vocab, other=float("-inf"))
        left = (tokens < vocab) & ((x < last) | ((x == last) & (tokens > last_token)))
        last, last_token = _best(tl.where(left, x, float("-inf")), tl.where(left, tokens, NO_TOKEN))
        left &= tokens != last_token
        peaks = tl.where(spans == span, tl.max(tl.where(left, x, float("-inf")), 0), peaks)
        tl.store(values_out + number, last - lse)
        tl.store(tokens_out + number, last_token)


@triton.jit
def _store_logprobs(
    own_out, values_out, tokens_out, logits, token, peaks, masses, count, vocab,
    SPANS: tl.constexpr, SPAN: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Of the sampled token and of the alternatives, under the unmodified logits."""
    peak = tl.max(peaks, 0)
    lse = peak + tl.log(_total(masses, peaks, peak, 1.0, SPANS, CHUNKS))
    tl.store(own_out, tl.load(logits + token) - lse)
    _store_alternatives(values_out, tokens_out, logits, peaks, lse, count, vocab, SPANS, SPAN)


@triton.jit
def _choose_kept(
    scores, tokens, peaks, masses, values, words, position, listed, spans_listed, vocab, num_spans,
    SPANS: tl.constexpr, SPAN: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr, SPANS_AT_ONCE: tl.constexpr,
    LISTED_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The token to sample of those that top-k, top-p and min-p keep."""
    temperature, top_k = read_float(words, TEMPERATURE), tl.load(words + TOP_K)
    top_p, min_p = read_float(words, TOP_P), read_float(words, MIN_P)
    seed, inverse = read_seed(words), 1.0 / temperature
    peak = tl.max(peaks, 0)
    total = _total(masses, peaks, peak, inverse, SPANS, CHUNKS)
    keys, real = ordered(peaks), tl.arange(0, SPANS) < num_spans
    floor = LOWEST + tl.zeros([], tl.int32)
    if min_p > 0:
        floor = ordered(peak + temperature * tl.log(min_p))
    few = tl.sum(((keys >= floor) & real).to(tl.int32), 0) * _FEW_SPANS < num_spans
    if (top_k > 0) | few:
        bound = floor
        if top_k > 0:
            bound = _kth_largest(tl.where(real, keys, LOWEST), top_k)
        length = _list_tokens(listed, spans_listed, keys, bound, values, vocab, num_spans, SPANS, SPAN, SPANS_AT_ONCE)
        if top_k > 0:
            bound = _kth_largest_listed(listed, length, values, top_k, LISTED_AT_ONCE)
            floor = tl.maximum(floor, bound)
            if top_p < 1:  # of what top-k leaves
                total = _listed_mass(listed, length, values, bound, peak, inverse, LISTED_AT_ONCE)
        token = _choose_listed(
            listed, length, values, floor, top_p, total, peak, inverse, temperature, seed, position, LISTED_AT_ONCE
        )
    else:
        token = _choose_among_spans(
            scores, tokens, values, floor, top_p, total, peak, inverse, temperature, seed, position, vocab,
            SPANS, SPAN, TILE,
        )  # fmt: skip
    return token


@triton.jit
def _choose_before_mask(
    scores, tokens, peaks, values, words, vocab, SPANS: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr
):
    """The token that it will be with any mask that allows it, or UNDECIDED. The best of all tokens is the best of
    those that a mask leaves. What top-k and min-p keep they also keep of fewer tokens; top-p does for certain if it
    would with all smaller ones masked."""
    temperature, top_k = read_float(words, TEMPERATURE), tl.load(words + TOP_K)
    top_p, min_p = read_float(words, TOP_P), read_float(words, MIN_P)
    inverse, peak = 1.0 / temperature, tl.max(peaks, 0)
    _, token = _best(scores, tokens)
    token = tl.minimum(token, vocab - 1)
    x = tl.load(values + token)
    lanes = tl.arange(0, TILE)
    count, mass = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.float32)
    for base in range(0, vocab, TILE):
        at = base + lanes
        y = tl.load(values + at, mask=at < vocab, other=float("-inf"))
        count += (y > x).to(tl.int32)
        mass += tl.where(y > x, tl.exp((y - peak) * inverse), 0.0)
    above = tl.sum(mass, 0) * _ROUNDED
    kept = (top_k == 0) | (tl.sum(count, 0) < top_k)
    kept &= (top_p >= 1) | (above < top_p * (above + tl.exp((x - peak) * inverse)))
    kept &= (min_p <= 0) | (ordered(x) >= ordered(peak + temperature * tl.log(min_p)))
    return tl.where(kept | (x >= peak), token, UNDECIDED)


@triton.jit
def choose_kernel(
    out, last_tokens, own_logprobs, top_logprobs, top_tokens, listed, spans_listed, adjusted, span_scores, span_tokens,
    span_peaks, masses, raw_span_peaks, raw_masses, logits, rows, positions, mask_of, row_params, seen, vocab, stride,
    num_chunks,
    SPANS: tl.constexpr, SPAN: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr, SPANS_AT_ONCE: tl.constexpr,
    LISTED_AT_ONCE: tl.constexpr, MOST_ALTERNATIVES: tl.constexpr, DRAFTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.load(rows + index).to(tl.int64)
    words = row_params + row * WORDS
    needs = tl.load(words)
    if (needs == 0) | (tl.load(out + index) == NOT_A_NUMBER):
        return
    raw = logits + index * stride
    values = raw
    if needs & ADJUST:
        values = adjusted + index * vocab
    num_spans = num_chunks * (SPANS // CHUNKS)
    spans, chunks = tl.arange(0, SPANS), tl.arange(0, CHUNKS)
    at, real = index * num_spans + spans, spans < num_spans
    chunk_at, real_chunk = index * num_chunks + chunks, chunks < num_chunks
    scores = tl.load(span_scores + at, mask=real, other=float("-inf"))
    tokens = tl.load(span_tokens + at, mask=real, other=NO_TOKEN)
    if needs & FILTER:
        peaks = tl.load(span_peaks + at, mask=real, other=float("-inf"))
        if tl.load(mask_of + index) == _CHECKED:
            token = _choose_before_mask(scores, tokens, peaks, values, words, vocab, SPANS, SPAN, TILE)
        else:
            token = _choose_kept(
                scores, tokens, peaks, tl.load(masses + chunk_at, mask=real_chunk, other=0.0), values, words,
                tl.load(positions + index).to(tl.uint32), listed + index * vocab, spans_listed + index * num_spans,
                vocab, num_spans, SPANS, SPAN, CHUNKS, TILE, SPANS_AT_ONCE, LISTED_AT_ONCE,
            )  # fmt: skip
    else:
        _, token = _best(scores, tokens)
    token = tl.minimum(token, vocab - 1)
    tl.store(out + index, token.to(tl.int64))
    if not DRAFTS:  # else only some of the tokens stand for good
        tl.store(last_tokens + row, tl.maximum(token, 0).to(tl.int64))  # some token where there is none
        if needs & PENALTIES:
            known = tl.load(seen + row * vocab + token).to(tl.int32)
            more = tl.where((known & MOST_COUNTED) < MOST_COUNTED, known + 1, known)
            tl.store(seen + row * vocab + token, more.to(tl.int16))
    if needs & LOGPROBS:
        into = index * MOST_ALTERNATIVES
        _store_logprobs(
            own_logprobs + index, top_logprobs + into, top_tokens + into, raw, token,
            tl.load(raw_span_peaks + at, mask=real, other=float("-inf")),
            tl.load(raw_masses + chunk_at, mask=real_chunk, other=0.0), tl.load(words + ALTERNATIVES), vocab,
            SPANS, SPAN, CHUNKS,
        )  # fmt: skip
