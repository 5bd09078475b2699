"""Drives an engine in this process, in a closed or an open loop, and records the time of every token."""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.bench.adapters import adapter_of
from penstock.bench.measure import Timeline
from penstock.bench.progress import Progress
from penstock.bench.workloads import Job
from penstock.core.errors import EngineFailure, Overloaded
from penstock.core.request import Chunk, GenerateRequest, Objective
from penstock.engine.executor import Adapters, Executor
from penstock.engine.local import LocalEngine
from penstock.engine.loop import EngineLoop
from penstock.engine.scheduler import Scheduler

HEALTH_CHECK_SECONDS = 5.0


def take_chunk(timeline: Timeline, chunk: Chunk, now: float) -> None:
    if chunk.token_ids:
        timeline.token_times.append(now)
        timeline.output_tokens += len(chunk.token_ids)
    if chunk.finish_reason is not None:
        timeline.finished = now
        timeline.ledger = chunk.ledger
        timeline.error = {"error": "engine", "deadline": "deadline"}.get(chunk.finish_reason)


def make_request(
    job: Job, request_id: str, salt: str, objective: Objective | None = None, seed: int = 0
) -> GenerateRequest:
    params = replace(job.sampling, max_tokens=job.output_len, ignore_eos=True)
    objective = objective or Objective()
    return GenerateRequest(
        request_id,
        job.prompt,
        params,
        seed=seed,
        cache_salt=salt,
        objective=objective,
        tenant=job.tenant,
        adapter=None if job.adapter is None else adapter_of(job.adapter),
    )


class ClosedLoop:
    """Steps an engine on this thread, with so many requests in flight. Nothing is promised to them."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        progress: Progress | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self.loop = EngineLoop(scheduler, executor, self._take, adapters=adapters)
        self._progress = progress
        self._open: dict[str, Timeline] = {}
        self._sent = 0

    def run(self, jobs: Sequence[Job], clients: int | None, salt: str) -> list[Timeline]:
        """Keep `clients` requests in flight (None: all) until every job is done.

        Workloads of one seed begin with the same token ids; a salt of its own keeps a run from another's cache.
        """
        todo = deque(jobs)
        timelines = []
        while todo or self._open:
            while todo and (clients is None or len(self._open) < clients):
                timelines.append(self._send(todo.popleft(), salt))
            self.loop.step()
        while self.loop.step():  # what was launched ahead
            pass
        return timelines

    def _send(self, job: Job, salt: str) -> Timeline:
        request = make_request(job, f"{salt}/{self._sent}", salt, seed=self._sent)
        self._sent += 1
        timeline = Timeline(time.perf_counter(), prompt_tokens=len(job.prompt), kind=job.kind)
        self._open[request.id] = timeline
        self.loop.submit(request)
        return timeline

    def _take(self, chunks: list[Chunk]) -> None:
        now = time.perf_counter()
        for chunk in chunks:
            take_chunk(self._open[chunk.request_id], chunk, now)
            if chunk.finish_reason is not None:
                timeline = self._open.pop(chunk.request_id)
                if self._progress is not None:
                    self._progress.done(timeline)


@dataclass(slots=True)
class OpenLoop:
    """Sends each job at its time to an engine on its own thread, whatever has become of the others."""

    engine: LocalEngine
    objectives: Mapping[str, Objective]
    allowed_misses: int | None = None  # past them nothing more is sent
    progress: Progress | None = None
    missed: int = 0  # among the admitted
    refused: int = 0
    _done: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def run(self, jobs: Sequence[Job], salt: str) -> list[Timeline]:
        timelines = []
        gc.collect()
        gc.freeze()  # so that a collection in the run does not walk the prompts of all jobs
        start = time.perf_counter()
        for index, job in enumerate(jobs):
            due = start + job.arrival
            objective = self.objectives.get(job.kind)
            request = make_request(job, f"{salt}/{index}", salt, objective)
            timeline = Timeline(due, prompt_tokens=len(job.prompt), kind=job.kind, objective=objective)
            time.sleep(max(0.0, due - time.perf_counter()))
            if self.allowed_misses is not None and self.missed + self.refused > self.allowed_misses:
                break
            timeline.late = time.perf_counter() - due
            timelines.append(timeline)
            self._send(request, timeline)
        self._wait(len(timelines) - self.refused)
        gc.unfreeze()
        return timelines

    def _send(self, request: GenerateRequest, timeline: Timeline) -> None:
        def take(chunk: Chunk) -> None:
            take_chunk(timeline, chunk, time.perf_counter())
            if chunk.finish_reason is not None:
                self.missed += not timeline.met
                self._ended(timeline)
                self._done.release()

        try:
            self.engine.start(request, take)
        except Overloaded as refusal:
            timeline.finished = time.perf_counter()
            timeline.refused, timeline.retry_after = True, refusal.retry_after
            self.refused += 1
            self._ended(timeline)

    def _ended(self, timeline: Timeline) -> None:
        if self.progress is not None:
            self.progress.done(timeline)

    def _wait(self, admitted: int) -> None:
        for _ in range(admitted):
            while not self._done.acquire(timeout=HEALTH_CHECK_SECONDS):
                if not (health := self.engine.health()).ok:
                    raise EngineFailure(health.detail)
