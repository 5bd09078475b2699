"""A barrier across the grid of one kernel, whose programs all run at once.

The counter only grows, by one per program and phase, so nothing is reset between launches: each launch starts at a
multiple of its grid. Programs must be resident together, or those that wait keep out those that are waited for.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

# One thread looks; the others follow by the barrier after it. Millions of looks are seconds: a program is missing.
_SPIN = tl.constexpr("""
{
    .reg .pred other, early, lost;
    .reg .b32 thread, looks;
    .reg .b64 seen;
    mov.u32 thread, %tid.x;
    mov.u32 looks, 0;
    setp.ne.u32 other, thread, 0;
    @other bra READY;
AGAIN:
    ld.acquire.gpu.global.b64 seen, [$1];
    add.u32 looks, looks, 1;
    setp.gt.u32 lost, looks, 20000000;
    @lost trap;
    setp.lt.s64 early, seen, $2;
    @early bra AGAIN;
READY:
    mov.u32 $0, looks;
}
""")
_INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def grid_start(counter):
    """What the counter was when this launch began: no phase of it ends before the caller has arrived."""
    programs = tl.num_programs(0)
    return tl.load(counter, volatile=True) // programs * programs


@triton.jit
def arrive_at_grid(counter):
    """Everything this program wrote can be read by whoever awaits the count."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
def await_grid(counter, due):
    if _INTERPRETED:
        tl.device_assert(tl.load(counter) >= due, "programs are interpreted one after the other: launch a single one")
    else:
        tl.inline_asm_elementwise(
            _SPIN, "=r,l,l", [counter.to(tl.int64), due.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.debug_barrier()
