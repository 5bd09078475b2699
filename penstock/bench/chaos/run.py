"""`penstock chaos` as a whole: learn the right answers, ask again with nothing broken, then under faults."""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import AsyncExitStack

from penstock.bench.chaos.faults import Admin, Fault, break_replicas, shuffled_rounds
from penstock.bench.chaos.load import Load, Phase
from penstock.bench.chaos.report import Report
from penstock.bench.chaos.streams import Stream, has_chats, plan
from penstock.client.http import HttpClient, openai_base
from penstock.core.errors import PenstockError


def run(args: Namespace) -> int:
    return asyncio.run(_run(args))


async def _run(args: Namespace) -> int:
    seed = random.SystemRandom().getrandbits(32) if args.seed is None else args.seed
    rng = random.Random(seed)
    fresh = {"Cache-Control": "no-store"}  # every answer is computed
    async with AsyncExitStack() as stack:
        base, timeout = openai_base(args.url), args.timeout
        admin_http = await stack.enter_async_context(HttpClient(base, api_key=args.api_key, timeout=timeout))
        http = HttpClient(base, api_key=args.tenant_key, timeout=timeout, headers=fresh)
        await stack.enter_async_context(http)
        admin = Admin(admin_http, args.model)
        await admin.check(args.faults)
        await admin.until_ready()
        load = Load(http, args.streams)
        if not (chats := await has_chats(http, admin.model)):
            _say(f"{admin.model} has no chat template: completions only")
        await load.learn(plan(admin.model, args.streams, args.output_tokens, seed, chats=chats))
        _say(f"learnt the answers to {len(load.right)} requests")
        calm = Phase()
        await load.run(iter(rng.sample(load.right * 2, 2 * len(load.right))), calm)
        _say(f"asked again with nothing broken: {calm.defects} of {len(calm.streams)} answers differ or failed")
        chaos, faults = Phase(), list[Fault]()
        ended = await _under_faults(args, admin, load, chaos, faults, rng)
    report = Report(args, admin.model, seed, calm, chaos, faults, ended)
    print(report.table())
    if args.json:
        report.write_json(args.json)
    if args.html:
        report.write_html(args.html)
    return 0 if report.passed else 1


async def _under_faults(
    args: Namespace, admin: Admin, load: Load, chaos: Phase, faults: list[Fault], rng: random.Random
) -> str:
    """Keep the load up while replicas are broken, and tell how it goes. Returns why it ended early, if it did."""
    began, draw, done = time.perf_counter(), random.Random(rng.random()), False

    def order() -> Iterator[Stream]:
        while not done:
            yield draw.choice(load.right)

    def kinds() -> Iterator[str]:
        for kind in itertools.islice(shuffled_rounds(args.faults, rng), args.count):
            if args.seconds is not None and time.perf_counter() - began >= args.seconds:
                return
            yield kind

    async def break_all() -> str:
        nonlocal done
        try:
            broken = break_replicas(admin, kinds(), args.interval, args.slow_seconds, rng, load.flows_since)
            async for fault in broken:
                faults.append(fault)
                count = len(faults) if args.count is None else f"{len(faults)} of {args.count}"
                what = f"{fault.kind} {fault.replica} with {fault.requests} requests"
                came = f"{chaos.defects} of {len(chaos.streams)} streams failed or differ"
                _say(f"{count}: {what}, recovered in {fault.recovered - fault.at:.1f} s; {came}")
        except PenstockError as error:
            return error.message
        finally:
            done = True
        return ""

    async with asyncio.TaskGroup() as group:
        group.create_task(load.run(order(), chaos))
        breaking = group.create_task(break_all())
    return breaking.result()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
