"""How the attention of a decode step is divided on CUDA: parts of about equal length, the longest first.

A sequence longer than its fair share of the device becomes several parts, so that no step waits for one long context;
starting the longest first leaves short ones for the end, when the device runs empty.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

FIELDS = tl.constexpr(
    8
)  # sequence (-1: unused), start, stop, context, number in the sequence, first part, parts, prefixed
MOST_PARTS = tl.constexpr(32)  # of one sequence


@triton.jit(
    do_not_specialize=["num_seqs", "num_parts", "tile", "window"],
    do_not_specialize_on_alignment=["contexts", "shared"],
)
def _plan_kernel(
    plan, contexts, shared, num_seqs, num_parts, tile, window, SEQS: tl.constexpr, PREFIX: tl.constexpr
):  # fmt: skip
    """One program writes the parts of one sequence; where they go follows from the lengths of all."""
    seq = tl.program_id(0)
    seqs = tl.arange(0, SEQS)
    real = seqs < num_seqs
    context = tl.load(contexts + seqs, mask=real, other=0)
    first = tl.zeros([SEQS], tl.int32)
    if PREFIX:
        first = tl.load(shared + seqs, mask=real, other=0)
    prefixed = first > 0
    first = tl.where(window > 0, tl.maximum(first, context - window), first)
    tokens = context - first
    fair = tl.cdiv(tl.sum(tokens, 0), num_parts - num_seqs)
    share = tl.maximum(fair, tile)
    counts = tl.minimum(tl.maximum(tl.cdiv(tokens, share), 1), MOST_PARTS)
    lengths = tl.maximum(tl.cdiv(tl.cdiv(tokens, counts), tile), 1) * tile
    counts = tl.where(real, tl.maximum(tl.cdiv(tokens, lengths), 1), 0)

    mine = seqs == seq
    length = tl.sum(tl.where(mine, lengths, 0), 0)
    count = tl.sum(tl.where(mine, counts, 0), 0)
    earlier = (lengths > length) | ((lengths == length) & (seqs < seq))
    at = tl.sum(tl.where(earlier, counts, 0), 0)
    end = tl.sum(tl.where(mine, context, 0), 0)
    parts = tl.arange(0, MOST_PARTS)
    start = tl.sum(tl.where(mine, first, 0), 0) + parts * length
    entry = plan + (at + parts) * FIELDS
    written = parts < count
    tl.store(entry, seq, mask=written)
    tl.store(entry + 1, start, mask=written)
    tl.store(entry + 2, tl.minimum(start + length, end), mask=written)
    tl.store(entry + 3, end, mask=written)
    tl.store(entry + 4, parts, mask=written)
    tl.store(entry + 5, at, mask=written)
    tl.store(entry + 6, count, mask=written)
    tl.store(entry + 7, tl.sum((mine & prefixed).to(tl.int32), 0), mask=written)
    for unused in range(tl.sum(counts, 0) + seq, num_parts, num_seqs):
        tl.store(plan + unused * FIELDS, -1)


def decode_parts(num_seqs: int, num_kv_heads: int, programs: int = 264) -> int:
    """Parts that keep the device busy: `programs` is what runs at once (2 on each of 132 SMs).

    In a large batch, starting the longest first is enough unless one is several times the mean; dividing costs more.
    The number is the grid size in a CUDA graph; each step uses as many of them as its contexts fill.
    """
    return max(num_seqs + num_seqs // 4 + 1, programs // num_kv_heads)


def plan_decode(
    contexts_S: torch.Tensor,
    num_parts: int,
    tile: int,
    *,
    window: int = 0,
    shared_S: torch.Tensor | None = None,
) -> torch.Tensor:
    """int32 [num_parts, FIELDS]. Parts are whole tiles but for the last of a sequence; what is shared is left out.

    There must be more parts than sequences: each sequence has one, and what is beyond divides the long ones.
    """
    size = len(contexts_S)
    if num_parts <= size:
        raise ValueError(f"{num_parts} parts cannot divide {size} sequences; see decode_parts")
    plan = torch.empty((num_parts, FIELDS.value), dtype=torch.int32, device=contexts_S.device)
    _plan_kernel[(size,)](
        plan, contexts_S, contexts_S if shared_S is None else shared_S, size, num_parts, tile, window,
        SEQS=_padded(size), PREFIX=shared_S is not None, num_warps=1,
    )  # fmt: skip
    return plan


def _padded(size: int) -> int:
    """To few sizes: each is compiled on its own."""
    return next((most for most in (32, 128, 512) if size <= most), triton.next_power_of_2(size))


@dataclass(frozen=True, slots=True)
class Division:
    """How a batch is divided, as `plan_decode` takes it."""

    parts: int
    tile: int

    def plan(self, contexts_S: torch.Tensor, *, window: int = 0, shared_S: torch.Tensor | None = None) -> torch.Tensor:
        return plan_decode(contexts_S, self.parts, self.tile, window=window, shared_S=shared_S)
