"""One request's way through a fleet: to a replica, and on to another one if that refuses it, fails or is lost."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from penstock.core.engine import ChunkStream
from penstock.core.errors import EngineFailure, Overloaded, PenstockError, Unavailable
from penstock.core.request import Chunk
from penstock.fleet.journal import Journal
from penstock.fleet.launcher import Loss
from penstock.fleet.router import Placement
from penstock.worker.protocol import NOT_STARTED

if TYPE_CHECKING:
    from penstock.fleet.fleet import Fleet


class RequestStream:
    """The chunks of one request, from whichever replica has it. Like an async generator, at a fraction of the price."""

    __slots__ = ("_chunks", "_fleet", "_journal", "_loss", "_over", "_placed")

    _loss: asyncio.Future[Loss]  # of the instance that has the request

    def __init__(self, fleet: Fleet, journal: Journal) -> None:
        self._fleet = fleet
        self._journal = journal
        self._placed: Placement | None = None  # None, both: no replica has it
        self._chunks: ChunkStream | None = None
        self._over = False

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> Chunk:
        if self._over:
            raise StopAsyncIteration
        try:
            while True:
                chunks = self._chunks or await self._start()
                try:
                    chunk = await chunks.__anext__()
                    if chunk.error is not None and chunk.error.error == EngineFailure.__name__:
                        chunk.raise_failure()
                except (Overloaded, Unavailable, EngineFailure, StopAsyncIteration) as error:
                    await self._failed(chunks, error)
                    continue
                if self._journal.plain and chunk.finish_reason is None:
                    return self._journal.note(chunk)
                return self._take(chunk)
        except BaseException:
            await self.aclose()
            raise

    async def _start(self) -> ChunkStream:
        fleet, journal = self._fleet, self._journal
        if not journal.attempt:
            fleet.begin(journal)
        placed = (None if journal.suspected else fleet.choose(journal)) or await fleet.place(journal)
        self._placed = placed
        journal.fruitless += 1
        journal.resume(placed.replica.name, placed.reason)
        journal.engine, self._loss = placed.replica.engine, placed.replica.loss
        chunks = self._chunks = journal.engine.submit(journal.next_request())
        if fleet.hedging is not None and journal.attempt == 1:
            self._placed = self._chunks = None  # until one has won, the race leaves them
            winner = await fleet.hedging.race(journal, placed, chunks, len(fleet.journals))
            self._placed, self._loss, journal.engine = winner.placed, winner.loss, winner.engine
            chunks = self._chunks = winner.rest()
        return chunks

    def _take(self, chunk: Chunk) -> Chunk:
        journal, placed = self._journal, self._placed
        assert placed is not None
        if journal.fruitless and chunk.token_ids:
            self._fleet.proved(journal, placed)
        journal.take(chunk)
        if chunk.finish_reason is not None:
            self._over = True
            self._fleet.completed(journal, placed)
        return chunk

    async def _failed(self, chunks: ChunkStream, error: Exception) -> None:
        """Leave the replica. Raises if no other one is to be tried."""
        fleet, journal, placed = self._fleet, self._journal, self._placed
        assert placed is not None
        await chunks.aclose()
        try:
            if isinstance(error, Overloaded) or (isinstance(error, EngineFailure) and error.code == NOT_STARTED):
                fleet.refused(journal, placed.replica, error)
            elif isinstance(error, PenstockError):
                await fleet.failed(journal, placed.replica, self._loss, error)
            else:
                early = EngineFailure("the engine ended the stream without a finish reason")
                await fleet.failed(journal, placed.replica, self._loss, early)
        finally:
            self._placed = self._chunks = None
            fleet.left(placed)

    async def aclose(self) -> None:
        """Abort the request, unless it has ended."""
        if self._over:
            return
        self._over = True
        try:
            if self._chunks is not None:
                await self._chunks.aclose()
        finally:
            if self._placed is not None:
                self._fleet.left(self._placed)
            self._fleet.abandoned(self._journal)
