"""The tokens of a scheduled step as arrays on the host, ready to be sent to a device.

T tokens, S sequences, N tokens after which one is sampled, M blocks in the longest table.
"""

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
    sampled_N: npt.NDArray[np.int64]  # whose they are
    last_N: Ints  # their indices in T
    rows_N: Ints
    next_positions_N: Ints  # where the sampled token will stand


def build_batch(step: Step, state: Rows, block_size: int) -> Batch:
    """Few operations where every sequence decodes: after a step that has swept the caches each costs some 10 µs."""
    rows_S = np.array(step.rows, dtype=np.int32)
    starts_S = np.array(step.starts, dtype=np.int32)
    if len(step.tokens) == len(rows_S):
        num_decodes = len(rows_S)
        query_starts = np.arange(num_decodes + 1, dtype=np.int32)
        contexts_S = starts_S + np.int32(1)
        rows_T, positions_T = rows_S, starts_S
    else:
        counts = np.array(step.counts, dtype=np.int32)
        num_decodes = int((counts != 1).argmax())
        query_starts = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_starts[1:])
        contexts_S = starts_S + counts
        rows_T = np.repeat(rows_S, counts)
        positions_T = np.arange(query_starts[-1], dtype=np.int32) + np.repeat(starts_S - query_starts[:-1], counts)
    indices_T, offsets_T = np.divmod(positions_T, np.int32(block_size))
    longest = -(-int(contexts_S.max()) // block_size)
    sampled_N, last_N = np.arange(len(rows_S)), query_starts[1:] - np.int32(1)
    rows_N, next_positions_N = rows_S, contexts_S
    if step.samples.count(1) < len(step.samples):
        samples = np.array(step.samples, dtype=np.int32)
        sampled_N = np.repeat(sampled_N, samples)
        # 0 for the last one of its sequence, -1 for the one before it, and so on
        behind = np.arange(len(sampled_N), dtype=np.int32) + np.int32(1) - np.cumsum(samples, dtype=np.int32)[sampled_N]
        last_N, rows_N = last_N[sampled_N] + behind, rows_S[sampled_N]
        next_positions_N = contexts_S[sampled_N] + behind
    return Batch(
        tokens_T=np.array(step.tokens, dtype=np.int32),
        rows_T=rows_T,
        positions_T=positions_T,
        slots_T=state.tables_RM[rows_T, indices_T] * np.int32(block_size) + offsets_T,
        tables_SM=state.tables_RM[rows_S, :longest],
        query_starts=query_starts,
        contexts_S=contexts_S,
        num_decodes=num_decodes,
        sampled_N=sampled_N,
        last_N=last_N,
        rows_N=rows_N,
        next_positions_N=next_positions_N,
    )
