"""One HTTP request as it arrived, and its way to be cancelled."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Protocol

from penstock.core.errors import PenstockError, RequestTimeout, RequestTooLarge
from penstock.core.output_journal import OutputJournal
from penstock.gateway.errors import ClientGone

if TYPE_CHECKING:
    from penstock.gateway.http.response import Response

Header = tuple[bytes, bytes]

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_NO_PARAMS: Mapping[str, str] = {}


class Upgraded(Protocol):
    """Another protocol on a connection that began with HTTP."""

    def receive(self, data: bytes) -> None: ...

    def shut_down(self) -> None:
        """The server ends: say goodbye."""
        ...


class Peer(Protocol):
    """Whoever sends requests and takes responses: a client's connection, or a part of this process."""

    @property
    def paused(self) -> bool:
        """It does not take what was written."""
        ...

    @property
    def draining(self) -> bool:
        """The next request is for another server."""
        ...

    async def resumed(self) -> None: ...

    def write(self, data: bytes) -> None: ...

    def write_soon(self, data: bytes) -> None: ...

    def steer_reading(self) -> None: ...

    def finish(self, response: Response) -> None: ...

    def take_over(self, upgraded: Upgraded) -> None:
        """What is received from here on is for `upgraded`."""
        ...


class Request:
    """Its head is complete; its body may still be arriving."""

    __slots__ = (
        "_awaited",
        "_body",
        "_cancelled_by",
        "_connection",
        "_taken",
        "answered",
        "arrived",
        "background",
        "body_complete",
        "body_size",
        "cancelled_on_disconnect",
        "detached",
        "disconnected",
        "error",
        "headers",
        "http_1_1",
        "id",
        "journal",
        "method",
        "path",
        "path_params",
        "query",
        "raw_headers",
        "task",
        "trace_id",
        "unique",
    )

    def __init__(
        self,
        connection: Peer,
        method: str,
        path: str,
        query: bytes,
        raw_headers: list[Header],
        *,
        http_1_1: bool = True,
        error: PenstockError | None = None,
    ) -> None:
        self.method = method
        self.path = path
        self.query = query
        self.path_params = _NO_PARAMS  # what stands in the places of the route's path
        self.raw_headers = raw_headers  # names in lower case; one may come twice
        self.headers = dict(raw_headers)
        self.http_1_1 = http_1_1  # otherwise HTTP/1.0, which knows no chunks
        self.arrived = time.monotonic()
        # A client may send the same x-request-id twice; this is ours alone. It opens nothing, so it is no secret.
        self.unique = f"{random.getrandbits(96):024x}"
        self.id = self.header(b"x-request-id", _REQUEST_ID) or self.unique
        self.trace_id: str | None = None  # of its trace, where that is recorded
        self.error = error  # it could not be read
        self.body_size = 0
        self.body_complete = False
        self.answered = False  # the response has begun, so nobody asks for the body any more
        self.disconnected = False  # its client has left
        self.cancelled_on_disconnect = False
        self.detached = False  # the work goes on without its client
        self.task: asyncio.Task[None] | None = None  # which answers it
        self.background = False  # nobody waits for it: it runs in the class of the lowest rank
        self.journal: OutputJournal | None = None  # if it outlives this process
        self._connection = connection
        self._body: list[bytes] = []
        self._taken = 0  # bytes of the body that were handed on part by part
        self._awaited: asyncio.Future[None] | None = None  # more of the body
        self._cancelled_by: PenstockError | None = None

    def header(self, name: bytes, pattern: re.Pattern[bytes]) -> str | None:
        """None as well if the value is of another form."""
        value = self.headers.get(name)
        return value.decode("ascii") if value is not None and pattern.fullmatch(value) else None

    # ------------------------------------------------------------ the body

    def receive(self, part: bytes) -> None:
        """The connection has more of the body."""
        if not self.answered:
            self._body.append(part)
            self.body_size += len(part)
            self._wake()

    def receive_end(self) -> None:
        self.body_complete = True
        self._wake()

    def unread(self) -> int:
        """How many bytes of the body lie here that nobody has asked for yet."""
        return self.body_size - self._taken if self._awaited is None and not self.answered else 0

    def fail(self, error: PenstockError) -> None:
        """The body cannot be read to its end."""
        self.error = error
        self._wake()

    def _wake(self) -> None:
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(None)

    async def parts(self, limit: int, seconds: float) -> AsyncIterator[bytes]:
        """The body as it arrives, so that it may be larger than memory: no more is read while a part is worked on.
        Each part must come within so many seconds."""
        self._check_length(limit)
        self._ask_for_body()
        while True:
            if self._body:
                parts, self._body = self._body, []
                for part in parts:
                    self._taken += len(part)
                    yield part
            if self.body_size > limit:
                raise _too_large(limit)
            if self.body_complete and not self._body:
                return
            if not self._body:
                try:
                    async with asyncio.timeout(seconds):
                        await self._more()
                except TimeoutError:
                    raise RequestTimeout(f"nothing of the body came for {seconds:g} s") from None
                self._awaited = None

    async def body(self, limit: int, seconds: float) -> list[bytes]:
        """The whole body in the parts in which it arrived: joining much of it would take a while. It is refused at its
        Content-Length, as soon as a chunked one outgrows the limit, or if it is too slow."""
        self._check_length(limit)
        if not self.body_complete:
            self._ask_for_body()
            try:
                async with asyncio.timeout(seconds):
                    await self._rest_of_body(limit)
            except TimeoutError:
                raise RequestTimeout(f"the body did not arrive within {seconds:g} s") from None
        if self.body_size > limit:
            raise _too_large(limit)
        parts, self._body = self._body, []
        return parts

    def _check_length(self, limit: int) -> None:
        length = self.header(b"content-length", _LENGTH)
        if length is not None and int(length) > limit:
            raise _too_large(limit)

    def _ask_for_body(self) -> None:
        if not self.body_complete and self.http_1_1 and self.headers.get(b"expect", b"").lower() == b"100-continue":
            self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def _rest_of_body(self, limit: int) -> None:
        while not self.body_complete and self.body_size <= limit:
            await self._more()

    async def _more(self) -> None:
        """Wait for more of the body."""
        if self.disconnected:
            raise ClientGone("client left while sending the body")
        if self.error is not None:
            raise self.error
        self._awaited = asyncio.get_running_loop().create_future()
        self._connection.steer_reading()
        await self._awaited

    # ------------------------------------------------------------ its end

    def cancelling_on_disconnect(self) -> _CancellingOnDisconnect:
        """What is awaited in here is cancelled when the client leaves, unless it is detached from that."""
        return _CancellingOnDisconnect(self)

    def disconnect(self) -> None:
        """The client has left."""
        self.disconnected = True
        self._wake()
        if self.cancelled_on_disconnect:
            self.cancel(ClientGone("client closed the connection"))

    def cancel(self, reason: PenstockError) -> None:
        """Stop the work on this request from outside; it ends with `reason`."""
        if self._cancelled_by is None and self.task is not None:
            self._cancelled_by = reason
            self.task.cancel()

    def catch_cancellation(self) -> PenstockError | None:
        """The reason given to `cancel`, in the task that it has cancelled; None if something else cancelled that."""
        if self._cancelled_by is not None and self.task is not None:
            self.task.uncancel()
            return self._cancelled_by
        return None

    def close(self) -> None:
        """Drop what refers back to this request, so that all is freed at once: a pause of the garbage collector would
        hold up every stream."""
        self.task = self.error = None


class _CancellingOnDisconnect:
    """A class, since `contextlib.contextmanager` takes three times as long, and every request enters one."""

    __slots__ = ("_request",)

    def __init__(self, request: Request) -> None:
        self._request = request

    def __enter__(self) -> None:
        request = self._request
        if request.disconnected and not request.detached:
            raise ClientGone("client left before the work began")
        request.cancelled_on_disconnect = not request.detached

    def __exit__(self, *raised: object) -> None:
        self._request.cancelled_on_disconnect = False


def _too_large(limit: int) -> RequestTooLarge:
    return RequestTooLarge(f"body is larger than the limit of {limit} bytes", code="body_too_large")
