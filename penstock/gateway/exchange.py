"""One HTTP request and its response, and the ASGI boundary that owns them all.

`Edge` makes an `Exchange` of every request: it gives it an id, turns errors into responses, counts and logs it.
Endpoints are `async def endpoint(exchange)`, wrapped by `Endpoint` for the router.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.core.errors import DeadlineExceeded, PenstockError, RequestTooLarge, Unavailable
from penstock.core.request import Objective
from penstock.gateway.errors import ClientGone, InternalError, error_body, error_headers, from_http_exception
from penstock.gateway.keys import redacted
from penstock.gateway.tenants import OPEN
from penstock.observability.account import Account
from penstock.observability.logging import log
from penstock.observability.metrics import GatewayMetrics
from penstock.observability.request_log import RequestLog
from penstock.observability.tracing import Tracing

logger = logging.getLogger("penstock.gateway")

Header = tuple[bytes, bytes]
MakeAccount = Callable[[int, str | None], Account]  # of a status and an error's message

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_LENGTH = re.compile(rb"[0-9]{1,18}")
WATCH_AFTER_SECONDS = 0.02  # answers from a cache are out before, and would pay more for the watching than for the rest

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
        "account",
        "arrived",
        "body_size",
        "deadline",
        "endpoint",
        "headers",
        "id",
        "model",
        "objective",
        "output_asked",
        "received",
        "scope",
        "span",
        "status",
        "streaming",
        "tenant",
        "unique",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.received: dict[bytes, bytes] = dict(scope["headers"])
        self.arrived = time.monotonic()
        # A client may send the same x-request-id twice; this is ours alone. It opens nothing, so it is no secret.
        self.unique = f"{random.getrandbits(96):024x}"
        self.id = self.header(b"x-request-id", _REQUEST_ID) or self.unique
        self.endpoint = "other"
        self.status = 0  # 0: the response has not started
        self.streaming = False
        self.body_size = 0
        self.output_asked = False  # whether the client said how many
        self.model = ""
        self.tenant = OPEN
        self.objective = Objective()
        self.deadline: float | None = None  # seconds after arrival
        self.headers: list[Header] = []  # of the response, beside those every response has
        self.account: MakeAccount | None = None  # of a request that generates
        self.span: Any = None  # of OpenTelemetry, while tracing is on
        self._receive = receive
        self._send = send
        self._task = asyncio.current_task()
        self._cancelled_by: PenstockError | None = None

    @property
    def path(self) -> str:
        path: str = self.scope["path"]
        return path

    def remaining(self) -> float | None:
        """Seconds from now to the deadline; raises when it has passed."""
        if self.deadline is None:
            return None
        left = self.arrived + self.deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"the deadline of {self.deadline * 1000:.0f} ms passed before the work began")
        return left

    def header(self, name: bytes, pattern: re.Pattern[bytes]) -> str | None:
        """None as well if the value is of another form."""
        value = self.received.get(name)
        return value.decode("ascii") if value is not None and pattern.fullmatch(value) else None

    async def body(self, limit: int) -> bytes:
        """The whole body; refused at its header, or as soon as a chunked one outgrows the limit."""
        length = self.header(b"content-length", _LENGTH)
        if length is not None and int(length) > limit:
            raise _too_large(limit)
        parts: list[bytes] = []
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone("client left while sending the body")
            parts.append(message["body"])
            self.body_size += len(parts[-1])
            if self.body_size > limit:
                raise _too_large(limit)
            if not message["more_body"]:
                return parts[0] if len(parts) == 1 else b"".join(parts)

    async def send(self, status: int, body: bytes, *headers: Header) -> None:
        self.status = status
        length = (b"content-length", b"%d" % len(body))
        request_id = (b"x-request-id", self.id.encode())
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [length, request_id, *self.headers, *(headers or (_JSON,))],
            }
        )
        await self._send({"type": "http.response.body", "body": body})

    async def send_events(self, events: bytes) -> None:
        """Send server-sent events; the first call starts the response, so errors before it keep their status."""
        if not self.status:
            self.status = 200
            self.streaming = True
            headers = [(b"x-request-id", self.id.encode()), *self.headers, *_STREAM_HEADERS]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end_events(self, events: bytes) -> None:
        await self._send({"type": "http.response.body", "body": events})

    async def send_error(self, error: PenstockError) -> None:
        if self.streaming:
            await self.end_events(b"data: %b\n\n" % error_body(error))
        elif not self.status:
            await self.send(error.status, error_body(error), _JSON, *error_headers(error))

    def close(self) -> None:
        """Let go of what refers back to this, so that it is freed now: collecting garbage would hold up streams."""
        del self.scope["exchange"]
        self.account = self._task = None

    def cancel(self, reason: PenstockError) -> None:
        """Stop work on this exchange from outside; it ends with `reason`."""
        if self._cancelled_by is None and self._task is not None:
            self._cancelled_by = reason
            self._task.cancel()

    @contextmanager
    def cancelled_on_disconnect(self) -> Iterator[None]:
        """While inside, a client that closes its connection cancels this exchange within WATCH_AFTER_SECONDS."""
        loop = asyncio.get_running_loop()
        watchers: list[asyncio.Task[None]] = []

        async def watch() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            self.cancel(ClientGone("client closed the connection"))

        timer = loop.call_later(WATCH_AFTER_SECONDS, lambda: watchers.append(loop.create_task(watch())))
        try:
            yield
        finally:
            timer.cancel()
            for watcher in watchers:
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


def _too_large(limit: int) -> RequestTooLarge:
    return RequestTooLarge(f"body is larger than the limit of {limit} bytes", code="body_too_large")


Handler = Callable[[Exchange], Awaitable[None]]
Enter = Callable[[Exchange], None]  # finds out who asks, or refuses


def anybody(exchange: Exchange) -> None:
    """For endpoints that need no key."""


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
    """A door and an `async def f(exchange)` behind it, as the ASGI app that a route wants."""

    def __init__(self, name: str, enter: Enter, handle: Handler) -> None:
        self.name = name
        self.enter = enter
        self.handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["exchange"]
        exchange.endpoint = self.name
        self.enter(exchange)
        await self.handle(exchange)


class Edge:
    """The outermost layer. Plain ASGI: per-chunk sends go from the endpoint to the server with nothing between."""

    def __init__(
        self,
        app: ASGIApp,
        traffic: Traffic,
        metrics: GatewayMetrics,
        requests: RequestLog,
        tracing: Tracing | None = None,
        endpoints: Mapping[tuple[str, str], ASGIApp] | None = None,
    ) -> None:
        """`endpoints` by method and path are found without `app`, the router."""
        self.app = app
        self.endpoints = endpoints or {}
        self.traffic = traffic
        self.metrics = metrics
        self.requests = requests
        self.tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send)
        scope["exchange"] = exchange
        if self.tracing is not None and exchange.path not in _QUIET:
            self.tracing.begin(exchange)
        self.traffic.enter(exchange)
        self.metrics.in_flight += 1
        reason: PenstockError | None = None
        try:
            app = self.endpoints.get((scope["method"], scope["path"]), self.app)
            await app(scope, receive, send)
        except (Exception, asyncio.CancelledError) as error:
            reason = exchange.reason(error)
            if not isinstance(reason, ClientGone):
                await exchange.send_error(reason)
        finally:
            self.metrics.in_flight -= 1
            self.traffic.leave(exchange)
            self._record(exchange, reason)
            exchange.close()

    def _record(self, exchange: Exchange, reason: PenstockError | None) -> None:
        """An error in mid-stream is counted by its own status, though the response began with 200."""
        status = exchange.status if reason is None else reason.status
        why = None if reason is None else reason.message
        self.metrics.requests[exchange.endpoint, status] += 1
        account = None if exchange.account is None else exchange.account(status, why)
        if account is not None:
            self.metrics.settle(account)
            self.requests.add(account)
        if self.tracing is not None:
            self.tracing.end(exchange, status, why, account)
        if exchange.path not in _QUIET:
            log(
                logger,
                logging.INFO,
                "request",
                method=exchange.scope["method"],
                path=redacted(exchange.path),
                status=status,
                ms=(time.monotonic() - exchange.arrived) * 1000,
                tenant=exchange.tenant.name or None,
                **_log_fields(account),
                id=redacted(exchange.id),
                why=why and redacted(why),
            )


def _log_fields(account: Account | None) -> dict[str, Any]:
    if account is None:
        return {}
    parts = account.choices[0].parts
    return {
        "class": account.objective,
        "cache": account.choices[0].cache,
        "first_ms": account.ttft and account.ttft * 1000,
        "queued_ms": parts.queued * 1000,
        "prompt": account.prompt_tokens,
        "cached": account.cached_tokens,
        "output": account.output_tokens,
    }
