"""HTTP/1.1 on a socket: bytes in, requests answered one after another, bytes out.

A protocol of our own rather than a general server under a general framework: a request begins where its bytes arrive,
its client's leaving is known at once, and an answer is one write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast
from urllib.parse import unquote

import httptools

from penstock.core.errors import InvalidRequest, PenstockError
from penstock.gateway.errors import HeadersTooLarge, UnsupportedCoding
from penstock.gateway.http.request import Header, Request, Upgraded
from penstock.gateway.http.response import Response
from penstock.gateway.http.traffic import Traffic

Answer = Callable[[Request, Response], Coroutine[Any, Any, None]]

MAX_HEAD = 65_536  # bytes of a request line and its headers
MAX_FRAMING = 65_536  # bytes of a chunked body that are no content: chunk extensions and trailers
CHUNK_FRAMING = 32  # bytes around the content of each chunk that do not count
HEAD_SECONDS = 30.0  # for a client to send them in
KEEP_ALIVE_SECONDS = 75.0  # longer than what load balancers keep an idle connection for
DRAIN_SECONDS = 60.0  # for a client to take any of what was written
MAX_AHEAD = 65_536  # bytes of requests sent ahead, before a client's leaving goes unnoticed
MAX_UNREAD = 65_536  # bytes of a body that nobody has asked for yet
LINGER_BYTES = 64 * 2**20  # read and dropped after a last answer that did not wait for the whole request
LINGER_SECONDS = 10.0  # for the client to notice it

_EMPTY_LINE = b"\r\n\r\n"


class Connection(asyncio.Protocol):
    """One client's connection. Requests that it sends ahead stay bytes until it has taken the answers before them."""

    transport: asyncio.Transport

    def __init__(self, answer: Answer, connections: set[Connection], traffic: Traffic) -> None:
        self.paused = False  # the client does not take what was written
        self._answer = answer
        self._connections = connections
        self._traffic = traffic
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._resumed = asyncio.Event()
        self._unsent: list[bytes] = []
        self._written = 0  # bytes, since the beginning
        self._taken = 0  # bytes of them, as of the last sweep that saw more than the one before
        self._taken_at = 0.0  # when that was
        self._input = b""  # what was received, from shortly before
        self._position = 0  # up to which the parser has it
        self._head_bytes = 0  # of a head that is not complete
        self._body_left = 0  # bytes of a body of known length
        self._framing = 0  # bytes of a chunked body that are no content
        self._current: Response | None = None  # not complete
        self._receiving: Request | None = None  # its body is not complete
        self._reading = True
        self._last = False  # no request is read any more
        self._upgraded: Upgraded | None = None  # what is received goes to it
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
        self._read_no_more()
        self._unsent.clear()
        self.paused = False
        self._resumed.set()
        if self._current is not None:
            self._current.request.disconnect()
        self._current = self._receiving = None
        del self._parser  # it refers back to this

    def data_received(self, data: bytes) -> None:
        if self._upgraded is not None:
            self._upgraded.receive(data)
            return
        if not self._last:
            self._input = self._input + data if self._input else data
            self._parse()
            return
        self._discarded += len(data)
        if self._discarded > LINGER_BYTES:
            self.transport.close()

    def pause_writing(self) -> None:
        self.paused = True
        self._resumed.clear()
        self.steer_reading()

    def resume_writing(self) -> None:
        self.paused = False
        self._resumed.set()
        self._since = self._loop.time()
        self._parse()

    @property
    def draining(self) -> bool:
        return self._traffic.draining

    async def resumed(self) -> None:
        await self._resumed.wait()

    def write(self, data: bytes) -> None:
        if self._unsent:
            data = b"".join((*self._unsent, data))
            self._unsent.clear()
        self._written += len(data)
        self.transport.write(data)

    def write_soon(self, data: bytes) -> None:
        """Together with what else is written in this turn of the event loop: tokens that came together cost one call
        of the kernel, not one each."""
        if not self._unsent:
            self._loop.call_soon(self._write_unsent)
        self._unsent.append(data)

    def _write_unsent(self) -> None:
        if self._unsent:
            self.write(b"")

    # ------------------------------------------------------------ what was received

    def _parse(self) -> None:
        """Feed the parser a head, or a piece of a body, at a time: of a request that is being received, or of the next
        one once its turn has come. The parser does not say where a request ends, so each gets pieces of its own."""
        try:
            while self._position < len(self._input):
                if self._receiving is not None:
                    self._feed_body(self._next_piece())
                elif self._current is None and not self.paused and not self._last:
                    self._feed_head(self._next_piece())
                else:
                    break
        except PenstockError as error:
            self._refuse(error)
        except httptools.HttpParserError as error:
            why = error.__context__  # what a call of ours raised
            self._refuse(why if isinstance(why, PenstockError) else _invalid(f"this is not valid HTTP: {why or error}"))
        fed = self._position
        if self._head_bytes or (self._receiving is not None and not self._body_left):
            fed = max(0, fed - len(_EMPTY_LINE) + 1)  # the next byte may complete the line that ends it
        self._input = self._input[fed:]
        self._position -= fed
        if self._input or self._receiving is not None or not self._reading:
            self.steer_reading()

    def _next_piece(self) -> bytes:
        """Heads and chunked bodies end with an empty line, if not every such line ends them."""
        start = self._position
        if self._body_left:
            end = start + self._body_left
        else:
            found = self._input.find(_EMPTY_LINE, max(0, start - len(_EMPTY_LINE) + 1))
            end = len(self._input) if found < 0 else found + len(_EMPTY_LINE)
        piece = self._input[start:end]
        self._position += len(piece)
        return piece

    def _feed_head(self, piece: bytes) -> None:
        before = self._head_bytes
        self._head_bytes += len(piece)
        try:
            self._parser.feed_data(piece[: MAX_HEAD - before])
        except httptools.HttpParserUpgrade:
            self._parser = httptools.HttpRequestParser(self)
            self._parser.feed_data(self._without_offer())
        if not before and self._head_bytes:  # more of it is to come
            self._since = self._loop.time()
        if self._head_bytes > MAX_HEAD:
            raise HeadersTooLarge(f"the request's headers are larger than {MAX_HEAD} bytes")

    def _feed_body(self, piece: bytes) -> None:
        if self._body_left:
            self._body_left -= len(piece)
            self._parser.feed_data(piece)
            return
        self._framing += len(piece)  # the parser's calls subtract what is content
        self._parser.feed_data(piece)
        self._check_framing()
        self._framing = max(0, self._framing)

    def _check_framing(self) -> None:
        """The parser keeps a trailer in memory until it is complete, and none of this counts as content."""
        if self._framing > MAX_FRAMING:
            raise HeadersTooLarge(f"chunk extensions and trailers are larger than {MAX_FRAMING} bytes")

    def _without_offer(self) -> bytes:
        """The latest head again, without the word by which the parser takes up the offer to speak another protocol, and
        would skip the body: Java's client offers HTTP/2 with its first request. A WebSocket still finds the offer."""
        lines = []
        for name, value in self._headers:
            if name == b"connection":
                value = b",".join(word for word in value.split(b",") if word.strip().lower() != b"upgrade")
            lines.append(b"%b: %b\r\n" % (name, value))
        return b"%b %b HTTP/%b\r\n%b\r\n" % (*self._offered, b"".join(lines))

    def steer_reading(self) -> None:
        """Read no more while what was read waits for its turn or to be asked for, or answers for the client."""
        unread = 0 if self._receiving is None else self._receiving.unread()
        full = self.paused or self._last or len(self._input) > MAX_AHEAD or unread > MAX_UNREAD
        if (full and not self._lingering) is self._reading:
            self._reading = not self._reading
            (self.transport.resume_reading if self._reading else self.transport.pause_reading)()

    # ------------------------------------------------------------ the parser's calls

    def on_message_begin(self) -> None:
        self._target = b""
        self._headers: list[Header] = []

    def on_url(self, part: bytes) -> None:
        self._target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._receiving is None:  # trailers after a chunked body are nothing to anybody
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        method, version = parser.get_method(), parser.get_http_version()
        if parser.should_upgrade():
            if method == b"CONNECT":
                raise _invalid("this is not a proxy")
            self._offered = method, self._target, version.encode()
            return
        self._head_bytes = 0
        target = httptools.parse_url(self._target)
        path = (target.path or b"/").decode("ascii")
        request = Request(
            self,
            method.decode("ascii"),
            unquote(path) if "%" in path else path,
            target.query or b"",
            self._headers,
            http_1_1=version == "1.1",
        )
        _check_head(request, version)
        self._framing = 0
        self._body_left = int(request.headers.get(b"content-length", 0))
        self._receiving = request
        self._begin(request, keep_alive=parser.should_keep_alive())

    def on_chunk_header(self) -> None:
        self._framing -= CHUNK_FRAMING

    def on_body(self, part: bytes) -> None:
        self._framing -= len(part)
        if self._receiving is not None:
            self._receiving.receive(part)

    def on_message_complete(self) -> None:
        if self._receiving is not None:
            self._check_framing()
            self._receiving.receive_end()
            self._receiving = None

    # ------------------------------------------------------------ requests and their responses

    def _begin(self, request: Request, *, keep_alive: bool) -> None:
        self._current = Response(self, request, keep_alive=keep_alive)
        request.task = self._loop.create_task(self._answer(request, self._current))

    def finish(self, response: Response) -> None:
        """The response is complete; the next request may be read."""
        if response is not self._current:
            return
        self._current = None
        self._since = self._loop.time()
        if response.keep_alive:
            if self._input or not self._reading:
                self._parse()
        elif response.request.body_complete:
            self._close()
        else:
            self._linger()

    def take_over(self, upgraded: Upgraded) -> None:
        received, self._input, self._position = self._input[self._position :], b"", 0
        self._upgraded = upgraded
        self.steer_reading()
        if received:
            upgraded.receive(received)

    def _linger(self) -> None:
        """Closing now would answer what is still being sent with a reset, and the client might never see the answer."""
        self._read_no_more()
        self._lingering = True
        if self.transport.can_write_eof():  # TLS has no half-closed connections
            self.transport.write_eof()
        self.steer_reading()

    def _refuse(self, error: PenstockError) -> None:
        """What follows cannot be understood, so this is the last answer."""
        self._read_no_more()
        broken, self._receiving = self._receiving, None
        if broken is None:
            self._begin(Request(self, "-", "-", b"", [], error=error), keep_alive=False)
        elif self._current is not None and broken is self._current.request:
            self._current.keep_alive = False
            broken.fail(error)
        else:  # it was answered before
            self._close()
        self.steer_reading()

    def _read_no_more(self) -> None:
        self._last = True
        self._input, self._position, self._head_bytes = b"", 0, 0

    def _close(self) -> None:
        self._read_no_more()
        self.transport.close()

    def close_if_stale(self, now: float) -> None:
        """The client takes nothing of its answers, or asks for nothing."""
        buffered = self.transport.get_write_buffer_size()
        if not buffered or self._written - buffered > self._taken:
            self._taken, self._taken_at = self._written - buffered, now
        elif now - self._taken_at > DRAIN_SECONDS:
            self.transport.abort()  # closing would wait for what is buffered
        allowed = LINGER_SECONDS if self._lingering else HEAD_SECONDS if self._head_bytes else KEEP_ALIVE_SECONDS
        if self._current is None and not self.paused and now - self._since > allowed:
            self._close()

    def shut_down(self) -> None:
        """Now if idle, else after the answer under way."""
        if self._current is None:
            self._close()
        elif self._upgraded is not None:
            self._upgraded.shut_down()
        else:
            self._current.keep_alive = False


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="invalid_http")


def _check_head(request: Request, version: str) -> None:
    """What the parser lets pass, though servers behind each other might read it differently."""
    headers = request.headers
    if version not in ("1.0", "1.1"):
        raise _invalid(f"HTTP/{version} is not spoken here; use HTTP/1.1")
    if b"host" not in headers and version == "1.1":
        raise _invalid("the request has no Host header")
    if len(headers) < len(request.raw_headers):
        names = [name for name, _ in request.raw_headers]
        for name in (b"host", b"transfer-encoding"):
            if names.count(name) > 1:
                raise _invalid(f"the request has more than one {name.decode()} header")
    coding = headers.get(b"transfer-encoding")
    if coding is not None and (coding.strip().lower() != b"chunked" or version == "1.0"):
        raise UnsupportedCoding("Transfer-Encoding must be chunked and nothing else, and the version HTTP/1.1")
