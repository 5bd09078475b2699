"""Per-sequence state of an executor, in fixed rows on the host: block table, last token, sampling parameters.

A row is written when a sequence takes it and when it gets blocks. R rows, M blocks per table.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntFlag

import numpy as np

from penstock.core.request import SamplingParams
from penstock.engine.executor import NO_ADAPTER, RowSetup, Step


class Needs(IntFlag):
    """What a row asks of the sampler beyond the greedy token."""

    NOTHING = 0
    RANDOM = 1
    FILTER = 2
    PENALTIES = 4
    BIAS = 8
    MIN_TOKENS = 16
    LOGPROBS = 32
    PROMPT_LOGPROBS = 64
    GRAMMAR = 128


def needs_of(params: SamplingParams) -> Needs:
    needs = Needs.NOTHING
    if not params.greedy:
        needs |= Needs.RANDOM
        if params.top_k or params.top_p < 1 or params.min_p > 0:
            needs |= Needs.FILTER
    if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
        needs |= Needs.PENALTIES
    if params.logit_bias:
        needs |= Needs.BIAS
    if params.min_tokens:
        needs |= Needs.MIN_TOKENS
    if params.logprobs is not None:
        needs |= Needs.LOGPROBS
    if params.prompt_logprobs is not None:
        needs |= Needs.PROMPT_LOGPROBS
    if params.grammar is not None:
        needs |= Needs.GRAMMAR
    return needs


class Rows:
    """The part that lies on the host wherever the model runs: batches are built from it."""

    def __init__(self, rows: int, table_blocks: int) -> None:
        self.tables_RM = np.zeros((rows, table_blocks), dtype=np.int32)
        self.temperature = np.zeros(rows, dtype=np.float32)
        self.top_p = np.ones(rows, dtype=np.float32)
        self.top_k = np.zeros(rows, dtype=np.int32)
        self.min_p = np.zeros(rows, dtype=np.float32)
        self.seed = np.zeros(rows, dtype=np.int64)
        self.needs = np.zeros(rows, dtype=np.uint8)  # of each row, as `Needs`
        self.adapter = np.full(rows, NO_ADAPTER, dtype=np.int32)  # slot of each row
        self._setups: list[RowSetup | None] = [None] * rows

    def apply(self, step: Step) -> None:
        for setup in step.setups:
            self._set_up(setup)
        for row, index, blocks in step.blocks:
            self.tables_RM[row, index : index + len(blocks)] = blocks

    def _set_up(self, setup: RowSetup) -> None:
        row, params = setup.row, setup.params
        self._setups[row] = setup
        self.needs[row] = needs_of(params)
        self.temperature[row] = params.temperature
        self.top_p[row] = params.top_p
        self.top_k[row] = params.top_k
        self.min_p[row] = params.min_p
        self.seed[row] = setup.seed
        self.adapter[row] = setup.adapter

    def params(self, row: int) -> SamplingParams:
        return self._setup(row).params

    def prompt(self, row: int) -> Sequence[int]:
        setup = self._setup(row)
        return setup.tokens[: setup.prompt_len]

    def forbidden(self, row: int, position: int) -> Sequence[int]:
        """Tokens that may not stand at this position because the output would end before min_tokens."""
        setup = self._setup(row)
        return setup.stop_ids if position - setup.prompt_len < setup.params.min_tokens else ()

    def _setup(self, row: int) -> RowSetup:
        setup = self._setups[row]
        assert setup is not None, "a row is used before it was set up"
        return setup
