"""The greedy tokens of a batch of logits, which also go to the rows that the next step reads them from."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from penstock.kernels.triton.overlap import overlaps_launches
from penstock.kernels.triton.sampling_row import NOT_A_NUMBER

_CHUNK = 8192  # tokens per program
_BLOCK = 2048


@triton.jit(do_not_specialize_on_alignment=["places"])
def _argmax_kernel(
    out, last_tokens, places, best_scores, best_tokens, arrivals, logits, vocab, stride,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, FEED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    num_chunks = tl.num_programs(1)
    chunks = tl.arange(0, CHUNKS)
    lanes = tl.arange(0, BLOCK)
    begin = chunk * CHUNK
    if PDL:
        tl.extra.cuda.gdc_wait()
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    chosen = begin + lanes
    for base in range(begin, begin + CHUNK, BLOCK):
        tokens = base + lanes
        x = tl.load(logits + row * stride + tokens, mask=tokens < vocab, other=float("-inf")).to(tl.float32)
        better = x > best
        best = tl.where(better, x, best)
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
        highest = tl.max(scores, 0)
        winner = tl.min(tl.where(scores == highest, tokens, 0x7FFFFFFF), 0)
        if FEED:
            tl.store(last_tokens + tl.load(places + row), winner.to(last_tokens.dtype.element_ty))
        winner = tl.where(highest > float("-inf"), winner, NOT_A_NUMBER)
        tl.store(out + row, winner.to(out.dtype.element_ty))


@dataclass(frozen=True, slots=True)
class ArgmaxScratch:
    """Work space for up to as many rows as it was made for; all calls of a stream may share it."""

    scores: torch.Tensor  # float32 [S * chunks]
    tokens: torch.Tensor  # int32 [S * chunks]
    arrivals: torch.Tensor  # int32 [S], zero between launches


def argmax_scratch(num_rows: int, vocab: int, device: torch.device) -> ArgmaxScratch:
    cells = num_rows * triton.cdiv(vocab, _CHUNK)
    return ArgmaxScratch(
        scores=torch.zeros(cells, dtype=torch.float32, device=device),
        tokens=torch.zeros(cells, dtype=torch.int32, device=device),
        arrivals=torch.zeros(num_rows, dtype=torch.int32, device=device),
    )


def argmax(
    logits: torch.Tensor,
    out: torch.Tensor,
    scratch: ArgmaxScratch,
    feed: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Greedy tokens of [S, V] logits; the lowest token wins a tie. NOT_A_NUMBER where no logit is a number.

    `feed` is (last tokens of all rows [R], rows [S]): the token of each, or some token, goes to its row as well.
    """
    S, V = logits.shape
    chunks = triton.cdiv(V, _CHUNK)
    last_tokens, places = feed or (out, out)
    pdl = overlaps_launches()
    _argmax_kernel[S, chunks](
        out, last_tokens, places, scratch.scores, scratch.tokens, scratch.arrivals, logits, V, logits.stride(0),
        CHUNK=_CHUNK, BLOCK=_BLOCK, CHUNKS=triton.next_power_of_2(chunks), FEED=feed is not None, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out
