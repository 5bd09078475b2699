"""What the next step computes: streams keep their pace, and the rest of the step goes to the most urgent prompts.

`choose` says which streams the next step advances, `schedule` plans it with their drafts, `complete` takes its result.
At most one step is in flight between the two, so a sequence may be one sampled token ahead of what is known here
(`Sequence.pending`). Time is always passed in: the same scheduler runs on a virtual clock.
"""

from __future__ import annotations

import math
from bisect import insort
from dataclasses import asdict, replace
from operator import attrgetter

from penstock.core.engine import EngineStats
from penstock.core.errors import DeadlineExceeded, Overloaded, PenstockError
from penstock.core.ledger import Ledger
from penstock.core.request import Chunk, FinishReason, GenerateRequest, failed
from penstock.engine import bookkeeping as books
from penstock.engine.admission import Admission, load_beside
from penstock.engine.arrival import NOTHING, Prepared, objective_of, sequence_of
from penstock.engine.background import Background
from penstock.engine.deadlines import Deadlines
from penstock.engine.executor import StepResult
from penstock.engine.fairness import TenantCounters
from penstock.engine.limits import SchedulerLimits
from penstock.engine.pacing import Pacing, decode_shape
from penstock.engine.placement import Placement
from penstock.engine.planned_step import Choice, PlannedStep, StepsInFlight
from penstock.engine.sequence import Sequence
from penstock.engine.speculation import NO_DRAFTS, Drafts, Speculation, decode
from penstock.engine.step_time import StepTimes
from penstock.engine.urgency import Promotions, Ranking, WaitingQueue, comes_later, demote_if_late, patience

_ORDER = attrgetter("order")
_ALLOWANCE = 1024  # cost that a tenant may be ahead by, unless a step is smaller


