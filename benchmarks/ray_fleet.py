"""What Ray costs: the same fleet with and without it, in one run.

    python benchmarks/ray_fleet.py
    python benchmarks/ray_fleet.py --rounds 20 --ray-address 127.0.0.1:6379

Starts two servers of the built-in model with the same settings, one with local worker processes and one on a Ray
cluster (a new one on this machine unless an address is given), and asks both in turn. TTFT: one client, a request here,
the same one there, and so on, in alternating order. Throughput: so many clients on one server while the other is idle,
then the other way round; the ratio is taken of the two halves of each round, since the speed of a machine drifts. CPU
time per token is that of a server with its workers and, on Ray, of everything that Ray runs beside them; the processes
of Ray also run while the server without it is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

from penstock.bench.prompts import WORDS
from penstock.client.http import HttpClient, openai_base

URL = re.compile(r"http://[\w.:\[\]]+")
UP = re.compile(rb"^penstock_replica_up\{.*\} 1\.0$", re.M)
MODEL = "smollm2-135m"
START_SECONDS = 180


@dataclass
class Server:
    name: str
    url: str
    process: subprocess.Popen[str]
    ttft_ms: list[float] = field(default_factory=list)
    tokens_per_second: list[float] = field(default_factory=list)
    cpu_ms_per_token: list[float] = field(default_factory=list)


@contextmanager
def serving(name: str, arguments: Sequence[str]) -> Iterator[Server]:
    command = [sys.executable, "-m", "penstock.cli.main", "serve", "--port", "0", "--state", "memory", *arguments]
    settings = {"PENSTOCK_CACHE__ENABLED": "false", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, **settings}
    )
    try:
        assert process.stdout is not None
        found = next(filter(None, map(URL.search, process.stdout)), None)
        if found is None:
            raise SystemExit(f"the server {name} does not start: {' '.join(command)}")
        yield Server(name, found[0], process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


async def until_all_ready(server: Server, replicas: int) -> None:
    end = time.monotonic() + START_SECONDS
    async with HttpClient(openai_base(server.url)) as http:
        while len(UP.findall((await http.get("/metrics")).body)) < replicas:
            if time.monotonic() > end:
                raise SystemExit(f"{server.name}: not all replicas were ready in {START_SECONDS} s")
            await asyncio.sleep(0.2)


async def ask(http: HttpClient, prompt: str, tokens: int) -> float:
    """Stream one answer. Returns the TTFT in milliseconds."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    began, first = time.perf_counter(), 0.0
    async with http.stream("POST", "/v1/completions", body) as response:
        if response.status != 200:
            raise SystemExit(f"{http.url} answers {response.status}: {await response.read_error()}")
        async for event in response.events():
            if not first and event != "[DONE]" and json.loads(event)["choices"]:
                first = time.perf_counter()
    return (first - began) * 1000


def new_prompt(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))


async def measure_ttft(
    servers: Sequence[Server], clients: Sequence[HttpClient], count: int, rng: random.Random
) -> None:
    for number in range(count):
        prompt = new_prompt(rng, 64)
        turns = list(zip(servers, clients, strict=True))
        for server, http in turns if number % 2 else reversed(turns):
            server.ttft_ms.append(await ask(http, prompt, 2))


async def measure_throughput(server: Server, http: HttpClient, clients: int, tokens: int, rng: random.Random) -> None:
    prompts = [new_prompt(rng, 64) for _ in range(4 * clients)]
    waiting = iter(prompts)

    async def client() -> None:
        for prompt in waiting:
            await ask(http, prompt, tokens)

    began, cpu = time.perf_counter(), cpu_seconds(server.process.pid)
    await asyncio.gather(*(client() for _ in range(clients)))
    made = len(prompts) * tokens
    server.tokens_per_second.append(made / (time.perf_counter() - began))
    server.cpu_ms_per_token.append((cpu_seconds(server.process.pid) - cpu) * 1000 / made)


def cpu_seconds(root: int) -> float:
    """CPU time of a process and of all that come from it."""
    children: dict[int, list[int]] = {}
    spent: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, _, rest = stat.read_text().partition(" ")
        except OSError:  # it has ended
            continue
        fields = rest.rpartition(") ")[2].split()
        children.setdefault(int(fields[1]), []).append(int(pid))
        spent[int(pid)] = int(fields[11]) + int(fields[12])
    total, waiting = 0, [root]
    while waiting:
        process = waiting.pop()
        total += spent.get(process, 0)
        waiting += children.get(process, [])
    return total / os.sysconf("SC_CLK_TCK")


async def run(args: argparse.Namespace, servers: Sequence[Server]) -> None:
    rng = random.Random(args.seed)
    for server in servers:
        await until_all_ready(server, args.replicas)
    clients = [HttpClient(openai_base(server.url), timeout=120) for server in servers]
    for http in clients:  # not counted
        await asyncio.gather(*(ask(http, new_prompt(rng, 64), 32) for _ in range(args.clients)))
    for number in range(args.rounds):
        await measure_ttft(servers, clients, args.requests, rng)
        turns = list(zip(servers, clients, strict=True))
        for server, http in turns if number % 2 else reversed(turns):
            await measure_throughput(server, http, args.clients, args.tokens, rng)
        print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
    for http in clients:
        await http.close()


def table(local: Server, ray: Server) -> str:
    def spread(values: Sequence[float]) -> str:
        quarters = quantiles(values, n=4)
        return f"{median(values):.2f} ({quarters[0]:.2f} to {quarters[2]:.2f})"

    rows = [("", local.name, ray.name, "with Ray")]
    difference = median(b - a for a, b in zip(local.ttft_ms, ray.ttft_ms, strict=True))
    apart = median(ray.ttft_ms) - median(local.ttft_ms)
    rows.append(("TTFT p50, ms", spread(local.ttft_ms), spread(ray.ttft_ms), f"{apart:+.2f} (pairs {difference:+.2f})"))
    for label, of in (("output tokens/s", "tokens_per_second"), ("CPU ms per token", "cpu_ms_per_token")):
        without, with_ray = getattr(local, of), getattr(ray, of)
        ratio = median(b / a for a, b in zip(without, with_ray, strict=True))
        rows.append((label, spread(without), spread(with_ray), f"{ratio:.1%}"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--requests", type=int, default=20, help="for the TTFT of each round")
    parser.add_argument("--clients", type=int, default=8, help="for the throughput")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer there")
    parser.add_argument("--ray-address", metavar="HOST:PORT")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    common = ["--replicas", str(args.replicas), "--kv-memory-gib", "0.2", "--max-model-len", "1024"]
    address = ["--ray-address", args.ray_address] if args.ray_address else []
    with serving("local", common) as local, serving("Ray", [*common, "--on", "ray", *address]) as ray:
        asyncio.run(run(args, [local, ray]))
        print(f"{args.replicas} replicas, {args.rounds} rounds, {args.clients} clients; median (quartiles)")
        print(table(local, ray))


if __name__ == "__main__":
    main()
