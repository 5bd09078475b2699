"""The worker's side of the socket: requests in, one frame of chunks per client and step out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field

from penstock.core.engine import EngineInfo
from penstock.core.errors import PenstockError
from penstock.core.request import Chunk, GenerateRequest
from penstock.engine.loop import EngineLoop
from penstock.worker.protocol import (
    BEAT_SECONDS,
    Abort,
    Beat,
    Chunks,
    Hello,
    Refused,
    decode_to_worker,
    frame,
    read_frame,
)

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Client:
    writer: asyncio.StreamWriter
    requests: set[str] = field(default_factory=set)


class WorkerServer:
    """Lives on the asyncio thread; only `emit` is called from the engine's as well."""

    def __init__(self, info: EngineInfo) -> None:
        self._info = info
        self._engine: EngineLoop | None = None
        self._owners: dict[str, _Client] = {}
        self._clients: set[_Client] = set()
        self._asyncio = asyncio.get_running_loop()

    def attach(self, engine: EngineLoop) -> None:
        self._engine = engine

    @property
    def engine(self) -> EngineLoop:
        assert self._engine is not None, "attach comes first"
        return self._engine

    def emit(self, chunks: list[Chunk]) -> None:
        if not self._asyncio.is_closed():
            self._asyncio.call_soon_threadsafe(self._send, chunks)

    def _send(self, chunks: list[Chunk]) -> None:
        by_client: dict[_Client, list[Chunk]] = {}
        for chunk in chunks:
            owner = self._owners.get(chunk.request_id)
            if owner is None:
                continue  # aborted meanwhile, or its client went away
            by_client.setdefault(owner, []).append(chunk)
            if chunk.finish_reason is not None:
                self._forget(chunk.request_id)
        for client, theirs in by_client.items():
            client.writer.write(frame(Chunks(theirs)))

    def _forget(self, request_id: str) -> None:
        client = self._owners.pop(request_id)
        client.requests.discard(request_id)

    async def serve(self, address: str) -> asyncio.Server:
        """Listen on a Unix socket path."""
        return await asyncio.start_unix_server(self._converse, address)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = _Client(writer)
        self._clients.add(client)
        writer.write(frame(Hello(self._info)))
        writer.write(frame(Beat(self.engine.stats)))
        try:
            while True:
                message = decode_to_worker(await read_frame(reader))
                if isinstance(message, Abort):
                    if message.request_id in client.requests:
                        self.engine.abort(message.request_id)
                else:
                    self._submit(client, message.request)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client went away; its requests end below
        finally:
            self._clients.discard(client)
            for request_id in list(client.requests):
                self._forget(request_id)
                self.engine.abort(request_id)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def hang_up(self) -> None:
        """End every conversation; cancelled instead, each would leave a traceback in the log."""
        writers = [client.writer for client in self._clients]
        for writer in writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)

    def _submit(self, client: _Client, request: GenerateRequest) -> None:
        try:
            if request.id in self._owners:
                raise PenstockError(f"request id {request.id!r} is in use")
            self.engine.submit(request)
        except PenstockError as error:
            client.writer.write(frame(Refused.of(request.id, error)))
        else:
            self._owners[request.id] = client
            client.requests.add(request.id)

    async def beat(self) -> None:
        """Tell every client once a second how the engine is doing, above all whether it still moves."""
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            message = frame(Beat(self.engine.stats))
            for client in self._clients:
                client.writer.write(message)
