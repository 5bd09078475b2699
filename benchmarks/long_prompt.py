"""What one long prompt does to everybody else, over HTTP, in the default class.

    penstock serve &
    python benchmarks/long_prompt.py --url http://127.0.0.1:8000 --long 8000

Closed-loop clients stream short answers; after a while one prompt near the context limit joins them. Prints the short
requests' time to first token and gaps between tokens before and during its prefill, and its own time to first token
beside that of the same length on an idle server.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from itertools import pairwise

from penstock.bench.measure import Percentiles, Timeline
from penstock.bench.prompts import words_prompt
from penstock.bench.server import Call, Server, connect
from penstock.bench.workloads import Job
from penstock.client.http import HttpClient, openai_base


class Crowd:
    """Clients that each send their next short request when the last one ended."""

    def __init__(self, server: Server, clients: int, prompt_len: int, output_len: int) -> None:
        self._server = server
        self._lengths = prompt_len, output_len
        self._stopping = False
        self.timelines: list[Timeline] = []
        self._tasks = [asyncio.create_task(self._client(random.Random(number))) for number in range(clients)]

    async def _client(self, draw: random.Random) -> None:
        prompt_len, output_len = self._lengths
        while not self._stopping:
            lengths = draw.randint(prompt_len // 2, 2 * prompt_len), draw.randint(output_len // 2, 2 * output_len)
            self.timelines.append(await self._server.complete(call(self._server, *lengths)))

    async def stop(self) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)

    def between(self, begin: float, end: float) -> tuple[Percentiles | None, Percentiles | None]:
        """Times to first token of requests sent in that time, and gaps that began in it, in milliseconds."""
        ttft = [t.ttft for t in self.timelines if begin <= t.sent < end and t.ttft is not None]
        gaps = [b - a for t in self.timelines for a, b in pairwise(t.token_times) if begin <= a < end]
        return Percentiles.of_ms(ttft), Percentiles.of_ms(gaps)


def call(server: Server, prompt_len: int, output_len: int) -> Call:
    ids = [random.randrange(100, 30_000) for _ in range(prompt_len)]
    return Call(words_prompt(ids, server.calibration), Job(ids, output_len))


async def run(args: argparse.Namespace) -> None:
    fresh = {"Cache-Control": "no-store"}
    async with HttpClient(openai_base(args.url), api_key=args.api_key, headers=fresh) as http:
        server = await connect(http, None, chat=False, seed=random.getrandbits(32))
        await server.complete(call(server, args.long // 2, 8))  # whatever happens only once has happened
        alone = await server.complete(call(server, args.long, 8))
        crowd = Crowd(server, args.clients, args.prompt_tokens, args.output_tokens)
        await asyncio.sleep(2.0)
        begin = time.perf_counter()
        await asyncio.sleep(args.seconds)
        sent = time.perf_counter()
        long = await server.complete(call(server, args.long, 8))
        await crowd.stop()
    if not (alone.token_times and long.token_times):
        raise SystemExit(f"the long prompt failed: {alone.error or long.error}")
    calm, disturbed = crowd.between(begin, sent), crowd.between(sent, long.token_times[0])
    print(f"{args.clients} clients, about {args.prompt_tokens} in and {args.output_tokens} out; one of {args.long} in")
    for name, before, during in zip(("time to first token", "inter-token latency"), calm, disturbed, strict=True):
        if before is None or during is None:
            print(f"{name}: none in that time")
            continue
        for q in ("p50", "p99"):
            a, b = getattr(before, q), getattr(during, q)
            print(f"{name:<20} {q}  {a:8.1f} ms before  {b:8.1f} ms during   x{b / a:.2f}")
    first, beside = alone.ttft or 0.0, long.ttft or 0.0
    print(f"the long prompt's first token  {first:.2f} s alone  {beside:.2f} s beside them   x{beside / first:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key")
    parser.add_argument("--long", type=int, default=8000, help="tokens of the long prompt (default 8000)")
    parser.add_argument("--clients", type=int, default=28)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=15.0, help="before the long prompt (default 15)")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
