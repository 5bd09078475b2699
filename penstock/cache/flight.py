"""Single flight: one computation that identical requests share. It is cancelled when its last listener leaves.

Every output token that anybody gets is charged once. The owner pays for what it takes, and when it leaves for what
others took further and left with. Who has waited longest is its heir and pays for the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from penstock.core.errors import DeadlineExceeded, EngineFailure
from penstock.core.request import CacheStatus, Chunk, Share


class Flight:
    """`source` runs in a task of its own, so it goes on when the first request is cancelled."""

    def __init__(self, expires: float | None, on_end: Callable[[Flight], None]) -> None:
        self.expires = expires  # by the event loop's clock: the engine gives the computation up; None: never
        self.found: CacheStatus | None = None  # set by the source when it need not compute
        self._chunks: list[Chunk] = []
        self._ended = False
        self._error: BaseException | None = None
        self._waiting: list[asyncio.Future[None]] = []
        self._listeners: dict[Share, None] = {}  # in the order they came
        self._owner: Share | None = None
        self._tokens = 0  # of output, so far
        self._complete = False  # as an answer that is stored
        self._paid: int | None = None  # output tokens that owners who have left pay for; None: not even the prompt
        self._taken_free = 0  # the most output tokens that one has left with who was no owner
        self._on_end = on_end
        self._task: asyncio.Task[None] | None = None

    def start(self, source: AsyncGenerator[Chunk, None]) -> None:
        self._task = asyncio.create_task(self._run(source))

    def outlasts(self, expires: float | None) -> bool:
        """Whether the computation runs at least until the deadline of a request that wants to join."""
        return self.expires is None or (expires is not None and expires <= self.expires)

    async def listen(self, share: Share, expires: float | None = None) -> AsyncGenerator[Chunk, None]:
        """Yield all chunks from the first one on, until the listener's own deadline."""
        self._listeners[share] = None
        if self._owner is None:
            self._owner, share.owner = share, True
        position = 0
        try:
            while True:
                while position < len(self._chunks):
                    chunk = self._chunks[position]
                    if position == 0:
                        share.cached_tokens = chunk.cached_tokens
                    share.taken += len(chunk.token_ids)
                    position += 1
                    yield chunk
                if self._error is not None:
                    raise self._error.with_traceback(None)
                if self._ended:
                    return
                await self._next(expires)
        finally:
            del self._listeners[share]
            if share is self._owner:
                self._pass_on(share)
            else:
                self._taken_free = max(self._taken_free, share.taken)
            if not self._listeners and not self._ended:
                self._end()
                assert self._task is not None
                self._task.cancel()

    def _pass_on(self, owner: Share) -> None:
        self._owner = None
        charged = max(owner.taken, self._paid or 0)
        for_all = self._tokens if self._complete and not self._listeners else self._taken_free
        owner.unseen = max(0, for_all - charged)
        if owner.cached_tokens is not None and not owner.waived:
            self._paid = charged + owner.unseen
        all_paid = self._ended and self._paid is not None and self._paid >= self._tokens
        if self._listeners and not all_paid:
            self._owner = heir = next(iter(self._listeners))
            heir.owner, heir.paid = True, self._paid

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
                    self._tokens += len(chunk.token_ids)
                    if chunk.finish_reason is not None:
                        self._complete = chunk.finish_reason in ("stop", "length")
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
