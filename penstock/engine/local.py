"""An engine in this process: the loop on a thread of its own, its chunks handed to whoever asked."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress

from penstock.core.engine import EngineInfo, EngineStats, Health
from penstock.core.errors import EngineFailure, Unavailable
from penstock.core.request import Chunk, GenerateRequest, failed
from penstock.engine.executor import Adapters, Executor
from penstock.engine.grammar import Grammars
from penstock.engine.loop import EngineLoop
from penstock.engine.scheduler import Scheduler

log = logging.getLogger(__name__)


class LocalEngine:
    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        info: EngineInfo,
        grammars: Grammars | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self.info = info
        self._sinks: dict[str, Callable[[Chunk], None]] = {}
        self._closed = False
        self._failed = False  # its thread has ended by itself
        self._process = os.getpid()
        self._loop = EngineLoop(scheduler, executor, self._deliver, grammars, adapters)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def start(self, request: GenerateRequest, sink: Callable[[Chunk], None]) -> None:
        """Run a request; `sink` is called on the engine's thread, or on the one that closes the engine."""
        self._sinks[request.id] = sink  # before the check: whatever is here after it is ended with the engine
        try:
            self.check_open()
            self._loop.submit(request)
        except BaseException:
            self._sinks.pop(request.id, None)
            raise

    def check_open(self) -> None:
        if self._closed:
            raise Unavailable("the engine has been closed; load the model again to use it", code="closed")
        if self._failed:
            raise EngineFailure("the engine has failed; load the model again to use it")
        if os.getpid() != self._process:
            problem = "the engine belongs to the process that this one was forked from; load the model in this one"
            raise Unavailable(problem, code="forked")

    def abort(self, request_id: str) -> None:
        if self._sinks.pop(request_id, None) is not None:
            self._loop.abort(request_id)

    async def submit(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        chunks: asyncio.Queue[Chunk] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def deliver(chunk: Chunk) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(chunks.put_nowait, chunk)

        self.start(request, deliver)
        try:
            while True:
                chunk = await chunks.get()
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            self.abort(request.id)

    def _deliver(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            ended = chunk.finish_reason is not None
            sink = self._sinks.pop(chunk.request_id, None) if ended else self._sinks.get(chunk.request_id)
            if sink is not None:
                sink(chunk)

    @property
    def stats(self) -> EngineStats:
        return self._loop.stats

    def health(self) -> Health:
        return Health(False, "the engine has failed") if self._failed else self._loop.health()

    def close(self) -> None:
        """End every request that still runs with an error, refuse new ones from now on, and let go of the model."""
        if self._closed:
            return
        self._closed = True
        self._loop.stop()
        self._thread.join()
        self._loop.release()
        self._end_all(EngineFailure("the engine was closed before the answer was complete"))

    def _run(self) -> None:
        try:
            self._loop.run()
        except BaseException:  # a panic of a library is one
            log.exception("the engine has failed; its requests are lost")
            self._failed = True
            self._end_all(EngineFailure("the engine failed before the answer was complete; load the model again"))

    def _end_all(self, error: EngineFailure) -> None:
        for request_id in list(self._sinks):
            with suppress(Exception):  # its books may be what the engine failed at
                self._loop.end(request_id, "error", error)
        while self._sinks:  # those, and the ones that were just being submitted
            request_id, sink = self._sinks.popitem()
            sink(failed(request_id, "error", error, None))
