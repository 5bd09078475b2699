"""What chat streams notice of a flood of embeddings on the same machine: TTFT and ITL with and without, in turn.

    python benchmarks/embedding_flood.py --rounds 4 --seconds 20

One server with two models, smollm2-135m and all-minilm-l6-v2, a worker process each. Chats arrive at a steady rate,
each with a prompt of its own. In every other phase a few clients send batches of texts as fast as they are answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

BOOK = Path(__file__).parents[1] / "tests" / "data" / "moby-dick.txt"
SETTINGS = """
models:
  chat: {model: smollm2-135m, engine: {kv_memory_gib: 0.5}}
  minilm: {model: all-minilm-l6-v2}
cache: {enabled: false}
"""


class Phase:
    """What was measured with the flood, or without it."""

    def __init__(self) -> None:
        self.ttft: list[float] = []
        self.itl: list[float] = []
        self.refused = 0
        self.promises = self.kept = 0.0
        self.texts = 0
        self.seconds = 0.0

    def row(self, name: str) -> str:
        times = [f"{percentile(values, q) * 1e3:.0f}" for values in (self.ttft, self.itl) for q in (0.5, 0.99)]
        rate = self.texts / self.seconds
        met = f"{self.kept / self.promises:.1%}" if self.promises else "–"
        return f"| {name} | {len(self.ttft)} | {self.refused} | {met} | {' | '.join(times)} | {rate:.0f} |"


def percentile(values: list[float], q: float) -> float:
    return sorted(values)[min(int(q * len(values)), len(values) - 1)] if values else float("nan")


def words(draw: random.Random, count: int) -> str:
    book = BOOK.read_text().split()
    start = draw.randrange(len(book) - count)
    return " ".join(book[start : start + count])


async def chat(client: httpx.AsyncClient, draw: random.Random, phase: Phase) -> None:
    body = {
        "model": "chat",
        "messages": [{"role": "user", "content": words(draw, draw.choice((10, 60, 200)))}],
        "max_tokens": 48,
        "stream": True,
        "service_tier": "interactive",
    }
    last, began = None, time.perf_counter()
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            phase.refused += 1
            return
        async for line in response.aiter_lines():
            if not line.startswith("data: {") or not json.loads(line[6:])["choices"][0]["delta"].get("content"):
                continue
            now = time.perf_counter()
            if last is None:
                phase.ttft.append(now - began)
            else:
                phase.itl.append(now - last)
            last = now


async def promises(client: httpx.AsyncClient) -> tuple[float, float]:
    """Objectives of chats so far, TTFT and ITL each: all, and those that were kept."""
    lines = (await client.get("/metrics")).text.splitlines()
    found = [line.split() for line in lines if line.startswith("penstock_objectives_total") and 'model="chat"' in line]
    counts = [(float(value), 'met="true"' in labels) for labels, value in found]
    return sum(count for count, _ in counts), sum(count for count, met in counts if met)


async def embed(client: httpx.AsyncClient, draw: random.Random, phase: Phase) -> None:
    while True:
        texts = [words(draw, draw.choice((5, 20, 80, 150))) for _ in range(32)]
        response = await client.post("/v1/embeddings", json={"model": "minilm", "input": texts})
        phase.texts += len(texts) if response.status_code == 200 else 0


async def run_phase(
    client: httpx.AsyncClient, draw: random.Random, phase: Phase, args: argparse.Namespace, flood: int
) -> None:
    flooding = [asyncio.create_task(embed(client, draw, phase)) for _ in range(flood)]
    all_before, kept_before = await promises(client)
    began, chats = time.perf_counter(), []
    while time.perf_counter() - began < args.seconds:
        chats.append(asyncio.create_task(chat(client, draw, phase)))
        await asyncio.sleep(draw.expovariate(args.rate))
    await asyncio.gather(*chats)
    phase.seconds += time.perf_counter() - began
    all_now, kept_now = await promises(client)
    phase.promises += all_now - all_before
    phase.kept += kept_now - kept_before
    for task in flooding:
        task.cancel()
    await asyncio.gather(*flooding, return_exceptions=True)


async def measure(url: str, args: argparse.Namespace) -> None:
    draw = random.Random(args.seed)
    phases = {"without": Phase(), "with": Phase()}
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        await run_phase(client, draw, Phase(), args, 0)  # warms up
        for _ in range(args.rounds):
            for name, phase in phases.items():
                await run_phase(client, draw, phase, args, args.flood if name == "with" else 0)
    print(f"{args.rate} chats/s, {args.flood} clients that flood, seed {args.seed}\n")
    print("| flood | chats | refused | objectives met | TTFT p50, ms | p99 | ITL p50, ms | p99 | texts/s embedded |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, phase in phases.items():
        print(phase.row(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rate", type=float, default=1.0, help="chats per second")
    parser.add_argument("--flood", type=int, default=4, help="clients that send embeddings without a pause")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    args = parser.parse_args()
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(SETTINGS)
        file.flush()
        command = [sys.executable, "-m", "penstock", "serve", "--config", file.name, "--port", "0", "--state", "memory"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert server.stdout is not None
        try:
            url = next(found[0] for line in server.stdout if (found := re.search(r"http://[\w.:]+", line)))
            asyncio.run(measure(url, args))
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
