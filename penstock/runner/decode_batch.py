"""What one decode step after the other of the same sequences has in common, so that it is found out once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.runner.batch import Ints
from penstock.runner.rows import Rows
from penstock.runner.scoring import Asked, asked_by
from penstock.runner.shared_prefix import may_share


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    listed: list[int]  # rows
    rows: Ints  # the same
    entries: list[int]  # their numbers
    slots: Ints  # of their LoRA adapters
    may_share: bool  # whether a prefix common to most is possible
    asked: Asked


def decode_batch(listed: list[int], state: Rows) -> DecodeBatch:
    """Holds until a row is set up for another sequence."""
    rows = np.array(listed, dtype=np.int32)
    sharing, entries = may_share(state.tables_RM, rows), list(range(len(rows)))
    return DecodeBatch(listed, rows, entries, state.adapter[rows], sharing, asked_by(state, rows))
