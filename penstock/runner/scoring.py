"""Log-probabilities of sampled and prompt tokens: who asks for them, and their values on the host. V vocabulary."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.core.request import TokenLogprob
from penstock.engine.executor import Step
from penstock.runner.batch import Ints
from penstock.runner.rows import Needs, Rows

Floats = npt.NDArray[np.float32]


def scored_prompts(state: Rows, step: Step) -> list[tuple[int, Ints, Ints]]:
    """For those that ask for prompt logprobs: the sequence, its tokens in the step, the prompt tokens that follow."""
    asking = np.flatnonzero(state.needs[step.rows] & Needs.PROMPT_LOGPROBS).tolist()
    if not asking:
        return []
    found = []
    first_S = np.cumsum([0, *step.counts], dtype=np.int32)
    for index in asking:
        start, count = step.starts[index], step.counts[index]
        following = state.prompt(step.rows[index])[start + 1 : start + 1 + count]
        if following:
            rows = first_S[index] + np.arange(len(following), dtype=np.int32)
            found.append((index, rows, np.array(following, dtype=np.int32)))
    return found


def scored_rows(state: Rows, rows: Ints) -> tuple[list[int], list[int]]:
    """Which of these rows ask for logprobs of what they sample, and how many alternatives each."""
    asked = np.flatnonzero(state.needs[rows] & Needs.LOGPROBS).tolist()
    return asked, [state.params(int(rows[i])).logprobs or 0 for i in asked]


def score(logits: Floats, tokens: Ints, widths: list[int]) -> list[TokenLogprob]:
    """Log-probabilities of these tokens under the unmodified model, and as many alternatives as each asks for."""
    return [_score(*row) for row in zip(logits, tokens.tolist(), widths, strict=True)]


def _score(logits_V: Floats, token: int, width: int) -> TokenLogprob:
    peak = logits_V.max()
    total = peak + np.log(np.exp(logits_V - peak).sum(dtype=np.float64))
    top: list[int] = []
    if width:
        candidates = np.argpartition(logits_V, -width)[-width:]
        top = candidates[np.lexsort((candidates, -logits_V[candidates]))].tolist()
    return TokenLogprob(token, float(logits_V[token] - total), tuple((t, float(logits_V[t] - total)) for t in top))
