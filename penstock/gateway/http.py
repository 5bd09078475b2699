"""HTTP/1.1 on a socket: bytes in, exchanges one after another, bytes out.

A protocol of our own rather than a general server under a general framework: a request begins where its bytes arrive,
its client's leaving is known at once, and an answer is one write.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, cast
from urllib.parse import unquote

import httptools

from penstock.core.errors import InvalidRequest, PenstockError
from penstock.gateway.errors import HeadersTooLarge
from penstock.gateway.exchange import Exchange, Header

if TYPE_CHECKING:
    from penstock.gateway.edge import Edge

MAX_HEAD = 65_536  # bytes of a request line and its headers
HEAD_SECONDS = 30.0  # for a client to send them in
KEEP_ALIVE_SECONDS = 75.0  # longer than what load balancers keep an idle connection for
MAX_WAITING = 16  # requests sent ahead, before a client's leaving goes unnoticed
MAX_UNREAD = 65_536  # bytes of a body that nobody has asked for yet
LINGER_BYTES = 64 * 2**20  # read and dropped after a last answer that did not wait for the whole request
LINGER_SECONDS = 10.0  # for the client to notice it


class Connection(asyncio.Protocol):
    """One client's. Requests that it sends before the last one was answered wait their turn."""

    transport: asyncio.Transport

    def __init__(self, edge: Edge, connections: set[Connection]) -> None:
        self.paused = False  # the client does not take what was written
        self._edge = edge
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)  # it is ignored here, not an error
        self._resumed = asyncio.Event()
        self._unsent: list[bytes] = []
        self._waiting: deque[Exchange] = deque()
        self._current: Exchange | None = None  # being answered
        self._newest: Exchange | None = None  # its body is being received
        self._head_bytes = 0  # of a head that is not complete
        self._in_head = False
        self._lingering = False  # the last answer is out, the client may still be sending
        self._discarded = 0  # bytes, since then
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self._since = self._loop.time()  # when the last answer was out, or the head under way began

    # ------------------------------------------------------------ the transport's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are not derived from it
        self._connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self)
        self.closed.set_result(None)
        self._waiting.clear()
        self._unsent.clear()
        self.resume_writing()
        if self._current is not None:
            self._current.lose_client()
        self._current = self._newest = None
        del self._parser  # it refers back to this

    def data_received(self, data: bytes) -> None:
        if self._lingering:
            self._discarded += len(data)
            if self._discarded > LINGER_BYTES:
                self.transport.close()
            return
        try:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                self.data_received(self._without_offer() + data[offer.args[0] :])
                return
            if self._in_head:
                self._head_bytes += len(data)
                if self._head_bytes > MAX_HEAD:
                    self._refuse(HeadersTooLarge(f"the request's headers are larger than {MAX_HEAD} bytes"))
        except httptools.HttpParserError as error:
            self._refuse(InvalidRequest(f"this is not valid HTTP: {error.__context__ or error}", code="invalid_http"))
        if self._current is None and self._waiting:
            self._begin()

    def _without_offer(self) -> bytes:
        """The latest head again, without its offer to speak another protocol: the parser took it up and skipped the
        body. Java's client sends one with its first request."""
        offered = self._waiting.pop()
        if offered.method == "CONNECT":
            raise httptools.HttpParserError("this is not a proxy")
        kept = [b"%b: %b\r\n" % header for header in self._headers if header[0] not in (b"connection", b"upgrade")]
        return b"%b %b HTTP/1.1\r\n%b\r\n" % (offered.method.encode(), self._target, b"".join(kept))

    def pause_writing(self) -> None:
        self.paused = True
        self._resumed.clear()

    def resume_writing(self) -> None:
        self.paused = False
        self._resumed.set()

    async def resumed(self) -> None:
        await self._resumed.wait()

    def write(self, data: bytes) -> None:
        self.transport.write(b"".join((*self._unsent, data)) if self._unsent else data)
        self._unsent.clear()

    def write_soon(self, data: bytes) -> None:
        """Together with what else is written in this turn of the event loop: tokens that came together cost one call
        of the kernel, not one each."""
        if not self._unsent:
            self._loop.call_soon(self._write_unsent)
        self._unsent.append(data)

    def _write_unsent(self) -> None:
        if self._unsent:
            self.write(b"")

    # ------------------------------------------------------------ the parser's calls

    def on_message_begin(self) -> None:
        self._target = b""
        self._headers: list[Header] = []
        self._in_head = True
        self._head_bytes = 0
        self._since = self._loop.time()

    def on_url(self, part: bytes) -> None:
        self._target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # trailers after a chunked body are nothing to anybody
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        parser = self._parser
        target = httptools.parse_url(self._target)
        path = (target.path or b"/").decode("ascii")
        self._newest = Exchange(
            self,
            parser.get_method().decode("ascii"),
            unquote(path) if "%" in path else path,
            target.query or b"",
            self._headers,
            keep_alive=parser.should_keep_alive(),
            chunked=parser.get_http_version() == "1.1",
        )
        self._waiting.append(self._newest)
        if len(self._waiting) > MAX_WAITING:
            self.transport.pause_reading()

    def on_body(self, part: bytes) -> None:
        if self._newest is not None and self._newest.receive(part) > MAX_UNREAD:
            self.transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._newest is not None:
            self._newest.received_all()
            self._newest = None

    # ------------------------------------------------------------ exchanges

    def _begin(self) -> None:
        exchange = self._current = self._waiting.popleft()
        exchange.task = self._loop.create_task(self._edge.answer(exchange))

    def ended(self, exchange: Exchange) -> None:
        """Its response is complete."""
        if exchange is not self._current:
            return
        self._current = None
        self._since = self._loop.time()
        if not exchange.keep_alive:
            self._waiting.clear()
            if exchange.body_complete:
                self.transport.close()
            else:
                self._linger()
        elif self._waiting:
            self._begin()
        else:
            self.transport.resume_reading()

    def _linger(self) -> None:
        """Closing now would answer what is still being sent with a reset, and the client might never see the answer."""
        self._lingering = True
        self.transport.write_eof()
        self.transport.resume_reading()

    def _refuse(self, error: PenstockError) -> None:
        """What follows cannot be understood, so this is the last answer."""
        self.transport.pause_reading()
        self._in_head = False
        self._waiting.append(Exchange.refused(self, error))

    def close_if_stale(self, now: float) -> None:
        allowed = LINGER_SECONDS if self._lingering else HEAD_SECONDS if self._in_head else KEEP_ALIVE_SECONDS
        if self._current is None and now - self._since > allowed:
            self.transport.close()

    def shut_down(self) -> None:
        """Now if idle, else after the answer under way."""
        if self._current is None:
            self.transport.close()
        else:
            self._current.keep_alive = False
