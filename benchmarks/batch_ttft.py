"""What a running batch costs interactive requests: their TTFT with and without one, in turns, on one server.

    python benchmarks/batch_ttft.py --rounds 6 --seconds 20

Every round has a phase without and one with a batch under way, in random order. Interactive requests arrive at random
(Poisson), at the same moments of both phases, and are streamed. Prints p50 and p99 of both and the ratio of the p99.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from batch_chaos import MODEL, Server, ask

WORDS = [
    "the",
    "river",
    "carries",
    "water",
    "down",
    "to",
    "a",
    "wheel",
    "that",
    "turns",
    "stones",
    "and",
    "grinds",
    "corn",
]


def prompt(chance: random.Random, words: int) -> str:
    return " ".join(chance.choice(WORDS) for _ in range(words))


def start_batch(client: httpx.Client, chance: random.Random, lines: int) -> str:
    made = []
    for number in range(lines):
        body = {"model": MODEL, "prompt": prompt(chance, 60), "max_tokens": 64, "ignore_eos": True}
        made.append({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body})
    content = "".join(json.dumps(each) + "\n" for each in made).encode()
    file = ask(client, "POST", "/v1/files", files={"file": ("b.jsonl", content)}, data={"purpose": "batch"}).json()
    wanted = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    id = str(ask(client, "POST", "/v1/batches", json=wanted).json()["id"])
    while ask(client, "GET", f"/v1/batches/{id}").json()["request_counts"]["completed"] == 0:
        time.sleep(0.1)
    return id


def stop_batch(client: httpx.Client, id: str) -> int:
    """How many lines it has answered."""
    batch = ask(client, "POST", f"/v1/batches/{id}/cancel").json()
    while batch["status"] != "cancelled":
        time.sleep(0.1)
        batch = ask(client, "GET", f"/v1/batches/{id}").json()
    return int(batch["request_counts"]["completed"])


def arrivals(chance: random.Random, seconds: float, rate: float) -> list[float]:
    times = [chance.expovariate(rate)]
    while times[-1] < seconds:
        times.append(times[-1] + chance.expovariate(rate))
    return times


async def interactive(url: str, chance: random.Random, arrivals: list[float]) -> list[float]:
    """Times to first token."""
    times: list[float] = []

    async def one(client: httpx.AsyncClient) -> None:
        body = {"model": MODEL, "prompt": prompt(chance, 120), "max_tokens": 16, "stream": True, "ignore_eos": True}
        began = time.perf_counter()
        async with client.stream("POST", "/v1/completions", json={**body, "service_tier": "interactive"}) as response:
            if response.status_code != 200:
                raise SystemExit(f"refused: {await response.aread()!r}")
            first = None
            async for line in response.aiter_lines():
                if first is None and line.startswith("data:"):
                    first = time.perf_counter() - began
            times.append(first or 0.0)

    async with httpx.AsyncClient(base_url=url, timeout=60) as client, asyncio.TaskGroup() as tasks:
        start = time.monotonic()
        for at in arrivals:
            await asyncio.sleep(start + at - time.monotonic())
            tasks.create_task(one(client))
    return times


def quantile(times: list[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(share * len(times)))]


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    chance = random.Random(args.seed)
    server = Server(folder, args.port, f"sqlite:///{folder}/state.db")
    times: dict[bool, list[float]] = {False: [], True: []}
    lines = 0
    try:
        with httpx.Client(base_url=server.url, timeout=30) as client:
            ask(client, "GET", "/health")
            asyncio.run(interactive(server.url, chance, arrivals(chance, 5, args.rate)))
            for _ in range(args.rounds):
                arriving = arrivals(chance, args.seconds, args.rate)
                for with_batch in chance.sample((False, True), 2):
                    id = start_batch(client, chance, args.lines) if with_batch else ""
                    times[with_batch] += asyncio.run(interactive(server.url, chance, arriving))
                    lines += stop_batch(client, id) if with_batch else 0
        server.stop()
    finally:
        server.process.kill()
    alone, beside = times[False], times[True]
    return {
        "requests": [len(alone), len(beside)],
        "p50 ms": [round(quantile(each, 0.5) * 1000, 1) for each in (alone, beside)],
        "p99 ms": [round(quantile(each, 0.99) * 1000, 1) for each in (alone, beside)],
        "p99 ratio": round(quantile(beside, 0.99) / quantile(alone, 0.99), 3),
        "batch lines": lines,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rate", type=float, default=2.0, help="interactive requests a second")
    parser.add_argument("--lines", type=int, default=2000, help="of the batch")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--port", type=int, default=8474)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-ttft-") as name:
        print(json.dumps({"seed": args.seed, **run(args, Path(name))}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
