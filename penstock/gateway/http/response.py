"""What is sent in answer to one HTTP request: JSON or an event stream."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from email.utils import formatdate
from http import HTTPStatus

from penstock.core.errors import PenstockError
from penstock.gateway.errors import OPENAI_ERRORS, ErrorFormat, error_headers, leaves_input
from penstock.gateway.http.request import Header, Peer, Request, Upgraded

_STATUS_LINES = {status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in HTTPStatus}
_JSON: Header = (b"content-type", b"application/json")
_STREAM_HEADERS: list[Header] = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold chunks back
]


class Response:
    __slots__ = (
        "_chunked",
        "_connection",
        "_finished",
        "headers",
        "keep_alive",
        "request",
        "status",
        "stream_type",
        "streaming",
    )

    def __init__(self, connection: Peer, request: Request, *, keep_alive: bool) -> None:
        self.request = request
        self.keep_alive = keep_alive
        self.headers: dict[bytes, bytes] = {}  # beside those that every response has
        self.status = 0  # 0: it has not started
        self.streaming = False
        self.stream_type = b"text/event-stream; charset=utf-8"
        self._connection = connection
        self._chunked = request.http_1_1  # otherwise a stream ends with the connection
        self._finished: float | None = None  # when the last of it was about to be sent

    def elapsed(self) -> float:
        """Seconds from the request's arrival to the end of the response, or to now while that has not come."""
        return (self._finished or time.monotonic()) - self.request.arrived

    async def send(self, status: int, body: bytes, *headers: Header) -> None:
        if self._connection.paused:
            await self._connection.resumed()
        # A response without content has no Content-Length of its own.
        length = () if status in (204, 304) else ((b"content-length", b"%d" % len(body)),)
        head = self._head(status, *length, *(headers or (_JSON,)))
        self._write_last(head if self.request.method == "HEAD" else head + body)

    async def send_parts(self, length: int, parts: AsyncIterator[bytes], *headers: Header) -> None:
        """A body of this length that need not fit into memory. What cannot be read to its end closes the connection."""
        if self._connection.paused:
            await self._connection.resumed()
        if self.request.disconnected:
            return
        head = self._head(200, (b"content-length", b"%d" % length), *headers)
        if self.request.method == "HEAD":
            self._write_last(head)
            return
        self._connection.write(head)
        sent = 0
        async for part in parts:
            if self._connection.paused:
                await self._connection.resumed()
            if self.request.disconnected:
                return
            self._connection.write(part)
            sent += len(part)
        self.keep_alive = self.keep_alive and sent == length
        self._write_last(b"")

    async def send_events(self, events: bytes) -> None:
        """Send server-sent events; the first call starts the response, so errors before it keep their status."""
        if self._connection.paused:
            await self._connection.resumed()
        if self.request.disconnected:
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

    async def send_error(self, error: PenstockError, format: ErrorFormat = OPENAI_ERRORS) -> None:
        """In the middle of a stream as its last event, unless the stream has ended itself."""
        if self.streaming:
            if self._finished is None:
                await self.end_events(format.event(error, self.request.id))
        elif not self.status:
            self.keep_alive = self.keep_alive and not leaves_input(error)
            status, body = format.status(error), format.body(error, self.request.id)
            await self.send(status, body, _JSON, *error_headers(error))

    def detach(self) -> None:
        """The work goes on without the client, whether that has its answer or reads on: its time is still counted."""
        self._finished = None
        self.request.detached = True

    def upgrade(self, head: bytes, upgraded: Upgraded) -> None:
        """From here on the connection speaks another protocol."""
        self.status = 101
        self.request.answered = True
        self._connection.write(head)
        self._connection.take_over(upgraded)

    async def drained(self) -> bool:
        """Waits while the client does not take what was written. Whether it had to."""
        waits = self._connection.paused
        if waits:
            await self._connection.resumed()
        return waits

    def send_raw(self, data: bytes) -> None:
        """These two: of a connection that was upgraded."""
        if not self.request.disconnected:
            self._connection.write_soon(data)

    def close_upgraded(self) -> None:
        self.keep_alive = False
        self._write_last(b"")

    def _stream_head(self) -> bytes:
        self.streaming = True
        content_type = b"content-type", self.stream_type
        if self._chunked:
            return self._head(200, (b"transfer-encoding", b"chunked"), content_type, *_STREAM_HEADERS)
        self.keep_alive = False
        return self._head(200, content_type, *_STREAM_HEADERS)

    def _chunk(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data

    def _head(self, status: int, *headers: Header) -> bytes:
        """Nothing in a header comes from a client as it was, except ids of a form that cannot break a line."""
        self.status = status
        self.request.answered = True
        if self._connection.draining:
            self.keep_alive = False
        lines = [_STATUS_LINES[status], _date.line(), b"x-request-id: %b\r\n" % self.request.id.encode()]
        lines += [b"%b: %b\r\n" % header for header in (*self.headers.items(), *headers)]
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        elif not self.request.http_1_1:  # without it, an older client waits for the end of the connection
            lines.append(b"connection: keep-alive\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)

    def _write_last(self, data: bytes) -> None:
        self._finished = time.monotonic()  # before: once it is written, the client may have it
        if not self.request.disconnected:
            self._connection.write(data)
        self._connection.finish(self)


class _Date:
    """The Date header, made once a second."""

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
