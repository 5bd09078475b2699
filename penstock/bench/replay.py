"""An executor that computes every step and then gives the tokens of a recorded output instead of those it sampled.

Whether drafts are right is a matter of the text, and how long a step takes is not: with outputs that are given, random
weights measure speculative decoding as well as real ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.engine.executor import Executor, Step, StepResult, TokenMask


class Replay:
    """`outputs`: by the seed of the request."""

    def __init__(self, executor: Executor, outputs: Mapping[int, Sequence[int]]) -> None:
        self._executor = executor
        self._outputs = outputs
        self._rows: dict[int, tuple[Sequence[int], int]] = {}  # output, and where it begins
        self.num_blocks = executor.num_blocks
        self.runs_ahead = executor.runs_ahead
        self.mask_memory = executor.mask_memory
        self.idle_seconds: float | None = None  # that of the executor is known to whoever has it

    def padded_tokens(self, tokens: int) -> int:
        return self._executor.padded_tokens(tokens)

    def launch(self, step: Step) -> tuple[Step, list[tuple[Sequence[int], int]], Any]:
        for setup in step.setups:
            self._rows[setup.row] = self._outputs[setup.seed], setup.prompt_len
        return step, [self._rows[row] for row in step.rows], self._executor.launch(step)

    def constrain(self, handle: tuple[Step, Any, Any], masks: TokenMask) -> None:
        self._executor.constrain(handle[2], masks)

    def resample(self, handle: tuple[Step, Any, Any], masks: Mapping[int, TokenMask]) -> list[int]:
        return self._executor.resample(handle[2], masks)

    def collect(self, handle: tuple[Step, list[tuple[Sequence[int], int]], Any]) -> StepResult:
        step, replayed, inner = handle
        result = self._executor.collect(inner)
        first = 0
        for index, (output, begin) in enumerate(replayed):
            count, samples = step.counts[index], step.samples[index]
            draft = step.tokens[first + count - samples + 1 : first + count]
            position = step.starts[index] + count - samples + 1 - begin
            right = output[position : position + samples]
            result.tokens[index] = list(right[: 1 + _agreeing(draft, right)])
            first += count
        return result


def _agreeing(draft: Sequence[int], right: Sequence[int]) -> int:
    wrong = (at for at, (guess, token) in enumerate(zip(draft, right, strict=False)) if guess != token)
    return next(wrong, len(draft))
