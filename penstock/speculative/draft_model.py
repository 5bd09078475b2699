"""Drafts by a smaller model with the same tokenizer, or by a rougher copy of the model itself.

It samples as the model does that verifies its drafts: with the parameters of the request, its seed and its positions.
Draws are a function of these and of the logits, so where the two models agree on those, they agree on samples, too.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from penstock.core.request import SamplingParams
from penstock.engine.executor import NO_ADAPTER, SAMPLED, Executor, RowSetup, Step
from penstock.engine.sequence import Sequence
from penstock.engine.step_time import StepShape, StepTimes
from penstock.speculative.acceptance import Acceptance

_PRIOR, _PRIOR_GUESSES = 0.8, 4.0  # share of guesses that are right, before anything is known
_SEQUENCE_MEMORY, _MEMORY = 32.0, 512.0  # guesses
_AT_ONCE = 16  # tokens that are computed before a draft without a thought; the least chunk of more than that
_CHUNK_MEMORY = 4.0  # chunks


@dataclass(frozen=True, slots=True)
class DraftLimits:
    rows: int  # sequences whose tokens its KV cache holds
    table_blocks: int  # of each: it has room for a whole sequence
    block_size: int
    max_step_tokens: int


@dataclass(slots=True, eq=False)
class Draft:
    """What the draft model holds of one sequence."""

    row: int
    adapter: int  # slot that its row was set up with
    computed: int = 0  # tokens of the sequence whose keys and values are in its cache
    begin: int = 0  # where the last draft stands in the sequence
    tokens: list[int] = field(default_factory=list)  # the last draft
    acceptance: Acceptance = field(default_factory=lambda: Acceptance(_SEQUENCE_MEMORY))


class ModelDrafter:
    """`tables`: the KV blocks of each row, as `Step.blocks` has them. `clock` gives the time in seconds: what drafting
    takes is measured."""

    def __init__(
        self,
        executor: Executor,
        limits: DraftLimits,
        tables: list[tuple[int, int, list[int]]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._executor = executor
        self._limits = limits
        self._clock = clock
        self._times = StepTimes()
        self._drafts: OrderedDict[Sequence, Draft] = OrderedDict()  # least recently used first
        self._free = list(range(limits.rows))
        self._tables = tables  # of the next step
        self._setups: list[RowSetup] = []
        self._acceptance = Acceptance(_MEMORY)
        self._context = 0  # tokens of a sequence, the last time
        self._token_seconds = 0.0  # of chunks; 0: not known yet

    def outlook(self, sequence: Sequence) -> float:
        if len(sequence.tokens) >= self._limits.table_blocks * self._limits.block_size:
            return 0.0
        known = self._acceptance.rate(_PRIOR, _PRIOR_GUESSES)
        draft = self._drafts.get(sequence)
        if draft is None:
            return known
        self._settle(draft, sequence.tokens)
        return draft.acceptance.rate(known, _PRIOR_GUESSES)

    def _settle(self, draft: Draft, tokens: list[int]) -> None:
        """Find out which tokens of the last draft were right."""
        came, right = tokens[draft.begin :], 0
        for guess, token in zip(draft.tokens, came, strict=False):
            draft.acceptance.add(guess == token)
            self._acceptance.add(guess == token)
            if guess != token:
                break
            right += 1
        draft.computed = min(draft.computed, draft.begin + right, len(tokens) - 1)
        draft.begin, draft.tokens = len(tokens), []

    def behind(self, sequence: Sequence) -> float | None:
        draft = self._drafts.get(sequence)
        missing = _missing(sequence, 0 if draft is None else draft.computed)
        return missing * self._token_seconds if missing > _AT_ONCE else None

    def catch_up(self, sequence: Sequence, decodes: list[Sequence], seconds: float) -> bool:
        draft = self._seat(sequence, decodes)
        if draft is None:
            return False
        fitting = int(seconds / self._token_seconds) if self._token_seconds else 0
        count = min(_missing(sequence, draft.computed), max(_AT_ONCE, fitting), self._limits.max_step_tokens)
        began = self._clock()
        self._compute(sequence, draft, count)
        each = (self._clock() - began) / count
        self._token_seconds += (each - self._token_seconds) / (_CHUNK_MEMORY if self._token_seconds else 1.0)
        return True

    def seconds(self, sequences: int) -> float:
        return self._times.predict(StepShape(sequences, sequences * self._context))

    def propose(self, sequences: list[Sequence], depths: list[int]) -> list[list[int]]:
        """One step for each depth, with all sequences that have not got as many tokens as they should."""
        seated = [self._seat(s, sequences) for s in sequences]
        wanted = zip(sequences, seated, depths, strict=True)
        going = [
            (s, draft, depth) for s, draft, depth in wanted if draft is not None and self._prepare(s, draft, depth)
        ]
        while going:
            self._decode([(s, draft) for s, draft, _ in going])
            going = [each for each in going if len(each[1].tokens) < each[2]]
        return [list(draft.tokens) if draft else [] for draft in seated]

    def _seat(self, sequence: Sequence, needed: list[Sequence]) -> Draft | None:
        """Its row; a new one if need be from whoever drafted the longest time ago. None: all are needed."""
        draft = self._drafts.get(sequence)
        if draft is None:
            if not self._free:
                victim = next((s for s in self._drafts if s not in needed), None)
                if victim is None:
                    return None
                self._free.append(self._drafts.pop(victim).row)
            draft = self._drafts[sequence] = Draft(self._free.pop(), NO_ADAPTER)
            self._set_up(sequence, draft)
        elif _penalised(sequence.request.params) or draft.adapter != self._adapter_slot(sequence):
            self._set_up(sequence, draft)  # rejected tokens have been counted, or it was preempted
        self._drafts.move_to_end(sequence)
        self._settle(draft, sequence.tokens)
        return draft

    def _adapter_slot(self, sequence: Sequence) -> int:
        """A draft model of its own has no adapters."""
        return NO_ADAPTER

    def _set_up(self, sequence: Sequence, draft: Draft) -> None:
        draft.adapter = self._adapter_slot(sequence)
        request = sequence.request
        params = replace(request.params, grammar=None, logprobs=None, prompt_logprobs=None)
        tokens, stops = tuple(sequence.tokens), tuple(sequence.stop_ids)
        setup = RowSetup(draft.row, params, request.seed, tokens, sequence.prompt_len, stops, draft.adapter)
        self._setups.append(setup)

    def _prepare(self, sequence: Sequence, draft: Draft, depth: int) -> bool:
        """Compute the few tokens that have come since its last draft. False: it has just got its row, or that has no
        room for so long a draft."""
        missing = _missing(sequence, draft.computed)
        room = self._limits.table_blocks * self._limits.block_size
        if missing > _AT_ONCE or len(sequence.tokens) - 1 + depth > room:
            return False
        if missing:
            self._compute(sequence, draft, missing)
        self._context = draft.computed
        return True

    def _compute(self, sequence: Sequence, draft: Draft, count: int) -> None:
        """The next so many of its tokens."""
        start, end = draft.computed, draft.computed + count
        shape = StepShape().with_chunk(start, count)
        self._run(Step([draft.row], [start], [count], [0], sequence.tokens[start:end]), shape)
        draft.computed = end

    def _decode(self, going: list[tuple[Sequence, Draft]]) -> None:
        ones = [1] * len(going)
        starts = [draft.computed for _, draft in going]
        tokens = [SAMPLED if draft.tokens else s.tokens[-1] for s, draft in going]
        step = Step([draft.row for _, draft in going], starts, ones, list(ones), tokens)
        sampled = self._run(step, StepShape(len(going), sum(starts)))
        for (_, draft), (token,) in zip(going, sampled, strict=True):
            draft.computed += 1
            draft.tokens.append(max(token, 0))  # where no logit is a number any draft will do

    def _run(self, step: Step, shape: StepShape) -> list[list[int]]:
        step.setups, self._setups = self._setups, []
        step.blocks, self._tables = self._tables, []
        began = self._clock()
        result = self._executor.collect(self._executor.launch(step))
        self._times.observe(shape, self._clock() - began)
        return result.tokens

    def forget(self, sequence: Sequence) -> None:
        if (draft := self._drafts.pop(sequence, None)) is not None:
            self._free.append(draft.row)


def _missing(sequence: Sequence, computed: int) -> int:
    """Tokens that are computed before a draft: all but the last one, with which the draft begins."""
    return len(sequence.tokens) - 1 - computed


def _penalised(params: SamplingParams) -> bool:
    return bool(params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty)
