"""What the web page's live stream costs, and whether ledgers agree with what clients measure.

    python benchmarks/live_page.py
    python benchmarks/live_page.py --streams 16 --rounds 10
    python benchmarks/live_page.py --apart

Starts `penstock serve` with the built-in model and keeps it busy with streams over HTTP. Rounds with and without one
watcher of GET /admin/live take turns. The cost is the gateway's CPU time beyond what it needs for as many tokens
without a watcher, as a share of the machine's cores: on a CPU the engine computes on all of them, so this is what it
loses at most. Of every request the end-to-end time that its client measured is compared with the sum of the parts in
its ledger. What delays a client before it reads its clock counts as disagreement, and so does the time until a gateway
is scheduled to read a request: the engine's threads want every core. `--apart` gives the engine a core of its own and
the gateway and the client another, as if the client sat at another machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.client.http import HttpClient

MODEL = "smollm2-135m"
AGREE_SHARE, AGREE_SECONDS = 0.01, 0.002
ENGINE_CORE, GATEWAY_CORE = 0, 1


def cpu_seconds(process: int) -> float:
    """Of all its threads, to the nanosecond."""
    tasks = Path(f"/proc/{process}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


@dataclass
class Load:
    """Streams that ask again as soon as they are answered, each time something else."""

    http: HttpClient
    seed: int
    tokens: int = 0
    pairs: list[tuple[float, dict[str, Any]]] = field(default_factory=list)  # measured by the client, account

    async def keep_asking(self) -> None:
        while True:
            await self._ask()

    async def _ask(self) -> None:
        self.seed += 1
        chance = random.Random(self.seed)
        words = " ".join(chance.choices(("river", "rain", "valve", "turbine", "storm"), k=chance.choice((10, 60, 300))))
        body = {
            "model": MODEL,
            "prompt": f"{self.seed} {words}",
            "max_tokens": chance.choice((8, 32, 96)),
            "stream": True,
        }
        id = f"bench-{self.seed}"
        start = time.perf_counter()
        async with self.http.stream("POST", "/v1/completions", body, headers={"x-request-id": id}) as response:
            async for data in response.events():
                self.tokens += data != "[DONE]"
        measured = time.perf_counter() - start
        account = (await self.http.get(f"/v1/requests/{id}")).json()
        self.pairs.append((measured, account))


async def watch(url: str) -> None:
    async with HttpClient(url) as http, http.stream("GET", "/admin/live") as response:
        async for _ in response.body():
            pass


async def measure(url: str, gateway: int, streams: int, rounds: int, seconds: float, seed: int) -> None:
    async with HttpClient(url) as http:
        load = Load(http, seed)
        asking = [asyncio.create_task(load.keep_asking()) for _ in range(streams)]
        await asyncio.sleep(seconds)
        load.pairs.clear()  # of a warm-up, in which connections were opened
        results: dict[bool, list[tuple[float, int, float]]] = {False: [], True: []}  # CPU seconds, tokens, seconds
        for turn in range(2 * rounds):
            watched = bool(turn % 2)
            watcher = asyncio.create_task(watch(url)) if watched else None
            await asyncio.sleep(0.5)
            cpu, tokens, start = cpu_seconds(gateway), load.tokens, time.perf_counter()
            await asyncio.sleep(seconds)
            results[watched].append((cpu_seconds(gateway) - cpu, load.tokens - tokens, time.perf_counter() - start))
            if watcher is not None:
                watcher.cancel()
                with suppress(asyncio.CancelledError):
                    await watcher
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    report_cost(results)
    report_agreement(load.pairs)


def report_cost(results: dict[bool, list[tuple[float, int, float]]]) -> None:
    cores = os.cpu_count() or 1
    speeds, costs = [], []
    for alone, watched in zip(results[False], results[True], strict=True):
        speeds.append((watched[1] / watched[2]) / (alone[1] / alone[2]))
        extra = watched[0] - alone[0] * watched[1] / max(1, alone[1])
        costs.append(extra / watched[2] / cores)
    alone_speed = statistics.median(tokens / seconds for _, tokens, seconds in results[False])
    print(f"output without a watcher: {alone_speed:.0f} tokens/s; with one: {statistics.median(speeds):.1%} of that")
    print(f"CPU time of one watcher: {statistics.median(costs):.3%} of {cores} cores ({len(costs)} pairs of rounds)")


def report_agreement(pairs: list[tuple[float, dict[str, Any]]]) -> None:
    apart = []
    for measured, account in pairs:
        accounted = sum(account["choices"][0]["parts"].values())
        apart.append((abs(measured - accounted), measured))
    agree = sum(difference <= max(AGREE_SECONDS, AGREE_SHARE * measured) for difference, measured in apart)
    differences = sorted(difference for difference, _ in apart)
    p50, p99 = (1000 * differences[int(share * (len(differences) - 1))] for share in (0.5, 0.99))
    limits = f"{AGREE_SHARE:.0%} or {AGREE_SECONDS * 1000:.0f} ms"
    print(f"ledger and client agree within {limits} for {agree / len(apart):.2%} of {len(apart)} requests")
    print(f"they differ by {p50:.2f} ms (p50) and {p99:.2f} ms (p99)")


def move_engine(server: int) -> None:
    """A worker has as many threads as it had cores when it started; now it gets one of its own."""
    for child in Path(f"/proc/{server}/task/{server}/children").read_text().split():
        if b"penstock.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
            for task in Path(f"/proc/{child}/task").iterdir():
                os.sched_setaffinity(int(task.name), {ENGINE_CORE})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=6, help="of each kind")
    parser.add_argument("--seconds", type=float, default=5, help="of a round")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--apart", action="store_true", help="the engine on one core, gateway and client on another")
    asked = parser.parse_args()
    if asked.apart:
        os.sched_setaffinity(0, {GATEWAY_CORE})
    command = [sys.executable, "-m", "penstock.cli.main", "serve", MODEL, "--port", "0", "--state", "memory"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        url = next(found[0] for line in server.stdout if (found := re.search(r"http://[\w.:]+", line)))
        if asked.apart:
            move_engine(server.pid)
        asyncio.run(measure(url, server.pid, asked.streams, asked.rounds, asked.seconds, asked.seed))
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
