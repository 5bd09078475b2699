"""Per-sequence state of the executor on the CPU: what `rows.py` has, and the rows of the native sampler."""

from __future__ import annotations

import numpy as np

from penstock.engine.executor import RowSetup, Step
from penstock.kernels.native.sampling import NativeSampling
from penstock.runner.rows import Needs, Rows


class HostRows(Rows):
    def __init__(self, rows: int, table_blocks: int, vocab_size: int) -> None:
        super().__init__(rows, table_blocks)
        self.last_token_R = np.zeros(rows, dtype=np.int32)
        self.sampling = NativeSampling(rows, vocab_size)
        self.scored: set[int] = set()  # rows that ask for log-probabilities
        self._demanding: set[int] = set()  # rows that ask the sampler for more than the argmax

    def _set_up(self, setup: RowSetup) -> None:
        super()._set_up(setup)
        row, needs = setup.row, Needs(int(self.needs[setup.row]))
        if needs or row in self._demanding:
            self.sampling.set(
                row,
                setup.params,
                seed=setup.seed,
                prompt_len=setup.prompt_len,
                tokens=setup.tokens if needs & Needs.PENALTIES else (),
                stop_ids=setup.stop_ids,
            )
        (self._demanding.add if needs else self._demanding.discard)(row)
        asks = needs & (Needs.LOGPROBS | Needs.PROMPT_LOGPROBS)
        (self.scored.add if asks else self.scored.discard)(row)

    def apply(self, step: Step) -> None:
        super().apply(step)
        for row, tokens in step.forced:
            self.sampling.count(row, tokens)
