"""Many requests over one WebSocket: `GET /v1/stream`. The framing is that of the `websockets` library.

A client sends `{"type": "request", "id": ..., "url": ..., "body": {...}}` and `{"type": "cancel", "id": ...}`. Each
request passes through what requests over HTTP pass through, and its messages carry its id (docs/websocket.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import cast

import msgspec
from websockets.frames import Frame, Opcode
from websockets.http11 import Request as Handshake
from websockets.protocol import State
from websockets.server import ServerProtocol

from penstock.core.errors import InvalidRequest
from penstock.gateway.api.serving import Serving, encode_json
from penstock.gateway.errors import ClientGone
from penstock.gateway.http.local import LocalResponse, local_request
from penstock.gateway.http.request import Request
from penstock.gateway.http.response import Response
from penstock.gateway.tenancy.tenants import Tenant

Answer = Callable[[Request, Response, Tenant], Awaitable[None]]

MAX_REQUESTS = 256  # of one connection at a time
PING_SECONDS = 20.0  # of silence before a ping, and before a client that does not answer it is given up
CLOSE_SECONDS = 5.0  # for a client to answer a close frame
STREAMED = frozenset(("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"))
GOING_AWAY = 1001  # a code of close frames


class Ask(msgspec.Struct, tag_field="type", tag="request", forbid_unknown_fields=True):
    id: str
    url: str
    body: msgspec.Raw


class Cancel(msgspec.Struct, tag_field="type", tag="cancel", forbid_unknown_fields=True):
    id: str


class Event(msgspec.Struct, tag_field="type", tag="event"):
    """A server-sent event of a request that streams."""

    id: str
    data: msgspec.Raw


class End(msgspec.Struct, tag_field="type", tag="response"):
    """The last message of a request: its status, and its body unless that came as events."""

    id: str
    status: int
    body: msgspec.Raw | None = None


class Cancelled(msgspec.Struct, tag_field="type", tag="cancelled"):
    id: str


class Mistake(msgspec.Struct, tag_field="type", tag="error"):
    """A message that could not be understood; the connection stays."""

    message: str
    id: str | None = None


_decoder = msgspec.json.Decoder(Ask | Cancel)


class WebSocketEndpoint:
    """`answer` is set once there is a gateway to answer requests with."""

    answer: Answer

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def open(self, request: Request, response: Response, tenant: Tenant) -> None:
        protocol = ServerProtocol(max_size=self._serving.max_body)
        protocol.receive_data(_head(request))
        found = protocol.events_received()
        if not found:
            raise InvalidRequest(f"this is no WebSocket handshake: {protocol.handshake_exc}", code="upgrade_required")
        accepted = protocol.accept(cast(Handshake, found[0]))
        if accepted.status_code != 101:
            raise InvalidRequest(f"open a WebSocket here: {protocol.handshake_exc}", code="upgrade_required")
        protocol.send_response(accepted)
        self._serving.traffic.leave(request)  # a drain waits for its requests, not for the connection
        socket = _Socket(protocol, request, response, self._serving, tenant, self.answer)
        response.upgrade(b"".join(protocol.data_to_send()), socket)
        with request.cancelling_on_disconnect():
            await socket.run()


def _head(request: Request) -> bytes:
    """As it came, with the word that the parser of HTTP was kept from seeing."""
    lines = [b"GET %b HTTP/1.1\r\n" % request.path.encode()]
    lines += [b"%b: %b\r\n" % header for header in request.raw_headers if header[0] != b"connection"]
    return b"".join((*lines, b"Connection: Upgrade\r\n\r\n"))


class _Socket:
    """One connection. It is used on the event loop only."""

    def __init__(
        self,
        protocol: ServerProtocol,
        request: Request,
        response: Response,
        serving: Serving,
        tenant: Tenant,
        answer: Answer,
    ) -> None:
        self._protocol = protocol
        self._request = request
        self._response = response
        self._serving = serving
        self._tenant = tenant
        self._answer = answer
        self._running: dict[str, Request] = {}
        self._cancelled: set[Request] = set()  # by messages of the client; they have not ended yet
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self._heard = asyncio.Event()
        self._parts: list[bytes] = []  # of a message that is not complete

    async def run(self) -> None:
        pinging = asyncio.create_task(self._ping())
        try:
            await self._ended.wait()
        finally:
            pinging.cancel()
            for running in list(self._running.values()):
                running.cancel(ClientGone("the WebSocket was closed"))
            await asyncio.gather(pinging, *self._tasks, return_exceptions=True)
            self._response.close_upgraded()

    # ------------------------------------------------------------ what the connection calls

    def receive(self, data: bytes) -> None:
        self._heard.set()
        self._protocol.receive_data(data)
        for frame in self._protocol.events_received():
            if isinstance(frame, Frame):
                self._take(frame)
        self._flush()

    def shut_down(self) -> None:
        self._close(GOING_AWAY, "the server is shutting down")

    # ------------------------------------------------------------ messages

    def _take(self, frame: Frame) -> None:
        if frame.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
            self._parts.append(bytes(frame.data))
            if frame.fin:
                message, self._parts = b"".join(self._parts), []
                self._take_message(message)

    def _take_message(self, message: bytes) -> None:
        try:
            asked = _decoder.decode(message)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._say(Mistake(f"the message was not understood: {error}"))
            return
        if isinstance(asked, Cancel):
            if (running := self._running.get(asked.id)) is not None:
                self._cancelled.add(running)
                running.cancel(ClientGone("cancelled by its client"))
            return
        if asked.id in self._running:
            self._say(Mistake("a request with this id is running", asked.id))
        elif asked.url not in STREAMED:
            self._say(Mistake(f"url must be one of {', '.join(sorted(STREAMED))}", asked.id))
        elif len(self._running) >= MAX_REQUESTS:
            self._say(Mistake(f"{MAX_REQUESTS} requests are running on this connection", asked.id))
        else:
            request = local_request(asked.url, bytes(asked.body))
            self._running[asked.id] = request
            task = request.task = asyncio.create_task(self._run(asked.id, request))
            self._tasks.add(task)
            task.add_done_callback(partial(self._end, asked.id, request))

    async def _run(self, id: str, request: Request) -> None:
        async def on_events(events: bytes) -> None:
            for line in events.split(b"\n"):
                data = line.removeprefix(b"data:").strip()
                if line.startswith(b"data:") and data != b"[DONE]":
                    await self._send(Event(id, msgspec.Raw(data)))

        response = LocalResponse(request, on_events)
        await self._answer(request, response, self._tenant)
        del self._running[id]
        if not response.status or request in self._cancelled:
            await self._send(Cancelled(id))
        elif response.streaming:
            status = 200 if response.error is None else response.error.status
            await self._send(End(id, status))
        else:
            await self._send(End(id, response.status, msgspec.Raw(response.body)))

    def _end(self, id: str, request: Request, task: asyncio.Task[None]) -> None:
        """A task that was cancelled before its first step has run nothing of `_run`."""
        self._tasks.discard(task)
        self._cancelled.discard(request)
        if self._running.get(id) is request:
            del self._running[id]
            if task.cancelled():
                self._say(Cancelled(id))

    async def _send(self, message: msgspec.Struct) -> None:
        """Waits while the client does not take what was sent, so nothing piles up here."""
        await self._response.drained()
        self._say(message)

    def _say(self, message: msgspec.Struct) -> None:
        if self._protocol.state is State.OPEN:
            self._protocol.send_text(encode_json(message))
            self._flush()

    # ------------------------------------------------------------ the connection's life

    async def _ping(self) -> None:
        """A client that is silent is asked whether it is there."""
        while True:
            if not await self._heard_within(PING_SECONDS):
                self._protocol.send_ping(b"")
                self._flush()
                if not await self._heard_within(PING_SECONDS):
                    self._close(GOING_AWAY, "no answer to a ping")
                    return

    async def _heard_within(self, seconds: float) -> bool:
        """Nothing is read from a client that does not take what was sent. It is heard of when it takes that."""
        self._heard.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._heard.wait()
        except TimeoutError:
            return await self._response.drained()
        return True

    def _close(self, code: int, why: str) -> None:
        if self._protocol.state is State.OPEN:
            self._protocol.send_close(code, why)
            self._flush()
            asyncio.get_running_loop().call_later(CLOSE_SECONDS, self._ended.set)

    def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            if data:
                self._response.send_raw(data)
        if self._protocol.close_expected() or self._protocol.state is State.CLOSED:
            self._ended.set()
