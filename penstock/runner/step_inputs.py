"""The fixed buffers that the CUDA graphs of decode steps and of sampling read, filled by one copy a step.

S entries: sequences, or in steps with drafts tokens, of which a sequence may have several.
"""

from __future__ import annotations

import numpy as np
import torch

from penstock.engine.executor import SAMPLED, Step
from penstock.kernels.triton.drafts import Drafts
from penstock.kernels.triton.prefix import SharedPrefix
from penstock.kernels.triton.sampling_row import CHECKED, NO_MASK
from penstock.runner.batch import Ints
from penstock.runner.device_stream import DeviceStream, Pinned
from penstock.runner.transfer import to_device
from penstock.runner.verification import first_entries

# Runs of new blocks, and blocks in all, that are sent one by one: decode steps have few.
_FEW_RUNS, FEW_BLOCKS = 16, 1024


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
    def __init__(self, most: int, tables_RM: torch.Tensor, stream: DeviceStream) -> None:
        """For up to `most` entries. `tables_RM` are the block tables of all rows; the last row is spare."""
        self._most = most
        self._tables_RM = tables_RM
        self._stream = stream
        self._spare = len(tables_RM) - 1
        device = tables_RM.device
        # Six values of each entry, then the length of the shared prefix.
        self.size = 6 * most + 1
        self._buffer = torch.zeros(self.size, dtype=torch.int32, device=device)
        entries = self._buffer[: 6 * most].view(6, most)
        self.of_sampling = entries[:3]  # rows, positions of the tokens to sample, which mask applies, if any
        self.rows_S, self.contexts_S, _, self._shared_S, tokens_S, firsts_S = entries
        self.drafts = Drafts(tokens_S, firsts_S)
        self._prefix_table = torch.zeros(tables_RM.shape[1], dtype=torch.int32, device=device)
        self._padding = np.zeros(self.size, dtype=np.int32)
        rows, _, masks, _, tokens, firsts = self._padding[: 6 * most].reshape(6, most)
        self._numbers = np.arange(most, dtype=np.int32)
        rows[:], masks[:], tokens[:], firsts[:] = self._spare, NO_MASK, SAMPLED, self._numbers
        self._nothing = Pinned((self.size,), torch.int32, device)
        self._nothing.values[:] = self._padding

    def clear(self) -> None:
        """Make everything in the buffer padding, as compiling and capturing need it."""
        self._stream.send(self._buffer.data_ptr(), self._nothing.address, 4 * self.size)

    def send_blocks(self, step: Step, staged: Pinned) -> None:
        """New blocks into the device's copy of the tables."""
        if not step.blocks:
            return
        if len(step.blocks) > _FEW_RUNS or sum(len(blocks) for _, _, blocks in step.blocks) > FEW_BLOCKS:
            send_blocks(step, self._tables_RM)
            return
        tables, width, at = self._tables_RM.data_ptr(), self._tables_RM.shape[1], 0
        for row, index, blocks in step.blocks:
            staged.values[at : at + len(blocks)] = blocks
            self._stream.send(tables + 4 * (row * width + index), staged.address + 4 * at, 4 * len(blocks))
            at += len(blocks)

    def send(
        self,
        staged: Pinned,
        rows: Ints,
        contexts: Ints,
        *,
        tokens: Ints | None = None,
        sequences: Ints | None = None,
        masked: tuple[list[int], list[int]] = ([], []),
        shared: Ints | None = None,
        length: int = 0,
    ) -> None:
        """Of entries that sample: a context is also the position of the token to be sampled. They go through `staged`,
        `size` values that nobody writes until the step is done.

        `tokens` are those that the entries sample after, unless all are SAMPLED; `sequences` says which one each entry
        is of, where a sequence may have several. `masked`: which of them are going to have a mask, in the order of the
        masks, and which sample without the one that they would need (`Step.checked`). `shared`: how many tokens of each
        are in the prefix of `length` tokens that some have in common.
        """
        size, used, values = self._most, len(rows), staged.values
        values[:] = self._padding
        values[:used] = rows
        values[size : size + used] = contexts
        entries = values[: 6 * size].reshape(6, size)
        waiting, checked = masked
        if waiting:
            of_mask, numbers = entries[2], self._numbers[: len(waiting)]
            of_mask[slice(used) if len(waiting) == used else waiting] = numbers
        if checked:
            entries[2][checked] = CHECKED
        if shared is not None:
            entries[3, :used] = shared
            self._prefix_table.copy_(self._tables_RM[int(rows[np.argmax(shared)])])
            values[-1] = length
        if tokens is not None:
            entries[4, :used] = tokens
        if sequences is not None:
            entries[5, :used] = first_entries(sequences)
        self._stream.send(self._buffer.data_ptr(), staged.address, 4 * self.size)

    def prefix(self, size: int, splits: int) -> SharedPrefix:
        return SharedPrefix(
            table_M=self._prefix_table,
            length=self._buffer[6 * self._most :],
            lengths_S=self._shared_S[:size],
            splits=splits,
        )
