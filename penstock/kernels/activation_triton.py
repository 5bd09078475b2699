"""SiLU(gate) * up for CUDA, optionally quantised to fp8 per token."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.kernels.norm_triton import store_quantized
from penstock.kernels.overlap_triton import overlaps_launches


@triton.jit
def _silu_mul_kernel(out, scales, gate_up, width, BLOCK: tl.constexpr, QUANTIZE: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < width
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gate = tl.load(gate_up + row * 2 * width + columns, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=real, other=0.0).to(tl.float32)
    values = gate / (1 + tl.exp(-gate)) * up
    if QUANTIZE:
        store_quantized(values, out + row * width, scales, row, columns, real)
    else:
        tl.store(out + row * width + columns, values.to(out.dtype.element_ty), mask=real)


def silu_mul(
    gate_up: torch.Tensor, *, out: torch.Tensor | None = None, scales: torch.Tensor | None = None
) -> torch.Tensor:
    """`gate_up` [T, 2 * width], gate first. With `scales` (float32 [T]) the result is float8_e4m3fn."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        dtype = gate_up.dtype if scales is None else torch.float8_e4m3fn
        out = torch.empty((rows, width), dtype=dtype, device=gate_up.device)
    # A quantised row needs its maximum, so one program holds it whole.
    block = min(1024, triton.next_power_of_2(width)) if scales is None else triton.next_power_of_2(width)
    pdl = overlaps_launches()
    _silu_mul_kernel[rows, triton.cdiv(width, block)](
        out, scales if scales is not None else out, gate_up, width,
        BLOCK=block, QUANTIZE=scales is not None, PDL=pdl, num_warps=min(16, max(1, block // 256)), launch_pdl=pdl,
    )  # fmt: skip
    return out


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, -1)
    return torch.nn.functional.silu(gate) * up