class Scheduler:
    def __init__(
        self, limits: SchedulerLimits, times: StepTimes | None = None, speculation: Speculation | None = None
    ) -> None:
        self.limits = limits
        self.times = times or StepTimes()
        self.speculation = speculation
        self._placement = Placement(limits)
        self.pool = self._placement.pool
        self.running: list[Sequence] = []  # by order
        self.waiting = WaitingQueue()  # new, or preempted and to be recomputed
        self.counters = books.Counts()
        self._sequences: dict[str, Sequence] = {}
        self._arrivals = 0
        self._promotions = Promotions(limits.max_seqs)
        self._tenants = TenantCounters(min(_ALLOWANCE, limits.max_step_tokens))
        self._admission = Admission(self.times, self.counters)
        self._pacing = Pacing(limits, self.times)
        self._background = Background(self.times)
        self._clock = books.QueueClock()
        self._deadlines = Deadlines()
        self._notices: list[Chunk] = []  # of requests that ended outside a step
        self.in_flight = StepsInFlight(self.times)
        self._now = 0.0

    # -- requests in and out -----------------------------------------------------------------------------------------

    def add(self, request: GenerateRequest, now: float, prepared: Prepared = NOTHING) -> None:
        """Raises Overloaded for work whose objective cannot be met, and when too much is waiting already."""
        limits = self.limits
        if not request.resumed:
            self._admission.check_queue(self.waiting, limits.max_waiting)
        objective = objective_of(request, limits)
        counter = self._tenants.enter("" if limits.fcfs else request.tenant, request.weight)
        sequence = sequence_of(request, self._arrivals, counter, limits, now, prepared)
        if not limits.fcfs:
            sequence.to_compute -= len(self._placement.cached_blocks(sequence)) * limits.block_size
            sequence.due += objective.ttft or patience(sequence, self.times)
        if request.resumed:  # somebody has waited for its next token since before it came here
            sequence.due, sequence.promised = now, False
        elif objective.ttft is not None or request.deadline is not None:
            ranking, free_at = self._ranking(now), self.in_flight.free_at(now)
            load = load_beside(sequence, self.waiting, self.running, ranking, self._pacing, free_at)
            try:
                self._admission.admit(sequence, objective, load)
            except Overloaded:
                self._tenants.leave(counter)
                raise
        self._arrivals += 1
        self._sequences[request.id] = sequence
        self.waiting.push(sequence)
        self._background.arrived(sequence, now)
        self._clock.arrive(sequence)
        self.counters.requests += 1
        self.counters.prompt_tokens += sequence.prompt_len
        if request.deadline is not None:
            self._deadlines.add(sequence, now + request.deadline)

    def end(self, request_id: str, reason: FinishReason, error: PenstockError, now: float) -> Chunk | None:
        """Stop working for a request. Returns its last chunk; None if it has ended already."""
        sequence = self._sequences.get(request_id)
        return None if sequence is None else self._fail(sequence, reason, error, now)

    def take_notices(self) -> list[Chunk]:
        """Last chunks of requests that ended outside a step."""
        self._notices, notices = [], self._notices
        return notices

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    # -- planning a step ---------------------------------------------------------------------------------------------

    def choose(self, now: float) -> Choice:
        """The streams of the next step, each with a block for its next token."""
        self._now = now
        self._expire(now)
        self._make_way(ranking := self._ranking(now))
        preemptions = self.counters.preemptions
        decodes, prompts = self._plan_decodes(), self._plan_prompts(ranking)
        # From here on nothing is preempted, so what a planned sequence computes may be shared within the step.
        admit = self.counters.preemptions == preemptions
        seated, urgent = [s for s in decodes if s.row >= 0], [*prompts[-1:], *self._admissible(ranking, admit)]
        return Choice(*self._background.admit(seated, urgent, ranking), prompts, ranking, admit)

    def schedule(self, now: float, choice: Choice, drafts: Drafts = NO_DRAFTS) -> PlannedStep | None:
        """Streams first, a token each and a draft; then the most urgent prompts, for as long as the step may take."""
        self._clock.tick(now)
        planned = PlannedStep(now, drafts.seconds, background=choice.background)
        streams, prompts = ([s for s in each if s.finished is None] for each in (choice.streams, choice.prompts))
        decode(planned, streams, drafts, self._placement)
        self._fill(planned, prompts, replace(choice.ranking, now=now), admit=choice.admit)
        self._background.planned(planned)
        return self._finished(planned) if planned.sequences else None

    def _admissible(self, ranking: Ranking, admit: bool) -> list[Sequence]:
        """The most urgent request that waits, if the next step can begin with it; not asked where nothing may pause."""
        head = self.waiting.first(ranking, self.times) if admit and self._background.present else None
        leads = ranking.leads.get(head.counter, 0) > 0 if head else False
        return [head] if head and self._placement.fits(head, self.running, leads=leads) else []

    def _ranking(self, now: float) -> Ranking:
        classes = [self.waiting.best_class, self.running[0].order[:2] if self.running else None]
        best = min((c for c in classes if c is not None), default=(0, 0))
        return Ranking(now, self._tenants.leads(), best, promoting=self._promotions.has_room)

    def _expire(self, now: float) -> None:
        for sequence in self._deadlines.passed(now):
            self.counters.expired += 1
            error = DeadlineExceeded(f"the deadline passed after {sequence.outputs} tokens")
            self._notices.append(self._fail(sequence, "deadline", error, now))

    def _make_way(self, ranking: Ranking) -> None:
        """The most urgent request displaces running ones that may wait, those with the least work to lose first."""
        head = self.waiting.first(ranking, self.times) if self.running else None
        if head is None or head.pending:
            return
        for sequence in ranking.giving_way(head, self.running):
            if self._placement.fits(head, self.running, leads=ranking.leads.get(head.counter, 0) > 0):
                return
            self._preempt(sequence)

    def _plan_decodes(self) -> list[Sequence]:
        """Those with one token to compute, with a block for it."""
        size, budget = self.limits.block_size, self.limits.max_step_tokens
        decodes = []
        for s in list(self.running):
            known = len(s.tokens) + s.pending
            if known - s.computed != 1 or known >= s.max_len or s.row < 0 or s.pending > 1:
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
        prompts = [s for s in self.running if len(s.tokens) + s.pending - s.computed > s.sampling]
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
            later = [s for s in self.running if comes_later(s, sequence)]
            victim = min(later, key=attrgetter("computed"), default=sequence)
            self._preempt(victim)
            if victim is sequence:
                return False
        self._placement.allocate(sequence, tokens)
        return True

    def _fill(self, planned: PlannedStep, prompts: list[Sequence], ranking: Ranking, *, admit: bool) -> None:
        """Give what is left of the step to prompts, running or waiting, in order of urgency."""
        budget = self.limits.max_step_tokens - len(planned.step.tokens)
        limit = math.inf
        if prompts or self.waiting:
            ttft = self._admission.tightest_ttft(ranking.now)
            limit = self._pacing.step_limit(planned, ttft, prompts, self.waiting, ranking.now)
        planned.limited = limit < math.inf
        missing, seats = self._placement.missing_blocks, self._placement.has_free_row
        reserved = self._placement.reserved(self.running) if admit and self.waiting and seats else 0
        self._clock.blocked_by("order")
        while budget > 0:
            sequence = self.waiting.first(ranking, self.times) if admit else None
            if prompts and (sequence is None or ranking.of(prompts[-1]) < ranking.of(sequence)):
                sequence = prompts[-1]
            if sequence is None:
                return
            runs = sequence.row >= 0
            if sequence.background and not planned.background:
                prompts, admit = (prompts[:-1], admit) if runs else (prompts, False)
                continue
            if sequence.background:
                limit = min(limit, self._background.step_limit(planned.shape, ranking.now))
            leads = ranking.leads.get(sequence.counter, 0) > 0
            hits = [] if runs else self._placement.room_for(sequence, reserved, leads=leads)
            if hits is None:
                self._clock.blocked_by(self._placement.lacking(sequence))
                admit = False
                continue
            start = sequence.computed + len(hits) * self.limits.block_size
            most = min(budget, self._placement.most_tokens(sequence) - start) if runs else budget
            count = self._pacing.fitting(planned.shape, sequence, start, most, limit)
            if count == 0:
                return
            if runs:
                reserved -= missing(sequence, sequence.known)
                prompts.pop()
            else:
                ranking = self._admit(sequence, hits, ranking)
            self._placement.allocate(sequence, start + count)
            planned.compute(sequence, count)
            self._placement.share_full_blocks(sequence)
            reserved += missing(sequence, sequence.known)
            budget -= count

    def _admit(self, sequence: Sequence, hits: list[int], ranking: Ranking) -> Ranking:
        """Returns the ranking from then on."""
        now = ranking.now
        self.waiting.remove(sequence)
        self._clock.leave(sequence, now)
        if self._promotions.begins(sequence, ranking):
            ranking = self._ranking(now)
        insort(self.running, sequence, key=_ORDER)
        cached = len(hits) * self.limits.block_size
        if sequence.started is None:
            sequence.started = now
            cause = self._placement.miss_cause(sequence, len(hits))
            self.counters.cached_tokens += books.looked_up(sequence, cached, self.limits.block_size, cause)
        else:
            sequence.ledger.recomputed_tokens += max(0, sequence.lost - cached)
        self._placement.seat(sequence, hits)
        return ranking

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
        planned.constrain()
        self._placement.write_into(planned.step)
        books.planned(planned.step, self.limits.read_bytes(planned.shape.kv_tokens), self.counters)
        self.in_flight.add(planned)
        return planned

    def complete(self, planned: PlannedStep, result: StepResult, now: float) -> list[Chunk]:
        """Append what was sampled, end what is done, and say what happened to each request."""
        seconds, usual = self.in_flight.end(planned, now)
        self.counters.step_seconds += seconds
        step, culprit, all_samples = planned.step, planned.culprit, planned.step.samples
        chunks = []
        for index, sequence in enumerate(planned.sequences):
            if sequence.finished is not None:
                continue
            if sequence.first_token is not None:
                books.decoded(sequence, usual, culprit, now)
            else:
                books.computed(sequence, step.counts[index], now)
            if sequence.prompt_logprobs is not None and index in result.prompt_logprobs:
                books.scored(sequence, step.starts[index] + 1, result.prompt_logprobs[index])
            samples = all_samples[index]
            if samples and (sequence.constraint is None or sequence.counts_sample(result.tokens[index])):
                chunks.append(self._append(sequence, samples, result, index, now))
            elif not sequence.sampling and step.starts[index] + step.counts[index] == sequence.given:
                chunks.append(self._prefilled(sequence, result.vectors.get(index), now))
        books.passed_over(self.running, culprit, now)
        self.counters.output_tokens += len(chunks)  # nearly all have one token; the others correct it
        return chunks

    def _append(self, sequence: Sequence, samples: int, result: StepResult, index: int, now: float) -> Chunk:
        """Take the tokens that a sequence sampled, up to the one that ends it."""
        tokens, sampled = sequence.tokens, result.tokens[index]
        tokens += sampled
        sequence.pending -= samples
        if samples > 1:
            books.drafted(sequence, samples - 1, len(sampled) - 1, self.counters)
        reason, constraint = None, sequence.constraint
        if samples != 1 or constraint is not None or sequence.may_end_with(sampled[0]):
            try:
                reason = sequence.cut(sampled, samples)
            except PenstockError as error:
                del tokens[-len(sampled) :]  # they are not sent
                self.counters.output_tokens -= 1
                return self._fail(sequence, "error", error, now)
            self.counters.output_tokens += len(sampled) - 1
        if sequence.row >= 0 and len(tokens) // self.limits.block_size > sequence.shared:
            self._placement.share_full_blocks(sequence)
        chunk = Chunk(sequence.request.id, sampled, reason)
        if sequence.first_token is None:
            self._first_chunk(sequence, chunk, now)
        if constraint is not None and sequence.row >= 0:  # a reader is waiting for what follows the forced tokens
            sequence.due, sequence.promised = now, False
        books.sent(sequence, now)
        if result.logprobs and index in result.logprobs:
            chunk.logprobs = result.logprobs[index]
        if reason is not None:
            if chunk.logprobs is not None:
                del chunk.logprobs[len(sampled) :]
            chunk.ledger = self._finish(sequence, reason, now)
        return chunk

    def _prefilled(self, sequence: Sequence, vector: bytes | None, now: float) -> Chunk:
        """The only chunk of a sequence that samples nothing: all its tokens are computed."""
        self.counters.output_tokens -= 1
        if vector == b"":
            return self._fail(sequence, "error", sequence.no_numbers("vector"), now)
        chunk = Chunk(sequence.request.id, finish_reason="length", vector=vector)
        self._first_chunk(sequence, chunk, now)
        chunk.ledger = self._finish(sequence, "length", now)
        return chunk

    def _first_chunk(self, sequence: Sequence, chunk: Chunk, now: float) -> None:
        sequence.first_token = now
        self._admission.learn(sequence, now)
        self.counters.output_tokens += books.open_stream(sequence, chunk)

    def fail(self, steps: list[PlannedStep], error: PenstockError, now: float) -> list[Chunk]:
        """These steps were lost and cache contents with them: their sequences end, all others start over. Where there
        is none, planning one failed and would fail again: all end."""
        self.in_flight.clear()
        lost = [s for planned in steps for s in planned.sequences] if steps else [*self._sequences.values()]
        chunks = [self._fail(s, "error", error, now) for s in lost if s.finished is None]
        for sequence in list(self.running):
            self._preempt(sequence)
        self._placement.forget()
        return chunks

    def _fail(self, sequence: Sequence, reason: FinishReason, error: PenstockError, now: float) -> Chunk:
        return failed(sequence.request.id, reason, error, self._finish(sequence, reason, now))

    def _finish(self, sequence: Sequence, reason: FinishReason, now: float) -> Ledger:
        sequence.finished = reason
        del self._sequences[sequence.request.id]
        self._promotions.ended(sequence)
        self._tenants.leave(sequence.counter)
        self._background.ended(sequence)
        if self.speculation is not None:
            self.speculation.forget(sequence)
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

    def stats(self, seconds_since_step: float = 0.0) -> EngineStats:
        return EngineStats(
            running=len(self.running),
            waiting=len(self.waiting),
            **self._placement.readings(self.running),
            prefill_tokens=self.waiting.tokens + books.begun_prefill(self.running),
            seconds_since_step=seconds_since_step,
            **self.times.readings(decode_shape(self.running)),
            **asdict(self.counters),
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks, rows and sequences add up."""
        self._placement.check_integrity(self.running)
        assert len(self.running) + len(self.waiting) == len(self._sequences), "a sequence was lost"
        assert all(not s.blocks and s.row < 0 for s in self.waiting), "a waiting sequence holds memory"
