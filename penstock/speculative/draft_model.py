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

    def outlook(self, sequence: Sequence) -> float:
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

    def seconds(self, sequences: int) -> float:
        return self._times.predict(StepShape(sequences, sequences * self._context))

    def propose(self, sequences: list[Sequence], depths: list[int]) -> list[list[int]]:
        """One step for each depth, with all sequences that have not got as many tokens as they should."""
        seated = [self._seat(s, sequences) for s in sequences]
        wanted = zip(sequences, seated, depths, strict=True)
        going = [
            (s, draft, depth) for s, draft, depth in wanted if draft is not None and self._catch_up(s, draft, depth)
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

    def _catch_up(self, sequence: Sequence, draft: Draft, depth: int) -> bool:
        """Compute what it has not seen but the last token. False: a row has no room for it and so long a draft."""
        limits, last = self._limits, len(sequence.tokens) - 1
        if last + depth > limits.table_blocks * limits.block_size:
            return False
        while draft.computed < last:
            end = min(last, draft.computed + limits.max_step_tokens)
            count = end - draft.computed
            chunk = sequence.tokens[draft.computed : end]
            shape = StepShape().with_chunk(draft.computed, count)
            self._run(Step([draft.row], [draft.computed], [count], [0], chunk), shape)
            draft.computed = end
        self._context = draft.computed
        return True

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


def _penalised(params: SamplingParams) -> bool:
    return bool(params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty)
