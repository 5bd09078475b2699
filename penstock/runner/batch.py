"""A step as tensors. T tokens, S sequences, N sequences that sample, M blocks in the longest table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from penstock.engine.executor import Step
from penstock.kernels.base import AttentionBatch
from penstock.runner.row_state import RowState


@dataclass(slots=True)
class Batch:
    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    attention: AttentionBatch
    last_N: torch.Tensor  # index in T of the token whose logits are sampled
    sampled: list[int]  # N: index in the step of each sequence that samples
    rows_N: torch.Tensor
    rows: np.ndarray  # N, the same on the host
    next_positions_N: torch.Tensor  # where the sampled token will stand


def build_batch(step: Step, state: RowState, block_size: int) -> Batch:
    device = state.tables_RM.device
    starts = np.array(step.starts, dtype=np.int64)
    counts = np.array(step.counts, dtype=np.int64)
    rows = np.array(step.rows, dtype=np.int64)
    contexts = starts + counts
    ends = np.cumsum(counts)
    num_decodes = int(np.argmax(counts != 1)) if (counts != 1).any() else len(counts)
    positions = np.arange(int(ends[-1])) + np.repeat(contexts - ends, counts)
    sampled = np.flatnonzero(np.array(step.samples))

    positions_T = torch.from_numpy(positions).to(device)
    row_T = torch.from_numpy(np.repeat(rows, counts)).to(device)
    rows_S = torch.from_numpy(rows).to(device)
    tokens_T = torch.tensor(step.tokens, dtype=torch.int64, device=device)
    tokens_T = torch.where(tokens_T < 0, state.last_token_R[row_T], tokens_T)
    blocks_T = state.tables_RM[row_T, positions_T // block_size].to(torch.int64)
    longest = -(-int(contexts.max()) // block_size)
    return Batch(
        tokens_T=tokens_T,
        positions_T=positions_T,
        attention=AttentionBatch(
            slots_T=blocks_T * block_size + positions_T % block_size,
            tables_SM=state.tables_RM[rows_S, :longest],
            query_starts=[0, *ends.tolist()],
            contexts=contexts.tolist(),
            num_decodes=num_decodes,
            contexts_S=torch.from_numpy(contexts.astype(np.int32)).to(device),
        ),
        last_N=torch.from_numpy(ends[sampled] - 1).to(device),
        sampled=sampled.tolist(),
        rows_N=rows_S[torch.from_numpy(sampled).to(device)],
        rows=rows[sampled],
        next_positions_N=torch.from_numpy(contexts[sampled]).to(device),
    )
