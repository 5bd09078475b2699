"""Single flight: one computation that identical requests share. It is cancelled when its last listener leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from penstock.core.errors import DeadlineExceeded, EngineFailure
from penstock.core.request import CacheStatus, Chunk


class Flight:
    """`source` runs in a task of its own, so it goes on when the first request is cancelled."""

    def __init__(self, expires: float | None, on_end: Callable[[Flight], None]) -> None:
        self.expires = expires  # by the event loop's clock: the engine gives the computation up; None: never
        self.found: CacheStatus | None = None  # set by the source when it need not compute
        self._chunks: list[Chunk] = []
        self._ended = False
        self._error: BaseException | None = None
        self._waiting: list[asyncio.Future[None]] = []
        self._listeners = 0
        self._on_end = on_end
        self._task: asyncio.Task[None] | None = None

    def start(self, source: AsyncGenerator[Chunk, None]) -> None:
        self._task = asyncio.create_task(self._run(source))

    def outlasts(self, expires: float | None) -> bool:
        """Whether the computation runs at least until the deadline of a request that wants to join."""
        return self.expires is None or (expires is not None and expires <= self.expires)

    async def listen(self, expires: float | None = None) -> AsyncGenerator[Chunk, None]:
        """Yield all chunks from the first one on, until the listener's own deadline."""
        self._listeners += 1
        position = 0
        try:
            while True:
                while position < len(self._chunks):
                    yield self._chunks[position]
                    position += 1
                if self._error is not None:
                    raise self._error.with_traceback(None)
                if self._ended:
                    return
                await self._next(expires)
        finally:
            self._listeners -= 1
            if self._listeners == 0 and not self._ended:
                self._end()
                assert self._task is not None
                self._task.cancel()

    async def _next(self, expires: float | None) -> None:
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        if expires is None:
            await waiting
            return
        try:
            async with asyncio.timeout_at(expires):
                await waiting
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before the answer was complete") from None

    async def _run(self, source: AsyncGenerator[Chunk, None]) -> None:
        try:
            async with aclosing(source) as chunks:
                async for chunk in chunks:
                    self._chunks.append(chunk)
                    if chunk.finish_reason is not None:
                        self._end()
                    self._wake()
            if not self._ended:
                raise EngineFailure("the engine ended the stream without a finish reason")
        except Exception as error:
            self._error = error
        finally:
            self._end()
            self._wake()

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._on_end(self)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
