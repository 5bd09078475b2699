"""A lean HTTP/1.1 client over asyncio streams: keep-alive, JSON in, JSON or server-sent events out.

Load generators share the machine with the server they measure, so this client does little per chunk: no redirects,
no compression, no cookies. Every transport problem is an `Unavailable` whose `code` says which:
`connect`, `certificate` (the server's is not trusted), `timeout`, `closed` (the server hung up early) or `protocol`
(what came is not HTTP).
"""

from __future__ import annotations

import asyncio
import json
import secrets
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from penstock.client.events import EventParser
from penstock.core.errors import InvalidRequest, PenstockError, Unauthorized, Unavailable

T = TypeVar("T")

LINE_LIMIT = 1 << 20  # bytes in one header or chunk-size line
READ_SIZE = 1 << 16
NO_BODY = (204, 304)
SWEEP_SECONDS = 1.0  # between looks for kept connections that the server has closed
UPLOAD_BYTES = 1 << 18  # of a file, read and sent at once


@dataclass(frozen=True, slots=True)
class Response:
    """A complete answer. Header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise Unavailable(f"the answer is not JSON: {self.body[:80]!r}", code="protocol") from error

    @property
    def error_message(self) -> str:
        return error_message(self.body)


class _Connection:
    """One socket and what has been received on it. Waiting fails after `timeout` seconds without a byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timeout: float) -> None:
        self._reader = reader
        self._writer = writer
        self._timeout = timeout
        self._buffer = bytearray()
        self.fresh = True  # nothing has been answered on it yet

    @property
    def usable(self) -> bool:
        return not (self._buffer or self._reader.at_eof() or self._writer.is_closing())

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._within_timeout(self._writer.drain())

    async def line(self) -> bytes:
        """One line without its end."""
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > LINE_LIMIT:
                raise Unavailable(f"a line of the answer exceeds {LINE_LIMIT} bytes", code="protocol")
            await self._receive()
        return self._take(end + 1).rstrip(b"\r\n")

    async def exactly(self, count: int) -> bytes:
        while len(self._buffer) < count:
            await self._receive()
        return self._take(count)

    async def until_closed(self) -> AsyncGenerator[bytes, None]:
        yield self._take(len(self._buffer))
        while part := await self._within_timeout(self._reader.read(READ_SIZE)):
            yield part

    async def _receive(self) -> None:
        data = await self._within_timeout(self._reader.read(READ_SIZE))
        if not data:
            raise Unavailable("the server closed the connection in mid-answer", code="closed")
        self._buffer += data

    def _take(self, count: int) -> bytes:
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        return data

    async def _within_timeout(self, work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._timeout):
                return await work
        except TimeoutError as error:
            raise Unavailable(f"nothing came for {self._timeout:g} s", code="timeout") from error
        except OSError as error:
            raise Unavailable(f"the connection broke: {error}", code="closed") from error

    def close(self) -> None:
        self._writer.close()


class StreamingResponse:
    """An answer whose body is still on its way. Read it once, by one of `read`, `body` or `events`."""

    def __init__(self, connection: _Connection, status: int, headers: dict[str, str]) -> None:
        self.status = status
        self.headers = headers
        self.complete = False  # the body was read to its end, so the connection may carry another request
        self._connection = connection

    async def read(self) -> bytes:
        return b"".join([part async for part in self.body()])

    async def read_error(self) -> str:
        return error_message(await self.read())

    async def body(self) -> AsyncGenerator[bytes, None]:
        """The body in the pieces the server sent."""
        if self.status in NO_BODY:
            pass
        elif "chunked" in self.headers.get("transfer-encoding", "").lower():
            async for part in self._chunks():
                yield part
        elif "content-length" in self.headers:
            remaining = _number(self.headers["content-length"], 10)
            while remaining:
                part = await self._connection.exactly(min(remaining, READ_SIZE))
                remaining -= len(part)
                yield part
        else:
            async for part in self._connection.until_closed():
                yield part
            return  # nobody knows whether that was all
        self.complete = True

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        connection = self._connection
        while size := _number((await connection.line()).partition(b";")[0], 16):
            data = await connection.exactly(size + 2)
            if data[size:] != b"\r\n":
                raise Unavailable("a chunk of the answer has no end", code="protocol")
            yield data[:size]
        while await connection.line():  # trailers
            pass

    async def events(self) -> AsyncGenerator[str, None]:
        """The data of each server-sent event. Lines, events and characters may span any number of chunks. A server that
        sends one JSON document instead, such as an error with status 200, has said all in one event."""
        if self.headers.get("content-type", "").lower().startswith("application/json"):
            yield (await self.read()).decode("utf-8", "replace")
            return
        parser = EventParser()
        async for part in self.body():
            for event in parser.feed(part):
                yield event
        if self.complete:  # some servers leave out the empty line after the last event
            for event in parser.feed(b"\n\n"):
                yield event


