"""Verification of drafts on a GPU: how many tokens of each sequence a step has sampled for good.

A step computes drafts of a sequence beside its last token and samples after each of them. An entry is one such token:
what is sampled there stands for good if every draft before it is what was sampled one entry before.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from penstock.kernels.triton.overlap import overlaps_launches
from penstock.kernels.triton.sampling_row import MOST_COUNTED, PENALTIES, WORDS


@dataclass(frozen=True, slots=True)
class Drafts:
    """The entries of a step, those of a sequence one after the other. N entries."""

    tokens: torch.Tensor  # int32 [N]: after which an entry samples; -1: the last one of the row
    firsts: torch.Tensor  # int32 [N]: the first entry of the same sequence

    def __getitem__(self, entries: slice) -> Drafts:
        return Drafts(self.tokens[entries], self.firsts[entries])


@triton.jit(do_not_specialize=["num_entries"])
def _accept_kernel(
    last_tokens, seen, sampled, tokens, firsts, rows, row_params, num_entries, vocab,
    COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if tl.load(firsts + first) != first:
        return
    row = tl.load(rows + first).to(tl.int64)
    counts = False
    if COUNT:
        counts = (tl.load(row_params + row * WORDS) & PENALTIES) != 0
    entry, last, accepted = first, tl.load(sampled + first), True
    while accepted:
        last = tl.load(sampled + entry)
        if counts:
            at = seen + row * vocab + tl.maximum(last, 0)
            known = tl.load(at).to(tl.int32)
            tl.store(at, tl.where((known & MOST_COUNTED) < MOST_COUNTED, known + 1, known).to(tl.int16))
            tl.debug_barrier()
        entry += 1
        real = entry < num_entries
        same = real & (tl.load(firsts + entry, mask=real, other=-1) == first)
        accepted = same & (tl.load(tokens + entry, mask=same, other=-1).to(tl.int64) == last)
    tl.store(last_tokens + row, tl.maximum(last, 0))  # some token where no logit is a number


def accept(
    sampled: torch.Tensor,
    drafts: Drafts,
    rows: torch.Tensor,
    last_tokens: torch.Tensor,
    counted: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Puts the last token that stands for good into the row of each sequence.

    `sampled` [N] is what the entries sampled, `rows` [N] their rows. `counted` is (`seen`, `params`) of `SamplingRows`:
    the tokens that stand are counted where the row has penalties.
    """
    size, pdl = len(rows), overlaps_launches()
    seen, params = counted or (rows, rows)
    _accept_kernel[(size,)](
        last_tokens, seen, sampled, drafts.tokens, drafts.firsts, rows, params, size,
        seen.shape[1] if counted else 0, COUNT=counted is not None, PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
