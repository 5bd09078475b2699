"""The engine loop: choose, draft, schedule, launch, collect the previous step, emit.

A device that runs ahead gets its next step before the one under way has ended, but no sooner than it has to.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.core.engine import EngineStats, Health
from penstock.core.errors import EngineFailure, InvalidRequest, PenstockError, Unavailable
from penstock.core.request import Chunk, FinishReason, GenerateRequest
from penstock.engine.arrival import Prepared, constrained
from penstock.engine.executor import Adapters, Executor, StepResult, TokenMask
from penstock.engine.grammar import Grammars, Masks, refused
from penstock.engine.limits import SchedulerLimits
from penstock.engine.planned_step import PlannedStep
from penstock.engine.scheduler import Scheduler
from penstock.engine.sequence import Sequence
from penstock.engine.speculation import NO_DRAFTS, Drafts

log = logging.getLogger(__name__)

IDLE_CHECK_SECONDS = 1.0
MOST_WAIT_SECONDS = 0.1  # for a step under way to be nearly done: predictions may be far off

_End = tuple[str, FinishReason, PenstockError]  # the arguments of `EngineLoop.end`


class EngineLoop:
    """Owns scheduler and executor. `submit`, `abort` and `stop` may be called from any thread; one thread steps.

    The lock is held to decide, never while a step or a drafter computes: a request is refused or queued at once.
    `clock` gives the time in seconds and `sleep` lets it pass; in a simulation both are virtual.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        emit: Callable[[list[Chunk]], None],
        grammars: Grammars | None = None,
        adapters: Adapters | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._emit = emit
        self.grammars = grammars
        self.adapters = adapters
        self._masks = None if grammars is None else Masks(grammars, _mask_memory(executor, scheduler.limits))
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._in_flight: tuple[PlannedStep, Any] | None = None
        self._ends: list[_End] | None = None  # that wait for the drafter, while it reads sequences
        self._last_progress = self._clock()
        self.turns = 0  # that have ended

    def submit(self, request: GenerateRequest) -> None:
        """Raises InvalidRequest for what could never run, Overloaded for what could not keep its objective."""
        self._scheduler.limits.check(request)
        constraint = adapter = None
        if (grammar := request.params.grammar) is not None:
            if self.grammars is None:
                raise InvalidRequest("this engine has no grammars", param=grammar.param)
            constraint = constrained(request, grammar, self.grammars, self._scheduler.limits)
        if request.adapter is not None:
            if self.adapters is None:
                raise InvalidRequest("this engine has no LoRA adapters", param="model")
            adapter = self.adapters.get(request.adapter)
        with self._lock:
            if not self._busy:
                self._last_progress = self._clock()
            self._scheduler.add(request, self._clock(), Prepared(constraint, adapter))
        self._wake.set()

    def abort(self, request_id: str) -> None:
        """Its last chunk comes as every other one does."""
        self.end(request_id, "abort", Unavailable("the engine aborted the request", code="aborted"))

    def end(self, request_id: str, reason: FinishReason, error: PenstockError) -> None:
        """Stop working for a request and end it with this error, unless it has ended already."""
        with self._lock:
            if self._ends is not None:
                self._ends.append((request_id, reason, error))
                return
            last = self._scheduler.end(request_id, reason, error, self._clock())
        if last is not None:
            self._emit([last])

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()

    def release(self) -> None:
        """After `run` has ended, for good: nothing here keeps the model in memory any longer."""
        del self._executor, self._masks
        self._scheduler.times.release()
        self.adapters = None

    def run(self) -> None:
        """Step while there is work, sleep while there is none, until stopped."""
        checked = False
        while True:
            self._wake.clear()
            if self._stopping:  # asked for after the clear, or `stop` would be lost in between
                break
            if self.step():
                checked = False
            elif not self._wake.wait(None if checked else IDLE_CHECK_SECONDS):
                with self._lock:
                    self._scheduler.check_integrity()
                self._scheduler.times.save()
                if self.grammars is not None:
                    self.grammars.prepare()
                checked = True
        self._scheduler.times.save()

    def step(self) -> bool:
        """One turn. False when there is nothing left to do."""
        if not self._scheduler.has_work and self._in_flight is None:
            return False
        previous, self._in_flight = self._in_flight, None
        planned, chunks = None, list[Chunk]()
        try:
            if previous is not None:
                self._wait_to_plan()
            with self._lock:
                choice = self._scheduler.choose(self._clock())
            drafts = self._draft(choice.streams)
            with self._lock:
                planned = self._scheduler.schedule(self._clock(), choice, drafts)
                chunks += self._scheduler.take_notices()
            if planned is not None:
                planned.check_samples(self._executor.runs_ahead)
                self._in_flight = (planned, self._executor.launch(planned.step))
            if not self._executor.runs_ahead:
                chunks += self._constrain()
                previous, self._in_flight = self._in_flight, None
            if previous is not None:
                result = self._executor.collect(previous[1])
                chunks += self._check(*previous, result)
                with self._lock:
                    chunks += self._scheduler.complete(previous[0], result, self._clock())
            if self._in_flight is not None:
                chunks += self._constrain()  # after the step before it: that decides what may follow
        except Exception:
            log.exception("a step failed; its requests are lost")
            lost = [step for step in (previous and previous[0], planned) if step is not None]
            self._in_flight = None  # steps run in order, so its result may be left unread
            with self._lock:
                error = EngineFailure("the engine failed while computing this request; send it again")
                chunks += self._scheduler.fail(lost, error, self._clock())
                chunks += self._scheduler.take_notices()
        if chunks:
            self._emit(chunks)
        self._last_progress = self._clock()
        self.turns += 1
        return True

    def _draft(self, streams: list[Sequence]) -> Drafts:
        """Ask the drafter, without the lock. Requests may come meanwhile; those that are to end do so afterwards, for
        the drafter reads their sequences."""
        speculation = self._scheduler.speculation
        if speculation is None:
            return NO_DRAFTS
        ends: list[_End] = []
        with self._lock:
            self._ends = ends
            streams = [s for s in streams if s.finished is None]
        try:
            return speculation.plan(streams, self._scheduler.limits.max_step_tokens - len(streams))
        finally:
            with self._lock:
                self._ends = None
            for end in ends:
                self.end(*end)

    def _constrain(self) -> list[Chunk]:
        """Tell the executor what the sequences with a grammar may sample in the step just launched. Returns the last
        chunks of requests whose grammars cannot go on."""
        if self._in_flight is None or not self._in_flight[0].step.constrained or self._masks is None:
            return []
        planned, handle = self._in_flight
        masks, failures = self._masks.of(planned)
        self._executor.constrain(handle, masks)
        return self._fail(failures)

    def _check(self, planned: PlannedStep, handle: Any, result: StepResult) -> list[Chunk]:
        """Let the sequences that sampled without a mask sample again where their grammars refuse the token; where the
        next step has read it already, they are left without one. Returns the last chunks of requests whose grammars
        cannot go on."""
        if not planned.step.checked or self._masks is None or not (again := refused(planned, result)):
            return []
        if self._executor.runs_ahead:
            for index in again:
                result.tokens[index] = []
            return []
        masks, failures = self._masks.of_refused(again)
        for index, token in zip(masks, self._executor.resample(handle, masks), strict=True):
            result.tokens[index] = [token]
        return self._fail(failures)

    def _fail(self, failures: list[tuple[str, PenstockError]]) -> list[Chunk]:
        with self._lock:
            ended = [self._scheduler.end(name, "error", error, self._clock()) for name, error in failures]
        return [chunk for chunk in ended if chunk is not None]

    def _wait_to_plan(self) -> None:
        """Until the step under way is nearly done, so that whoever arrives meanwhile is in the next one."""
        seconds = self._scheduler.in_flight.plan_next_at() - self._clock()
        if seconds > 0:
            self._sleep(min(seconds, MOST_WAIT_SECONDS))

    @property
    def _busy(self) -> bool:
        """With requests, or with a step under way for some that were aborted. The lock is held."""
        return self._scheduler.has_work or bool(self._scheduler.in_flight.shapes)

    @property
    def stats(self) -> EngineStats:
        with self._lock:
            return self._scheduler.stats(self._clock() - self._last_progress if self._busy else 0.0)

    def overdue(self, seconds: float) -> bool:
        """Whether a busy engine that has not finished a step for so long must hang."""
        with self._lock:
            return seconds > self._scheduler.times.patience(self._scheduler.in_flight.shapes)

    def health(self) -> Health:
        stats = self.stats
        if self.overdue(stats.seconds_since_step):
            return Health(False, f"no step finished for {stats.seconds_since_step:.0f} s with requests waiting")
        return activity(stats)


def _mask_memory(executor: Executor, limits: SchedulerLimits) -> TokenMask:
    if executor.mask_memory is not None:
        return executor.mask_memory
    return np.zeros((limits.max_seqs, -(-limits.vocab_size // 32)), np.int32)


def activity(stats: EngineStats) -> Health:
    return Health(True, "busy" if stats.running or stats.waiting else "idle")
