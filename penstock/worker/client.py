"""The gateway's side of a worker's socket, as an `Engine`."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

from penstock.core.engine import ChunkStream, EngineInfo, EngineStats, Health, HostStats
from penstock.core.errors import Conflict, PenstockError, Unavailable
from penstock.core.ledger import Ledger
from penstock.core.machine import boot_id
from penstock.core.request import Chunk, GenerateRequest, TokenLogprob
from penstock.engine.loop import activity
from penstock.worker.protocol import (
    DEAD_AFTER_HEARTBEATS,
    HEARTBEAT_SECONDS,
    Abort,
    Alive,
    Chunks,
    FromWorker,
    Heartbeat,
    Leaving,
    Pausing,
    Profile,
    Profiled,
    PromptScores,
    Refused,
    Submit,
    decode_from_worker,
    frame,
    take_frames,
)

LOST = "worker_lost"  # code of the error that ends the requests of a worker that has gone
GONE = "worker_gone"  # and of those that come after that
LAST_CHUNK_SECONDS = 1.0  # how long the ledger of an aborted request is waited for
KEPT_LEDGER_SECONDS = 60.0  # how long one is kept for a reader who is slow to ask
STOPPED_AFTER_HEARTBEATS = 2  # without a byte, of a process that is known to be stopped
_ALIVE = frame(Alive())
_UNSENT, _RUNNING, _ENDED = range(3)


class _Stream:
    """The chunks of one request, as they come. Like an async generator, at a fraction of the price."""

    __slots__ = ("_client", "_items", "_request", "_state", "_waiter", "scores")

    def __init__(self, client: WorkerClient, request: GenerateRequest) -> None:
        self.scores: list[TokenLogprob | None] = []  # of the prompt, for the next chunk
        self._client = client
        self._request = request
        self._state = _UNSENT
        self._items: deque[Chunk | PenstockError] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> _Stream:
        return self

    async def __anext__(self) -> Chunk:
        if self._state != _RUNNING:
            if self._state == _ENDED:
                raise StopAsyncIteration
            self._client._send(self._request, self)
            self._state = _RUNNING
        while not self._items:
            self._waiter = self._client._loop.create_future()
            await self._waiter
        item = self._items.popleft()
        if isinstance(item, PenstockError):
            self._end(completed=True)
            raise item
        if item.finish_reason is not None:
            self._end(completed=True)
        return item

    async def aclose(self) -> None:
        """Abort the request, unless it has ended."""
        if self._state == _RUNNING:
            self._end(completed=False)
        self._state = _ENDED

    def _end(self, *, completed: bool) -> None:
        self._state = _ENDED
        self._client._left(self._request.id, completed)

    def put(self, item: Chunk | PenstockError) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _CutTransport:
    """What is written to it arrives nowhere."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.abort = transport.abort

    def write(self, data: bytes) -> None:
        pass


@dataclass(slots=True)
class _Profile:
    asked: int  # `Profile.now`, by which its pieces are known
    found: asyncio.Future[bytes]
    pieces: list[bytes] = field(default_factory=list)