def error_message(body: bytes) -> str:
    """What the server says went wrong: the message of an OpenAI error envelope, else the start of the body."""
    try:
        value = json.loads(body)
        value = value.get("error", value)
        message = value.get("message") or value.get("detail")
    except (ValueError, AttributeError):
        message = None
    return str(message) if message else body[:200].decode("utf-8", "replace").strip()


def _number(text: str | bytes, base: int) -> int:
    try:
        value = int(text, base)
    except ValueError as error:
        raise Unavailable(f"{text!r} is not a length", code="protocol") from error
    if value < 0:
        raise Unavailable(f"{text!r} is not a length", code="protocol")
    return value


def openai_base(url: str) -> str:
    """The root of an OpenAI-compatible server, which people give with or without its `/v1`."""
    return url.rstrip("/").removesuffix("/v1")


class HttpClient:
    """Requests to one server. Connections are kept and reused; as many are opened as there are requests at once."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout: float = 600.0,
        connect_timeout: float = 10.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError as error:
            raise InvalidRequest(f"url {url!r} has a bad port", param="url") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequest(f"url {url!r} must look like http://HOST:PORT", param="url")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._host, self._prefix = parts.hostname, parts.path.rstrip("/")
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = port or (443 if self._ssl else 80)
        self._timeout, self._connect_timeout = timeout, connect_timeout
        sent = {"Host": parts.netloc.rpartition("@")[2], "Accept": "*/*", "Content-Type": "application/json"}
        if api_key:
            sent["Authorization"] = f"Bearer {api_key}"
        sent.update(headers or {})
        for name, value in sent.items():
            if not (value.isascii() and value.isprintable()):
                what = "the API key" if name == "Authorization" else f"the header {name}"
                raise InvalidRequest(f"{what} holds a line break or another character that no header may have")
        self._sent = sent
        self._idle: list[_Connection] = []
        self._sweep_at = 0.0
        self._closed = False

    async def __aenter__(self) -> HttpClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """A stream that is still being read goes on, and closes its connection at its end."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()
        await asyncio.sleep(0)  # lets the transports drop their sockets before the loop may end

    async def get(self, path: str) -> Response:
        return await self._whole("GET", path, None)

    async def post(self, path: str, payload: object) -> Response:
        return await self._whole("POST", path, payload)

    async def _whole(self, method: str, path: str, payload: object) -> Response:
        async with self.stream(method, path, payload) as response:
            return Response(response.status, response.headers, await response.read())

    @asynccontextmanager
    async def stream(
        self, method: str, path: str, payload: object = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[StreamingResponse]:
        """Leaving the block before the body has ended closes the connection, which servers take as an abort."""
        connection, response = await self._exchange(self._encode(method, path, payload, headers or {}))
        try:
            yield response
        finally:
            if response.complete and response.headers.get("connection", "").lower() != "close":
                self._keep(connection)
            else:
                connection.close()

    def _keep(self, connection: _Connection) -> None:
        """For the next request, which takes the one that was kept last. So those of a busy time lie there until the
        server closes them, and would do so for ever after."""
        if self._closed or not connection.usable:
            connection.close()
            return
        connection.fresh = False
        self._idle.append(connection)
        now = asyncio.get_running_loop().time()
        if now >= self._sweep_at:
            self._sweep_at = now + SWEEP_SECONDS
            kept, self._idle = self._idle, []
            for each in kept:
                self._idle.append(each) if each.usable else each.close()

    def _encode(self, method: str, path: str, payload: object, headers: Mapping[str, str]) -> bytes:
        body = b"" if payload is None else json.dumps(payload).encode()
        return self._head(method, path, headers, len(body)) + body

    def _head(self, method: str, path: str, headers: Mapping[str, str], length: int) -> bytes:
        lines = "".join(f"{name}: {value}\r\n" for name, value in {**self._sent, **headers}.items())
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{lines}Content-Length: {length}\r\n\r\n"
        return head.encode("latin-1")

    async def upload(
        self, path: str, file: Path, fields: Mapping[str, str], on_sent: Callable[[int], object]
    ) -> Response:
        """A form with one file, read as it is sent; `on_sent` is told how many bytes of it have gone."""
        boundary = secrets.token_hex(16)
        head = "".join(
            f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
            for name, value in fields.items()
        )
        quoted = file.name.replace("\\", "\\\\").replace('"', '\\"')
        head += f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{quoted}"\r\n\r\n'
        before, after = head.encode(), f"\r\n--{boundary}--\r\n".encode()
        kind = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
        length = len(before) + (await asyncio.to_thread(file.stat)).st_size + len(after)
        connection = await self._acquire()
        try:
            with suppress(Unavailable):  # a server that refuses it may stop reading; its answer says why
                await connection.send(self._head("POST", path, kind, length) + before)
                with file.open("rb") as contents:
                    while part := await asyncio.to_thread(contents.read, UPLOAD_BYTES):
                        await connection.send(part)
                        on_sent(len(part))
                await connection.send(after)
            response = await _read_head(connection)
            return Response(response.status, response.headers, await response.read())
        finally:
            connection.close()

    async def _exchange(self, request: bytes) -> tuple[_Connection, StreamingResponse]:
        """Send and read the head of the answer. A kept connection that the server has since closed is replaced."""
        while True:
            connection = await self._acquire()
            try:
                await connection.send(request)
                return connection, await _read_head(connection)
            except Unavailable as error:
                connection.close()
                if connection.fresh or error.code != "closed":
                    raise Unavailable(f"{self.url}: {error.message}", code=error.code) from error
            except BaseException:
                connection.close()
                raise

    async def _acquire(self) -> _Connection:
        while self._idle:
            if (connection := self._idle.pop()).usable:
                return connection
            connection.close()
        try:
            async with asyncio.timeout(self._connect_timeout):
                reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._ssl)
        except TimeoutError as error:
            raise Unavailable(f"no connection to {self.url} in {self._connect_timeout:g} s", code="connect") from error
        except ssl.SSLCertVerificationError as error:
            raise Unavailable(
                f"cannot trust {self.url}: {error}\nIf the system does not know the authority behind its certificate, "
                "set SSL_CERT_FILE to that authority's certificate in PEM.",
                code="certificate",
            ) from error
        except OSError as error:
            raise Unavailable(f"cannot connect to {self.url}: {error}", code="connect") from error
        return _Connection(reader, writer, self._timeout)


