"""How well a model predicts a text: the price of quantisation, measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from penstock.kernels.native_model import NativeModel, NativeRows, NativeStep

WINDOW = 512  # tokens of context; each window is scored on its own, as the first tokens of a prompt are


def perplexity(model: NativeModel, tokens: Sequence[int], progress: Callable[[int, int], None] | None = None) -> float:
    """exp of the mean negative log-likelihood of each token after those before it in its window."""
    total, scored = 0.0, 0
    windows = [tokens[start : start + WINDOW] for start in range(0, len(tokens), WINDOW)]
    for number, window in enumerate(windows):
        if len(window) > 1:
            losses = _losses(model, np.array(window, dtype=np.int32))
            total, scored = total + float(losses.sum()), scored + len(losses)
        if progress is not None:
            progress(number + 1, len(windows))
    return math.exp(total / scored)


def _losses(model: NativeModel, tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> npt.NDArray[np.float64]:
    blocks = -(-len(tokens) // model.block_size)
    rows = NativeRows(np.arange(blocks, dtype=np.int32)[None], np.zeros(1, dtype=np.int32))
    step = NativeStep(tokens.tolist(), rows=[0], starts=[0], counts=[len(tokens)], logit_rows=range(len(tokens) - 1))
    logits, _ = model.forward(step, rows)
    peaks = logits.max(axis=1)
    totals = np.log(np.exp(logits - peaks[:, None]).sum(axis=1, dtype=np.float64)) + peaks
    losses: npt.NDArray[np.float64] = totals - logits[np.arange(len(logits)), tokens[1:]]
    return losses
