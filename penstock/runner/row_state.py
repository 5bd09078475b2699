"""Per-sequence state on a device, in fixed rows, so that a step can be launched before the last token is known here.

R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.engine.executor import RowSetup, Step
from penstock.runner.rows import Needs, Rows


class RowState(Rows):
    """What the forward pass reads and writes."""

    def __init__(self, rows: int, table_blocks: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(rows, table_blocks)
        self._vocab_size = vocab_size
        self._device = device
        self.last_token_R = torch.zeros(rows, dtype=torch.int64, device=device)


class TorchRows(RowState):
    """With what the sampler in plain torch needs."""

    def __init__(self, rows: int, table_blocks: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(rows, table_blocks, vocab_size, device)
        # A vocabulary per row is large, so these exist only once a request needs them.
        self._counts_RV: torch.Tensor | None = None
        self._prompt_RV: torch.Tensor | None = None
        self._bias_RV: torch.Tensor | None = None

    def _set_up(self, setup: RowSetup) -> None:
        super()._set_up(setup)
        row, params = setup.row, setup.params
        needs = Needs(int(self.needs[row]))
        if needs & Needs.PENALTIES:
            prompt, output = setup.tokens[: setup.prompt_len], setup.tokens[setup.prompt_len :]
            self.prompt_RV[row] = False
            self.prompt_RV[row, self._ids(prompt)] = True
            self.counts_RV[row] = torch.bincount(self._ids(output), minlength=self._vocab_size).to(torch.int32)
        if needs & Needs.BIAS:
            self.bias_RV[row] = 0
            bias = {token: value for token, value in params.logit_bias.items() if 0 <= token < self._vocab_size}
            self.bias_RV[row, self._ids(list(bias))] = torch.tensor(list(bias.values()), device=self._device)

    def apply(self, step: Step) -> None:
        super().apply(step)
        for row, tokens in step.forced:
            if self.needs[row] & Needs.PENALTIES:
                counted = torch.bincount(self._ids(tokens), minlength=self._vocab_size)
                self.counts_RV[row] += counted.to(torch.int32)

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
