"""Hedged first tokens: a request whose first token is late is sent to a second replica too, and goes on where the first
token comes first. The other one is aborted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from penstock.core.engine import ChunkStream
from penstock.core.errors import EngineFailure
from penstock.core.request import Chunk
from penstock.fleet.journal import Journal
from penstock.fleet.replica import Replica
from penstock.fleet.router import Placement

MAX_SHARE = 0.05  # of the requests in flight that may be hedged at a time; one always may


class Hedging:
    def __init__(
        self,
        seconds: float,
        choose: Callable[[Journal, Replica], Placement | None],
        left: Callable[[Placement], None],
    ) -> None:
        """`choose` a second replica beside the given one, if there is any; `left` is told which one is aborted."""
        self._seconds = seconds
        self._choose = choose
        self._left = left
        self._racing = 0
        self.won = self.lost = 0  # races that the second replica won, or lost

    async def race(self, journal: Journal, placed: Placement, chunks: ChunkStream, in_flight: int) -> Contender:
        """Where the request goes on, or has failed at the first replica. A client that leaves aborts both."""
        first = Contender(placed, journal.engine_id, chunks)
        second: Contender | None = None
        try:
            await asyncio.wait([first.chunk], timeout=self._seconds)
            if not first.chunk.done() and self._racing < max(1, MAX_SHARE * in_flight):
                second = self._second(journal, placed.replica)
            if second is None:
                return first
            winner = await _faster(first, second)
            await self._leave(first if winner is second else second)
        except BaseException:
            await self._leave(*(each for each in (first, second) if each is not None))
            raise
        finally:
            self._racing -= second is not None
        self.won += winner is second
        self.lost += winner is first
        if winner is second:
            placed.replica.breaker.failed(time.monotonic())  # one that hangs looks idle, as its requests leave it
            journal.hedge(winner.placed.replica.name, winner.placed.reason, winner.engine_id, winner.began)
        return winner

    def _second(self, journal: Journal, replica: Replica) -> Contender | None:
        placed = self._choose(journal, replica)
        if placed is None:
            return None
        self._racing += 1
        request = journal.hedged_request()
        return Contender(placed, request.id, placed.replica.engine.submit(request))

    async def _leave(self, *contenders: Contender) -> None:
        """Goes on if whoever waits for it is cancelled."""
        await asyncio.wait([contender.leave(self._left) for contender in contenders])


class Contender:
    """An attempt at a request. `engine` and `loss` are those of the instance that has it: its replica may have another
    one when the race is over."""

    def __init__(self, placed: Placement, engine_id: str, chunks: ChunkStream) -> None:
        self.placed = placed
        self.engine, self.loss = placed.replica.engine, placed.replica.loss
        self.engine_id = engine_id
        self.began = time.monotonic()
        self._chunks = chunks
        self.chunk = asyncio.create_task(self._first())
        self._leaving: asyncio.Task[None] | None = None

    async def _first(self) -> Chunk:
        async for chunk in self._chunks:
            return chunk
        raise EngineFailure("the engine ended the stream without a finish reason")

    def succeeded(self) -> bool:
        return not self.chunk.cancelled() and self.chunk.exception() is None and self.chunk.result().error is None

    def leave(self, left: Callable[[Placement], None]) -> asyncio.Task[None]:
        """Abort it, once, and tell `left`."""
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._abort(left))
        return self._leaving

    async def _abort(self, left: Callable[[Placement], None]) -> None:
        self.chunk.cancel()
        try:
            await asyncio.wait([self.chunk])
            if not self.chunk.cancelled():
                self.chunk.exception()  # nobody else asks for it
            await self._chunks.aclose()
        finally:
            left(self.placed)

    async def rest(self) -> AsyncGenerator[Chunk, None]:
        async with aclosing(self._chunks) as chunks:
            yield await self.chunk
            async for chunk in chunks:
                yield chunk


async def _faster(first: Contender, second: Contender) -> Contender:
    """Who has a chunk first; where both fail, the first, for its failure."""
    await asyncio.wait([first.chunk, second.chunk], return_when=asyncio.FIRST_COMPLETED)
    for one, other in ((first, second), (second, first)):
        if one.chunk.done():
            if one.succeeded():
                return one
            await asyncio.wait([other.chunk])
            return other if other.succeeded() else first
    raise AssertionError("one of them is done")
