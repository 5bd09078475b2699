"""What the next step computes: first-come-first-served within a priority, decoding before prefill, in fixed budgets.

`schedule` plans a step, `complete` takes its result. At most one step is in flight between the two, so a sequence may
be one sampled token ahead of what is known here (`Sequence.pending`).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from penstock.core.engine import EngineStats
from penstock.core.errors import ContextTooLong, InvalidRequest
from penstock.core.request import Chunk, FinishReason, GenerateRequest
from penstock.engine.block_pool import BlockPool
from penstock.engine.executor import SAMPLED, RowSetup, Step, StepResult
from penstock.engine.sequence import Sequence

_ORDER = attrgetter("order")

# Scoring a prompt takes logits at every position; this many at a time bounds the memory of tokens times vocabulary.
_SCORED_TOKENS = 256


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    num_blocks: int
    block_size: int
    max_seqs: int
    max_step_tokens: int
    max_model_len: int
    vocab_size: int
    eos_ids: frozenset[int] = frozenset()
    prefix_caching: bool = True

    @property
    def longest_sequence(self) -> int:
        return min(self.max_model_len, self.num_blocks * self.block_size)


@dataclass(slots=True)
class PlannedStep:
    """A step together with the sequences it advances; kept until its result comes back."""

    step: Step
    sequences: list[Sequence]


@dataclass(slots=True)
class Counters:
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    batch_tokens: int = 0
    batch_sequences: int = 0


class Scheduler:
    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks)
        self.running: list[Sequence] = []  # by order
        self.waiting: list[Sequence] = []  # by order; new, or preempted and to be recomputed
        self.counters = Counters()
        self._sequences: dict[str, Sequence] = {}
        self._free_rows = list(range(limits.max_seqs - 1, -1, -1))
        self._arrivals = 0
        self._setups: list[RowSetup] = []
        self._new_blocks: list[tuple[int, int, list[int]]] = []

    # -- requests in and out -----------------------------------------------------------------------------------------

    def validate(self, request: GenerateRequest) -> None:
        """Refuse what could never run. Reads only constants, so any thread may call it."""
        limits = self.limits
        if not request.prompt:
            raise InvalidRequest("the prompt is empty; send at least one token", param="prompt")
        if len(request.prompt) >= limits.longest_sequence:
            raise ContextTooLong(
                f"the prompt has {len(request.prompt)} tokens; this server holds at most {limits.longest_sequence} "
                "tokens per request, prompt and output together",
                param="prompt",
            )
        params = request.params
        for name, ids in (
            ("prompt", request.prompt),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
        ):
            if ids and not (min(ids) >= 0 and max(ids) < limits.vocab_size):
                raise InvalidRequest(f"{name} must hold token ids in 0..{limits.vocab_size - 1}", param=name)

    def add(self, request: GenerateRequest, now: float) -> None:
        limits, params = self.limits, request.params
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= limits.eos_ids
        max_new = params.max_tokens or limits.longest_sequence
        sequence = Sequence(
            request=request,
            order=(request.priority, self._arrivals),
            arrival=now,
            max_len=min(len(request.prompt) + max_new, limits.longest_sequence),
            stop_ids=stop_ids,
            tokens=list(request.prompt),
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )
        self._arrivals += 1
        self._sequences[request.id] = sequence
        insort(self.waiting, sequence, key=_ORDER)
        self.counters.prompt_tokens += sequence.prompt_len

    def abort(self, request_id: str) -> bool:
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._finish(sequence, "abort")
        return sequence is not None

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    # -- planning a step ---------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> PlannedStep | None:
        """Running sequences first, in order; what they leave of the budget goes to those waiting."""
        self._make_way()
        counts, preempted = self._plan_running()
        planned = PlannedStep(Step(), [])
        # From here on nothing is preempted, so what a planned sequence computes may be shared within the step.
        for sequence, count in counts.items():
            self._commit(planned, sequence, count)
        if not preempted:
            self._admit_waiting(planned, self.limits.max_step_tokens - sum(counts.values()), now)
        return self._finished(planned) if planned.sequences else None

    def _make_way(self) -> None:
        """A waiting sequence of a better priority displaces running ones of a worse priority."""
        while self.waiting and self.running and self.waiting[0].order[0] < self.running[-1].order[0]:
            if self._room_for(self.waiting[0]) is not None:
                return
            self._preempt(self.running[-1])

    def _plan_running(self) -> tuple[dict[Sequence, int], bool]:
        """How many tokens each running sequence computes, those with one to compute before those with more."""
        budget = self.limits.max_step_tokens
        counts: dict[Sequence, int] = {}
        preempted = False
        decodes = [s for s in self.running if s.known - s.computed == 1 and s.known < s.max_len]
        partial = [s for s in self.running if s.known - s.computed > 1]
        for sequence in decodes + partial:
            count = self._next_tokens(sequence, budget)
            if sequence.row < 0 or count == 0:
                continue
            missing = self._missing_blocks(sequence, sequence.computed + count)
            while missing > self.pool.available and sequence.row >= 0:
                victim = self.running[-1]
                self._preempt(victim)
                budget += counts.pop(victim, 0)
                preempted = True
            if sequence.row >= 0:
                self._allocate(sequence, missing)
                counts[sequence] = count
                budget -= count
        return counts, preempted

    def _admit_waiting(self, planned: PlannedStep, budget: int, now: float) -> None:
        while self.waiting and budget:
            sequence = self.waiting[0]
            hits = None if sequence.pending else self._room_for(sequence)
            if hits is None:
                return
            self._admit(sequence, hits, now)
            count = self._next_tokens(sequence, budget)
            self._allocate(sequence, self._missing_blocks(sequence, sequence.computed + count))
            self._commit(planned, sequence, count)
            budget -= count

    def _room_for(self, sequence: Sequence) -> list[int] | None:
        """The cached blocks a waiting sequence would start with, or None if its known tokens will not fit now."""
        if not self._free_rows:
            return None
        hits = self._cached_blocks(sequence)
        owed = sum(self._missing_blocks(s, s.known) for s in self.running)
        needed = self._missing_blocks(sequence, sequence.known) - len(hits)
        return hits if owed + needed <= self.pool.available - self.pool.evictable_among(hits) else None

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the beginning of this sequence. One token at least is left to compute, to have logits."""
        if not self.limits.prefix_caching or sequence.prompt_logprobs is not None:
            return []
        full = (len(sequence.tokens) - 1) // self.limits.block_size
        return self.pool.match(sequence.block_hashes(self.limits.block_size, full))

    def _admit(self, sequence: Sequence, hits: list[int], now: float) -> None:
        del self.waiting[0]
        insort(self.running, sequence, key=_ORDER)
        self.pool.acquire(hits)
        sequence.blocks = hits
        sequence.shared = len(hits)
        sequence.computed = len(hits) * self.limits.block_size
        sequence.row = self._free_rows.pop()
        if sequence.started is None:
            sequence.started = now
            sequence.cached_tokens = sequence.computed
            self.counters.cached_tokens += sequence.computed
        request = sequence.request
        self._setups.append(
            RowSetup(
                row=sequence.row,
                params=request.params,
                seed=request.seed,
                tokens=tuple(sequence.tokens),
                prompt_len=sequence.prompt_len,
                stop_ids=tuple(sequence.stop_ids),
            )
        )
        if hits:
            self._new_blocks.append((sequence.row, 0, list(hits)))

    def _next_tokens(self, sequence: Sequence, budget: int) -> int:
        remaining = min(sequence.known - sequence.computed, budget)
        return remaining if sequence.prompt_logprobs is None else min(remaining, _SCORED_TOKENS)

    def _missing_blocks(self, sequence: Sequence, tokens: int) -> int:
        return max(0, -(-tokens // self.limits.block_size) - len(sequence.blocks))

    def _allocate(self, sequence: Sequence, count: int) -> None:
        if count:
            blocks = self.pool.allocate(count)
            self._new_blocks.append((sequence.row, len(sequence.blocks), blocks))
            sequence.blocks.extend(blocks)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to waiting; everything known is kept and its cache recomputed, or hit, when it comes back."""
        self._release(sequence)
        insort(self.waiting, sequence, key=_ORDER)
        self.counters.preemptions += 1

    def _commit(self, planned: PlannedStep, sequence: Sequence, count: int) -> None:
        """Write a sequence into the step and move its books to after the step."""
        step, start = planned.step, sequence.computed
        planned.sequences.append(sequence)
        step.rows.append(sequence.row)
        step.starts.append(start)
        step.counts.append(count)
        tokens = sequence.tokens[start : start + count]
        step.tokens.extend(tokens)
        if len(tokens) < count:
            step.tokens.append(SAMPLED)
        sequence.computed += count
        caught_up = sequence.computed == sequence.known
        step.samples.append(caught_up)
        if caught_up:
            sequence.pending += 1
        self._share_full_blocks(sequence)

    def _finished(self, planned: PlannedStep) -> PlannedStep:
        step = planned.step
        step.setups, step.blocks = self._setups, self._new_blocks
        self._setups, self._new_blocks = [], []
        self.counters.steps += 1
        self.counters.batch_tokens += len(step.tokens)
        self.counters.batch_sequences += len(step.rows)
        return planned

    def _share_full_blocks(self, sequence: Sequence) -> None:
        """Offer blocks whose tokens are known and computed, or being computed by a launched step, for sharing."""
        if not self.limits.prefix_caching:
            return
        full = min(sequence.computed, len(sequence.tokens)) // self.limits.block_size
        if full > sequence.shared:
            hashes = sequence.block_hashes(self.limits.block_size, full)
            for index in range(sequence.shared, full):
                self.pool.share(sequence.blocks[index], hashes[index])
            sequence.shared = full

    # -- taking a result ---------------------------------------------------------------------------------------------

    def complete(self, planned: PlannedStep, result: StepResult) -> list[Chunk]:
        """Append what was sampled, end what is done, and say what happened to each request."""
        chunks = []
        for index, sequence in enumerate(planned.sequences):
            if sequence.finished is not None:
                continue
            if index in result.prompt_logprobs and sequence.prompt_logprobs is not None:
                known = len(sequence.prompt_logprobs)  # a recomputed prompt gives its logprobs again
                skip = known - (planned.step.starts[index] + 1)
                sequence.prompt_logprobs.extend(result.prompt_logprobs[index][skip:])
            if planned.step.samples[index]:
                chunks.append(self._append(sequence, result.tokens[index], result, index))
        return chunks

    def _append(self, sequence: Sequence, token: int, result: StepResult, index: int) -> Chunk:
        first = len(sequence.tokens) == sequence.prompt_len
        sequence.pending -= 1
        sequence.tokens.append(token)
        self.counters.output_tokens += 1
        if sequence.row >= 0:
            self._share_full_blocks(sequence)
        chunk = Chunk(sequence.request.id, [token])
        if first:
            chunk.cached_tokens = sequence.cached_tokens
            chunk.queue_seconds = (sequence.started or sequence.arrival) - sequence.arrival
            chunk.prompt_logprobs = sequence.prompt_logprobs
        if index in result.logprobs:
            chunk.logprobs = [result.logprobs[index]]
        outputs = len(sequence.tokens) - sequence.prompt_len
        if token in sequence.stop_ids and outputs >= sequence.request.params.min_tokens:
            chunk.finish_reason = "stop"
        elif len(sequence.tokens) >= sequence.max_len:
            chunk.finish_reason = "length"
        if chunk.finish_reason is not None:
            self._finish(sequence, chunk.finish_reason)
        return chunk

    def fail(self, steps: Iterable[PlannedStep], message: str) -> list[Chunk]:
        """These steps were lost and cache contents with them: their sequences end, all others start over."""
        lost = list({s: None for planned in steps for s in planned.sequences if s.finished is None})
        for sequence in lost:
            self._finish(sequence, "error")
        for sequence in list(self.running):
            self._preempt(sequence)
        self.pool.forget()
        return [Chunk(s.request.id, finish_reason="error", error=message) for s in lost]

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finished = reason
        del self._sequences[sequence.request.id]
        if sequence.row >= 0:
            self._release(sequence)
        else:
            self.waiting.remove(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence.blocks)
        self._free_rows.append(sequence.row)
        sequence.blocks = []
        sequence.shared = sequence.computed = 0
        sequence.row = -1

    # -- observation -------------------------------------------------------------------------------------------------

    def stats(self, seconds_since_step: float = 0.0) -> EngineStats:
        counters = self.counters
        return EngineStats(
            running=len(self.running),
            waiting=len(self.waiting),
            kv_blocks=self.pool.num_blocks,
            kv_blocks_used=self.pool.used,
            steps=counters.steps,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            output_tokens=counters.output_tokens,
            preemptions=counters.preemptions,
            batch_tokens=counters.batch_tokens,
            batch_sequences=counters.batch_sequences,
            seconds_since_step=seconds_since_step,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks, rows and sequences add up."""
        held: dict[int, int] = {}
        for block in _chain(s.blocks for s in self.running):
            held[block] = held.get(block, 0) + 1
        self.pool.check_integrity(held)
        rows = self._free_rows + [s.row for s in self.running]
        assert sorted(rows) == list(range(self.limits.max_seqs)), "rows were lost or given out twice"
        assert len(self.running) + len(self.waiting) == len(self._sequences), "a sequence was lost"
        assert all(not s.blocks and s.row < 0 for s in self.waiting), "a waiting sequence holds memory"


def _chain(lists: Iterable[list[int]]) -> Iterable[int]:
    for items in lists:
        yield from items
