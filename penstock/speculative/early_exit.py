"""Drafts by the model's own first layers, for checkpoints that were trained for early exit (LayerSkip).

A draft step computes the first layers and then the final norm and the head. Keys and values of these layers are those
that the whole model has computed for the tokens before, in the same KV blocks: there is nothing to catch up with, and
no second copy of weights or KV cache. Those of drafted tokens are written at the positions behind, which verification
writes again: into the rest of the sequence's own blocks, and then into spare blocks of the drafter.
"""

from __future__ import annotations

from penstock.engine.executor import Executor
from penstock.engine.sequence import Sequence
from penstock.speculative.draft_model import Draft, DraftLimits, ModelDrafter


class EarlyExitDrafter(ModelDrafter):
    def __init__(self, executor: Executor, limits: DraftLimits, spare: list[list[int]]) -> None:
        """`executor` computes the first layers over the model's own KV blocks; `spare`: other blocks for each row, with
        room for one draft."""
        super().__init__(executor, limits, tables=[])
        self._spare = spare

    def behind(self, sequence: Sequence) -> None:
        return None  # whatever the model has computed

    def _seat(self, sequence: Sequence, needed: list[Sequence]) -> Draft | None:
        draft = super()._seat(sequence, needed)
        if draft is not None:
            draft.computed = sequence.computed
            self._tables.append((draft.row, 0, sequence.blocks + self._spare[draft.row]))
        return draft

    def _adapter_slot(self, sequence: Sequence) -> int:
        return sequence.adapter_slot
