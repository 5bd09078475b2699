"""The forward pass of a step, from a batch to logits: the interface, and its implementation in plain torch."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from penstock.kernels.base import AttentionBackend, AttentionBatch
from penstock.models.base import CausalLM
from penstock.runner.batch import Batch
from penstock.runner.row_state import RowState


class Forward(Protocol):
    def __call__(
        self, batch: Batch, state: RowState, logit_rows: npt.NDArray[np.int32]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 logits after some of the batch's tokens, [R, V], and the index of the largest in each, [R]."""
        ...


class TorchForward:
    """The model as it is written down, on any device."""

    def __init__(self, model: CausalLM, attention: AttentionBackend, device: torch.device) -> None:
        self._model = model
        self._attention = attention
        self._device = device

    def __call__(
        self, batch: Batch, state: RowState, logit_rows: npt.NDArray[np.int32]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits_RV = self._model.logits(self.hidden(batch, state)[self._put(logit_rows)])
        return logits_RV, logits_RV.argmax(-1)

    def hidden(self, batch: Batch, state: RowState) -> torch.Tensor:
        """Final hidden states of all tokens, [T, D]."""
        tokens_T = self._put(batch.tokens_T)
        tokens_T = torch.where(tokens_T < 0, state.last_token_R[self._put(batch.rows_T)], tokens_T)
        self._attention.plan(
            AttentionBatch(
                slots_T=self._put(batch.slots_T),
                tables_SM=self._put(batch.tables_SM),
                query_starts=batch.query_starts.tolist(),
                contexts=batch.contexts_S.tolist(),
                num_decodes=batch.num_decodes,
                contexts_S=self._put(batch.contexts_S),
            )
        )
        return self._model.forward(tokens_T, self._put(batch.positions_T), self._attention)

    def _put(self, values: npt.NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device, torch.int64)
