"""HTTP as it comes over a socket: whole, in pieces, several at once, and broken."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from penstock.core.config import ServerConfig, Settings
from penstock.gateway.http import MAX_HEAD
from penstock.text.tokenizer import Tokenizer
from tests.gateway.conftest import Gateway, serving
from tests.gateway.scripted_engine import MODEL, hang

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"


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


def send_for(seconds: float, it: Wire) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        it.send(b"x" * 1000)


@contextmanager
def wire(gateway: Gateway) -> Iterator[Wire]:
    with socket.create_connection((gateway.host, gateway.port), timeout=20) as connection:
        it = Wire(connection)
        with it.file:  # it would keep the socket open
            yield it


def test_requests_sent_at_once_are_answered_in_order(gateway: Gateway) -> None:
    with wire(gateway) as it:
        it.send(chat(b"x-request-id: a\r\n") + b"GET /health HTTP/1.1\r\nx-request-id: b\r\n\r\n" + chat(n=2))
        assert it.response()[1]["x-request-id"] == "a"
        assert it.response()[1]["x-request-id"] == "b"
        assert len(json.loads(it.response()[2])["choices"]) == 2
        it.send(b"GET /health HTTP/1.1\r\n\r\n")  # and the connection goes on
        assert it.response()[0] == 200


def test_a_request_may_come_byte_by_byte(gateway: Gateway) -> None:
    with wire(gateway) as it:
        it.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in chat(b"Transfer-Encoding: chunked\r\n").partition(b"Content-Length")[0]:
            it.send(bytes([byte]))
        body = chat().partition(b"\r\n\r\n")[2]
        it.send(b"\r\n" + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\nauthorization: x\r\n\r\n")
        assert it.response()[0] == 200


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x02\x00\x01", b"GET /\xff\xfe HTTP/1.1\r\n\r\n", b"CONNECT x:1 HTTP/1.1\r\n\r\n"]
)
def test_what_is_not_http_is_refused_and_the_connection_closed(shared_gateway: Gateway, garbage: bytes) -> None:
    with wire(shared_gateway) as it:
        it.send(garbage)
        status, headers, body = it.response()
        assert (status, headers["connection"]) == (400, "close")
        assert json.loads(body)["error"]["code"] == "invalid_http"
        assert it.is_closed()


def test_garbage_after_a_request_does_not_spoil_its_answer(gateway: Gateway) -> None:
    with wire(gateway) as it:
        it.send(chat() + b"\x00garbage\r\n\r\n")
        assert it.response()[0] == 200
        assert it.response()[0] == 400
        assert it.is_closed()


def test_endless_headers_are_refused(shared_gateway: Gateway) -> None:
    with wire(shared_gateway) as it:
        it.send(b"GET / HTTP/1.1\r\nx: " + b"x" * (MAX_HEAD + 1))
        assert it.response()[0] == 431
        assert it.is_closed()


def test_connections_end_when_asked_to(gateway: Gateway) -> None:
    with wire(gateway) as it:
        it.send(chat(b"Connection: close\r\n") + chat())
        status, headers, _ = it.response()
        assert (status, headers["connection"]) == (200, "close")
        assert it.is_closed()


def test_an_older_client_gets_a_stream_that_ends_with_the_connection(gateway: Gateway) -> None:
    with wire(gateway) as it:
        it.send(chat(stream=True).replace(b"HTTP/1.1", b"HTTP/1.0"))
        _, headers, _ = it.response()
        assert "transfer-encoding" not in headers
        assert it.file.read().endswith(b"data: [DONE]\n\n")


def test_head_is_get_without_the_body(shared_gateway: Gateway) -> None:
    with wire(shared_gateway) as it:
        it.send(b"HEAD /health HTTP/1.1\r\n\r\nGET /health HTTP/1.1\r\n\r\n")
        _, asked, _ = it.response(with_body=False)
        _, got, body = it.response()
    assert asked["content-length"] == got["content-length"] == str(len(body))


def test_offers_to_speak_another_protocol_are_not_taken_up(gateway: Gateway) -> None:
    with wire(gateway) as it:
        it.send(chat(b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"))
        assert it.response()[0] == 200
        it.send(b"GET /health HTTP/1.1\r\n\r\n")
        assert it.response()[0] == 200


def test_who_waits_to_be_told_to_continue_is_told(gateway: Gateway) -> None:
    head, _, body = chat(b"Expect: 100-continue\r\n").partition(b"\r\n\r\n")
    with wire(gateway) as it:
        it.send(head + b"\r\n\r\n")
        assert it.response()[0] == 100
        it.send(body)
        assert it.response()[0] == 200


def test_refused_without_its_body_the_next_request_is_understood(shared_gateway: Gateway) -> None:
    head, _, body = chat().replace(b"/v1/chat/completions", b"/no/such/path").partition(b"\r\n\r\n")
    with wire(shared_gateway) as it:
        it.send(head + b"\r\n\r\n")
        assert it.response()[0] == 404
        it.send(body + b"GET /health HTTP/1.1\r\n\r\n")
        assert it.response()[0] == 200


def test_a_slow_body_is_given_up(tokenizer: Tokenizer) -> None:
    with (
        serving(tokenizer, Settings(server=ServerConfig(body_seconds=0.05))) as gateway,
        wire(gateway) as it,
    ):
        it.send(chat()[:-1])
        status, headers, body = it.response()
        assert (status, headers["connection"]) == (408, "close")
        assert b"did not arrive within 0.05 s" in body
        assert it.is_closed()


LARGE = b"x" * 2**25  # more than the sockets between hold
TOO_MUCH = {
    "body": (CHAT + b"Content-Length: %d\r\n\r\n" % len(LARGE) + LARGE, 413),
    "chunked body": (CHAT + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(LARGE), LARGE), 413),
    "body of a stranger that will not stay": (
        b"POST /unknown HTTP/1.1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(LARGE), LARGE),
        404,
    ),
    "headers": (b"GET / HTTP/1.1\r\nx: " + LARGE, 431),
    "garbage": (b"\x16\x03" + LARGE, 400),
}


@pytest.mark.parametrize("what", TOO_MUCH)
def test_who_sends_all_before_reading_gets_the_refusal(shared_gateway: Gateway, what: str) -> None:
    request, expected = TOO_MUCH[what]
    with wire(shared_gateway) as it:
        it.send(request)
        status, headers, body = it.response()
        assert (status, headers["connection"]) == (expected, "close")
        assert json.loads(body)["error"]
        assert it.is_closed()


@pytest.mark.parametrize("bound", ["bytes", "seconds"])
def test_who_goes_on_sending_is_cut_off(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    monkeypatch.setattr("penstock.gateway.http.LINGER_BYTES", 2**20 if bound == "bytes" else 2**40)
    monkeypatch.setattr("penstock.gateway.http.LINGER_SECONDS", 1e9 if bound == "bytes" else 0.0)
    monkeypatch.setattr("penstock.gateway.server.SWEEP_SECONDS", 0.02)
    with serving(tokenizer) as gateway, wire(gateway) as it:
        it.send(b"garbage\r\n\r\n")
        assert it.response()[0] == 400
        with pytest.raises(ConnectionError):
            send_for(20, it)


def test_a_client_that_leaves_does_not_wait_for_its_pipelined_requests(gateway: Gateway) -> None:
    gateway.runs(lambda request: [[100], hang])
    with wire(gateway) as it:
        it.send(chat(stream=True) + chat(stream=True))
        assert it.response(with_body=False)[0] == 200
    (ended,) = gateway.engine.ended.values()
    assert ended.wait(20)
