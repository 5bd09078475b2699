"""The inputs of a decode step in a CUDA graph, gathered by one kernel from the rows of its sequences.

A row is the fixed place of a sequence in device memory: its block table and its last token.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_COLUMNS = 1024


@triton.jit
def _gather_kernel(
    x, positions, slots, tables_out, rows, contexts, last_token, tokens, tables, embedding, width, hidden,
    BLOCK_SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + index).to(tl.int64)
    context = tl.load(contexts + index)
    given = tl.load(tokens + index).to(tl.int64)
    token = tl.where(given >= 0, given, tl.load(last_token + row))
    for base in range(0, hidden, COLUMNS):
        columns = base + tl.arange(0, COLUMNS)
        values = tl.load(embedding + token * hidden + columns, mask=columns < hidden)
        tl.store(x + index * hidden + columns, values, mask=columns < hidden)
    used = (context + BLOCK_SIZE - 1) // BLOCK_SIZE
    for base in range(0, used, COLUMNS):
        columns = base + tl.arange(0, COLUMNS)
        blocks = tl.load(tables + row * width + columns, mask=columns < used, other=0)
        tl.store(tables_out + index * width + columns, blocks, mask=columns < used)
    position = tl.maximum(context - 1, 0)
    block = tl.load(tables + row * width + position // BLOCK_SIZE)
    tl.store(positions + index, position)
    tl.store(slots + index, tl.where(context > 0, block * BLOCK_SIZE + position % BLOCK_SIZE, -1))


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    x_SC: torch.Tensor  # embedding of the last token
    positions_S: torch.Tensor  # int32
    slots_S: torch.Tensor  # int32; -1 for padding, which has context 0
    tables_SM: torch.Tensor  # int32; what lies beyond the context is undefined


def gather_decode_inputs(
    rows_S: torch.Tensor,
    contexts_S: torch.Tensor,
    last_token_R: torch.Tensor,
    tokens_S: torch.Tensor,
    tables_RM: torch.Tensor,
    embedding: torch.Tensor,
    block_size: int,
) -> DecodeInputs:
    """`tokens_S`, int32: those that are known; -1: the last one of the row."""
    size, width, device = len(rows_S), tables_RM.shape[1], rows_S.device
    hidden = embedding.shape[1]
    positions, slots = torch.empty((2, size), dtype=torch.int32, device=device)
    tables = torch.empty((size, width), dtype=torch.int32, device=device)
    x = torch.empty((size, hidden), dtype=embedding.dtype, device=device)
    _gather_kernel[(size,)](
        x, positions, slots, tables, rows_S, contexts_S, last_token_R, tokens_S, tables_RM, embedding, width, hidden,
        BLOCK_SIZE=block_size, COLUMNS=_COLUMNS,
    )  # fmt: skip
    return DecodeInputs(x, positions, slots, tables)


def gather_decode_inputs_reference(
    rows_S: torch.Tensor,
    contexts_S: torch.Tensor,
    last_token_R: torch.Tensor,
    tokens_S: torch.Tensor,
    tables_RM: torch.Tensor,
    embedding: torch.Tensor,
    block_size: int,
) -> DecodeInputs:
    """The same by indexing; here whole tables are copied."""
    rows = rows_S.long()
    positions = (contexts_S - 1).clamp_min(0)
    blocks = tables_RM[rows, (positions // block_size).long()]
    slots = torch.where(contexts_S > 0, blocks * block_size + positions % block_size, -1)
    tokens = torch.where(tokens_S >= 0, tokens_S.long(), last_token_R[rows])
    return DecodeInputs(embedding[tokens], positions, slots.int(), tables_RM[rows])
