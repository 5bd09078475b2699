"""What is remembered of each running sequence, in fixed rows: block table, last token, sampling parameters.

A row is written when a sequence takes it and when it gets blocks. What a step itself changes (the last token, counts
for penalties) lives on the device, so the next step can be launched before the token is known here; the rest is on the
host, where batches are built. R rows, M blocks per table, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntFlag

import numpy as np
import torch

from penstock.core.request import SamplingParams
from penstock.engine.executor import RowSetup, Step


class Needs(IntFlag):
    """What a row asks of the sampler beyond the likeliest token."""

    NOTHING = 0
    RANDOM = 1
    FILTER = 2
    PENALTIES = 4
    BIAS = 8
    MIN_TOKENS = 16
    LOGPROBS = 32
    PROMPT_LOGPROBS = 64


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
    return needs


class RowState:
    def __init__(self, rows: int, table_blocks: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self.tables_RM = np.zeros((rows, table_blocks), dtype=np.int32)
        self.last_token_R = torch.zeros(rows, dtype=torch.int64, device=device)
        self.temperature = np.zeros(rows, dtype=np.float32)
        self.top_p = np.ones(rows, dtype=np.float32)
        self.top_k = np.zeros(rows, dtype=np.int32)
        self.min_p = np.zeros(rows, dtype=np.float32)
        self.seed = np.zeros(rows, dtype=np.int64)
        self.needs = np.zeros(rows, dtype=np.uint8)  # of each row, as `Needs`
        self._setups: list[RowSetup | None] = [None] * rows
        # A vocabulary per row is large, so these exist only once a request needs them.
        self._counts_RV: torch.Tensor | None = None
        self._prompt_RV: torch.Tensor | None = None
        self._bias_RV: torch.Tensor | None = None

    def apply(self, step: Step) -> None:
        for setup in step.setups:
            self._set_up(setup)
        for row, index, blocks in step.blocks:
            self.tables_RM[row, index : index + len(blocks)] = blocks

    def _set_up(self, setup: RowSetup) -> None:
        row, params = setup.row, setup.params
        needs = needs_of(params)
        self._setups[row] = setup
        self.needs[row] = needs
        self.temperature[row] = params.temperature
        self.top_p[row] = params.top_p
        self.top_k[row] = params.top_k
        self.min_p[row] = params.min_p
        self.seed[row] = setup.seed
        if needs & Needs.PENALTIES:
            prompt, output = setup.tokens[: setup.prompt_len], setup.tokens[setup.prompt_len :]
            self.prompt_RV[row] = False
            self.prompt_RV[row, self._ids(prompt)] = True
            self.counts_RV[row] = torch.bincount(self._ids(output), minlength=self._vocab_size).to(torch.int32)
        if needs & Needs.BIAS:
            self.bias_RV[row] = 0
            bias = {token: value for token, value in params.logit_bias.items() if 0 <= token < self._vocab_size}
            self.bias_RV[row, self._ids(list(bias))] = torch.tensor(list(bias.values()), device=self._device)

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

    def _ids(self, tokens: Sequence[int]) -> torch.Tensor:
        return torch.tensor(tokens, dtype=torch.int64, device=self._device)

    def _vocabulary(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(len(self._setups), self._vocab_size, dtype=dtype, device=self._device)

    @property
    def counts_RV(self) -> torch.Tensor:
        """How often each token was sampled."""
        if self._counts_RV is None:
            self._counts_RV = self._vocabulary(torch.int32)
        return self._counts_RV

    @property
    def prompt_RV(self) -> torch.Tensor:
        """Whether each token is in the prompt."""
        if self._prompt_RV is None:
            self._prompt_RV = self._vocabulary(torch.bool)
        return self._prompt_RV

    @property
    def bias_RV(self) -> torch.Tensor:
        if self._bias_RV is None:
            self._bias_RV = self._vocabulary(torch.float32)
        return self._bias_RV
