"""Which rows ask for more than greedy tokens, and who asks for log-probabilities of sampled and prompt tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from penstock.engine.executor import Step
from penstock.runner.batch import Ints
from penstock.runner.rows import Needs, Rows


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


@dataclass(frozen=True, slots=True)
class Asked:
    """Of the sampler, by some rows."""

    anything: bool = False  # but greedy tokens
    scored: list[int] = field(default_factory=list)  # which of the rows want log-probabilities
    widths: list[int] = field(default_factory=list)  # with how many alternatives each


def asked_by(state: Rows, rows: Ints) -> Asked:
    return Asked(True, *scored_rows(state, rows)) if state.needs[rows].any() else Asked()


def scored_rows(state: Rows, rows: Ints) -> tuple[list[int], list[int]]:
    """Which of these rows ask for logprobs of what they sample, and how many alternatives each."""
    asked = np.flatnonzero(state.needs[rows] & Needs.LOGPROBS).tolist()
    return asked, [state.params(int(rows[i])).logprobs or 0 for i in asked]
