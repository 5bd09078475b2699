"""So many streams at any time, whose right answers are learnt before anything is broken."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from penstock.bench.chaos.streams import Ask, Difference, Stream, difference, send, with_stop_string
from penstock.client.http import HttpClient
from penstock.core.errors import Unauthorized, Unavailable

LEARNING_TRIES = 20  # of a request that is shed while nothing is broken


@dataclass(slots=True)
class Phase:
    """Streams that ran under the same conditions, and how each differs from its right answer."""

    streams: list[Stream] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, stream: Stream, right: Stream) -> None:
        compared = stream.error is None and not stream.shed
        self.streams.append(stream)
        self.differences.append(difference(right, stream) if compared else Difference())

    @property
    def defects(self) -> int:
        """Streams that failed or differ."""
        return sum(bool(s.error or d) for s, d in zip(self.streams, self.differences, strict=True))


class Load:
    """So many clients, each with one stream at a time."""

    def __init__(self, http: HttpClient, clients: int) -> None:
        self._http = http
        self._clients = clients
        self.right: list[Stream] = []  # the right answers
        self._in_flight: set[Stream] = set()

    def flows_since(self, at: float) -> bool:
        """Whether everything that was in flight then has brought something since."""
        return all(stream.flows_since(at) for stream in self._in_flight if stream.sent < at)

    async def learn(self, asks: Sequence[Ask]) -> None:
        """Find the right answers. Stop strings are cut from answers without them."""
        answers = await self._learn(asks)
        plain = [answer for answer in answers if answer.ask.kind == "completion"]
        stopped = [with_stop_string(answer.ask, answer.choices[0].text) for answer in plain]
        self.right = answers + await self._learn(stopped)

    async def _learn(self, asks: Sequence[Ask]) -> list[Stream]:
        answers: list[Stream] = []
        await self._all(iter(asks), self._patiently, answers.append)
        return answers

    async def _send(self, ask: Ask) -> Stream:
        stream = Stream(ask)
        self._in_flight.add(stream)
        await send(self._http, stream)
        self._in_flight.discard(stream)
        return stream

    async def _patiently(self, ask: Ask) -> Stream:
        for _ in range(LEARNING_TRIES):
            answer = await self._send(ask)
            if answer.error is not None:
                what = f"{ask.kind} fails while nothing is broken: {answer.error}"
                if answer.error.startswith(("401", "403")):
                    raise Unauthorized(f"{what}\nGive --tenant-key: the load needs a key of a tenant.")
                raise Unavailable(what)
            if not answer.shed:
                return answer
            await asyncio.sleep(answer.retry_after)
        raise Unavailable(f"{ask.kind} is refused again and again while nothing is broken: use fewer --streams")

    async def run(self, order: Iterator[Stream], phase: Phase) -> None:
        """Ask again for these, until there are no more."""
        began = time.perf_counter()
        right = {id(answer.ask): answer for answer in self.right}

        async def once(ask: Ask) -> Stream:
            stream = await self._send(ask)
            if stream.shed:
                await asyncio.sleep(stream.retry_after)
            return stream

        def note(stream: Stream) -> None:
            phase.add(stream, right[id(stream.ask)])

        await self._all((answer.ask for answer in order), once, note)
        phase.seconds = time.perf_counter() - began

    async def _all(
        self, asks: Iterator[Ask], ask_one: Callable[[Ask], Awaitable[Stream]], note: Callable[[Stream], None]
    ) -> None:
        async def client() -> None:
            for ask in asks:
                note(await ask_one(ask))

        await asyncio.gather(*(client() for _ in range(self._clients)))
