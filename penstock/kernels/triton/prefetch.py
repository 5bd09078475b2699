"""Ask for a part of the weight that the next GEMM reads: it comes into the L2 cache meanwhile. Hopper and later.

A small kernel between GEMMs that wait for memory leaves that idle. With this it does not.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

PREFETCHED_BYTES = 12 << 20  # what memory gives in some 3 µs
_STEP_BYTES = 128  # of a row, in one step of a GEMM


@triton.jit
def prefetch(weight, rows, row_bytes, bytes_each, THREADS: tl.constexpr):
    """The beginning of every row, so that all CTAs of the GEMM find some of theirs. THREADS: of the program."""
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    step = tl.num_programs(0) * tl.num_programs(1) * THREADS
    for first in range(program * THREADS, rows, step):
        row = first + tl.arange(0, THREADS)
        at = weight.to(tl.int64) + row.to(tl.int64) * row_bytes
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s64 p, $1, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
            "=r,l,r", [tl.where(row < rows, at, 0), bytes_each + tl.zeros([THREADS], tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


def prefetched(weight: torch.Tensor | None, unused: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """The arguments of `prefetch` for a weight [rows, depth]."""
    if weight is None or not PREFETCHED_BYTES:
        return unused, 0, 0, 0
    rows, row_bytes = len(weight), weight.stride(0) * weight.itemsize
    bytes_each = max(1, PREFETCHED_BYTES // (rows * _STEP_BYTES)) * _STEP_BYTES
    return weight, rows, row_bytes, min(bytes_each, row_bytes // 16 * 16)
