"""What structured output costs or gains over HTTP, with random weights: a server is started and loads take turns.

    python benchmarks/structured_http.py --model qwen3-0.6b [--streams 32] [--rounds 5] [--seconds 3]

`text` is free, `string` the inside of a JSON string, `minimum` that of one with a `minLength`, `contact` short texts
with a `maxLength`, whose masks take the longest, `beside` free text of one half of the streams where those of the other
half are contacts, `invoice` JSON most of which is forced, and `mixture` instances of all our schemas, in another order
for each stream. All at temperature 1. Ratios are medians of those within a round; ITL is the 99th percentile of the
times between two events of a stream, of free text alone for `beside`.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from profiled_server import served

from penstock.bench.architectures import ARCHITECTURES
from penstock.bench.schemas import CONTACT, INVOICE, Schema, mixture
from penstock.client.http import HttpClient

OUTPUT = 256  # tokens of each answer, at the most
KINDS: dict[str, Callable[[int], Schema | None]] = {  # by the number of a stream
    "text": lambda stream: None,
    "string": lambda stream: {"type": "string"},
    "minimum": lambda stream: {"type": "string", "minLength": 4000},
    "contact": lambda stream: CONTACT,
    "beside": lambda stream: CONTACT if stream % 2 else None,
    "invoice": lambda stream: INVOICE,
    "mixture": mixture,
}


class Load:
    """Streams of one kind, each of requests that follow each other without a pause."""

    def __init__(self, http: HttpClient, model: str, kind: str, prompt: int) -> None:
        self._http, self._model, self._kind, self._prompt = http, model, kind, prompt
        self.tokens = 0
        self.gaps: list[float] = []  # seconds between events
        self.measuring = False

    async def keep_busy(self, stream: int) -> None:
        schema = KINDS[self._kind](stream)
        extra = {} if schema is None else {"structured_outputs": {"json": schema}}
        while True:
            body = {
                "model": self._model,
                "prompt": [random.randrange(1000) for _ in range(self._prompt)],
                "max_tokens": random.randrange(OUTPUT // 2, OUTPUT),
                "temperature": 1,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
                **extra,
            }
            counted, last = 0, math.nan
            async with self._http.stream("POST", "/v1/completions", body) as response:
                if response.status != 200:
                    raise RuntimeError(await response.read_error())
                async for event in response.events():
                    if found := re.search(r'"completion_tokens":(\d+)', event):
                        now, more, counted = time.monotonic(), int(found[1]) - counted, int(found[1])
                        if self._kind != "beside" or schema is None:
                            self.tokens += more
                            if self.measuring and not math.isnan(last):
                                self.gaps.append(now - last)
                        last = now


async def measured(http: HttpClient, args: argparse.Namespace, kind: str) -> tuple[float, float]:
    """Output tokens a second, once all streams decode, and the ITL."""
    load = Load(http, args.model, kind, args.prompt)
    streams = [asyncio.create_task(load.keep_busy(stream)) for stream in range(args.streams)]
    await asyncio.sleep(args.seconds / 2)
    began, before, load.measuring = time.monotonic(), load.tokens, True
    await asyncio.sleep(args.seconds)
    found = (load.tokens - before) / (time.monotonic() - began)
    for stream in streams:
        stream.cancel()
    for failure in await asyncio.gather(*streams, return_exceptions=True):
        if isinstance(failure, Exception):
            raise failure
    return found, sorted(load.gaps)[int(0.99 * len(load.gaps))]


async def measure(url: str, args: argparse.Namespace) -> None:
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS if kind in ("text", *args.kinds)}
    itls: dict[str, list[float]] = {kind: [] for kind in rates}
    async with HttpClient(url, timeout=600) as http:
        for number in range(args.rounds + 1):
            for kind in rates:
                found, itl = await measured(http, args, kind)
                print(kind, round(found), file=sys.stderr, flush=True)
                if number:  # the first round is a warm-up
                    rates[kind].append(found)
                    itls[kind].append(itl)
    for kind, own in rates.items():
        ratios = [rate / free for rate, free in zip(own, rates["text"], strict=True)]
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        rate, ratio, itl = statistics.median(own), statistics.median(ratios), statistics.median(itls[kind])
        print(f"{kind}: {rate:,.0f} tok/s, {ratio:.3f} of text ({spread}), ITL p99 {itl * 1e3:.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", choices=list(ARCHITECTURES))
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS), help="beside text")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json, in place of one whose tokens have no meaning")
    args = parser.parse_args()
    with served(args.model, args.tokenizer) as url:
        asyncio.run(measure(url, args))


if __name__ == "__main__":
    main()
