"""`penstock bench serve`: load on any OpenAI-compatible server, with streaming, in a closed or an open loop.

Closed: C clients, each sending its next request when the last one ended; shows what the server can do.
Open: requests arrive at random times whatever the server does; shows what users would see at that rate.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from penstock.bench.measure import Percentiles, Timeline, summarise
from penstock.bench.prompts import words_prompt
from penstock.bench.report import Result, latency_table, results_table, write_json
from penstock.bench.server import Prompt, Server, connect
from penstock.bench.targets import find_target
from penstock.bench.workloads import Job, Workload, find_workload, uniform_workload
from penstock.core.errors import InvalidRequest
from penstock.http_client import HttpClient, openai_base

IDS_VOCAB = 30_000  # within every common vocabulary
DEFAULT_CONCURRENCY = 8


@dataclass(frozen=True, slots=True)
class Call:
    """A job ready to be sent."""

    prompt: Prompt
    job: Job


@dataclass(frozen=True, slots=True)
class Load:
    """How requests are sent: by `concurrency` clients in a closed loop or at `rate` per second in an open one."""

    seed: int
    concurrency: int | None = None  # None: what the workload says
    requests: int | None = None  # None: the workload's own number
    rate: float | None = None
    duration: float = 60.0
    ids: bool = False  # prompts as token ids instead of words

    def __post_init__(self) -> None:
        closed = self.concurrency is not None or self.requests is not None
        if closed and self.rate is not None:
            raise InvalidRequest("rate (open loop) excludes concurrency and requests (closed loop)", param="rate")


async def closed_loop(server: Server, calls: Sequence[Call], clients: int) -> list[Timeline]:
    """`clients` requests in flight until all are done."""
    timelines: list[Timeline] = []
    todo: Iterator[Call] = iter(calls)

    async def client() -> None:
        for call in todo:
            timelines.append(await _send(server, call))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(clients, len(calls))):
            group.create_task(client())
    return timelines


async def open_loop(server: Server, calls: Sequence[Call]) -> tuple[list[Timeline], list[float]]:
    """Each call at its arrival time, never waiting for an answer. Also: how late each was sent, in seconds."""
    lateness: list[float] = []
    tasks: list[asyncio.Task[Timeline]] = []
    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for call in calls:
            due = start + call.job.arrival
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            lateness.append(max(0.0, time.perf_counter() - due))
            tasks.append(group.create_task(_send(server, call)))
    return [task.result() for task in tasks], lateness


async def _send(server: Server, call: Call) -> Timeline:
    timeline = await server.complete(call.prompt, call.job.output_len, call.job.kind)
    if not timeline.prompt_tokens:
        timeline.prompt_tokens = len(call.job.prompt)
    return timeline


def poisson(jobs: Iterator[Job], rate: float, seconds: float, seed: int) -> list[Job]:
    """As many jobs as arrive in that time, with their arrival times."""
    rng = random.Random(seed)
    arrivals: list[Job] = []
    now = rng.expovariate(rate)
    while now <= seconds:
        arrivals.append(replace(next(jobs), arrival=now))
        now += rng.expovariate(rate)
    return arrivals


def plan(workload: Workload, load: Load) -> list[Job]:
    """The jobs of one run."""
    if workload.open_loop and (load.concurrency or load.requests or load.rate):
        raise InvalidRequest(f"{workload.name} has arrivals of its own; drop rate and the like", param="workload")
    if load.rate is not None:
        jobs = poisson(workload.endless(load.seed, IDS_VOCAB), load.rate, load.duration, load.seed)
    elif load.requests is not None:
        jobs = list(islice(workload.endless(load.seed, IDS_VOCAB), load.requests))
    else:
        jobs = workload.jobs(load.seed, IDS_VOCAB)
    if not jobs:
        raise InvalidRequest("duration is too short for a single arrival at this rate", param="duration")
    return jobs


async def measure(server: Server, workload: Workload, load: Load) -> Result:
    jobs = plan(workload, load)
    print(f"{workload.name} ({workload.about}): {len(jobs)} requests", file=sys.stderr)
    calls = [Call(job.prompt if load.ids else words_prompt(job.prompt, server.calibration), job) for job in jobs]
    target = find_target(server.model, None, workload.name, None)
    detail: dict[str, Any] = {"seed": load.seed, "prompts": "ids" if load.ids else "words"}
    start = time.perf_counter()
    if workload.open_loop or load.rate is not None:
        timelines, lateness = await open_loop(server, calls)
        late = Percentiles.of_ms(lateness)
        detail |= {"loop": "open", "rate": load.rate, "lateness_ms": late and asdict(late)}
    else:
        clients = load.concurrency or workload.clients or len(jobs)
        timelines = await closed_loop(server, calls, clients)
        detail |= {"loop": "closed", "concurrency": clients}
    return Result(workload, summarise(timelines, time.perf_counter() - start), target, detail)


def run(args: Namespace) -> int:
    return asyncio.run(_run(args))


async def _run(args: Namespace) -> int:
    seed = random.SystemRandom().getrandbits(32) if args.seed is None else args.seed
    load = Load(seed, args.concurrency, args.requests, args.rate, args.duration, args.prompts == "ids")
    workloads = _workloads(args)
    if args.chat and load.ids:
        raise InvalidRequest("prompts of token ids go to /v1/completions only; drop chat", param="prompts")
    async with HttpClient(openai_base(args.url), api_key=args.api_key, timeout=args.timeout) as http:
        server = await connect(http, args.model, chat=args.chat, seed=load.seed)
        if not server.ignore_eos:
            print("the server refuses ignore_eos: answers may end before their length", file=sys.stderr)
        if not server.counts_tokens:
            print("the server reports no usage: each chunk counts as one token", file=sys.stderr)
        results = []
        for index, workload in enumerate(workloads):
            # Workloads of one seed begin alike, and the server may keep prefixes.
            results.append(await measure(server, workload, replace(load, seed=load.seed + index)))
    print(results_table(results), latency_table(results), sep="\n\n")
    if args.json:
        write_json(args.json, "serve", results, url=http.url, model=server.model, ignore_eos=server.ignore_eos)
    return 0 if any(result.summary.output_tokens for result in results) else 1


def _workloads(args: Namespace) -> list[Workload]:
    if args.workload:
        return [find_workload(name) for name in args.workload.split(",")]
    count = args.requests or 4 * (args.concurrency or DEFAULT_CONCURRENCY)
    return [uniform_workload(args.prompt_tokens, args.output_tokens, count, DEFAULT_CONCURRENCY)]
