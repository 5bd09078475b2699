"""Runs workloads through a loaded engine in this process."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, product
from typing import Any

from penstock.bench.capacity import allowed_misses
from penstock.bench.driver import ClosedLoop, OpenLoop
from penstock.bench.measure import Summary, Timeline, better, summarise
from penstock.bench.progress import Progress
from penstock.bench.replay import Replay
from penstock.bench.workloads import VOCAB, Job, Metric, Workload
from penstock.core.engine import EngineInfo
from penstock.core.request import Objective
from penstock.engine.executor import Adapters, Executor
from penstock.engine.local import LocalEngine
from penstock.engine.scheduler import Scheduler
from penstock.engine.settings import Scheduling
from penstock.engine.speculation import Speculation

WARM_UP_REQUESTS = 32
WARM_UP_OUTPUT = 16
WARM_UP_CLIENTS = 8  # before an open loop, where the engine should have seen steps of every kind
SETTLE_SECONDS = 0.2  # for a step that was launched ahead of the last answer


@dataclass(frozen=True, slots=True)
class Run:
    """One pass over a workload, or several put together."""

    seeds: list[int]
    timelines: list[Timeline]
    summary: Summary
    steps: int
    sequences: int  # over all steps
    tokens: int
    cached_tokens: int
    preemptions: int
    drafted_tokens: int
    accepted_tokens: int
    device_idle_s: float | None  # how long GPU or CPU kernels waited for launches; None where that is not measured
    step_time_error: float  # median, relative; 0 where the engine keeps no step-time model
    stopped_early: bool = False

    def detail(self) -> dict[str, Any]:
        return {
            "seeds": self.seeds,
            "steps": self.steps,
            "mean_batch": self.sequences / self.steps,
            "mean_step_tokens": self.tokens / self.steps,
            "cached_tokens": self.cached_tokens,
            "preemptions": self.preemptions,
            "drafted_tokens": self.drafted_tokens,
            "accepted_tokens": self.accepted_tokens,
            "device_idle_s": self.device_idle_s,
            "step_time_error": self.step_time_error,
            "stopped_early": self.stopped_early,
        }


def pooled(runs: Sequence[Run]) -> Run:
    idle = [run.device_idle_s for run in runs if run.device_idle_s is not None]
    timelines = [timeline for run in runs for timeline in run.timelines]
    return Run(
        seeds=[seed for run in runs for seed in run.seeds],
        timelines=timelines,
        summary=summarise(timelines, sum(run.summary.wall_s for run in runs)),
        steps=sum(run.steps for run in runs),
        sequences=sum(run.sequences for run in runs),
        tokens=sum(run.tokens for run in runs),
        cached_tokens=sum(run.cached_tokens for run in runs),
        preemptions=sum(run.preemptions for run in runs),
        drafted_tokens=sum(run.drafted_tokens for run in runs),
        accepted_tokens=sum(run.accepted_tokens for run in runs),
        device_idle_s=sum(idle) if idle else None,
        step_time_error=runs[-1].step_time_error,
    )


def better_run(metric: Metric, a: Run, b: Run) -> Run:
    return a if better(metric, a.summary, b.summary) is a.summary else b


@dataclass(slots=True)
class LoadedEngine:
    """A loaded model with a scheduler for each way of scheduling. Only one of them works at a time."""

    executor: Executor
    info: EngineInfo
    schedulers: dict[Scheduling, Scheduler]
    speculations: Mapping[str, Speculation | None] = field(default_factory=lambda: {"off": None})  # by method
    adapters: Adapters | None = None
    # The schedulers write to the same blocks, so what one has cached may be another's by now: no salt is used twice.
    _salts: count[int] = field(default_factory=count)

    def measure(
        self, mode: Scheduling, workload: Workload, seed: int, attainment: float | None = None, drafts: str = "off"
    ) -> Run:
        """With an attainment, an open loop stops as soon as that can no longer be reached. `drafts`: the method."""
        jobs = workload.jobs(seed, self._vocab)
        scheduler, idle = self.schedulers[mode], self.executor.idle_seconds
        scheduler.speculation = self.speculations[drafts]
        before = scheduler.stats()
        allowed = None if attainment is None else allowed_misses(len(jobs), attainment)
        with Progress(f"{workload.name} {mode} seed {seed}", len(jobs)) as progress:
            if workload.rate is None:
                timelines = self._closed_loop(scheduler, jobs, workload.clients, progress)
            else:
                timelines = self._open_loop(scheduler, jobs, workload.objectives, allowed, progress)
        after = scheduler.stats()
        ends = [timeline.finished for timeline in timelines if timeline.finished is not None]
        return Run(
            seeds=[seed],
            timelines=timelines,
            summary=summarise(timelines, max(ends) - min(timeline.sent for timeline in timelines)),
            steps=after.steps - before.steps,
            sequences=after.batch_sequences - before.batch_sequences,
            tokens=after.batch_tokens - before.batch_tokens,
            cached_tokens=after.cached_tokens - before.cached_tokens,
            preemptions=after.preemptions - before.preemptions,
            drafted_tokens=after.drafted_tokens - before.drafted_tokens,
            accepted_tokens=after.accepted_tokens - before.accepted_tokens,
            device_idle_s=None if idle is None else (self.executor.idle_seconds or 0.0) - idle,
            step_time_error=after.step_time_error,
            stopped_early=len(timelines) < len(jobs),
        )

    def warm_up(self, workload: Workload) -> None:
        """The same shapes in small, before the clock: first calls compile, allocate and page in."""
        jobs = workload.jobs(0, self._vocab)[:WARM_UP_REQUESTS]
        short = [replace(job, output_len=min(job.output_len, WARM_UP_OUTPUT)) for job in jobs]
        for (mode, scheduler), speculation in product(self.schedulers.items(), self.speculations.values()):
            scheduler.speculation = speculation
            with Progress(f"{workload.name} {mode} warm-up", len(jobs)) as progress:
                if workload.rate is None:
                    self._closed_loop(scheduler, short, workload.clients, progress)
                else:  # whole outputs, because forecasts rest on a few hundred steps
                    self._closed_loop(scheduler, jobs, WARM_UP_CLIENTS, progress)

    def _closed_loop(
        self, scheduler: Scheduler, jobs: Sequence[Job], clients: int | None, progress: Progress
    ) -> list[Timeline]:
        executor, outputs = self.executor, {number: job.output for number, job in enumerate(jobs) if job.output}
        if outputs:
            executor = Replay(executor, outputs)
        return ClosedLoop(scheduler, executor, progress, self.adapters).run(jobs, clients, self._salt())

    def _open_loop(
        self,
        scheduler: Scheduler,
        jobs: Sequence[Job],
        objectives: Mapping[str, Objective],
        allowed: int | None,
        progress: Progress,
    ) -> list[Timeline]:
        engine = LocalEngine(scheduler, self.executor, self.info, adapters=self.adapters)
        try:
            return OpenLoop(engine, objectives, allowed, progress).run(jobs, self._salt())
        finally:
            time.sleep(SETTLE_SECONDS)
            engine.close()

    def check_integrity(self) -> None:
        for scheduler in self.schedulers.values():
            scheduler.check_integrity()

    @property
    def _vocab(self) -> int:
        return min(VOCAB, self.info.vocab_size)

    def _salt(self) -> str:
        return f"bench-{next(self._salts)}"
