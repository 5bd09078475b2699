"""The HTTP server without a socket and without a gateway: bytes in, requests and responses out."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable

from penstock.core.errors import PenstockError
from penstock.gateway.http.connection import Connection
from penstock.gateway.http.request import Request
from penstock.gateway.http.response import Response
from penstock.gateway.http.traffic import Traffic

MAX_BODY = 1000
QUIET_TURNS = 8  # of the event loop, after which nothing happens any more unless more bytes come

_HEAD = re.compile(rb"HTTP/1\.1 (\d+) [^\r]*\r\n(.*?)\r\n\r\n", re.DOTALL)
_LENGTH = re.compile(rb"content-length: (\d+)")


class Transport(asyncio.Transport):
    """Takes all that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.reading = True
        self.closed = False  # also in one direction

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.closed = True

    def close(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class Exchanges:
    """What a server made of some bytes."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, bytes, list[tuple[bytes, bytes]], bytes]] = []
        self.statuses: list[int] = []
        self.closed = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Exchanges) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return repr(vars(self))


def exchange(packets: Iterable[bytes]) -> Exchanges:
    """Let a server that reads every body and answers 200 receive these packets."""
    return asyncio.run(_exchange(packets))


async def _exchange(packets: Iterable[bytes]) -> Exchanges:
    found = Exchanges()

    async def answer(request: Request, response: Response) -> None:
        try:
            if request.error is not None:
                raise request.error
            body = b"".join(await request.body(MAX_BODY, 60))
            found.requests.append((request.method, request.path, request.query, request.raw_headers, body))
            await response.send(200, body)
        except PenstockError as error:
            await response.send_error(error)
        finally:
            request.close()

    transport = Transport()
    connection = Connection(answer, set(), Traffic())
    connection.connection_made(transport)
    for packet in packets:
        while not transport.reading:  # noqa: ASYNC110
            await asyncio.sleep(0)
        connection.data_received(packet)
        for _ in range(QUIET_TURNS):
            await asyncio.sleep(0)
    found.closed = transport.closed
    found.statuses = _statuses(transport.written)
    connection.connection_lost(None)
    await asyncio.sleep(0)
    return found


def _statuses(data: bytes) -> list[int]:
    found = []
    while data:
        head = _HEAD.match(data)
        assert head is not None, data
        length = _LENGTH.search(head[2])
        found.append(int(head[1]))
        data = data[head.end() + (int(length[1]) if length else 0) :]
    return found
