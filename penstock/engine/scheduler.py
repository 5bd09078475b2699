"""What the next step computes: streams keep their pace, and the rest of the step goes to the most urgent prompts.

`schedule` plans a step, `complete` takes its result. At most one step is in flight between the two, so a sequence may
be one sampled token ahead of what is known here (`Sequence.pending`). Time is always passed in: the same scheduler runs
on a virtual clock.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from operator import attrgetter

from penstock.core.engine import EngineStats
from penstock.core.errors import Overloaded
from penstock.core.ledger import Ledger
from penstock.core.request import Chunk, FinishReason, GenerateRequest, Objective
from penstock.engine import bookkeeping as books
from penstock.engine.admission import Admission, Load, remaining_seconds
from penstock.engine.executor import StepResult
from penstock.engine.fairness import Accounts
from penstock.engine.forecast import needed_share, step_limit
from penstock.engine.limits import SchedulerLimits
from penstock.engine.placement import Placement
from penstock.engine.planned_step import PlannedStep
from penstock.engine.sequence import Sequence
from penstock.engine.step_time import StepShape, StepTimes
from penstock.engine.urgency import Ranking, WaitingQueue, demote_if_late, patience

_ORDER = attrgetter("order")

# Scoring a prompt takes logits at every position; this many at a time bounds the memory of tokens times vocabulary.
_SCORED_TOKENS = 256
_ALLOWANCE = 1024  # cost that a tenant may be ahead by, unless a step is smaller
_PLAN_AHEAD = (0.3, 0.005)  # share of the step under way, and seconds, that are left of it when the next one is planned
_PACED_PROMPTS = 64  # with more prompts than this at hand there is no point in asking how fast they must be computed
_NOTHING = Objective()


@dataclass(slots=True)
class Counts:
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    batch_tokens: int = 0
    batch_sequences: int = 0
    refused: int = 0
    expired: int = 0


class Scheduler:
    def __init__(self, limits: SchedulerLimits, times: StepTimes | None = None) -> None:
        self.limits = limits
        self.times = times or StepTimes()
        self._placement = Placement(limits)
        self.pool = self._placement.pool
        self.running: list[Sequence] = []  # by order
        self.waiting = WaitingQueue()  # new, or preempted and to be recomputed
        self.counters = Counts()
        self._sequences: dict[str, Sequence] = {}
        self._arrivals = 0
        self._accounts = Accounts(min(_ALLOWANCE, limits.max_step_tokens))
        self._admission = Admission(self.times)
        self._clock = books.QueueClock()
        self._deadlines: list[tuple[float, int, Sequence]] = []  # heap
        self._notices: list[Chunk] = []  # of requests that ended outside a step
        self._in_flight: deque[PlannedStep] = deque()
        self._last_done = 0.0
        self._now = 0.0

    # -- requests in and out -----------------------------------------------------------------------------------------

    def add(self, request: GenerateRequest, now: float) -> None:
        """Raises Overloaded for work whose objective cannot be met, and when too much is waiting already."""
        limits, params = self.limits, request.params
        if len(self.waiting) >= limits.max_waiting:
            self.counters.refused += 1
            raise Overloaded(f"{len(self.waiting)} requests are waiting already", retry_after=self._queue_seconds())
        objective = _NOTHING if limits.fcfs else request.objective
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= limits.eos_ids
        max_new = params.max_tokens or limits.longest_sequence
        sequence = Sequence(
            request=request,
            order=(objective.rank, request.priority, self._arrivals),
            arrival=now,
            max_len=min(len(request.prompt) + max_new, limits.longest_sequence),
            stop_ids=stop_ids,
            tokens=list(request.prompt),
            prompt_len=len(request.prompt),
            account=self._accounts.enter("" if limits.fcfs else request.tenant, request.weight),
            ledger=books.open_ledger(request),
            due=now,  # first come, first served, unless it is set below
            promised=objective.ttft is not None,
            gap=objective.gap or math.inf,
            paced=objective.paced,
            to_compute=len(request.prompt),
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
            mark=now,
        )
        if not limits.fcfs:
            sequence.to_compute -= len(self._placement.cached_blocks(sequence)) * limits.block_size
            sequence.due += objective.ttft or patience(remaining_seconds(sequence, self.times))
        if objective.ttft is not None or request.deadline is not None:
            try:
                self._admission.admit(sequence, objective, self._load(now))
            except Overloaded:
                self._accounts.leave(sequence.account)
                self.counters.refused += 1
                raise
        self._arrivals += 1
        self._sequences[request.id] = sequence
        self.waiting.push(sequence)
        self._clock.arrive(sequence)
        self.counters.prompt_tokens += sequence.prompt_len
        if request.deadline is not None:
            heappush(self._deadlines, (now + request.deadline, sequence.order[2], sequence))

    def _load(self, now: float) -> Load:
        prompts = [*self.waiting, *(s for s in self.running if s.known - s.computed > 1)]
        decodes = self._decode_shape()
        return Load(self._ranking(now), prompts, decodes, self._longest_step(self.running, decodes), self._free_at(now))

    def _longest_step(self, streams: Collection[Sequence], decodes: StepShape) -> float:
        """Seconds that a step may be planned to take beside these streams."""
        longest = self.times.plan_within(min((s.gap for s in streams), default=math.inf))
        return min(longest, self.times.pace(decodes)) if any(s.paced for s in streams) else longest

    def _free_at(self, now: float) -> float:
        """When the steps under way will have ended."""
        end = self._last_done
        for planned in self._in_flight:
            end = max(end, planned.planned) + self.times.predict(planned.shape)
        return max(end, now)

    def _queue_seconds(self) -> float:
        """About how long all that is waiting takes to prefill; at least a second."""
        return max(1.0, sum(self.times.chunk_seconds(0, s.to_compute) for s in self.waiting))

    def abort(self, request_id: str, now: float) -> Chunk | None:
        """Its last chunk; None if it has ended already."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        return Chunk(request_id, finish_reason="abort", ledger=self._finish(sequence, "abort", now))

    def take_notices(self) -> list[Chunk]:
        """Last chunks of requests that ended outside a step."""
        notices, self._notices = self._notices, []
        return notices

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def in_flight(self) -> list[StepShape]:
        """Steps planned whose results are not there yet."""
        return [planned.shape for planned in self._in_flight]

    def plan_at(self) -> float:
        """When the next step should be planned: early enough to be launched before the one under way ends, but late,
        so that those who arrive meanwhile are in it. A step without a limit is followed at once."""
        if not self._in_flight or not self._in_flight[-1].limited:
            return 0.0
        planned = self._in_flight[-1]
        seconds, (share, least) = self.times.predict(planned.shape), _PLAN_AHEAD
        return max(self._last_done, planned.planned) + seconds - max(share * seconds, least)

    # -- planning a step ---------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> PlannedStep | None:
        """Streams first, a token each; then the most urgent prompts, for as long as the step may take."""
        self._now = now
        self._expire(now)
        self._clock.tick(now)
        ranking = self._ranking(now)
        self._make_way(ranking)
        preemptions = self.counters.preemptions
        decodes = self._plan_decodes()
        prompts = self._plan_prompts(ranking)
        # From here on nothing is preempted, so what a planned sequence computes may be shared within the step.
        planned, size = PlannedStep(now), self.limits.block_size
        planned.decode([s for s in decodes if s.row >= 0])
        for s in planned.sequences:
            if s.computed // size > s.shared:
                self._placement.share_full_blocks(s)
        self._fill(planned, prompts, ranking, admit=self.counters.preemptions == preemptions)
        return self._finished(planned) if planned.sequences else None

    def _ranking(self, now: float) -> Ranking:
        classes = [self.waiting.best_class, self.running[0].order[:2] if self.running else None]
        best = min((c for c in classes if c is not None), default=(0, 0))
        return Ranking(now, self._accounts.leads(), best)

    def _expire(self, now: float) -> None:
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][2].finished is not None):
            _, _, sequence = heappop(self._deadlines)
            if sequence.finished is None:
                self.counters.expired += 1
                message = f"the deadline passed after {sequence.outputs} tokens"
                ledger = self._finish(sequence, "deadline", now)
                self._notices.append(Chunk(sequence.request.id, finish_reason="deadline", error=message, ledger=ledger))

    def _make_way(self, ranking: Ranking) -> None:
        """The most urgent request displaces running ones that may wait, those with the least work to lose first."""
        head = self.waiting.first(ranking, self.times) if self.running else None
        if head is None or head.pending:
            return
        rank, priority, lead, _, _ = ranking.of(head)
        may_wait = [
            s
            for s in self.running
            if s.order[:2] > (rank, priority)
            or (head.promised and s.order[:2] == (rank, priority) and ranking.leads.get(s.account, 0) > lead)
        ]
        may_wait.sort(key=attrgetter("computed"))
        for sequence in may_wait:
            owed = self._placement.owed(self.running)
            if self._placement.room_for(head, owed, leads=lead > 0) is not None:
                return
            self._preempt(sequence)

    def _plan_decodes(self) -> list[Sequence]:
        """Those with one token to compute, with a block for it."""
        size, budget = self.limits.block_size, self.limits.max_step_tokens
        decodes = []
        for s in list(self.running):
            known = len(s.tokens) + s.pending
            if known - s.computed != 1 or known >= s.max_len or s.row < 0:
                continue
            if budget == 0:
                break
            if s.computed >= len(s.blocks) * size and not self._grow(s, s.computed + 1):
                continue
            decodes.append(s)
            budget -= 1
        return decodes

    def _plan_prompts(self, ranking: Ranking) -> list[Sequence]:
        """Running sequences with more to compute, the most urgent last. That one has blocks for all it knows."""
        prompts = [s for s in self.running if len(s.tokens) + s.pending - s.computed > 1]
        for sequence in prompts:
            demote_if_late(sequence, ranking.now, self.times)
        prompts.sort(key=ranking.of, reverse=True)
        while prompts and not self._grow(prompts[-1], prompts[-1].known):
            prompts = [s for s in prompts if s.row >= 0]
        return [s for s in prompts if s.row >= 0]

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Give it blocks for this many tokens, if need be from those that come later. False: it had to go itself."""
        missing = self._placement.missing_blocks(sequence, tokens)
        while missing > self.pool.available:
            later = [s for s in self.running if s.order > sequence.order]
            victim = min(later, key=attrgetter("computed"), default=sequence)
            self._preempt(victim)
            if victim is sequence:
                return False
        self._placement.allocate(sequence, tokens)
        return True

    def _fill(self, planned: PlannedStep, prompts: list[Sequence], ranking: Ranking, *, admit: bool) -> None:
        """Give what is left of the step to prompts, running or waiting, in order of urgency."""
        budget = self.limits.max_step_tokens - len(planned.sequences)
        limit = self._step_limit(planned, prompts, ranking.now)
        planned.limited = limit < math.inf
        missing, seats = self._placement.missing_blocks, self._placement.has_free_row
        owed = self._placement.owed(self.running) if admit and self.waiting and seats else 0
        self._clock.blocked_by("order")
        while budget > 0:
            sequence = self.waiting.first(ranking, self.times) if admit else None
            if prompts and (sequence is None or ranking.of(prompts[-1]) < ranking.of(sequence)):
                sequence = prompts[-1]
            if sequence is None:
                return
            runs = sequence.row >= 0
            leads = bool(ranking.leads.get(sequence.account))
            hits = [] if runs else self._placement.room_for(sequence, owed, leads=leads)
            if hits is None:
                self._clock.blocked_by("memory" if self._placement.has_free_row else "rows")
                admit = False
                continue
            start = sequence.computed + len(hits) * self.limits.block_size
            count = self._fitting(planned, sequence, start, budget, limit)
            if count == 0:
                return
            if runs:
                owed -= missing(sequence, sequence.known)
                prompts.pop()
            else:
                self._admit(sequence, hits, ranking.now)
            self._placement.allocate(sequence, start + count)
            planned.compute(sequence, count)
            self._placement.share_full_blocks(sequence)
            owed += missing(sequence, sequence.known)
            budget -= count

    def _step_limit(self, planned: PlannedStep, prompts: list[Sequence], now: float) -> float:
        """Seconds that this step may take."""
        if not (prompts or self.waiting):
            return math.inf
        longest = self._longest_step(planned.sequences, planned.shape)
        ttft = self._admission.tightest_ttft(now)
        if longest == ttft == math.inf:
            return math.inf
        pending = [*prompts, *self.waiting] if len(self.waiting) <= _PACED_PROMPTS else []
        share = math.inf
        if pending and all(s.promised for s in pending):
            share = needed_share(sorted((s.due, remaining_seconds(s, self.times)) for s in pending), now)
        return step_limit(longest, ttft, self.times.base_seconds(planned.shape), share)

    def _fitting(self, planned: PlannedStep, sequence: Sequence, start: int, budget: int, limit: float) -> int:
        """How many tokens of a prompt still fit into the step."""
        most = min(sequence.known - start, budget)
        if sequence.prompt_logprobs is not None:
            most = min(most, _SCORED_TOKENS)
        if sequence.row >= 0:
            most = min(most, (len(sequence.blocks) + self.pool.available) * self.limits.block_size - start)
        count = self.times.tokens_within(planned.shape, start, most, limit)
        if count == most:
            return count
        count -= count % self.limits.query_tile
        if not planned.shape.prefill:
            return max(count, min(most, self.limits.least_prefill))
        return count if count >= self.limits.block_size else 0  # crumbs cost a step's overhead each

    def _admit(self, sequence: Sequence, hits: list[int], now: float) -> None:
        self.waiting.remove(sequence)
        self._clock.leave(sequence, now)
        insort(self.running, sequence, key=_ORDER)
        cached = len(hits) * self.limits.block_size
        if sequence.started is None:
            sequence.started = now
            sequence.ledger.cached_tokens = cached
            self.counters.cached_tokens += cached
            books.missed(sequence, self.limits.block_size, self._placement.miss_cause(sequence, len(hits)))
        else:
            sequence.ledger.recomputed_tokens += max(0, sequence.lost - cached)
        self._placement.seat(sequence, hits)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to waiting; everything known is kept and its cache recomputed, or hit, when it comes back."""
        sequence.ledger.preemptions += 1
        sequence.lost = sequence.computed
        self._leave(sequence)
        if sequence.outputs:
            sequence.due, sequence.promised = self._now, False  # a reader is waiting for its next token
        self.waiting.push(sequence)
        self.counters.preemptions += 1

    def _finished(self, planned: PlannedStep) -> PlannedStep:
        step = planned.step
        self._placement.write_into(step)
        self.counters.steps += 1
        self.counters.batch_tokens += len(step.tokens)
        self.counters.batch_sequences += len(step.rows)
        self._in_flight.append(planned)
        return planned

    # -- taking a result ---------------------------------------------------------------------------------------------

    def complete(self, planned: PlannedStep, result: StepResult, now: float) -> list[Chunk]:
        """Append what was sampled, end what is done, and say what happened to each request."""
        usual = self._learn(planned, now)
        step, culprit = planned.step, planned.culprit
        chunks = []
        for index, sequence in enumerate(planned.sequences):
            if sequence.finished is not None:
                continue
            if sequence.first_token is not None:
                books.decoded(sequence, usual, culprit, now)
            else:
                books.computed(sequence, step.counts[index], now)
            if sequence.prompt_logprobs is not None and index in result.prompt_logprobs:
                known = len(sequence.prompt_logprobs)  # a recomputed prompt gives its logprobs again
                skip = known - (step.starts[index] + 1)
                sequence.prompt_logprobs.extend(result.prompt_logprobs[index][skip:])
            if step.samples[index]:
                chunks.append(self._append(sequence, result.tokens[index], result, index, now))
        books.passed_over(self.running, culprit, now)
        self.counters.output_tokens += len(chunks)
        return chunks

    def _learn(self, planned: PlannedStep, now: float) -> float:
        """Teach the step-time model; returns how long the step would have taken without its prompts."""
        self._in_flight.remove(planned)
        self.times.observe(planned.shape, now - max(planned.planned, self._last_done))
        self._last_done = now
        shape = planned.shape
        return self.times.predict(shape.without_prefill()) if shape.prefill and shape.decodes else math.inf

    def _append(self, sequence: Sequence, token: int, result: StepResult, index: int, now: float) -> Chunk:
        tokens = sequence.tokens
        sequence.pending -= 1
        tokens.append(token)
        if sequence.row >= 0 and len(tokens) // self.limits.block_size > sequence.shared:
            self._placement.share_full_blocks(sequence)
        chunk = Chunk(sequence.request.id, [token])
        if sequence.first_token is None:
            sequence.first_token = now
            self._admission.learn(sequence, now)
            chunk.cached_tokens = sequence.ledger.cached_tokens
            chunk.queue_seconds = (sequence.started or sequence.arrival) - sequence.arrival
            chunk.prompt_logprobs = sequence.prompt_logprobs
        elif now - sequence.last_token > sequence.gap:
            sequence.late_gaps += 1
        sequence.last_token = now
        if result.logprobs and index in result.logprobs:
            chunk.logprobs = [result.logprobs[index]]
        if token in sequence.stop_ids and sequence.outputs >= sequence.request.params.min_tokens:
            chunk.finish_reason = "stop"
        elif len(tokens) >= sequence.max_len:
            chunk.finish_reason = "length"
        if chunk.finish_reason is not None:
            chunk.ledger = self._finish(sequence, chunk.finish_reason, now)
        return chunk

    def fail(self, steps: Iterable[PlannedStep], message: str, now: float) -> list[Chunk]:
        """These steps were lost and cache contents with them: their sequences end, all others start over."""
        self._in_flight.clear()
        lost = list({s: None for planned in steps for s in planned.sequences if s.finished is None})
        chunks = []
        for s in lost:
            ledger = self._finish(s, "error", now)
            chunks.append(Chunk(s.request.id, finish_reason="error", error=message, ledger=ledger))
        for sequence in list(self.running):
            self._preempt(sequence)
        self.pool.forget()
        return chunks

    def _finish(self, sequence: Sequence, reason: FinishReason, now: float) -> Ledger:
        sequence.finished = reason
        del self._sequences[sequence.request.id]
        self._accounts.leave(sequence.account)
        if sequence.row < 0:
            self.waiting.remove(sequence)
            self._clock.leave(sequence, now)
        else:
            books.ended(sequence, now)
            self._leave(sequence)
        return books.close_ledger(sequence, reason, now)

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._placement.release(sequence)

    # -- observation -------------------------------------------------------------------------------------------------

    def _decode_shape(self) -> StepShape:
        decoding = [s.computed for s in self.running if s.known - s.computed <= 1]
        return StepShape(len(decoding), sum(decoding))

    def stats(self, seconds_since_step: float = 0.0) -> EngineStats:
        counters, decoding = self.counters, self._decode_shape()
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
            refused=counters.refused,
            expired=counters.expired,
            prefill_tokens_per_second=self.times.prefill_tokens_per_second,
            decode_step_seconds=self.times.predict(decoding if decoding.decodes else StepShape(1, 256)),
            loaded_step_seconds=self.times.loaded_step_seconds,
            step_time_error=self.times.median_error,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks, rows and sequences add up."""
        self._placement.check_integrity(self.running)
        assert len(self.running) + len(self.waiting) == len(self._sequences), "a sequence was lost"
        assert all(not s.blocks and s.row < 0 for s in self.waiting), "a waiting sequence holds memory"
