"""An executor that computes nothing but honours the cache: it stores token ids in the slots that a step assigns and
samples from what it reads back through the block tables. If blocks are shared, freed or reused wrongly, it samples
something else than `expected_output` says, or finds a slot that nobody wrote. What it samples depends on the LoRA
adapter that is in the row's adapter slot, too.

One request:

    loop = EngineLoop(Scheduler(limits), PagedExecutor(limits.num_blocks, limits.block_size), chunks.extend)
    loop.submit(GenerateRequest("r", prompt, SamplingParams(max_tokens=5, ignore_eos=True)))
    while loop.step():
        pass
    assert [t for c in chunks for t in c.token_ids] == expected_output(prompt, 0, 5, frozenset())
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from penstock.engine.executor import (
    NO_ADAPTER,
    SAMPLED,
    UNDECIDED,
    RowSetup,
    Step,
    StepResult,
    TokenMask,
    masks_by_sequence,
)

VOCAB = 50
EOS = 7


def next_token(
    context: Sequence[int],
    prompt_len: int,
    seed: int,
    forbidden: Collection[int] = (),
    allowed: Collection[int] = range(VOCAB),
) -> int:
    """Depends on what is prompt and what is output too, as penalties do."""
    draw, choices = random.Random(hash((tuple(context), prompt_len, seed))), set(allowed).difference(forbidden)
    while (token := draw.randrange(VOCAB)) not in choices and choices:
        pass
    return token


def seed_with(seed: int, adapter: str) -> int:
    """The seed to expect a request's output by, whose LoRA adapter has this digest; "" for none."""
    return hash((seed, adapter)) if adapter else seed


def expected_output(
    prompt: Sequence[int], seed: int, max_tokens: int, stop: frozenset[int], min_tokens: int = 0
) -> list[int]:
    tokens, first = list(prompt), len(prompt)
    while len(tokens) < first + max_tokens:
        tokens.append(next_token(tokens, first, seed, stop if len(tokens) - first < min_tokens else ()))
        if tokens[-1] in stop and len(tokens) - first >= min_tokens:
            break
    return tokens[first:]


class PagedExecutor:
    """`fail_next`: the next step fails, as if the device were lost."""

    idle_seconds: float | None = None
    mask_memory: TokenMask | None = None

    def __init__(self, num_blocks: int, block_size: int, *, runs_ahead: bool = True) -> None:
        self.runs_ahead = runs_ahead
        self.num_blocks = num_blocks
        self._block_size = block_size
        self._slots: dict[int, tuple[int, str]] = {}  # token, and the adapter that it was computed with
        self._adapters = {NO_ADAPTER: ""}
        self._tables: dict[int, dict[int, int]] = {}
        self._setups: dict[int, RowSetup] = {}
        self._last: dict[int, int] = {}
        self._outputs: dict[int, list[int]] = {}  # of each row, as a device that counts them for penalties knows them
        self._sampled_unmasked: set[int] = set()  # rows, which so may count tokens that were refused
        self._launched = Step()
        self.fail_next = False

    def padded_tokens(self, tokens: int) -> int:
        return tokens

    def launch(self, step: Step) -> StepResult:
        """Computes at once: a result exists before it is collected, as on a device that runs ahead."""
        assert len(step.rows) == len(set(step.rows)), "a row appears twice in a step"
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("device lost")
        self._adapters |= {slot: adapter.digest for slot, adapter in step.adapters}
        for setup in step.setups:
            self._setups[setup.row] = setup
            self._tables[setup.row] = {}
            self._outputs[setup.row] = list(setup.tokens[setup.prompt_len :])
            self._sampled_unmasked.discard(setup.row)
        for row, tokens in step.forced:
            self._outputs[row] += tokens
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
                self._slots[slot] = self._last[row] if token == SAMPLED else token, self._adapter(row)
            offset += count
        self._launched, waiting = step, set(step.constrained)
        result = StepResult([[] if i in waiting else self._sample(i) for i in range(len(step.rows))])
        for index in step.checked:
            if result.tokens[index][0] % 5 == 0:
                result.tokens[index] = [UNDECIDED]
            if self.runs_ahead:
                self._sampled_unmasked.add(step.rows[index])
        return result

    def _sample(self, index: int, mask: TokenMask | None = None) -> list[int]:
        """After each of the last `samples` tokens, as long as the token that follows is the one that was sampled."""
        step = self._launched
        row, samples = step.rows[index], step.samples[index]
        setup, sampled, end = self._setups[row], list[int](), step.starts[index] + step.counts[index]
        cached = [self._slots[self._slot(row, position)] for position in range(end)] if samples else []
        context, adapter = [token for token, _ in cached], self._adapter(row)
        assert all(used == adapter for _, used in cached), "KV was computed with another adapter"
        seed = seed_with(setup.seed, adapter)
        for depth, length in enumerate(range(end - samples + 1, end + 1)):
            early = length - setup.prompt_len < setup.params.min_tokens
            forbidden = setup.stop_ids if early else ()
            allowed = range(VOCAB) if mask is None else _tokens_of(np.atleast_2d(mask)[depth])
            token = next_token(context[:length], setup.prompt_len, seed, forbidden, allowed)
            counted = self._outputs[row] == context[setup.prompt_len : length] or row in self._sampled_unmasked
            assert counted, "penalties would count other tokens"
            self._outputs[row].append(token)
            sampled.append(token)
            self._last[row] = token
            if length < end and context[length] != token:
                break
        return sampled

    def _adapter(self, row: int) -> str:
        return self._adapters[self._setups[row].adapter]

    def _slot(self, row: int, position: int) -> int:
        return self._tables[row][position // self._block_size] * self._block_size + position % self._block_size

    def constrain(self, handle: StepResult, masks: TokenMask) -> None:
        for index, own in masks_by_sequence(self._launched, masks).items():
            handle.tokens[index] = self._sample(index, own)

    def collect(self, handle: StepResult) -> StepResult:
        return handle

    def resample(self, handle: StepResult, masks: Mapping[int, TokenMask]) -> list[int]:
        for index in masks:
            assert index in self._launched.checked, "its logits may have been changed"
            self._outputs[self._launched.rows[index]].pop()
        return [self._sample(index, mask)[0] for index, mask in masks.items()]


def _tokens_of(mask: TokenMask) -> Collection[int]:
    tokens: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB]).tolist()
    return tokens
