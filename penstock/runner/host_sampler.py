"""Samples tokens from logits on the host: the same choices as sampler.py, without torch, in native code.

N sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.engine.executor import TokenMask
from penstock.kernels.native.bindings import DRAW
from penstock.runner.batch import Ints
from penstock.runner.rows import HostRows, Needs

Floats = npt.NDArray[np.float32]
Draw = Callable[[Floats, npt.NDArray[Any]], Ints]  # rows of logits, draws -> tokens


def sample(
    draw: Draw,
    logits_NV: Floats,
    greedy_N: Ints,
    state: HostRows,
    rows_N: Ints,
    positions_N: Ints,
    masks: Mapping[int, TokenMask],
) -> Ints:
    """One token per row, counted there. May overwrite the logits; `greedy_N` is their argmax as it was."""
    needs_N = state.needs[rows_N]
    tokens_N = greedy_N.copy()
    for i in np.flatnonzero(needs_N & (Needs.BIAS | Needs.PENALTIES | Needs.MIN_TOKENS | Needs.GRAMMAR)).tolist():
        _adjust(logits_NV[i], state, int(rows_N[i]), int(positions_N[i]), int(needs_N[i]))
        if i in masks:
            allowed = np.unpackbits(masks[i].view(np.uint8), bitorder="little")[: logits_NV.shape[1]]
            logits_NV[i][allowed == 0] = -np.inf
        tokens_N[i] = logits_NV[i].argmax()
    random = np.flatnonzero(needs_N & Needs.RANDOM)
    if len(random):
        tokens_N[random] = draw(logits_NV, _draws(state, random, rows_N[random], positions_N[random]))
    for i in np.flatnonzero(needs_N & Needs.PENALTIES).tolist():
        state.count(int(rows_N[i]), int(tokens_N[i]))
    return tokens_N


def _adjust(logits_V: Floats, state: HostRows, row: int, position: int, needs: int) -> None:
    if needs & Needs.BIAS:
        tokens, bias = state.bias(row)
        logits_V[tokens] += np.array(bias, dtype=np.float32)
    if needs & Needs.PENALTIES:
        params = state.params(row)
        seen, counts = state.seen(row)
        values, repetition = logits_V[seen], np.float32(params.repetition_penalty)
        logits_V[seen] = (
            np.where(values > 0, values / repetition, values * repetition)
            - np.float32(params.frequency_penalty) * counts
            - np.float32(params.presence_penalty) * (counts > 0)
        )
    if needs & Needs.MIN_TOKENS:
        logits_V[list(state.forbidden(row, position))] = -np.inf


def _draws(state: HostRows, indices: npt.NDArray[np.int64], rows: Ints, positions: Ints) -> npt.NDArray[Any]:
    draws = np.empty(len(rows), dtype=DRAW)
    draws["row"], draws["position"], draws["seed"] = indices, positions, state.seed[rows]
    for name in ("temperature", "top_k", "top_p", "min_p"):
        draws[name] = getattr(state, name)[rows]
    return draws
