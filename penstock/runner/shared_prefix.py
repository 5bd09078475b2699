"""Finds the prefix that most sequences of a decode step share, for cascade attention, by their block tables."""

from __future__ import annotations

import numpy as np

from penstock.runner.batch import Ints

MIN_SHARING = 8  # sequences
_MIN_SHARED_TOKENS = 256


def may_share(tables_RM: Ints, rows: Ints) -> bool:
    """Whether enough of these begin with the same block. Usually nobody shares."""
    if len(rows) < MIN_SHARING:
        return False
    ordered = np.sort(tables_RM[rows, 0])
    return bool((ordered[MIN_SHARING - 1 :] == ordered[: 1 - MIN_SHARING]).any())


def shared_prefix(tables_RM: Ints, rows: Ints, contexts: Ints, block_size: int) -> tuple[Ints | None, int]:
    """How many tokens at its start each sequence shares with most others, and how many those are; (None, 0) if few."""
    firsts = tables_RM[rows, 0]
    values, counts = np.unique(firsts, return_counts=True)
    if 2 * counts.max() < len(rows):
        return None, 0
    members = firsts == values[counts.argmax()]
    width = int(contexts[members].min() - 1) // block_size
    theirs = tables_RM[rows[members], :width]
    differs = np.flatnonzero((theirs != theirs[0]).any(0))
    length = (int(differs[0]) if len(differs) else width) * block_size
    if length < _MIN_SHARED_TOKENS:
        return None, 0
    return np.where(members, length, 0).astype(np.int32), length
