"""A step as arrays on the host. T tokens, S sequences, N sequences that sample, M blocks in the longest table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.engine.executor import Step
from penstock.runner.rows import Rows

Ints = npt.NDArray[np.int32]


@dataclass(slots=True)
class Batch:
    tokens_T: Ints  # SAMPLED where only the device knows the token: the last one of the row
    rows_T: Ints
    positions_T: Ints
    slots_T: Ints  # block * block_size + offset where each token's key and value go
    tables_SM: Ints
    query_starts: Ints  # S + 1 offsets into T
    contexts_S: Ints  # tokens of the sequence after this step
    num_decodes: int  # the first sequences, which compute one token each
    sampled_N: npt.NDArray[np.int64]  # which sequences sample
    last_N: Ints  # index in T of the token whose logits they sample
    rows_N: Ints
    next_positions_N: Ints  # where the sampled token will stand


def build_batch(step: Step, state: Rows, block_size: int) -> Batch:
    counts = np.array(step.counts, dtype=np.int32)
    contexts_S = np.array(step.starts, dtype=np.int32) + counts
    rows_S = np.array(step.rows, dtype=np.int32)
    query_starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_starts[1:])
    ends_S = query_starts[1:]
    longer = np.flatnonzero(counts != 1)
    num_decodes = int(longer[0]) if len(longer) else len(counts)
    if len(longer):
        rows_T = np.repeat(rows_S, counts)
        positions_T = np.arange(ends_S[-1], dtype=np.int32) + np.repeat(contexts_S - ends_S, counts)
    else:
        rows_T, positions_T = rows_S, contexts_S - 1
    blocks_T = state.tables_RM[rows_T, positions_T // block_size]
    longest = -(-int(contexts_S.max()) // block_size)
    sampled_N = np.flatnonzero(np.array(step.samples))
    return Batch(
        tokens_T=np.array(step.tokens, dtype=np.int32),
        rows_T=rows_T,
        positions_T=positions_T,
        slots_T=blocks_T * np.int32(block_size) + positions_T % np.int32(block_size),
        tables_SM=state.tables_RM[rows_S, :longest],
        query_starts=query_starts,
        contexts_S=contexts_S,
        num_decodes=num_decodes,
        sampled_N=sampled_N,
        last_N=ends_S[sampled_N] - 1,
        rows_N=rows_S[sampled_N],
        next_positions_N=contexts_S[sampled_N],
    )
