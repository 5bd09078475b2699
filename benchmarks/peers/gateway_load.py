"""Load on a chat endpoint that costs next to nothing per byte, so that the server is what is measured.

python -m peers.gateway_load '{"url": …, "clients": 32, "seconds": 5, …}'     one JSON object in, one out
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import cast

import uvloop

WORDS = [
    "apple", "bread", "cloud", "dance", "earth", "flame", "grass", "house", "image", "juice", "knife", "light",
    "money", "night", "ocean", "paper", "queen", "river", "stone", "table", "uncle", "voice", "water", "youth",
    "zebra", "amber", "beach", "chair", "dream", "eagle", "field", "glass",
]  # fmt: skip

STEAL_SECONDS = 0.5  # between looks at what the host took from this machine; it tells in hundredths of a second
FEWEST_CALM = 300  # requests, for a 99th percentile
ARRIVALS_SEED = 6  # bursts make the slowest requests: every system meets the same ones


def words(number: int) -> str:
    """Eight of them, different for each of 2**40 numbers."""
    return " ".join(WORDS[number >> shift & 31] for shift in range(0, 40, 5))


@dataclass(frozen=True, slots=True)
class Load:
    port: int
    key: str
    model: str
    seconds: float
    tokens: int  # chunks of a stream, or tokens of an answer
    stream: bool
    clients: int | None = None  # closed loop
    rate: float | None = None  # open loop: Poisson arrivals per second
    deterministic: bool = False  # so that a cache may keep the answer
    repeat: bool = False  # the same request every time, for a cache to answer
    timeout: float = 10.0

    def request(self, number: int, nonce: int) -> bytes:
        prompt = "Why does rain fall?" if self.repeat else f"Why does rain fall on {words(nonce + number)}?"
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self.tokens,
            "stream": self.stream,
        }
        if self.deterministic:
            body["temperature"] = 0
        data = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self.key}\r\n"
        return f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


@dataclass(slots=True)
class Outcome:
    seconds: float = 0.0
    ttft: list[float] = field(default_factory=list)  # to the first byte of the body, of requests that succeeded
    total: list[float] = field(default_factory=list)
    events: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    late: list[float] = field(default_factory=list)  # how long after its time a request of the open loop was sent
    sent: list[float] = field(default_factory=list)  # when, of each in `ttft`
    stolen: list[tuple[float, int]] = field(default_factory=list)  # moments, and ticks that the host had taken by then

    def calm(self) -> list[float]:
        """`ttft` of those that were sent and answered while the host took nothing, nor in the interval before, unless
        they are too few."""
        taken = [(begin, end) for (begin, before), (end, after) in pairwise(self.stolen) if after > before]
        found = [
            seconds
            for sent, seconds in zip(self.sent, self.ttft, strict=True)
            if not any(begin < sent + seconds and sent < end + STEAL_SECONDS for begin, end in taken)
        ]
        return found if len(found) >= FEWEST_CALM else []

    def summary(self) -> dict[str, object]:
        """Times in milliseconds. `stolen` is summed over the cores."""
        return {
            "done": len(self.total),
            "seconds": self.seconds,
            "ttft": quantiles(self.ttft),
            "calm": quantiles(self.calm()),
            "total": quantiles(self.total),
            "late": quantiles(self.late),
            "events": self.events,
            "errors": self.errors,
            "stolen": (self.stolen[-1][1] - self.stolen[0][1]) * 10.0 if self.stolen else 0.0,
        }


def quantiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {f"p{q}": ordered[len(ordered) * q // 100] * 1e3 for q in (50, 90, 99)} if ordered else {}


def stolen_ticks() -> int:
    """Hundredths of a second of all cores since the start of the machine."""
    return int(Path("/proc/stat").read_text().split(maxsplit=9)[8])


class Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are not derived from it

    def send(self, request: bytes) -> asyncio.Future[None]:
        assert self.transport is not None
        self.head: bytes | None = b""
        self.remaining: int | None = None  # None: chunked
        self.events = 0
        self.status = 0
        self.end = b""
        self.first = 0.0
        self.done = asyncio.get_running_loop().create_future()
        self.sent = time.perf_counter()
        self.transport.write(request)
        return self.done

    def data_received(self, data: bytes) -> None:
        if self.head is not None:
            self.head += data
            head, found, data = self.head.partition(b"\r\n\r\n")
            if not found:
                return
            self.status = int(head[9:12])
            length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
            self.remaining = int(length) if length else None
            self.head = None
        if data and not self.first:
            self.first = time.perf_counter()
        if self.remaining is None:
            self.events += data.count(b"data: ")
            self.end = (self.end + data)[-5:]
            complete = self.end == b"0\r\n\r\n"
        else:
            self.remaining -= len(data)
            complete = self.remaining <= 0
        if complete and self.done is not None and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        if self.done is not None and not self.done.done():
            self.done.set_exception(ConnectionError("closed"))


class Client:
    def __init__(self, load: Load) -> None:
        self.load = load
        self.outcome = Outcome()
        self.nonce = random.getrandbits(40)
        self.numbers = count()
        self.idle: list[Connection] = []

    async def one(self) -> None:
        connection = self.idle.pop() if self.idle else await self._connect()
        try:
            await asyncio.wait_for(
                connection.send(self.load.request(next(self.numbers), self.nonce)), self.load.timeout
            )
        except (TimeoutError, ConnectionError) as error:
            self.outcome.errors[type(error).__name__] += 1
            if connection.transport is not None:
                connection.transport.close()
            return
        ended = time.perf_counter()
        if connection.status == 200:
            self.outcome.ttft.append(connection.first - connection.sent)
            self.outcome.sent.append(connection.sent)
            self.outcome.total.append(ended - connection.sent)
            self.outcome.events += connection.events
        else:
            self.outcome.errors[str(connection.status)] += 1
        if connection.transport is not None:
            self.idle.append(connection)

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, "127.0.0.1", self.load.port)
        return connection

    async def closed_loop(self, clients: int) -> None:
        end = time.perf_counter() + self.load.seconds

        async def client() -> None:
            while time.perf_counter() < end:
                await self.one()

        await asyncio.gather(*(client() for _ in range(clients)))

    async def open_loop(self, rate: float) -> None:
        arrivals = random.Random(ARRIVALS_SEED)
        watching = asyncio.create_task(self._watch_host())
        start = due = time.perf_counter()
        tasks = []
        while due < start + self.load.seconds:
            due += arrivals.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            self.outcome.late.append(max(0.0, time.perf_counter() - due))
            tasks.append(asyncio.create_task(self.one()))
        await asyncio.gather(*tasks)
        watching.cancel()
        self.outcome.stolen.append((time.perf_counter(), stolen_ticks()))

    async def _watch_host(self) -> None:
        while True:
            self.outcome.stolen.append((time.perf_counter(), stolen_ticks()))
            await asyncio.sleep(STEAL_SECONDS)

    async def run(self) -> Outcome:
        started = time.perf_counter()
        if self.load.rate is not None:
            await self.open_loop(self.load.rate)
        else:
            await self.closed_loop(self.load.clients or 1)
        self.outcome.seconds = time.perf_counter() - started
        return self.outcome


if __name__ == "__main__":
    outcome = uvloop.run(Client(Load(**json.loads(sys.argv[1]))).run())
    print(json.dumps(outcome.summary()))
