"""Rows of a GPU with all that sampling reads: a step samples without the host.

R rows, V vocabulary, W = V / 32 rounded up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from penstock.engine.executor import RowSetup, Step
from penstock.kernels.triton.sampling import SamplingRows
from penstock.kernels.triton.sampling_row import IN_PROMPT, ROW
from penstock.runner.device_stream import DeviceStream, Pinned
from penstock.runner.row_state import RowState
from penstock.runner.rows import Needs
from penstock.runner.transfer import to_device


class DeviceRows(RowState):
    """What a row asks for is sent when a sequence takes it; tokens are counted where they are sampled."""

    def __init__(self, rows: int, table_blocks: int, vocab_size: int, stream: DeviceStream) -> None:
        device = stream.device
        super().__init__(rows, table_blocks, vocab_size, device)
        self.stream = stream
        self.mask_words = -(-vocab_size // 32)

        def zeros(width: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros((rows, width), dtype=dtype, device=device)

        self.sampling = SamplingRows(
            params=zeros(ROW.itemsize // 4, torch.int32),
            seen=zeros(vocab_size, torch.int16),
            biases=zeros(vocab_size, torch.float32),
            stops=zeros(self.mask_words, torch.int32),
            last_tokens=self.last_token_R,
        )
        self._params = np.zeros(rows, dtype=ROW)  # as the device knows them, or is going to
        self._words = self._params.view(np.int32)  # the same
        self._sent_needs = np.zeros(rows, dtype=np.uint8)  # likewise

    @property
    def size(self) -> int:
        """Values of the parameters of all rows."""
        return self.sampling.params.numel()

    def send(self, step: Step, staged: Pinned) -> None:
        """What sampling reads of a step that was applied. Parameters go through `staged`, `size` values that nobody
        writes until the step is done."""
        changed = [setup for setup in step.setups if self.needs[setup.row] or self._sent_needs[setup.row]]
        if changed:
            self._send_params(changed, staged)
        for setup in changed:
            self._fill_tables(setup, Needs(int(self.needs[setup.row])))
        for row, tokens in step.forced:
            if self.needs[row] & Needs.PENALTIES:
                self._count(row, tokens)

    def _send_params(self, setups: Sequence[RowSetup], staged: Pinned) -> None:
        """In one copy, with those of the rows that lie between."""
        rows = [setup.row for setup in setups]
        for setup in setups:
            self._params[setup.row] = self._packed(setup)
        words = ROW.itemsize // 4
        first, end = words * min(rows), words * (max(rows) + 1)
        staged.values[first:end] = self._words[first:end]
        to, source = self.sampling.params.data_ptr() + 4 * first, staged.address + 4 * first
        self.stream.send(to, source, 4 * (end - first))
        self._sent_needs[rows] = self.needs[rows]

    def _packed(self, setup: RowSetup) -> tuple[float, ...]:
        """In the order of `ROW`."""
        params = setup.params
        return (
            self.needs[setup.row],
            params.temperature,
            params.top_k if params.top_k < self._vocab_size else 0,
            params.top_p,
            params.min_p,
            setup.seed & 0xFFFFFFFFFFFFFFFF,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            setup.prompt_len + params.min_tokens,
            params.logprobs or 0,
        )

    def _fill_tables(self, setup: RowSetup, needs: Needs) -> None:
        row, sampling = setup.row, self.sampling
        if needs & Needs.PENALTIES:
            sampling.seen[row] = 0
            sampling.seen[row, self._ids(setup.tokens[: setup.prompt_len])] = IN_PROMPT
            self._count(row, setup.tokens[setup.prompt_len :])
        if needs & Needs.BIAS:
            bias = {token: value for token, value in setup.params.logit_bias.items() if 0 <= token < self._vocab_size}
            values = np.array(list(bias.values()), dtype=np.float32)
            sampling.biases[row] = 0
            sampling.biases[row, self._ids(list(bias))] = to_device(values, self._device)
        if needs & Needs.MIN_TOKENS:
            bits = np.zeros(32 * self.mask_words, dtype=np.uint8)
            bits[list(setup.stop_ids)] = 1
            sampling.stops[row] = to_device(np.packbits(bits, bitorder="little").view(np.int32), self._device)

    def _count(self, row: int, tokens: Sequence[int]) -> None:
        """Tokens of the output that were not sampled in this row."""
        found, counts = np.unique(np.array(tokens, dtype=np.int64), return_counts=True)
        if len(found):
            self.sampling.seen[row, to_device(found, self._device)] += to_device(counts.astype(np.int16), self._device)

    def _ids(self, tokens: Sequence[int]) -> torch.Tensor:
        ids: npt.NDArray[np.int64] = np.array(tokens, dtype=np.int64)
        return to_device(ids, self._device)
