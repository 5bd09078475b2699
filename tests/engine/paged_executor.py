"""An executor that computes nothing but honours the cache: it stores token ids in the slots that a step assigns and
samples from what it reads back through the block tables. If blocks are shared, freed or reused wrongly, it samples
something else than `expected_output` says, or finds a slot that nobody wrote."""

from __future__ import annotations

import random
from collections.abc import Sequence

from penstock.engine.executor import SAMPLED, Step, StepResult

VOCAB = 50
EOS = 7


def next_token(context: Sequence[int], seed: int) -> int:
    return random.Random(hash((tuple(context), seed))).randrange(VOCAB)


def expected_output(prompt: Sequence[int], seed: int, max_tokens: int, stop: frozenset[int]) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(tokens, seed))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


class PagedExecutor:
    idle_seconds = None

    def __init__(self, num_blocks: int, block_size: int, *, runs_ahead: bool = True) -> None:
        self.runs_ahead = runs_ahead
        self.num_blocks = num_blocks
        self._block_size = block_size
        self._slots: dict[int, int] = {}
        self._tables: dict[int, dict[int, int]] = {}
        self._seeds: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self.fail_next = False

    def padded_tokens(self, tokens: int) -> int:
        return tokens

    def launch(self, step: Step) -> StepResult:
        """Computes at once: a result exists before it is collected, as on a device that runs ahead."""
        assert len(step.rows) == len(set(step.rows)), "a row appears twice in a step"
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("device lost")
        for setup in step.setups:
            self._seeds[setup.row] = setup.seed
            self._tables[setup.row] = {}
        for row, index, blocks in step.blocks:
            for offset, block in enumerate(blocks):
                self._tables[row][index + offset] = block
        offset = 0
        written: set[int] = set()
        for row, start, count in zip(step.rows, step.starts, step.counts, strict=True):
            for position, token in enumerate(step.tokens[offset : offset + count], start):
                slot = self._slot(row, position)
                assert slot not in written, "two sequences write one slot in a step"
                written.add(slot)
                self._slots[slot] = self._last[row] if token == SAMPLED else token
            offset += count
        tokens = []
        for row, start, count, samples in zip(step.rows, step.starts, step.counts, step.samples, strict=True):
            tokens.append(-1)
            if samples:
                context = [self._slots[self._slot(row, position)] for position in range(start + count)]
                tokens[-1] = self._last[row] = next_token(context, self._seeds[row])
        return StepResult(tokens)

    def _slot(self, row: int, position: int) -> int:
        return self._tables[row][position // self._block_size] * self._block_size + position % self._block_size

    def collect(self, handle: StepResult) -> StepResult:
        return handle
