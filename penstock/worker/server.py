"""The worker's side of the socket: requests in, one frame of chunks per step out."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from penstock.core.engine import EngineInfo
from penstock.core.errors import Failure, PenstockError
from penstock.core.request import Chunk, GenerateRequest
from penstock.engine.loop import EngineLoop
from penstock.worker.protocol import (
    HEARTBEAT_SECONDS,
    Abort,
    FromWorker,
    Heartbeat,
    Hello,
    Refused,
    Submit,
    decode_to_worker,
    frame,
    frames_of,
    read_frame,
)


class WorkerServer:
    """Lives on the asyncio thread; only `emit` is called from the engine's as well."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._requests: set[str] = set()
        self._asyncio = asyncio.get_running_loop()

    @classmethod
    async def over(cls, connection: socket.socket) -> WorkerServer:
        return cls(*await asyncio.open_unix_connection(sock=connection))

    def emit(self, chunks: list[Chunk]) -> None:
        if not self._asyncio.is_closed():
            self._asyncio.call_soon_threadsafe(self._emit, chunks)

    def _emit(self, chunks: list[Chunk]) -> None:
        wanted = [chunk for chunk in chunks if chunk.request_id in self._requests]  # others were aborted meanwhile
        self._requests.difference_update(chunk.request_id for chunk in wanted if chunk.finish_reason is not None)
        if wanted:
            self._writer.write(frames_of(wanted))

    def _send(self, message: FromWorker) -> None:
        self._writer.write(frame(message))

    async def handle_client(self, engine: EngineLoop, info: EngineInfo) -> None:
        """Greet the gateway and do as it says until it goes away, or `hang_up` ends the conversation."""
        self._send(Hello(info, engine.stats))
        heartbeats = asyncio.create_task(self._send_heartbeats(engine))
        try:
            while True:
                message = decode_to_worker(await read_frame(self._reader))
                if isinstance(message, Submit):
                    self._submit(engine, message.request)
                elif isinstance(message, Abort) and message.request_id in self._requests:
                    engine.abort(message.request_id)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            heartbeats.cancel()
            self.hang_up()
            with contextlib.suppress(ConnectionError):
                await self._writer.wait_closed()

    def hang_up(self) -> None:
        self._writer.close()

    def _submit(self, engine: EngineLoop, request: GenerateRequest) -> None:
        try:
            if request.id in self._requests:
                raise PenstockError(f"request id {request.id!r} is in use")
            engine.submit(request)
        except PenstockError as error:
            self._send(Refused(request.id, Failure.of(error)))
        else:
            self._requests.add(request.id)

    async def _send_heartbeats(self, engine: EngineLoop) -> None:
        """Say how the engine is doing, and by saying it that this process runs."""
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            self._send(Heartbeat(engine.stats))
