"""Keeping the ledgers: every moment of a request goes to exactly one entry, from `Sequence.mark` to now."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, fields

from penstock.core.cost import OUTPUT_TOKEN_COST
from penstock.core.ledger import MAX_CHUNKS, MAX_STALLS, Ledger, MissCause, PrefillChunk, QueueCause, Stall
from penstock.core.request import Chunk, FinishReason, GenerateRequest, TokenLogprob
from penstock.engine.executor import Step
from penstock.engine.sequence import Sequence


def open_ledger(request: GenerateRequest) -> Ledger:
    return Ledger(request.id, request.tenant, request.objective.name, time.time(), prompt_tokens=len(request.prompt))


@dataclass(slots=True)
class Counts:
    """What an engine has done in all, as `EngineStats` tells it."""

    steps: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    batch_tokens: int = 0
    batch_sequences: int = 0
    step_seconds: float = 0.0
    read_bytes_estimate: int = 0
    refused: int = 0
    expired: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def clear(self) -> None:
        for field in fields(self):
            setattr(self, field.name, field.default)


def planned(step: Step, read_bytes: int, counts: Counts) -> None:
    counts.steps += 1
    counts.batch_tokens += len(step.tokens)
    counts.batch_sequences += len(step.rows)
    counts.read_bytes_estimate += read_bytes


def begun_prefill(running: Iterable[Sequence]) -> int:
    """Tokens of prompts that have begun and have not been computed yet."""
    return sum(s.known - s.computed for s in running if s.first_token is None)


class QueueClock:
    """Why requests waited, as running sums, so that a thousand waiting ones cost nothing per step."""

    def __init__(self) -> None:
        self._sums: dict[QueueCause, float] = {"order": 0.0, "rows": 0.0, "memory": 0.0, "adapters": 0.0}
        self._cause: QueueCause = "order"
        self._since = 0.0
        self._entered: dict[Sequence, dict[QueueCause, float]] = {}
        self._arrived: list[Sequence] = []

    def arrive(self, sequence: Sequence) -> None:
        self._arrived.append(sequence)

    def tick(self, now: float) -> None:
        """A step is being planned: what has arrived since the last one waited for a step to end."""
        self._sums[self._cause] += now - self._since
        self._since = now
        for sequence in self._arrived:
            _queue(sequence, "step", now)
            self._entered[sequence] = dict(self._sums)
        self._arrived.clear()

    def blocked_by(self, cause: QueueCause) -> None:
        """What keeps the rest waiting from now on."""
        self._cause = cause

    def leave(self, sequence: Sequence, now: float) -> None:
        """Admitted, or ended while waiting. Called after `tick`, or with `now` between two ticks."""
        if sequence.ledger.preemptions:
            _queue(sequence, "preempted", now)
            return
        entered = self._entered.pop(sequence, None)
        if entered is None:
            if sequence in self._arrived:
                self._arrived.remove(sequence)
            _queue(sequence, "step", now)
            return
        for cause, total in self._sums.items():
            waited = total - entered[cause] + (now - self._since if cause == self._cause else 0.0)
            if waited > 0:
                sequence.ledger.queued[cause] = sequence.ledger.queued.get(cause, 0.0) + waited
        sequence.mark = now


def _queue(sequence: Sequence, cause: QueueCause, now: float) -> None:
    queued = sequence.ledger.queued
    queued[cause] = queued.get(cause, 0.0) + now - sequence.mark
    sequence.mark = now


def computed(sequence: Sequence, tokens: int, now: float) -> None:
    """A chunk of its prompt was computed."""
    chunks = sequence.ledger.prefill
    if len(chunks) < MAX_CHUNKS:
        chunks.append(PrefillChunk(tokens, now - sequence.mark))
    else:
        chunks[-1].tokens += tokens
        chunks[-1].seconds += now - sequence.mark
    sequence.mark = now


def decoded(sequence: Sequence, usual: float, culprit: Sequence | None, now: float) -> None:
    """A token was decoded, which without the prefill of others would have taken `usual` seconds."""
    elapsed, ledger = now - sequence.mark, sequence.ledger
    ledger.decode_steps += 1
    if elapsed <= usual or culprit is None:
        ledger.decode += elapsed
    else:
        ledger.decode += usual
        _stall(sequence, elapsed - usual, culprit)
    sequence.mark = now


def drafted(sequence: Sequence, tokens: int, accepted: int, counts: Counts) -> None:
    """So many tokens were drafted in a step, and so many of them were right: its tenant pays for those."""
    sequence.ledger.drafted_tokens += tokens
    sequence.ledger.accepted_tokens += accepted
    counts.drafted_tokens += tokens
    counts.accepted_tokens += accepted
    sequence.counter.charge(OUTPUT_TOKEN_COST * accepted)


def ended(sequence: Sequence, now: float) -> None:
    """It ended before the step under way did: what that has taken so far belongs to it."""
    if sequence.first_token is not None:
        sequence.ledger.decode += now - sequence.mark
        sequence.mark = now
    elif sequence.mark < now:
        computed(sequence, 0, now)


def passed_over(sequences: Iterable[Sequence], culprit: Sequence | None, now: float) -> None:
    """A step ended that did nothing for these: new ones were admitted while it ran, others had to let it pass."""
    for sequence in sequences:
        if sequence.mark < now:
            if sequence.started is not None and sequence.started >= sequence.mark and not sequence.ledger.prefill:
                _queue(sequence, "step", now)
            else:
                _stall(sequence, now - sequence.mark, culprit)
                sequence.mark = now


def _stall(sequence: Sequence, seconds: float, culprit: Sequence | None) -> None:
    """Requests of other tenants are not named."""
    name = ""
    if culprit is not None and culprit.request.tenant == sequence.request.tenant:
        name = culprit.request.id
    sequence.ledger.stalled += seconds
    entry = sequence.stalls.setdefault(name, [0.0, 0])
    entry[0] += seconds
    entry[1] += 1


def looked_up(sequence: Sequence, cached: int, block_size: int, cause: MissCause) -> int:
    """Of the prompt: what was cached, what no block could hold, and why the rest was not there. Returns the first."""
    ledger, prompt = sequence.ledger, sequence.prompt_len
    ledger.cached_tokens = min(cached, prompt)
    full = (prompt - 1) // block_size * block_size
    if cause == "off":
        ledger.missed_tokens = {"off": prompt}
        return ledger.cached_tokens
    if full > ledger.cached_tokens:
        ledger.missed_tokens[cause] = full - ledger.cached_tokens
    ledger.missed_tokens["too_short"] = prompt - max(full, ledger.cached_tokens)
    return ledger.cached_tokens


def scored(sequence: Sequence, first: int, logprobs: list[TokenLogprob]) -> None:
    """Log-probabilities of its prompt from this position on; a recomputed prompt gives them again."""
    if (known := sequence.prompt_logprobs) is not None:
        known.extend(logprobs[len(known) - first :])


def open_stream(sequence: Sequence, chunk: Chunk) -> int:
    """Put into the first chunk of a request what comes only once. Returns how many tokens those are."""
    chunk.cached_tokens = sequence.ledger.cached_tokens
    chunk.queue_seconds = (sequence.started or sequence.arrival) - sequence.arrival
    chunk.prompt_logprobs = sequence.prompt_logprobs
    forced = sequence.constraint.unsent if sequence.constraint is not None else []
    chunk.token_ids[:0] = forced
    return len(forced)


def sent(sequence: Sequence, now: float) -> None:
    """It has given a chunk, the first or another one."""
    if sequence.first_token != now and now - sequence.last_token > sequence.itl:
        sequence.late_tokens += 1
    sequence.last_token = now


def close_ledger(sequence: Sequence, reason: FinishReason, now: float) -> Ledger:
    ledger, objective = sequence.ledger, sequence.request.objective
    ledger.total = now - sequence.arrival
    ledger.output_tokens = sequence.outputs
    if sequence.constraint is not None:
        ledger.forced_tokens = sequence.constraint.jumped
    if sequence.first_token is not None:
        ledger.ttft = sequence.first_token - sequence.arrival
    if objective.ttft is not None and reason != "abort":
        ledger.met_ttft = ledger.ttft is not None and ledger.ttft <= objective.ttft
    if objective.itl is not None and reason != "abort":
        count = max(0, len(sequence.tokens) - sequence.given - 1)
        ledger.met_gap = sequence.late_tokens <= count - 1 - min(count - 1, int(0.99 * count)) if count else True
    longest = sorted(sequence.stalls.items(), key=lambda item: -item[1][0])[:MAX_STALLS]
    ledger.stalls = [Stall(culprit, seconds, int(steps)) for culprit, (seconds, steps) in longest]
    return ledger
