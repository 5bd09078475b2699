"""Log-probabilities computed on a GPU, and read on the host once the step has ended."""

from __future__ import annotations

import torch

from penstock.core.request import TokenLogprob
from penstock.runner.transfer import to_host


class DeviceScores:
    """Log-probabilities of some tokens and of the top alternatives, while they are copied to the host."""

    def __init__(self, logits: torch.Tensor, tokens: torch.Tensor, most: int) -> None:
        values = logits.log_softmax(-1)
        top = values.topk(most, -1)
        self.tokens, self._own = to_host(tokens), to_host(values.gather(-1, tokens.long()[:, None])[:, 0])
        self._top, self._top_tokens = to_host(top.values), to_host(top.indices)

    def read(self, widths: list[int]) -> list[TokenLogprob]:
        rows = zip(
            self.tokens.tolist(), self._own.tolist(), self._top_tokens.tolist(), self._top.tolist(), widths, strict=True
        )
        return [
            TokenLogprob(token, own, tuple(zip(tokens[:width], values[:width], strict=True)))
            for token, own, tokens, values, width in rows
        ]
