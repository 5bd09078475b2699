"""`penstock bench serve` puts load on any OpenAI-compatible server, with streaming, in a closed or an open loop.

Closed: C clients, each sending its next request when the last one ended; shows what the server can do.
Open: requests arrive at their times whatever the server does; shows what users would see.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from penstock.bench.arrivals import ArrivalPlan, mix_needs_rate
from penstock.bench.capacity import CapacitySearch, allowed_misses, holds
from penstock.bench.html_report import write_html
from penstock.bench.measure import Timeline, summarise
from penstock.bench.progress import Progress
from penstock.bench.prompts import probe_prompt, words_prompt
from penstock.bench.report import Result, announce, print_report, spoken_capacity, write_json
from penstock.bench.server import Call, Prompt, Server, connect, promised_objectives
from penstock.bench.targets import find_target
from penstock.bench.workloads import MIXES, Job, Workload, find_workload, uniform_workload
from penstock.client.http import HttpClient, openai_base
from penstock.core.errors import InvalidRequest
from penstock.core.request import Objective

IDS_VOCAB = 30_000  # within every common vocabulary
DEFAULT_CONCURRENCY = 8


@dataclass(frozen=True, slots=True)
class Load:
    """How prompts are made, and how many clients a closed loop has."""

    seed: int
    concurrency: int | None = None  # None: what the workload says
    requests: int | None = None  # None: the workload's own number
    ids: bool = False  # prompts as token ids instead of words
    names_classes: bool = False  # the server knows the classes of the jobs
    tenants: Mapping[str, HttpClient] = field(default_factory=dict)  # clients with the keys of tenants
    targets: bool = False  # results stand beside those of other machines


async def closed_loop(
    server: Server, calls: Sequence[Call], clients: int, progress: Progress | None = None
) -> list[Timeline]:
    """`clients` requests in flight until all are done."""
    timelines: list[Timeline] = []
    todo: Iterator[Call] = iter(calls)

    async def client() -> None:
        for call in todo:
            timelines.append(await server.complete(call))
            if progress is not None:
                progress.done(timelines[-1])

    async with asyncio.TaskGroup() as group:
        for _ in range(min(clients, len(calls))):
            group.create_task(client())
    return timelines


async def open_loop(
    server: Server,
    calls: Sequence[Call],
    objectives: Mapping[str, Objective],
    allowed: int | None = None,
    progress: Progress | None = None,
) -> list[Timeline]:
    """Each call at its arrival time, never waiting for an answer, until more than `allowed` have missed."""
    tasks: list[asyncio.Task[Timeline]] = []
    missed = 0
    start = time.perf_counter()

    async def send(call: Call, due: float, late: float) -> Timeline:
        nonlocal missed
        timeline = await server.complete(call)
        timeline.sent, timeline.late, timeline.objective = due, late, objectives.get(call.job.kind)
        missed += not timeline.met
        if progress is not None:
            progress.done(timeline)
        return timeline

    async with asyncio.TaskGroup() as group:
        for call in calls:
            due = start + call.job.arrival
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if allowed is not None and missed > allowed:
                break
            tasks.append(group.create_task(send(call, due, max(0.0, time.perf_counter() - due))))
    return [task.result() for task in tasks]


def plan(workload: Workload, load: Load) -> list[Job]:
    """The jobs of one run."""
    if workload.rate is None and load.requests is not None:
        return list(islice(workload.endless(load.seed, IDS_VOCAB), load.requests))
    return workload.jobs(load.seed, IDS_VOCAB)


def call_for(job: Job, server: Server, load: Load) -> Call:
    prompt: Prompt | None = job.content
    if prompt is None:
        prompt = job.prompt if load.ids else words_prompt(job.prompt, server.calibration)
    headers = {"x-penstock-class": job.kind} if job.kind and load.names_classes else {}
    return Call(prompt, job, headers, load.tenants.get(job.tenant))


async def check_classes(server: Server, calls: Sequence[Call], seed: int) -> None:
    """A class that the server does not know fails all of its requests, which would be told after the last one."""
    for headers in {tuple(call.headers.items()): call.headers for call in calls if call.headers}.values():
        probe = await server.complete(Call(probe_prompt(8, seed), Job([], 1), headers))
        if probe.error == "http 400":
            raise InvalidRequest(f"{server.http.url} answers: {probe.message}")


async def measure(server: Server, workload: Workload, load: Load, attainment: float | None = None) -> Result:
    """With an attainment, an open loop stops as soon as that can no longer be reached."""
    jobs = plan(workload, load)
    calls = [call_for(job, server, load) for job in jobs]
    detail: dict[str, Any] = {"seed": load.seed, "prompts": "ids" if load.ids else "words"}
    await check_classes(server, calls, load.seed)
    start = time.perf_counter()
    if workload.rate is not None:
        allowed = None if attainment is None else allowed_misses(len(jobs), attainment)
        with Progress(workload.name, len(calls)) as progress:
            timelines = await open_loop(server, calls, workload.objectives, allowed, progress)
        detail |= {"loop": "open", "stopped_early": len(timelines) < len(jobs)}
    else:
        clients = load.concurrency or workload.clients or len(jobs)
        with Progress(workload.name, len(calls)) as progress:
            timelines = await closed_loop(server, calls, clients, progress)
        detail |= {"loop": "closed", "concurrency": clients}
    summary = summarise(timelines, time.perf_counter() - start)
    target = find_target(server.model, None, workload.name, None) if load.targets else None
    announce(workload.name, workload.metric, summary, detail.get("stopped_early", False))
    return Result(workload, summary, target, detail, workload.name, timelines)


async def find_capacity(
    server: Server, base: Workload | str, arrivals: ArrivalPlan, load: Load, attainment: float
) -> tuple[float | None, list[Result]]:
    search = CapacitySearch(arrivals.rates[0], arrivals.probes)
    results = []
    while (rate := search.next_rate()) is not None:
        # A seed of its own for each probe: the server may remember prefixes.
        own = replace(load, seed=load.seed + search.tried)
        result = await measure(server, arrivals.workload(base, rate), own, attainment)
        held = not result.detail["stopped_early"] and holds(result.summary.share_met, attainment)
        search.record(rate, held)
        results.append(result)
    return search.held, results


def run(args: Namespace) -> int:
    return asyncio.run(_run(args))


async def _run(args: Namespace) -> int:
    seed = random.SystemRandom().getrandbits(32) if args.seed is None else args.seed
    arrivals = ArrivalPlan.from_args(args)
    names_classes = args.send_classes or bool(arrivals.shares or arrivals.trace)
    bases = _bases(args, arrivals)
    results: list[Result] = []
    capacities: dict[str, float | None] = {}
    fresh = {"Cache-Control": "no-store"}  # what is measured is computing answers, not remembering them
    async with AsyncExitStack() as stack:

        async def client(key: str | None) -> HttpClient:
            http = HttpClient(openai_base(args.url), api_key=key, timeout=args.timeout, headers=fresh)
            return await stack.enter_async_context(http)

        http = await client(args.api_key)
        tenants = {name: await client(key) for name, key in args.tenant_key}
        load = Load(seed, args.concurrency, args.requests, args.prompts == "ids", names_classes, tenants, args.targets)
        server = await connect(http, args.model, chat=args.chat, seed=load.seed)
        if arrivals.shares and not arrivals.objectives:
            promised = await promised_objectives(http)
            known = {name: objective for name, objective in promised.items() if name in arrivals.shares}
            arrivals = replace(arrivals, objectives=known)
        workloads = arrivals.workloads(bases)
        if not server.ignore_eos:
            print("the server refuses ignore_eos: answers may end before their length", file=sys.stderr)
        if not server.counts_tokens:
            print("the server reports no usage: each chunk counts as one token", file=sys.stderr)
        if arrivals.attainment is not None:
            for base in bases:
                name = base if isinstance(base, str) else base.name
                capacities[name], probed = await find_capacity(server, base, arrivals, load, arrivals.attainment)
                results += probed
        else:
            for index, workload in enumerate(workloads):
                # Workloads of one seed begin alike, and the server may keep prefixes.
                results.append(await measure(server, workload, replace(load, seed=load.seed + index)))
    print_report(results)
    for name, rate in capacities.items():
        print(f"\n{name}: {spoken_capacity(rate, args.attainment)}")
    facts: dict[str, Any] = {"url": http.url, "model": server.model, "ignore_eos": server.ignore_eos}
    facts |= {"capacity": capacities, "attainment": arrivals.attainment}
    if args.json:
        write_json(args.json, "serve", results, facts)
    if args.html:
        write_html(args.html, "serve", results, facts)
    return 0 if any(result.summary.output_tokens for result in results) else 1


def _bases(args: Namespace, arrivals: ArrivalPlan) -> list[Workload | str]:
    """Closed workloads, and mixes by name."""
    if (arrivals.rates or arrivals.trace) and (args.concurrency or args.requests):
        raise InvalidRequest("rate and trace (open loop) exclude concurrency and requests (closed loop)", param="rate")
    if args.chat and args.prompts == "ids":
        raise InvalidRequest("prompts of token ids go to /v1/completions only; drop chat", param="prompts")
    if not args.workload:
        count = args.requests or 4 * (args.concurrency or DEFAULT_CONCURRENCY)
        return [uniform_workload(args.prompt_tokens, args.output_tokens, count, DEFAULT_CONCURRENCY)]
    bases: list[Workload | str] = []
    for name in args.workload.split(","):
        if name in MIXES and not arrivals.rates:
            raise mix_needs_rate(name)
        bases.append(name if name in MIXES else find_workload(name))
    return bases
