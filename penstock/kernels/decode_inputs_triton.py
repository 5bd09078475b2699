"""What a captured decode step reads, gathered from the rows of its sequences in one kernel for CUDA."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

_COLUMNS = 1024


@triton.jit
def _gather_kernel(
    tokens, positions, slots, tables_out, rows, contexts, last_token, tables, width,
    BLOCK_SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    row = tl.load(rows + index).to(tl.int64)
    context = tl.load(contexts + index)
    used = (context + BLOCK_SIZE - 1) // BLOCK_SIZE
    for base in range(0, used, COLUMNS):
        columns = base + tl.arange(0, COLUMNS)
        blocks = tl.load(tables + row * width + columns, mask=columns < used, other=0)
        tl.store(tables_out + index.to(tl.int64) * width + columns, blocks, mask=columns < used)
    position = tl.maximum(context - 1, 0)
    block = tl.load(tables + row * width + position // BLOCK_SIZE)
    tl.store(tokens + index, tl.load(last_token + row))
    tl.store(positions + index, position)
    tl.store(slots + index, tl.where(context > 0, block * BLOCK_SIZE + position % BLOCK_SIZE, -1))


def gather_decode_inputs(
    rows_S: torch.Tensor,
    contexts_S: torch.Tensor,
    last_token_R: torch.Tensor,
    tables_RM: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token, position, slot (-1 for padding, which has context 0) and block table of each sequence, all int32."""
    size, width, device = len(rows_S), tables_RM.shape[1], rows_S.device
    tokens, positions, slots = torch.empty((3, size), dtype=torch.int32, device=device)
    tables = torch.empty((size, width), dtype=torch.int32, device=device)
    _gather_kernel[(size,)](
        tokens, positions, slots, tables, rows_S, contexts_S, last_token_R, tables_RM, width,
        BLOCK_SIZE=block_size, COLUMNS=_COLUMNS,
    )  # fmt: skip
    return tokens, positions, slots, tables


def gather_decode_inputs_reference(
    rows_S: torch.Tensor,
    contexts_S: torch.Tensor,
    last_token_R: torch.Tensor,
    tables_RM: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same by indexing; here whole tables are copied."""
    rows = rows_S.long()
    positions = (contexts_S - 1).clamp_min(0)
    blocks = tables_RM[rows, (positions // block_size).long()]
    slots = torch.where(contexts_S > 0, blocks * block_size + positions % block_size, -1)
    return last_token_R[rows].int(), positions, slots, tables_RM[rows]
