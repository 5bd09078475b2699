"""Sampling after a step on a GPU: a CUDA graph per graph bucket, replayed once the logits of the step are there.

Steps in which every row is greedy do without: the forward pass takes the argmax itself. The graphs are separate from
those of the forward pass because a grammar knows the mask of a token only while its logits are being computed already.
S sequences, W words of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from penstock.core.request import TokenLogprob
from penstock.engine.executor import TokenMask
from penstock.kernels.triton.drafts import Drafts
from penstock.kernels.triton.sampling import MOST_ALTERNATIVES, Sampled, SamplingInputs, sample, sampling_scratch
from penstock.runner.device_rows import DeviceRows
from penstock.runner.device_stream import DeviceStream, Graph, Pinned, captured
from penstock.runner.transfer import to_host


class SampledScores:
    """Log-probabilities of sampled tokens, while they are copied to the host."""

    def __init__(self, sampled: Sampled, count: int) -> None:
        self._own, self._top = to_host(sampled.logprobs[:count]), to_host(sampled.top_logprobs[:count])
        self._top_tokens = to_host(sampled.top_tokens[:count])

    def read(self, tokens: Sequence[int], asked: Sequence[int], widths: Sequence[int]) -> list[TokenLogprob]:
        """Of the sequences that asked, with so many alternatives each."""
        most = max(widths)
        own, top, top_tokens = self._own.tolist(), self._top[:, :most].tolist(), self._top_tokens[:, :most].tolist()
        return [
            TokenLogprob(tokens[i], own[i], tuple(zip(top_tokens[i][:width], top[i][:width], strict=True)))
            for i, width in zip(asked, widths, strict=True)
        ]


class DeviceSampler:
    def __init__(
        self,
        rows: DeviceRows,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        inputs: torch.Tensor,
        drafts: Drafts,
        stream: DeviceStream,
    ) -> None:
        """`logits` [S, V] and `tokens` [S] (greedy, until others are sampled) are what steps leave there. `inputs` is
        int32 [3, S]: rows, positions of the tokens to sample, and which mask applies (-1: none). `drafts` is read by
        steps with drafts."""
        most, vocab = logits.shape
        device = logits.device

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._rows = rows
        self._masks = zeros(most, rows.mask_words, dtype=torch.int32)
        rows_S, positions_S, mask_of_S = inputs
        self._inputs = SamplingInputs(logits, rows_S, positions_S, mask_of_S, self._masks, drafts)
        self._sampled = Sampled(
            tokens=tokens,
            logprobs=zeros(most),
            top_logprobs=zeros(most, MOST_ALTERNATIVES),
            top_tokens=zeros(most, MOST_ALTERNATIVES, dtype=torch.int32),
        )
        self._scratch = sampling_scratch(most, vocab, device)
        self._graphs: dict[tuple[int, bool], Graph] = {}
        self._stream = stream
        self._staged = Pinned((most, rows.mask_words), torch.int32, device)
        self.mask_memory: TokenMask = self._staged.values

    def run(self, size: int, drafts: bool = False) -> None:
        """Sample for the first `size` sequences, a graph bucket, where rows ask for more than the greedy token."""
        if (size, drafts) in self._graphs:
            self._graphs[size, drafts].replay()
        else:
            self._sample(size, drafts)

    def stage_masks(self, masks: TokenMask) -> TokenMask:
        """The same in `mask_memory`."""
        self.mask_memory[: len(masks)] = masks
        return self.mask_memory[: len(masks)]

    def send_masks(self, count: int) -> None:
        """The first rows of `mask_memory`, which was written after the step before had been collected: that one has
        read the masks before these. The copy overlaps the forward pass of the step under way."""
        self._stream.send_beside(self._masks.data_ptr(), self._staged.address, self.mask_memory[:count].nbytes)

    def scores(self, count: int) -> SampledScores:
        return SampledScores(self._sampled, count)

    def capture(self, sizes: Sequence[int], pool: Any, *, drafts: bool) -> None:
        for size in sizes:
            self._graphs[size, drafts] = captured(partial(self._sample, size, drafts), pool, self._stream)

    def _sample(self, size: int, drafts: bool) -> None:
        inputs = self._inputs
        sample(
            SamplingInputs(
                inputs.logits[:size],
                inputs.rows[:size],
                inputs.positions[:size],
                inputs.mask_of[:size],
                inputs.masks,
                inputs.drafts[:size] if inputs.drafts is not None and drafts else None,
            ),
            self._rows.sampling,
            self._sampled,
            self._scratch,
        )