class WorkerClient(asyncio.Protocol):
    """One connection. When it ends, every waiting request fails with `Unavailable` at once.

    A worker that has greeted and falls silent is a dead one: the connection ends, and `closed` says why.

    A protocol rather than a pair of streams: each frame is handed out where it arrives, without a task to wake first.
    """

    info: EngineInfo  # these two: known once connected
    start_seconds: Mapping[str, float]  # phases of the worker's start
    _transport: asyncio.Transport

    def __init__(self, *, remote: bool, is_stopped: Callable[[], bool]) -> None:
        self.stats = EngineStats()
        self.host = HostStats()
        self._remote = remote
        self._is_stopped = is_stopped
        self._received = bytearray()
        self._streams: dict[str, _Stream] = {}
        self._aborted: dict[str, asyncio.Future[Ledger | None]] = {}  # their ledgers, which may yet come
        self._heartbeats_missed = 0
        self._heartbeats_spared = 0  # that may be missed beside the usual ones
        self._profile: _Profile | None = None  # that is being taken
        self._silence = ""
        self._lost = False
        self._loop = asyncio.get_running_loop()
        self._greeted: asyncio.Future[None] = self._loop.create_future()
        self.leaving: asyncio.Future[None] = self._loop.create_future()  # done when the worker drains
        self.closed: asyncio.Future[str] = self._loop.create_future()  # "" if the other end did it

    @classmethod
    async def connect(
        cls, connection: socket.socket, *, is_stopped: Callable[[], bool] = lambda: False
    ) -> WorkerClient:
        """Returns when the worker serves. Raises ConnectionError if it goes away before.

        Over a network the worker wants to hear from this side as well. `is_stopped` tells whether its process is known
        to be stopped, so that less silence is enough.
        """
        loop = asyncio.get_running_loop()
        remote = connection.family != socket.AF_UNIX
        connect = loop.create_connection if remote else loop.create_unix_connection
        _, client = await connect(lambda: cls(remote=remote, is_stopped=is_stopped), sock=connection)
        try:
            await client._greeted
        except BaseException:
            client._transport.abort()
            raise
        return client

    def submit(self, request: GenerateRequest) -> ChunkStream:
        return _Stream(self, request)

    def _send(self, request: GenerateRequest, stream: _Stream) -> None:
        if self._lost:
            raise Unavailable("the worker is not running; try again in a few seconds", code=GONE)
        self._streams[request.id] = stream
        self._transport.write(frame(Submit(request)))

    def _left(self, request_id: str, completed: bool) -> None:
        """Nobody reads its chunks any more."""
        del self._streams[request_id]
        if completed:
            self._settle(request_id, None)
        elif not self._lost:
            self._expect_ledger(request_id)
            self._transport.write(frame(Abort(request_id)))

    async def aborted(self, request_id: str) -> Ledger | None:
        if request_id in self._streams:  # whoever reads it is being cancelled
            self._expect_ledger(request_id)
        ledger = self._aborted.get(request_id)
        if ledger is None:
            return None
        try:
            async with asyncio.timeout(LAST_CHUNK_SECONDS):
                return await asyncio.shield(ledger)
        except TimeoutError:
            return None

    async def profile(self, seconds: float, replica: str, number: int) -> bytes:
        """What `decode_profile` reads. `replica` is its name and `number` that of its process in the trace."""
        if self._profile is not None:
            raise Conflict("this replica is being profiled", code="profile_running")
        asked = Profile(seconds, replica, number, time.monotonic_ns(), boot_id())
        self._profile = profile = _Profile(asked.now, self._loop.create_future())
        try:
            self._transport.write(frame(asked))
            return await profile.found
        finally:
            self._profile = None

    def _profiled(self, message: Profiled) -> None:
        profile = self._profile
        if profile is None or profile.asked != message.asked or profile.found.done():  # nobody waits for it any more
            return
        profile.pieces.append(message.piece)
        if message.failure is not None:
            profile.found.set_exception(message.failure.exception())
        elif message.last:
            profile.found.set_result(b"".join(profile.pieces))

    def _expect_ledger(self, request_id: str) -> None:
        if request_id not in self._aborted:
            self._aborted[request_id] = self._loop.create_future()
            self._loop.call_later(KEPT_LEDGER_SECONDS, self._aborted.pop, request_id, None)

    def _settle(self, request_id: str, ledger: Ledger | None) -> None:
        expected = self._aborted.get(request_id)
        if expected is not None and not expected.done():
            expected.set_result(ledger)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not derived from it

    def data_received(self, data: bytes) -> None:
        """What it raises ends the connection."""
        self._heartbeats_missed = 0
        for body in take_frames(self._received, data):
            self._take(decode_from_worker(body))

    def _take(self, message: FromWorker) -> None:
        if isinstance(message, Chunks):
            streams = self._streams
            for request_id, token_ids in message.tokens.items():
                stream = streams.get(request_id)
                if stream is not None:
                    stream.put(Chunk(request_id, token_ids))
            for chunk in message.chunks:
                stream = streams.get(chunk.request_id)
                if stream is not None:
                    if stream.scores:
                        chunk.prompt_logprobs, stream.scores = stream.scores, []
                    stream.put(chunk)
                elif chunk.finish_reason is not None:
                    self._settle(chunk.request_id, chunk.ledger)
        elif isinstance(message, PromptScores):
            stream = self._streams.get(message.request_id)
            if stream is not None:
                stream.scores += message.logprobs
        elif isinstance(message, Heartbeat):
            self.stats = message.stats
            self.host = message.host or self.host
        elif isinstance(message, Refused):
            stream = self._streams.get(message.request_id)
            if stream is not None:
                stream.put(message.failure.exception())
            else:
                self._settle(message.request_id, None)
        elif isinstance(message, Pausing):
            self._heartbeats_spared = round(message.seconds / HEARTBEAT_SECONDS)
        elif isinstance(message, Profiled):
            self._profiled(message)
        elif isinstance(message, Leaving):
            if not self.leaving.done():
                self.leaving.set_result(None)
        elif self._greeted.done():
            raise ConnectionError("a worker greets once")
        else:
            self.info, self.stats, self.start_seconds = message.info, message.stats, message.start_seconds
            self._greeted.set_result(None)
            self._listen()

    def _listen(self) -> None:
        """Count heartbeats without a byte, until there are too many.

        Not by the clock: where this process did not run itself (stopped, suspended, short of CPU), it finds out late
        but counts one heartbeat, and the socket is read before the next.
        """
        missed = self._heartbeats_missed
        too_many = DEAD_AFTER_HEARTBEATS + self._heartbeats_spared
        if missed >= too_many or (missed >= STOPPED_AFTER_HEARTBEATS and self._is_stopped()):
            self._silence = f"nothing heard from it for {missed * HEARTBEAT_SECONDS:.2g} s"
            self._transport.abort()
        elif not self._lost:
            if self._remote:
                self._transport.write(_ALIVE)
            self._heartbeats_missed += 1
            self._loop.call_later(HEARTBEAT_SECONDS, self._listen)

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        if not self._greeted.done():
            self._greeted.set_exception(ConnectionError("the worker went away without a greeting"))
            self._greeted.exception()  # whoever waited for it may have been cancelled
        for stream in self._streams.values():
            stream.put(Unavailable("the worker died while this request was running; send it again", code=LOST))
        for request_id in self._aborted:
            self._settle(request_id, None)
        if self._profile is not None and not self._profile.found.done():
            self._profile.found.set_exception(Unavailable("the worker died while it was profiled", code=LOST))
        if not self.closed.done():
            self.closed.set_result(self._silence)

    def cut(self) -> None:
        """Hear nothing and say nothing from now on, as over a network that is cut."""
        self._transport.pause_reading()
        self._transport = cast(asyncio.Transport, _CutTransport(self._transport))

    def close(self) -> None:
        """End the connection. Requests in progress fail as if the worker had gone."""
        self._transport.abort()

    def health(self) -> Health:
        return Health(False, "the worker is not running") if self._lost else activity(self.stats)
