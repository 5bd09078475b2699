"""One HTTP request and its response."""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from penstock.core.errors import DeadlineExceeded, PenstockError, RequestTimeout, RequestTooLarge, Unavailable
from penstock.core.request import Objective
from penstock.gateway.errors import ClientGone, InternalError, error_body, error_headers, leaves_input
from penstock.gateway.tenancy.tenants import OPEN
from penstock.observability.account import Account
from penstock.observability.logging import log
from penstock.state.store import Grant

if TYPE_CHECKING:
    from penstock.gateway.http.connection import Connection

logger = logging.getLogger("penstock.gateway")

Header = tuple[bytes, bytes]
MakeAccount = Callable[[int, str | None], Account]  # of a status and an error's message

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_STATUS_LINES = {status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in HTTPStatus}
_JSON: Header = (b"content-type", b"application/json")
_STREAM_HEADERS: list[Header] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold chunks back
]


class Exchange:
    """Body in; JSON or an event stream out; cancelled when its client leaves while something is generated for it."""

    __slots__ = (
        "_awaited",
        "_body",
        "_cancelled_by",
        "_chunked",
        "_connection",
        "account",
        "answered",
        "arrived",
        "body_complete",
        "body_size",
        "deadline",
        "endpoint",
        "ends_with_client",
        "error",
        "given_headers",
        "gone",
        "grants",
        "headers",
        "id",
        "keep_alive",
        "method",
        "model",
        "objective",
        "output_asked",
        "path",
        "path_params",
        "query",
        "received",
        "span",
        "status",
        "streaming",
        "task",
        "tenant",
        "unique",
    )

    def __init__(
        self,
        connection: Connection,
        method: str,
        path: str,
        query: bytes,
        given_headers: list[Header],
        *,
        keep_alive: bool,
        chunked: bool,
    ) -> None:
        self.method = method
        self.path = path
        self.query = query
        self.path_params: dict[str, str] = {}
        self.given_headers = given_headers  # names in lower case; one may come twice
        self.received = dict(given_headers)
        self.keep_alive = keep_alive
        self.arrived = time.monotonic()
        self.answered: float | None = None  # when the last of the response was about to be sent
        # A client may send the same x-request-id twice; this is ours alone. It opens nothing, so it is no secret.
        self.unique = f"{random.getrandbits(96):024x}"
        self.id = self.header(b"x-request-id", _REQUEST_ID) or self.unique
        self.endpoint = "other"
        self.status = 0  # 0: the response has not started
        self.streaming = False
        self.body_size = 0
        self.body_complete = False
        self.output_asked = False  # whether the client said how many
        self.model = ""
        self.tenant = OPEN
        self.objective = _NO_OBJECTIVE
        self.deadline: float | None = None  # seconds after arrival
        self.headers: dict[bytes, bytes] = {}  # of the response, beside those every response has
        self.grants: list[Grant] = []  # of its tenant's limits, as long as they are not settled
        self.account: MakeAccount | None = None  # of a request that generates
        self.span: Any = None  # of OpenTelemetry, while tracing is on
        self.error: PenstockError | None = None  # it could not be read
        self.task: asyncio.Task[None] | None = None
        self.gone = False  # its client has left
        self.ends_with_client = False  # whether it is cancelled then
        self._connection = connection
        self._chunked = chunked  # whether the client understands it; otherwise a stream ends with the connection
        self._body: list[bytes] = []
        self._awaited: asyncio.Future[None] | None = None  # more of the body
        self._cancelled_by: PenstockError | None = None

    @classmethod
    def refused(cls, connection: Connection, error: PenstockError) -> Exchange:
        """Of bytes that are no request."""
        exchange = cls(connection, "-", "-", b"", [], keep_alive=False, chunked=True)
        exchange.error = error
        return exchange

    def elapsed(self) -> float:
        """Seconds from arrival to the end of the answer, or to now while there is none."""
        return (self.answered or time.monotonic()) - self.arrived

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

    # ------------------------------------------------------------ the body

    def receive(self, part: bytes) -> None:
        """The connection has more of the body."""
        if not self.status:  # otherwise it was answered without it
            self._body.append(part)
            self.body_size += len(part)
            self._wake()

    def unread(self) -> int:
        """How many bytes of the body lie here that nobody has asked for yet."""
        return self.body_size if self._awaited is None and not self.status else 0

    def received_all(self) -> None:
        self.body_complete = True
        self._wake()

    def fail(self, error: PenstockError) -> None:
        """The body cannot be read to its end, so nothing after it can."""
        self.error = error
        self.keep_alive = False
        self._wake()

    def _wake(self) -> None:
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(None)

    async def body(self, limit: int, seconds: float) -> list[bytes]:
        """The whole body, as it came: joining much of it would take a while. It is refused at its header, as soon as a
        chunked one outgrows the limit, or if it is too slow."""
        length = self.header(b"content-length", _LENGTH)
        if length is not None and int(length) > limit:
            raise _too_large(limit)
        if not self.body_complete:
            if self._chunked and self.received.get(b"expect", b"").lower() == b"100-continue":
                self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            try:
                async with asyncio.timeout(seconds):
                    await self._rest_of_body(limit)
            except TimeoutError:
                raise RequestTimeout(f"the body did not arrive within {seconds:g} s") from None
        if self.body_size > limit:
            raise _too_large(limit)
        parts, self._body = self._body, []
        return parts

    async def _rest_of_body(self, limit: int) -> None:
        while not self.body_complete and self.body_size <= limit:
            if self.gone:
                raise ClientGone("client left while sending the body")
            if self.error is not None:
                raise self.error
            self._awaited = asyncio.get_running_loop().create_future()
            self._connection.steer_reading()
            await self._awaited

    # ------------------------------------------------------------ the response

    async def send(self, status: int, body: bytes, *headers: Header) -> None:
        if self._connection.paused:
            await self._connection.resumed()
        length = (
            () if status == 204 else ((b"content-length", b"%d" % len(body)),)
        )  # an answer without content has none
        head = self._head(status, *length, *(headers or (_JSON,)))
        self._write_last(head if self.method == "HEAD" else head + body)

    async def send_events(self, events: bytes) -> None:
        """Send server-sent events; the first call starts the response, so errors before it keep their status."""
        if self._connection.paused:
            await self._connection.resumed()
        if self.gone:
            return
        if self.status:
            self._connection.write_soon(self._chunk(events))
        else:
            self._connection.write(self._stream_head() + self._chunk(events))

    async def end_events(self, events: bytes) -> None:
        if self._connection.paused:
            await self._connection.resumed()
        head = b"" if self.status else self._stream_head()
        self._write_last(head + self._chunk(events) + (b"0\r\n\r\n" if self._chunked else b""))

    def _stream_head(self) -> bytes:
        self.streaming = True
        if self._chunked:
            return self._head(200, (b"transfer-encoding", b"chunked"), *_STREAM_HEADERS)
        self.keep_alive = False
        return self._head(200, *_STREAM_HEADERS)

    def _chunk(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data

    def _head(self, status: int, *headers: Header) -> bytes:
        """Nothing in a header comes from a client as it was, except ids of a form that cannot break a line."""
        self.status = status
        lines = [_STATUS_LINES[status], _date.line(), b"x-request-id: ", self.id.encode(), b"\r\n"]
        for name, value in (*self.headers.items(), *headers):
            lines += (name, b": ", value, b"\r\n")
        lines.append(b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")
        return b"".join(lines)

    def _write_last(self, data: bytes) -> None:
        self.answered = time.monotonic()  # before: once it is written, the client may have it
        if not self.gone:
            self._connection.write(data)
        self._connection.ended(self)

    async def send_error(self, error: PenstockError) -> None:
        if self.streaming:
            await self.end_events(b"data: %b\n\n" % error_body(error))
        elif not self.status:
            self.keep_alive = self.keep_alive and not leaves_input(error)
            await self.send(error.status, error_body(error), _JSON, *error_headers(error))

    # ------------------------------------------------------------ its end

    @contextmanager
    def ending_with_client(self) -> Iterator[None]:
        """What is awaited in here is cancelled when the client leaves."""
        self.ends_with_client = True
        try:
            yield
        finally:
            self.ends_with_client = False

    def lose_client(self) -> None:
        self.gone = True
        self._wake()
        if self.ends_with_client:
            self.cancel(ClientGone("client closed the connection"))

    def cancel(self, reason: PenstockError) -> None:
        """Stop work on this exchange from outside; it ends with `reason`."""
        if self._cancelled_by is None and self.task is not None:
            self._cancelled_by = reason
            self.task.cancel()

    def close(self) -> None:
        """Let go of what refers back to this, so that it is freed now: collecting garbage would hold up streams."""
        self.account = self.task = None

    def reason(self, error: BaseException) -> PenstockError:
        """Why the exchange failed, in terms a client may see."""
        if isinstance(error, asyncio.CancelledError):
            if self._cancelled_by is None or self.task is None:
                raise error
            self.task.uncancel()
            return self._cancelled_by
        if isinstance(error, PenstockError):
            return error
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            log(logger, logging.ERROR, "out of file descriptors", id=self.id, path=self.path)
            return Unavailable(
                "the server is out of file descriptors; raise its limit (ulimit -n)", code="out_of_file_descriptors"
            )
        log(logger, logging.ERROR, "unexpected error", id=self.id, path=self.path, error=error)
        return InternalError(f"internal error; the log has details under request id {self.id}")


class _Date:
    """The header that tells the time, made once a second."""

    def __init__(self) -> None:
        self._second = 0
        self._line = b""

    def line(self) -> bytes:
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._line = b"date: %b\r\n" % formatdate(second, usegmt=True).encode()
        return self._line


_date = _Date()
_NO_OBJECTIVE = Objective()


def _too_large(limit: int) -> RequestTooLarge:
    return RequestTooLarge(f"body is larger than the limit of {limit} bytes", code="body_too_large")


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
