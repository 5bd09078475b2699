"""HTTP as bytes on a socket, for what no client library would send."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.simulation.scripted_engine import MODEL
from tests.gateway.conftest import Gateway

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GET_HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def chat(extra: bytes = b"", **fields: object) -> bytes:
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **fields}).encode()
    return CHAT + extra + b"Content-Length: %d\r\n\r\n" % len(body) + body


class Wire:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.file = connection.makefile("rb")

    def send(self, data: bytes) -> None:
        self.connection.sendall(data)

    def response(self, *, with_body: bool = True) -> tuple[int, dict[str, str], bytes]:
        status = int(self.file.readline().split()[1])
        headers = {}
        while line := self.file.readline().strip():
            name, _, value = line.partition(b": ")
            headers[name.decode()] = value.decode()
        body = self.file.read(int(headers.get("content-length", 0))) if with_body else b""
        return status, headers, body

    def is_closed(self) -> bool:
        return self.file.read(1) == b""


@contextmanager
def wire(gateway: Gateway) -> Iterator[Wire]:
    with socket.create_connection((gateway.host, gateway.port), timeout=20) as connection:
        it = Wire(connection)
        with it.file:  # it would keep the socket open
            yield it
