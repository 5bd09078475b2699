"""The gateway's side of a worker's socket, as an `Engine`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

from penstock.core.engine import EngineInfo, EngineStats, Health
from penstock.core.errors import EngineFailure, PenstockError, Unavailable
from penstock.core.request import Chunk, GenerateRequest
from penstock.engine.loop import health_of
from penstock.worker.protocol import (
    BEAT_SECONDS,
    Abort,
    Beat,
    Chunks,
    Hello,
    Refused,
    Submit,
    decode_from_worker,
    frame,
    read_frame,
)

SILENT_AFTER_SECONDS = 10 * BEAT_SECONDS


class WorkerClient:
    """One connection. When it ends, every waiting request fails with `Unavailable` at once."""

    def __init__(self, info: EngineInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.info = info
        self.stats = EngineStats()
        self._writer = writer
        self._inboxes: dict[str, asyncio.Queue[Chunk | PenstockError]] = {}
        self._last_heard = time.monotonic()
        self._lost = False
        self.closed = asyncio.create_task(self._receive(reader))

    @classmethod
    async def connect(cls, address: str) -> WorkerClient:
        reader, writer = await asyncio.open_unix_connection(address)
        hello = decode_from_worker(await read_frame(reader))
        if not isinstance(hello, Hello):
            raise ConnectionError(f"expected a greeting from the worker, got {type(hello).__name__}")
        return cls(hello.info, reader, writer)

    async def submit(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        if self._lost:
            raise Unavailable("the worker is not running; try again in a few seconds")
        inbox: asyncio.Queue[Chunk | PenstockError] = asyncio.Queue()
        self._inboxes[request.id] = inbox
        self._writer.write(frame(Submit(request)))
        ended = False
        try:
            while not ended:
                item = await inbox.get()
                if isinstance(item, PenstockError):
                    ended = True
                    raise item
                ended = item.finish_reason is not None
                if item.finish_reason == "error":
                    raise EngineFailure(item.error or "the step failed")
                yield item
        finally:
            del self._inboxes[request.id]
            if not ended and not self._lost:
                self._writer.write(frame(Abort(request.id)))

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                message = decode_from_worker(await read_frame(reader))
                self._last_heard = time.monotonic()
                if isinstance(message, Chunks):
                    for chunk in message.chunks:
                        self._put(chunk.request_id, chunk)
                elif isinstance(message, Beat):
                    self.stats = message.stats
                elif isinstance(message, Refused):
                    self._put(message.request_id, message.exception())
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the worker went away; say so to everyone below
        finally:
            self._lost = True
            self._writer.close()
            for inbox in self._inboxes.values():
                inbox.put_nowait(Unavailable("the worker died while this request was running; send it again"))

    def _put(self, request_id: str, item: Chunk | PenstockError) -> None:
        inbox = self._inboxes.get(request_id)
        if inbox is not None:
            inbox.put_nowait(item)

    def health(self) -> Health:
        silent = time.monotonic() - self._last_heard
        if self._lost:
            return Health(False, "the worker is not running")
        if silent > SILENT_AFTER_SECONDS:
            return Health(False, f"nothing heard from the worker for {silent:.0f} s")
        return health_of(self.stats)
