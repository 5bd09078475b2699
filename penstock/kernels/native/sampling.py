"""What rows ask of the native sampler and what they have sampled so far, in native memory."""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Sequence

from penstock.core.request import MAX_LOGPROBS, SamplingParams, TokenLogprob
from penstock.kernels.native.bindings import CRowParams, library

SCORE = struct.Struct(f"f{MAX_LOGPROBS}i{MAX_LOGPROBS}f")  # struct Score of sampling_rows.h


class NativeSampling:
    """Rows that want nothing but the argmax need not be set. A step counts what it samples in rows with penalties."""

    def __init__(self, rows: int, vocab_size: int) -> None:
        self._library = library()
        self.rows = rows
        self.address = self._library.penstock_sampling_new(rows, vocab_size)

    def __del__(self) -> None:
        if address := getattr(self, "address", None):
            self._library.penstock_sampling_free(address)

    def set(
        self,
        row: int,
        params: SamplingParams,
        *,
        seed: int = 0,
        prompt_len: int = 0,
        tokens: Sequence[int] = (),
        stop_ids: Sequence[int] = (),
    ) -> None:
        """Give a row to a sequence with this prompt and output, whose output may not end before `min_tokens`."""
        bias_tokens, biases = array("i", params.logit_bias.keys()), array("f", params.logit_bias.values())
        stops, seen = array("i", stop_ids), array("i", tokens)
        arrays = (bias_tokens, biases, stops, seen)
        given = CRowParams(
            seed=seed,
            temperature=0.0 if params.greedy else params.temperature,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            top_k=params.top_k,
            logprobs=-1 if params.logprobs is None else params.logprobs,
            prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
            min_tokens=params.min_tokens,
            prompt_len=prompt_len,
            num_biases=len(bias_tokens),
            num_stop_ids=len(stops),
            num_tokens=len(seen),
            **dict(
                zip(("bias_tokens", "biases", "stop_ids", "tokens"), (a.buffer_info()[0] for a in arrays), strict=True)
            ),
        )
        self._library.penstock_sampling_set(self.address, self._checked(row), ctypes.byref(given))

    def count(self, row: int, tokens: Sequence[int]) -> None:
        """Count output tokens that were not sampled by a step."""
        given = array("i", tokens)
        self._library.penstock_sampling_count(self.address, self._checked(row), given.buffer_info()[0], len(given))

    def _checked(self, row: int) -> int:
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} of {self.rows}")
        return row


class Scores:
    """Log-probabilities of the logits of one step, in memory that the step writes."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._buffer = ctypes.create_string_buffer(0)

    def reserve(self, rows: int) -> int:
        """Address of room for so many."""
        if rows * SCORE.size > len(self._buffer):
            self._buffer = ctypes.create_string_buffer(rows * SCORE.size)
        return ctypes.addressof(self._buffer)

    def read(self, index: int, token: int, alternatives: int) -> TokenLogprob:
        logprob, *top = SCORE.unpack_from(self._buffer, index * SCORE.size)
        count = min(alternatives, self._vocab_size)
        return TokenLogprob(token, logprob, tuple(zip(top[:count], top[MAX_LOGPROBS:], strict=False)))
