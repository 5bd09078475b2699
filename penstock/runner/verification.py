"""Steps that verify drafts: the host's part.

A sequence with drafts computes them beside its last known token and samples after each. An entry is one such token:
what is sampled there stands for good if every draft before it is what was sampled one entry before. The device decides
it as well (`kernels/triton/drafts.py`), since the next step may read the last token before the host does.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import numpy as np

from penstock.engine.executor import Step
from penstock.runner.batch import Ints


def without_excess(step: Step, most: int) -> Step:
    """The same step with so many entries at most. Drafts that are left out count as rejected."""
    if sum(step.samples) <= most:
        return step
    left = most - sum(samples > 0 for samples in step.samples)
    counts, kept, tokens = [], [], []
    for end, count, samples in zip(accumulate(step.counts), step.counts, step.samples, strict=True):
        omitted = max(0, samples - 1 - left)
        left -= max(0, samples - 1 - omitted)
        counts.append(count - omitted)
        kept.append(samples - omitted)
        tokens += step.tokens[end - count : end - omitted]
    return replace(step, counts=counts, samples=kept, tokens=tokens)


def kept_masks(planned: Step, step: Step) -> list[int]:
    """Of the masks of a planned step, the rows of those that its constrained sequences sample without the excess."""
    firsts = accumulate((planned.samples[index] for index in planned.constrained), initial=0)
    return [
        first + i for index, first in zip(step.constrained, firsts, strict=False) for i in range(step.samples[index])
    ]


def entries_of(sequences: list[int], some: list[int]) -> list[int]:
    """The entries of some sequences. `sequences` says which one each entry is of."""
    wanted = set(some)
    return [entry for entry, sequence in enumerate(sequences) if sequence in wanted]


def first_entries(sequences: Ints) -> Ints:
    """For each entry the first one of its sequence."""
    entries = np.arange(len(sequences), dtype=np.int32)
    begins = np.ones(len(sequences), dtype=bool)
    begins[1:] = sequences[1:] != sequences[:-1]
    return np.maximum.accumulate(np.where(begins, entries, 0)).astype(np.int32)


def accepted_entries(sequences: list[int], drafts: list[int], sampled: list[int]) -> list[int]:
    """Those whose tokens stand for good. `sequences` says which one each entry is of."""
    kept: list[int] = []
    for entry, sequence in enumerate(sequences):
        new = entry == 0 or sequences[entry - 1] != sequence
        if new or (kept[-1] == entry - 1 and sampled[entry - 1] == drafts[entry]):
            kept.append(entry)
    return kept
