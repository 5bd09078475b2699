"""`penstock bench engine`: workloads straight through the engine loop in this process, without HTTP or text."""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from argparse import Namespace
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial, reduce
from pathlib import Path

from penstock.bench.architectures import ARCHITECTURES, write_architecture
from penstock.bench.measure import Summary, Timeline, better, summarise
from penstock.bench.report import UNITS, Result, format_figure, latency_table, render_table, results_table, write_json
from penstock.bench.targets import COLD_START_GOALS, DeviceKind, find_target
from penstock.bench.workloads import VOCAB, Job, Metric, Workload, find_workload
from penstock.core.config import EngineConfig
from penstock.core.engine import EngineInfo
from penstock.core.request import Chunk, GenerateRequest, SamplingParams
from penstock.engine.executor import Executor
from penstock.engine.loop import EngineLoop
from penstock.engine.scheduler import Scheduler

WARM_UP_REQUESTS = 32
WARM_UP_OUTPUT = 16


class Driver:
    """Steps an engine loop on this thread and keeps the time of every token."""

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self.loop = EngineLoop(scheduler, executor, self._take)
        self._executor = executor
        self._open: dict[str, Timeline] = {}
        self._sent = 0

    def device_idle_seconds(self) -> float | None:
        return self._executor.idle_seconds

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
        return timelines

    def run_open_loop(self, jobs: Sequence[Job], salt: str) -> list[Timeline]:
        """Send each job at its arrival time, or as soon after it as the current step allows."""
        todo = deque(jobs)
        timelines = []
        start = time.perf_counter()
        while todo or self._open:
            while todo and start + todo[0].arrival <= time.perf_counter():
                job = todo.popleft()
                timeline = self._send(job, salt)
                timeline.sent = start + job.arrival  # waiting for a step to end is the engine's delay
                timelines.append(timeline)
            if not self.loop.step() and todo:
                time.sleep(max(0.0, start + todo[0].arrival - time.perf_counter()))
        return timelines

    def _send(self, job: Job, salt: str) -> Timeline:
        params = SamplingParams(temperature=0.0, max_tokens=job.output_len, ignore_eos=True)
        request = GenerateRequest(f"bench-{self._sent}", job.prompt, params, cache_salt=salt)
        self._sent += 1
        timeline = Timeline(time.perf_counter(), prompt_tokens=len(job.prompt), kind=job.kind)
        self._open[request.id] = timeline
        self.loop.submit(request)
        return timeline

    def _take(self, chunks: list[Chunk]) -> None:
        now = time.perf_counter()
        for chunk in chunks:
            timeline = self._open[chunk.request_id]
            if chunk.token_ids:
                timeline.token_times.append(now)
                timeline.output_tokens += len(chunk.token_ids)
            if chunk.finish_reason is not None:
                timeline.finished = now
                timeline.error = "engine" if chunk.finish_reason == "error" else None
                del self._open[chunk.request_id]


@dataclass(frozen=True, slots=True)
class Run:
    """One pass over a workload."""

    seed: int
    summary: Summary
    steps: int
    mean_batch: float  # sequences a step
    mean_step_tokens: float
    cached_tokens: int
    preemptions: int
    device_idle_s: float | None  # how long a GPU waited for launches; None where that is not measured


def measure(driver: Driver, workload: Workload, seed: int, vocab: int) -> Run:
    jobs, salt = workload.jobs(seed, vocab), f"{workload.name}/{seed}"
    before = driver.loop.stats
    idle = driver.device_idle_seconds()
    start = time.perf_counter()
    timelines = driver.run_open_loop(jobs, salt) if workload.open_loop else driver.run(jobs, workload.clients, salt)
    wall = time.perf_counter() - start
    after = driver.loop.stats
    steps = after.steps - before.steps
    return Run(
        seed=seed,
        summary=summarise(timelines, wall),
        steps=steps,
        mean_batch=(after.batch_sequences - before.batch_sequences) / steps,
        mean_step_tokens=(after.batch_tokens - before.batch_tokens) / steps,
        cached_tokens=after.cached_tokens - before.cached_tokens,
        preemptions=after.preemptions - before.preemptions,
        device_idle_s=None if idle is None else (driver.device_idle_seconds() or 0.0) - idle,
    )


