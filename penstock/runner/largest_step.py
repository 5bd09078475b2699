"""The largest step there can be on a GPU, which is tried before the KV cache is sized."""

from __future__ import annotations

import numpy as np

from penstock.core.request import SamplingParams
from penstock.engine.executor import RowSetup, Step
from penstock.runner.rows import Rows

# The most that a request can ask of a step's sampling.
_DEMANDING = SamplingParams(
    temperature=1.0, top_k=40, top_p=0.9, repetition_penalty=1.1, logit_bias={0: 1.0}, logprobs=20, max_tokens=1
)
_LEAST_SAMPLED = 64


def most_sampled(max_seqs: int) -> int:
    """How many tokens a step can sample, drafts included."""
    return max(max_seqs, _LEAST_SAMPLED)


def largest_step(state: Rows, max_tokens: int, block_size: int, slot: int) -> Step:
    """All rows but the spare one, with all that sampling may need. `slot` is that of a LoRA adapter."""
    all_rows, table_blocks = state.tables_RM.shape
    rows = min(all_rows - 1, max_tokens)
    counts = [min(len(part), table_blocks * block_size) for part in np.array_split(np.arange(max_tokens), rows)]
    return Step(
        rows=list(range(rows)),
        starts=[0] * rows,
        counts=counts,
        samples=[1] * rows,
        tokens=[0] * sum(counts),
        setups=[RowSetup(row, _DEMANDING, 0, [0] * count, count, (), slot) for row, count in enumerate(counts)],
    )
