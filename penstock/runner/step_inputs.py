"""The fixed buffers that the CUDA graphs of decode steps and of sampling read, filled by one copy a step.

S entries: sequences, or in steps with drafts tokens, of which a sequence may have several.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from penstock.engine.executor import SAMPLED, Step
from penstock.kernels.triton.drafts import Drafts
from penstock.kernels.triton.prefix import SharedPrefix
from penstock.runner.batch import Ints
from penstock.runner.transfer import to_device
from penstock.runner.verification import first_entries


def send_blocks(step: Step, tables_RM: torch.Tensor) -> None:
    """New blocks, as (row, index, block) triples, into the device's copy of the tables."""
    if not step.blocks:
        return
    lengths = [len(blocks) for _, _, blocks in step.blocks]
    triples = np.empty((3, sum(lengths)), dtype=np.int64)
    triples[0] = np.repeat([row for row, _, _ in step.blocks], lengths)
    triples[1] = np.concatenate([np.arange(i, i + len(blocks)) for _, i, blocks in step.blocks])
    triples[2] = np.concatenate([blocks for _, _, blocks in step.blocks])
    rows, indices, blocks = to_device(triples, tables_RM.device)
    tables_RM[rows, indices] = blocks.int()


class StepInputs:
    def __init__(self, most: int, tables_RM: torch.Tensor) -> None:
        """For up to `most` entries. `tables_RM` are the block tables of all rows; the last row is spare."""
        self._most = most
        self._tables_RM = tables_RM
        self._spare = len(tables_RM) - 1
        device = tables_RM.device
        # Rows, contexts, masks, shared tokens of each sequence, the length of the shared prefix.
        self._buffer = torch.zeros(4 * most + 1, dtype=torch.int32, device=device)
        self.rows_S, self.contexts_S, self._masks_S, self._shared_S = self._buffer[: 4 * most].view(4, most)
        self._prefix_table = torch.zeros(tables_RM.shape[1], dtype=torch.int32, device=device)
        self._drafts = torch.zeros((2, most), dtype=torch.int32, device=device)
        self.drafts = Drafts(*self._drafts)

    @property
    def of_sampling(self) -> torch.Tensor:
        """int32 [3, S]: rows, positions of the tokens to sample, which mask applies (-1: none)."""
        return self._buffer[: 3 * self._most].view(3, self._most)

    def send(
        self,
        rows: Ints,
        contexts: Ints,
        masked: Sequence[int] = (),
        shared: Ints | None = None,
        length: int = 0,
    ) -> None:
        """Of sequences that sample: a context is also the position of the token to be sampled. `masked`: which of them
        are going to have a mask, in the order of the masks."""
        size, used = self._most, len(rows)
        values = np.zeros(len(self._buffer), dtype=np.int32)
        values[:used], values[used:size] = rows, self._spare
        values[size : size + used] = contexts
        values[2 * size : 3 * size] = -1
        for mask, index in enumerate(masked):
            values[2 * size + index] = mask
        if shared is not None:
            values[3 * size : 3 * size + used] = shared
            values[4 * size] = length
            self._prefix_table.copy_(self._tables_RM[int(rows[np.argmax(shared)])])
        self._copy(self._buffer, values)

    def send_drafts(self, tokens: Ints, sequences: Ints) -> None:
        """The tokens of the entries, and which sequence each is of."""
        used = len(tokens)
        values = np.stack([np.full(self._most, SAMPLED, np.int32), np.arange(self._most, dtype=np.int32)])
        values[0, :used], values[1, :used] = tokens, first_entries(sequences)
        self._copy(self._drafts, values)

    def prefix(self, size: int, splits: int) -> SharedPrefix:
        return SharedPrefix(
            table_M=self._prefix_table,
            length=self._buffer[4 * self._most :],
            lengths_S=self._shared_S[:size],
            splits=splits,
        )

    def _copy(self, buffer: torch.Tensor, values: Ints) -> None:
        source = torch.from_numpy(values)
        buffer.copy_(source.pin_memory() if buffer.is_cuda else source, non_blocking=True)