def warm_up(driver: Driver, workload: Workload, vocab: int) -> None:
    """The same shapes in small, before the clock: first calls compile, allocate and page in."""
    jobs = workload.jobs(0, vocab)[:WARM_UP_REQUESTS]
    short = [Job(job.prompt, min(job.output_len, WARM_UP_OUTPUT)) for job in jobs]
    driver.run(short, workload.clients, salt=f"{workload.name}/warm-up")


def run(args: Namespace) -> int:
    began = time.perf_counter()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    workloads = [find_workload(name) for name in args.workload.split(",")]
    config = EngineConfig(
        args.device,
        args.dtype,
        args.quantization,
        max_model_len=args.max_model_len,
        max_seqs=args.max_seqs,
        max_step_tokens=args.max_step_tokens,
    )
    scheduler, executor, info = _start(args.model, config)
    cold_start = time.perf_counter() - began
    device, precision = _placement(config)
    driver = Driver(scheduler, executor)
    vocab = min(VOCAB, info.vocab_size)
    results = []
    for workload in workloads:
        warm_up(driver, workload, vocab)
        runs = [_measure_aloud(driver, workload, seed, vocab) for seed in range(args.seeds)]
        best = reduce(partial(better_run, workload.metric), runs)
        target = find_target(info.model, precision, workload.name, device)
        detail = asdict(best) | {"values": [run.summary.figure(workload.metric) for run in runs]}
        del detail["summary"]
        results.append(Result(workload, best.summary, target, detail))
    scheduler.check_integrity()
    goal = COLD_START_GOALS.get((info.model, device))
    print(
        f"{info.model}, {precision} on {device}, ready after {cold_start:.1f} s"
        + (f" (goal {goal:g} s)" if goal else "")
    )
    print(results_table(results), latency_table(results), steps_table(results), sep="\n\n")
    if args.json:
        facts = {"model": info.model, "precision": precision, "device": device, "cold_start_s": cold_start}
        write_json(args.json, "engine", results, **facts, max_seqs=args.max_seqs, seeds=args.seeds)
    return 1 if any(result.summary.errors for result in results) else 0


def _start(model: str, config: EngineConfig) -> tuple[Scheduler, Executor, EngineInfo]:
    from penstock.runner.progress import LoadProgress  # torch is imported from here on, within the cold start
    from penstock.runner.startup import start

    with tempfile.TemporaryDirectory() as folder:
        name = model.removeprefix("dummy:")
        if model.startswith("dummy:") and name in ARCHITECTURES:
            model = f"dummy:{write_architecture(name, Path(folder) / name)}"
        return start(model, config, LoadProgress(sys.stderr))


def _placement(config: EngineConfig) -> tuple[DeviceKind, str]:
    """Where "auto" has led."""
    import torch

    device: DeviceKind = "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"
    if config.quantization not in ("auto", "none"):
        return device, config.quantization
    automatic = "bfloat16" if device == "cuda" else "float32"
    return device, automatic if config.dtype == "auto" else config.dtype


def _measure_aloud(driver: Driver, workload: Workload, seed: int, vocab: int) -> Run:
    run = measure(driver, workload, seed, vocab)
    value = run.summary.figure(workload.metric)
    shown = "nothing finished" if value is None else f"{format_figure(workload.metric, value)} {UNITS[workload.metric]}"
    print(f"{workload.name} seed {seed}: {shown} in {run.summary.wall_s:.2f} s", file=sys.stderr, flush=True)
    return run


def better_run(metric: Metric, a: Run, b: Run) -> Run:
    return a if better(metric, a.summary, b.summary) is a.summary else b


def steps_table(results: Sequence[Result]) -> str:
    columns = [
        "engine",
        "steps",
        "sequences/step",
        "tokens/step",
        "cached tokens",
        "preemptions",
        "GPU waited",
        "values of all seeds",
    ]
    rows = []
    for result in results:
        detail, metric = result.detail, result.workload.metric
        values = ["-" if value is None else format_figure(metric, value) for value in detail["values"]]
        counts = [str(detail["steps"]), f"{detail['mean_batch']:.1f}", f"{detail['mean_step_tokens']:.1f}"]
        counts += [str(detail["cached_tokens"]), str(detail["preemptions"])]
        idle = detail["device_idle_s"]
        counts.append("-" if idle is None else f"{idle / result.summary.wall_s:.1%}")
        rows.append([result.workload.name, *counts, " ".join(values)])
    return render_table(columns, rows)
