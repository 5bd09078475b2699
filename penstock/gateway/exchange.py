"""One HTTP request and its response, and the ASGI boundary that owns them all.

`Edge` makes an `Exchange` of every request: it gives it an id, turns errors into responses, counts and logs it.
Endpoints are `async def endpoint(exchange)`, wrapped by `Endpoint` for the router.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.core.errors import PenstockError, RequestTooLarge, Unavailable
from penstock.gateway.errors import ClientGone, InternalError, error_body, error_headers, from_http_exception
from penstock.observability.logging import log
from penstock.observability.metrics import GatewayMetrics

logger = logging.getLogger("penstock.gateway")

Header = tuple[bytes, bytes]

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_QUIET = frozenset(("/health", "/metrics"))  # polled every few seconds; not worth a log line
_JSON: Header = (b"content-type", b"application/json")
_STREAM_HEADERS: list[Header] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold chunks back
]


class Exchange:
    """Body in; JSON or an event stream out; cancelled when its client leaves."""

    __slots__ = (
        "_cancelled_by",
        "_receive",
        "_send",
        "_task",
        "arrived",
        "body_size",
        "endpoint",
        "id",
        "output_tokens",
        "prompt_tokens",
        "scope",
        "status",
        "streaming",
        "unique",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.arrived = time.monotonic()
        self.unique = secrets.token_hex(12)  # a client may send the same x-request-id twice; this is ours alone
        self.id = self.header(b"x-request-id", _REQUEST_ID) or self.unique
        self.endpoint = "other"
        self.status = 0  # 0: the response has not started
        self.streaming = False
        self.body_size = 0
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self._receive = receive
        self._send = send
        self._task = asyncio.current_task()
        self._cancelled_by: PenstockError | None = None

    @property
    def path(self) -> str:
        path: str = self.scope["path"]
        return path

    def header(self, name: bytes, pattern: re.Pattern[bytes]) -> str | None:
        for key, value in self.scope["headers"]:
            if key == name:
                return value.decode("ascii") if pattern.fullmatch(value) else None
        return None

    async def body(self, limit: int) -> bytes:
        """The whole body; refused at its header, or as soon as a chunked one outgrows the limit."""
        too_large = RequestTooLarge(f"body is larger than the limit of {limit} bytes", code="body_too_large")
        length = self.header(b"content-length", _LENGTH)
        if length is not None and int(length) > limit:
            raise too_large
        parts: list[bytes] = []
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone("client left while sending the body")
            parts.append(message["body"])
            self.body_size += len(parts[-1])
            if self.body_size > limit:
                raise too_large
            if not message["more_body"]:
                return parts[0] if len(parts) == 1 else b"".join(parts)

    async def send(self, status: int, body: bytes, *headers: Header) -> None:
        self.status = status
        length = (b"content-length", b"%d" % len(body))
        request_id = (b"x-request-id", self.id.encode())
        await self._send(
            {"type": "http.response.start", "status": status, "headers": [length, request_id, *(headers or (_JSON,))]}
        )
        await self._send({"type": "http.response.body", "body": body})

    async def send_events(self, events: bytes) -> None:
        """Send server-sent events; the first call starts the response, so errors before it keep their status."""
        if not self.status:
            self.status = 200
            self.streaming = True
            headers = [(b"x-request-id", self.id.encode()), *_STREAM_HEADERS]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end_events(self, events: bytes) -> None:
        await self._send({"type": "http.response.body", "body": events})

    async def send_error(self, error: PenstockError) -> None:
        if self.streaming:
            await self.end_events(b"data: %b\n\n" % error_body(error))
        elif not self.status:
            await self.send(error.status, error_body(error), _JSON, *error_headers(error))

    def cancel(self, reason: PenstockError) -> None:
        """Stop work on this exchange from outside; it ends with `reason`."""
        if self._cancelled_by is None and self._task is not None:
            self._cancelled_by = reason
            self._task.cancel()

    @asynccontextmanager
    async def cancelled_on_disconnect(self) -> AsyncIterator[None]:
        """While inside, a client that closes its connection cancels this exchange at once."""

        async def watch() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            self.cancel(ClientGone("client closed the connection"))

        watcher = asyncio.create_task(watch())
        try:
            yield
        finally:
            watcher.cancel()

    def reason(self, error: BaseException) -> PenstockError:
        """Why the exchange failed, in terms a client may see."""
        if isinstance(error, asyncio.CancelledError):
            if self._cancelled_by is None or self._task is None:
                raise error
            self._task.uncancel()
            return self._cancelled_by
        if isinstance(error, PenstockError):
            return error
        if isinstance(error, HTTPException):
            return from_http_exception(error, self.scope["method"], self.path)
        log(logger, logging.ERROR, "unexpected error", id=self.id, path=self.path, error=error)
        return InternalError(f"internal error; the log has details under request id {self.id}")


Handler = Callable[[Exchange], Awaitable[None]]


class Traffic:
    """The exchanges in flight, and whether new work is let in."""

    def __init__(self) -> None:
        self.draining = False
        self.exchanges: set[Exchange] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self, exchange: Exchange) -> None:
        self.exchanges.add(exchange)
        self._idle.clear()

    def leave(self, exchange: Exchange) -> None:
        self.exchanges.discard(exchange)
        if not self.exchanges:
            self._idle.set()

    def admit(self) -> None:
        if self.draining:
            raise Unavailable("the server is shutting down; send the request to another one", code="draining")

    def drain(self) -> None:
        """Refuse new generation requests from now on; those in flight go on."""
        self.draining = True

    async def idle(self) -> None:
        await self._idle.wait()

    def abort(self) -> None:
        """End every exchange in flight with an error its client can read."""
        for exchange in list(self.exchanges):
            exchange.cancel(Unavailable("the server shut down before the request finished", code="shutdown"))


class Endpoint:
    """An `async def f(exchange)` as the ASGI app that a route wants."""

    def __init__(self, name: str, handle: Handler) -> None:
        self.name = name
        self.handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["exchange"]
        exchange.endpoint = self.name
        await self.handle(exchange)


class Edge:
    """The outermost layer. Plain ASGI: per-chunk sends go from the endpoint to the server with nothing between."""

    def __init__(self, app: ASGIApp, traffic: Traffic, metrics: GatewayMetrics) -> None:
        self.app = app
        self.traffic = traffic
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send)
        scope["exchange"] = exchange
        self.traffic.enter(exchange)
        self.metrics.in_flight += 1
        reason: PenstockError | None = None
        try:
            await self.app(scope, receive, send)
        except (Exception, asyncio.CancelledError) as error:
            reason = exchange.reason(error)
            if not isinstance(reason, ClientGone):
                await exchange.send_error(reason)
        finally:
            self.metrics.in_flight -= 1
            self.traffic.leave(exchange)
            self._record(exchange, reason)

    def _record(self, exchange: Exchange, reason: PenstockError | None) -> None:
        """An error in mid-stream is counted by its own status, though the response began with 200."""
        status = exchange.status if reason is None else reason.status
        self.metrics.requests[exchange.endpoint, status] += 1
        if exchange.path not in _QUIET:
            log(
                logger,
                logging.INFO,
                "request",
                method=exchange.scope["method"],
                path=exchange.path,
                status=status,
                ms=(time.monotonic() - exchange.arrived) * 1000,
                prompt=exchange.prompt_tokens,
                output=exchange.output_tokens,
                id=exchange.id,
                why=reason and reason.message,
            )