async def _read_head(connection: _Connection) -> StreamingResponse:
    status = 100
    while 100 <= status < 200:  # interim answers precede the real one
        version, _, rest = (await connection.line()).partition(b" ")
        if not version.startswith(b"HTTP/1.") or not rest[:3].isdigit():
            raise Unavailable("the answer is not HTTP/1", code="protocol")
        status = int(rest[:3])
        headers: dict[str, str] = {}
        while line := await connection.line():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
    return StreamingResponse(connection, status, headers)


async def first_model(http: HttpClient) -> str:
    """The name of the first model that an OpenAI-compatible server lists."""
    response = await http.get("/v1/models")
    if response.status != 200:
        raise failure(f"{http.url}/v1/models", response.status, response.error_message)
    try:
        return str(response.json()["data"][0]["id"])
    except (LookupError, TypeError) as error:
        raise Unavailable(f"{http.url}/v1/models names no model", code="protocol") from error


def failure(url: str, status: int, message: str) -> PenstockError:
    """Why a server did not do what a command asked of it; where a key is missing, with the way to give one."""
    what = f"{url} answers {status}: {message}"
    if status == 401:
        return Unauthorized(f"{what}\nSet PENSTOCK_API_KEY to a key of that server, or give --api-key.")
    return Unavailable(what)
