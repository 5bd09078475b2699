"""The fixed buffers that the CUDA graphs of decode steps and of sampling read, filled by one copy a step.

S entries: sequences, or in steps with drafts tokens, of which a sequence may have several.
"""

from __future__ import annotations

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
        # Six values of each entry, then the length of the shared prefix.
        self._buffer = torch.zeros(6 * most + 1, dtype=torch.int32, device=device)
        entries = self._buffer[: 6 * most].view(6, most)
        self.of_sampling = entries[:3]  # rows, positions of the tokens to sample, which mask applies (-1: none)
        self.rows_S, self.contexts_S, _, self._shared_S, tokens_S, firsts_S = entries
        self.drafts = Drafts(tokens_S, firsts_S)
        self._prefix_table = torch.zeros(tables_RM.shape[1], dtype=torch.int32, device=device)

    def staging(self) -> torch.Tensor:
        """Memory that `send` may copy from while the host goes on."""
        return torch.zeros(self._buffer.shape, dtype=torch.int32, pin_memory=self._buffer.is_cuda)

    def send(
        self,
        rows: Ints,
        contexts: Ints,
        *,
        tokens: Ints | None = None,
        sequences: Ints | None = None,
        masked: list[int] | None = None,
        shared: Ints | None = None,
        length: int = 0,
        staged: torch.Tensor | None = None,
    ) -> None:
        """Of entries that sample: a context is also the position of the token to be sampled.

        `tokens` are those that the entries sample after, unless all are SAMPLED; `sequences` says which one each entry
        is of, where a sequence may have several. `masked`: which of them are going to have a mask, in the order of the
        masks. `shared`: how many tokens of each are in the prefix of `length` tokens that some have in common. `staged`
        is memory of `staging` that nobody writes until the step is done.
        """
        size, used = self._most, len(rows)
        staged = self.staging() if staged is None else staged
        values = staged.numpy()
        entries = values[: 6 * size].reshape(6, size)
        entries[0, :used], entries[0, used:] = rows, self._spare
        entries[1, :used], entries[1, used:] = contexts, 0
        entries[2] = -1
        if masked:
            entries[2, masked] = np.arange(len(masked))
        entries[3] = 0
        if shared is not None:
            entries[3, :used] = shared
            self._prefix_table.copy_(self._tables_RM[int(rows[np.argmax(shared)])])
        entries[4] = SAMPLED
        if tokens is not None:
            entries[4, :used] = tokens
        entries[5] = np.arange(size)
        if sequences is not None:
            entries[5, :used] = first_entries(sequences)
        values[-1] = length
        self._buffer.copy_(staged, non_blocking=True)

    def prefix(self, size: int, splits: int) -> SharedPrefix:
        return SharedPrefix(
            table_M=self._prefix_table,
            length=self._buffer[6 * self._most :],
            lengths_S=self._shared_S[:size],
            splits=splits,
        )
