"""How well a model predicts a text: the price of quantisation, measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from penstock.kernels.native_model import NativeModel, StepArrays

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
    positions = np.arange(len(tokens), dtype=np.int32)
    blocks = -(-len(tokens) // model.block_size)
    logits, _ = model.forward(
        StepArrays(
            tokens_T=tokens,
            positions_T=positions,
            slots_T=positions,  # blocks 0, 1, 2 … in order
            tables_SM=np.arange(blocks, dtype=np.int32)[None],
            query_starts=np.array([0, len(tokens)], dtype=np.int32),
            contexts_S=np.array([len(tokens)], dtype=np.int32),
            logit_rows_R=positions[:-1],
        )
    )
    peaks = logits.max(axis=1)
    totals = np.log(np.exp(logits - peaks[:, None]).sum(axis=1, dtype=np.float64)) + peaks
    losses: npt.NDArray[np.float64] = totals - logits[np.arange(len(logits)), tokens[1:]]
    return losses
