"""The worker's side of its sockets: requests of every connected gateway in, one frame of chunks per step out."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import cast

from penstock.core.engine import EngineInfo
from penstock.core.errors import EngineFailure, Failure, PenstockError, Unavailable
from penstock.core.request import Chunk, GenerateRequest, Grammar, failed
from penstock.engine.executor import AdapterWeights
from penstock.engine.loop import EngineLoop
from penstock.worker.host import Host
from penstock.worker.outbox import Outbox
from penstock.worker.protocol import (
    DEAD_AFTER_HEARTBEATS,
    HEARTBEAT_SECONDS,
    NOT_STARTED,
    PROFILE_PIECE,
    Abort,
    Heartbeat,
    Hello,
    Leaving,
    Pausing,
    Profile,
    Profiled,
    Refused,
    Submit,
    decode_to_worker,
    frame,
    frames_of,
    take_frames,
)

log = logging.getLogger(__name__)

HEARTBEATS_PER_READING = 4  # of the machine
MOST_PAUSE_SECONDS = 60.0  # more than a vocabulary takes on a machine that is very busy


class WorkerServer:
    """Lives on the asyncio thread; only `emit` and `pausing` are called from others as well: the engine's thread sends
    the chunks of its steps itself."""

    engine: EngineLoop  # these three: set before the first gateway connects
    info: EngineInfo
    profile: Callable[[Profile], Awaitable[bytes]]

    def __init__(self) -> None:
        self.start_seconds: Mapping[str, float] = {}
        self._asyncio = asyncio.get_running_loop()
        self._gateways: set[GatewayConnection] = set()
        # Of the requests in progress. Used from several threads, by single calls: each is atomic.
        self._owners: dict[str, GatewayConnection] = {}
        self._emitting = threading.Lock()  # so that the last chunk of an aborted request is its last one
        self._preparing: dict[str, asyncio.Task[AdapterWeights | None]] = {}  # those that are not submitted yet
        self._idle = asyncio.Event()  # set when the last request ends
        self._draining = False
        self._profiling: dict[GatewayConnection, asyncio.Task[None]] = {}  # the latest profile that each asked for
        self._heartbeats = asyncio.create_task(self._send_heartbeats())

    def emit(self, chunks: list[Chunk]) -> None:
        with self._emitting:
            self._emit(chunks)

    def _emit(self, chunks: list[Chunk]) -> None:
        owners, ended = self._owners, False
        by_gateway: dict[GatewayConnection, list[Chunk]] = {}
        for chunk in chunks:
            last = chunk.finish_reason is not None
            gateway = owners.pop(chunk.request_id, None) if last else owners.get(chunk.request_id)
            if gateway is None:  # it has gone away meanwhile
                continue
            ended = ended or last
            if gateway in by_gateway:
                by_gateway[gateway].append(chunk)
            else:
                by_gateway[gateway] = [chunk]
        for gateway, own in by_gateway.items():
            gateway.write(frames_of(own))
        if ended and self._draining and not self._asyncio.is_closed():
            self._asyncio.call_soon_threadsafe(self._idle_if_done)

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """While a library holds the GIL, and no heartbeat can be sent. Entered once the gateways have been told."""
        self._tell_all(Pausing(MOST_PAUSE_SECONDS))
        try:
            yield
        finally:
            self._tell_all(Pausing(0.0))

    def _tell_all(self, message: Pausing | Leaving) -> None:
        for gateway in list(self._gateways):
            gateway.write(frame(message))

    @property
    def is_left_alone(self) -> bool:
        """Whether no gateway is connected over a network."""
        return not any(gateway.remote for gateway in self._gateways)

    def connected(self, gateway: GatewayConnection) -> None:
        if self._draining:
            gateway.close()
            return
        self._gateways.add(gateway)
        gateway.write(frame(Hello(self.info, self.engine.stats, dict(self.start_seconds))))

    def submit(self, gateway: GatewayConnection, request: GenerateRequest) -> None:
        if request.id in self._owners:
            gateway.refuse(request.id, PenstockError(f"request id {request.id!r} is in use"))
            return
        self._owners[request.id] = gateway  # before it is submitted: its chunks may come at once
        if request.adapter is not None or not self._is_compiled(request.params.grammar):
            self._prepare_first(gateway, request)
        else:
            self._submit(gateway, request)

    def _submit(self, gateway: GatewayConnection, request: GenerateRequest) -> None:
        try:
            self.engine.submit(request)
        except Exception as error:
            self._refuse(gateway, request.id, error)

    def _refuse(self, gateway: GatewayConnection, request_id: str, error: BaseException) -> None:
        del self._owners[request_id]
        gateway.refuse(request_id, _refusal(request_id, error))
        self._idle_if_done()

    def _is_compiled(self, grammar: Grammar | None) -> bool:
        """Or nothing is to be compiled."""
        return grammar is None or self.engine.grammars is None or self.engine.grammars.is_compiled(grammar)

    def _prepare_first(self, gateway: GatewayConnection, request: GenerateRequest) -> None:
        """Compile its grammar and read its adapter on another thread, then submit it, unless it was aborted
        meanwhile."""
        preparing = asyncio.create_task(asyncio.to_thread(self._prepare, request))
        self._preparing[request.id] = preparing

        def prepared(done: asyncio.Task[AdapterWeights | None]) -> None:
            if done.cancelled():
                return
            error = done.exception()
            if self._preparing.get(request.id) is not done:  # it was aborted when this had just ended
                return
            del self._preparing[request.id]
            if error is not None:
                self._refuse(gateway, request.id, error)
            else:  # the adapter stays in host memory while the task refers to it
                self._submit(gateway, request)

        preparing.add_done_callback(prepared)

    def _prepare(self, request: GenerateRequest) -> AdapterWeights | None:
        """What takes long, done so that `submit` finds it at hand."""
        engine, grammar = self.engine, request.params.grammar
        if grammar is not None and engine.grammars is not None:
            engine.grammars.compile(grammar)
        if request.adapter is not None and engine.adapters is not None:
            return engine.adapters.get(request.adapter)
        return None

    def abort(self, gateway: GatewayConnection, request_id: str) -> None:
        if self._owners.get(request_id) is gateway:
            self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        """Its last chunk goes to its owner, if it still has one."""
        if (preparing := self._preparing.pop(request_id, None)) is not None:
            preparing.cancel()
            self.emit([failed(request_id, "abort", Unavailable("the request was aborted", code="aborted"), None)])
        else:
            self.engine.abort(request_id)

    def take_profile(self, gateway: GatewayConnection, asked: Profile) -> None:
        """In the background, and sent in pieces when it is there. One at a time: others are refused."""

        async def answer() -> None:
            try:
                found = memoryview(await self.profile(asked))
            except PenstockError as error:
                gateway.write(frame(Profiled(asked.now, failure=Failure.of(error))))
                return
            for start in range(0, len(found), PROFILE_PIECE):
                end = start + PROFILE_PIECE
                gateway.write(frame(Profiled(asked.now, bytes(found[start:end]), last=end >= len(found))))
                await asyncio.sleep(0)  # chunks of streams go between

        self._profiling[gateway] = asyncio.create_task(answer())

    def disconnected(self, gateway: GatewayConnection) -> None:
        """Nobody waits for its requests any more."""
        self._gateways.discard(gateway)
        if (profiling := self._profiling.pop(gateway, None)) is not None:
            profiling.cancel()
        for request_id, owner in list(self._owners.items()):
            if owner is gateway and self._owners.pop(request_id, None) is not None:
                self._abort(request_id)
        self._idle_if_done()

    def _idle_if_done(self) -> None:
        if not self._owners:
            self._idle.set()

    async def drain(self, seconds: float) -> None:
        """Tell every gateway to send requests elsewhere, and wait until those under way have ended, or so long."""
        self._draining = True
        self._tell_all(Leaving())
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._owners:
                    self._idle.clear()
                    await self._idle.wait()
        with self._emitting:  # the last chunk of all is on its way, not only about to be sent
            pass

    def close(self) -> None:
        """Hang up on every gateway."""
        self._heartbeats.cancel()
        for gateway in list(self._gateways):
            gateway.close()

    async def _send_heartbeats(self) -> None:
        """Say how the engine is doing, and by saying it that this process runs."""
        host: Host | None = None
        # A thread of its own: grammars that take long to compile may have all threads of `asyncio.to_thread`.
        loop, thread = asyncio.get_running_loop(), ThreadPoolExecutor(1, "heartbeats")
        for number in itertools.count():
            await asyncio.sleep(HEARTBEAT_SECONDS)
            heartbeat = b""
            if self._gateways:
                host, reading = host or Host(), None
                if number % HEARTBEATS_PER_READING == 0:
                    reading = await loop.run_in_executor(thread, host.read)
                heartbeat = frame(Heartbeat(self.engine.stats, reading))
            for gateway in list(self._gateways):
                gateway.tick(heartbeat)


def _refusal(request_id: str, error: BaseException) -> PenstockError:
    """What the gateway is told. It tries another replica unless the request itself is to blame."""
    if isinstance(error, PenstockError) and not isinstance(error, EngineFailure):
        return error
    log.error("request %s could not be started", request_id, exc_info=error)
    problem = "the worker could not start this request; its log has the reason"
    return EngineFailure(error.message if isinstance(error, EngineFailure) else problem, code=NOT_STARTED)


class GatewayConnection(asyncio.Protocol):
    """One gateway. Over a network (`remote`) its silence for two seconds ends the connection, and so its requests."""

    _transport: asyncio.Transport
    _outbox: Outbox

    def __init__(self, server: WorkerServer, *, remote: bool = False) -> None:
        self._server = server
        self.remote = remote
        self._received = bytearray()
        self._heartbeats_missed = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not derived from it
        self._outbox = Outbox(self._transport)
        self._server.connected(self)

    def write(self, data: bytes) -> None:
        """May be called from any thread."""
        self._outbox.write(data)

    def refuse(self, request_id: str, error: PenstockError) -> None:
        self.write(frame(Refused(request_id, Failure.of(error))))

    def data_received(self, data: bytes) -> None:
        """What it raises ends the connection."""
        self._heartbeats_missed = 0
        for body in take_frames(self._received, data):
            message = decode_to_worker(body)
            if isinstance(message, Submit):
                self._server.submit(self, message.request)
            elif isinstance(message, Abort):
                self._server.abort(self, message.request_id)
            elif isinstance(message, Profile):
                self._server.take_profile(self, message)

    def tick(self, heartbeat: bytes) -> None:
        self._heartbeats_missed += self.remote
        if self._heartbeats_missed > DEAD_AFTER_HEARTBEATS:
            self._transport.abort()
        else:
            self.write(heartbeat)

    def close(self) -> None:
        self._outbox.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._outbox.discard()
        self._server.disconnected(self)
