"""Sampling on a GPU: one token per row in two kernels, whatever each row asks for of bias, penalties, forbidden stop
tokens, grammar mask, temperature, top-k, top-p, min-p and log-probabilities. Nothing depends on the host, so a CUDA
graph can hold them.

`kernels/sampling_reference.py` defines what they compute: the kept token with the largest logit / temperature + noise.
`_score_kernel` adjusts the logits of 2,048 tokens and takes, of each span of 64 tokens, the best score, its token and
the largest logit. `choose_kernel` (`choosing.py`) has a program per row, which works on the spans. It does not sort:

- Top-p: the token with the best score is the one to sample if it is kept, which the mass of the tokens above it tells.
  If it is not kept, no token below it is, and its span is scored again without those. The first one is kept as often as
  top-p says, and each that is not takes a share of the rest away with it, so few are looked at.
- Top-k: at least k tokens reach the k-th largest of the spans' largest logits. So the spans that reach it hold the top
  k; their tokens are listed, and searched for the k-th largest. Likewise for min-p, where few spans reach it.

Programs and their loops depend on the vocabulary alone, so a row samples the same token in any batch.

With drafts (`drafts.py`) a sequence has several entries. All are sampled at once: the penalties of an entry count the
drafts before it, which is right wherever its token stands for good.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from penstock.kernels.triton.choosing import choose_kernel
from penstock.kernels.triton.drafts import Drafts, accept
from penstock.kernels.triton.overlap import overlaps_launches
from penstock.kernels.triton.sampling_row import (
    ADJUST,
    BIAS,
    FILTER,
    FREQUENCY,
    GRAMMAR,
    LOGPROBS,
    MIN_END,
    MIN_TOKENS,
    MOST_COUNTED,
    NO_TOKEN,
    PENALTIES,
    PRESENCE,
    RANDOM,
    REPETITION,
    TEMPERATURE,
    WORDS,
    bits_of,
    mass_of,
    noise,
    read_float,
    read_seed,
)  # fmt: skip

MOST_ALTERNATIVES = 20  # beside each token in its log-probabilities

_CHUNK = 2048  # tokens per program of the first kernel
_SPAN = 64
_TILE = 8192  # tokens that the second kernel looks at at a time
_SPANS_AT_ONCE = 32  # whose tokens it lists at a time
_LISTED_AT_ONCE = 2048


@triton.jit
def _score_kernel(
    adjusted, span_scores, span_tokens, span_peaks, masses, raw_span_peaks, raw_masses, logits, rows, positions,
    mask_of, row_params, seen, biases, stops, masks, draft_tokens, firsts, vocab, stride, mask_words,
    CHUNK: tl.constexpr, SPAN: tl.constexpr, DRAFTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.load(rows + index).to(tl.int64)
    words = row_params + row * WORDS
    needs = tl.load(words)
    if needs == 0:
        return
    base = chunk * CHUNK
    tokens = base + tl.arange(0, CHUNK)
    real = tokens < vocab
    x = tl.load(logits + index * stride + tokens, mask=real, other=float("-inf"))
    spans = (index * tl.num_programs(1) + chunk) * (CHUNK // SPAN) + tl.arange(0, CHUNK // SPAN)
    at = index * tl.num_programs(1) + chunk
    if needs & LOGPROBS:
        tl.store(raw_span_peaks + spans, tl.max(tl.reshape(x, [CHUNK // SPAN, SPAN]), 1))
        tl.store(raw_masses + at, mass_of(x, tl.max(x, 0), 1.0))
    position = tl.load(positions + index)
    if needs & ADJUST:
        if needs & BIAS:
            x += tl.load(biases + row * vocab + tokens, mask=real, other=0.0)
        if needs & PENALTIES:
            known = tl.load(seen + row * vocab + tokens, mask=real, other=0).to(tl.int32)
            times = known & MOST_COUNTED
            if DRAFTS:
                for entry in range(tl.load(firsts + index) + 1, tl.program_id(0) + 1):
                    times += (tokens == tl.load(draft_tokens + entry)).to(tl.int32)
                times = tl.minimum(times, MOST_COUNTED)
                known |= times
            count = times.to(tl.float32)
            repetition = read_float(words, REPETITION)
            penalised = tl.where(x > 0, tl.math.div_rn(x, repetition), x * repetition)
            x = tl.where(known != 0, penalised, x)
            x -= read_float(words, FREQUENCY) * count
            x -= tl.where(count > 0, read_float(words, PRESENCE), 0.0)
        if needs & MIN_TOKENS:
            early = position < tl.load(words + MIN_END)
            forbidden = bits_of(stops + row * mask_words, tokens, real & early)
            x = tl.where(forbidden != 0, float("-inf"), x)
        if needs & GRAMMAR:
            mask = tl.load(mask_of + index).to(tl.int64)
            if mask >= 0:
                x = tl.where(bits_of(masks + mask * mask_words, tokens, real) != 0, x, float("-inf"))
        tl.store(adjusted + index * vocab + tokens, x, mask=real)
    score = x
    if needs & RANDOM:
        temperature = read_float(words, TEMPERATURE)
        score = x / temperature + noise(read_seed(words), position.to(tl.uint32), base, CHUNK)
        if needs & FILTER:
            tl.store(span_peaks + spans, tl.max(tl.reshape(x, [CHUNK // SPAN, SPAN]), 1))
            tl.store(masses + at, mass_of(x, tl.max(x, 0), 1.0 / temperature))
    score = tl.reshape(score, [CHUNK // SPAN, SPAN])
    best = tl.max(score, 1)
    chosen = tl.where(score == best[:, None], tl.reshape(tokens, [CHUNK // SPAN, SPAN]), NO_TOKEN)
    tl.store(span_scores + spans, best)
    tl.store(span_tokens + spans, tl.min(chosen, 1))


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """What the rows ask for, on the device. R rows, V vocabulary, W = V / 32 rounded up."""

    params: torch.Tensor  # int32 [R, words of ROW]
    seen: torch.Tensor  # int16 [R, V]: how often each token was sampled, plus IN_PROMPT
    biases: torch.Tensor  # float32 [R, V]
    stops: torch.Tensor  # int32 [R, W]: a bit for each stop token
    last_tokens: torch.Tensor  # int64 [R]: what was sampled last


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """Which sequences to sample for. S sequences."""

    logits: torch.Tensor  # float32 [S, V]
    rows: torch.Tensor  # int32 [S]
    positions: torch.Tensor  # int32 [S]: where the sampled token will stand
    mask_of: torch.Tensor  # int32 [S]: which of the masks; NO_MASK or CHECKED: any token
    masks: torch.Tensor  # int32 [S, W]: a bit for each token that the grammar allows
    drafts: Drafts | None = None  # then an entry of this is a token, and several may be of one sequence


@dataclass(frozen=True, slots=True)
class Sampled:
    """Results. Rows that ask for nothing keep the token that is there, and all do that have no logit."""

    tokens: torch.Tensor  # int64 [S]: the greedy ones before, or NOT_A_NUMBER
    logprobs: torch.Tensor  # float32 [S], of the tokens under the unmodified logits, where asked for
    top_logprobs: torch.Tensor  # float32 [S, MOST_ALTERNATIVES]
    top_tokens: torch.Tensor  # int32 [S, MOST_ALTERNATIVES]


@dataclass(frozen=True, slots=True)
class SamplingScratch:
    """Work space for up to S rows; all sampling of a stream may share it."""

    adjusted: torch.Tensor  # float32 [S * V]
    listed: torch.Tensor  # int32 [S * V]
    spans: torch.Tensor  # float32 [3, S * spans]: best scores, largest logits, largest unmodified logits
    span_tokens: torch.Tensor  # int32 [2, S * spans]: of the best scores; of the spans that are listed
    masses: torch.Tensor  # float32 [2, S * chunks]: with temperature, and unmodified


def sampling_scratch(num_rows: int, vocab: int, device: torch.device) -> SamplingScratch:
    chunks = num_rows * triton.cdiv(vocab, _CHUNK)
    spans = chunks * (_CHUNK // _SPAN)

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return SamplingScratch(
        adjusted=make(num_rows * vocab),
        listed=make(num_rows * vocab, dtype=torch.int32),
        spans=make(3, spans),
        span_tokens=make(2, spans, dtype=torch.int32),
        masses=make(2, chunks),
    )


def sample(inputs: SamplingInputs, rows: SamplingRows, out: Sampled, scratch: SamplingScratch) -> None:
    """Sample for all sequences that ask for more than the greedy token; the token goes to its row as well.

    With drafts, that is the last token which stands for good, also of sequences that take the greedy token.
    """
    S, V = inputs.logits.shape
    chunks = triton.cdiv(V, _CHUNK)
    padded = triton.next_power_of_2(chunks)
    spans = (scratch.spans[0], scratch.span_tokens[0], scratch.spans[1], scratch.masses[0])
    raw = (scratch.spans[2], scratch.masses[1])
    of_rows = (inputs.logits, inputs.rows, inputs.positions)
    drafts, pdl = inputs.drafts, overlaps_launches()
    stride = inputs.logits.stride(0)
    entries = (inputs.rows, inputs.rows) if drafts is None else (drafts.tokens, drafts.firsts)
    # Products are rounded before they are subtracted, as in the reference.
    common = {"SPAN": _SPAN, "DRAFTS": drafts is not None, "PDL": pdl, "launch_pdl": pdl, "enable_fp_fusion": False}
    _score_kernel[S, chunks](
        scratch.adjusted, *spans, *raw, *of_rows, inputs.mask_of, rows.params, rows.seen, rows.biases, rows.stops,
        inputs.masks, *entries, V, stride, rows.stops.shape[1], CHUNK=_CHUNK, num_warps=4, **common,
    )  # fmt: skip
    choose_kernel[(S,)](
        out.tokens, rows.last_tokens, out.logprobs, out.top_logprobs, out.top_tokens, scratch.listed,
        scratch.span_tokens[1], scratch.adjusted, *spans, *raw, *of_rows, inputs.mask_of, rows.params, rows.seen, V,
        stride, chunks,
        SPANS=padded * (_CHUNK // _SPAN), CHUNKS=padded, TILE=_TILE, SPANS_AT_ONCE=_SPANS_AT_ONCE,
        LISTED_AT_ONCE=_LISTED_AT_ONCE, MOST_ALTERNATIVES=MOST_ALTERNATIVES, num_warps=16, **common,
    )  # fmt: skip
    if drafts is not None:
        accept(out.tokens, drafts, inputs.rows, rows.last_tokens, (rows.seen, rows.params))
