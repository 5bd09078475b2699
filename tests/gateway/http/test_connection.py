"""HTTP as it comes over a socket: whole, in pieces, several at once, and broken."""

from __future__ import annotations

import json
import socket
import time

import pytest

from penstock.gateway.http.connection import MAX_HEAD
from penstock.gateway.settings import ServerConfig
from penstock.settings import Settings
from penstock.simulation.scripted_engine import hang
from penstock.text.tokenizer import Tokenizer
from tests.gateway.conftest import Gateway, serving
from tests.gateway.wire import CHAT, GET_HEALTH, Wire, chat, wire


def send_for(seconds: float, it: Wire) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        it.send(b"x" * 1000)


def test_requests_sent_at_once_are_answered_in_order(gateway: Gateway) -> None:
    with wire(gateway) as it:
        it.send(
            chat(b"x-request-id: a\r\n") + GET_HEALTH.replace(b"\r\n\r\n", b"\r\nx-request-id: b\r\n\r\n") + chat(n=2)
        )
        assert it.response()[1]["x-request-id"] == "a"
        assert it.response()[1]["x-request-id"] == "b"
        assert len(json.loads(it.response()[2])["choices"]) == 2
        it.send(GET_HEALTH)  # and the connection goes on
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


def test_an_older_client_is_told_that_its_connection_goes_on(gateway: Gateway) -> None:
    with wire(gateway) as it:
        older = GET_HEALTH.replace(b"HTTP/1.1\r\n", b"HTTP/1.0\r\nConnection: keep-alive\r\n")
        for _ in range(2):
            it.send(older)
            status, headers, _ = it.response()
            assert (status, headers["connection"]) == (200, "keep-alive")
        it.send(older.replace(b"keep-alive", b"close"))
        assert it.response()[1]["connection"] == "close"
        assert it.is_closed()


def test_head_is_get_without_the_body(shared_gateway: Gateway) -> None:
    with wire(shared_gateway) as it:
        it.send(GET_HEALTH.replace(b"GET", b"HEAD") + GET_HEALTH)
        _, asked, _ = it.response(with_body=False)
        _, got, body = it.response()
    assert asked["content-length"] == got["content-length"] == str(len(body))


def test_offers_to_speak_another_protocol_are_not_taken_up(gateway: Gateway) -> None:
    with wire(gateway) as it:
        it.send(chat(b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"))
        assert it.response()[0] == 200
        it.send(GET_HEALTH)
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
        it.send(body + GET_HEALTH)
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
        b"POST /unknown HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(LARGE), LARGE),
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
    monkeypatch.setattr("penstock.gateway.http.connection.LINGER_BYTES", 2**20 if bound == "bytes" else 2**40)
    monkeypatch.setattr("penstock.gateway.http.connection.LINGER_SECONDS", 1e9 if bound == "bytes" else 0.0)
    monkeypatch.setattr("penstock.gateway.http.server.SWEEP_SECONDS", 0.02)
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


BROKEN_CHUNKS = [b"zz\r\n", b"3\r\n{}\n\nmore", b"2\r\n{}0\r\n\r\n", b"2\n{}\r\n0\r\n\r\n", b"fffffffffffffffff\r\n"]


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/health"])
@pytest.mark.parametrize("chunks", BROKEN_CHUNKS)
def test_broken_chunks_are_refused_at_once(shared_gateway: Gateway, path: bytes, chunks: bytes) -> None:
    method = b"POST" if path != b"/health" else b"GET"
    head = CHAT.replace(b"POST /v1/chat/completions", method + b" " + path) + b"Transfer-Encoding: chunked\r\n\r\n"
    with wire(shared_gateway) as it:
        it.send(head + chunks)
        status, headers, body = it.response()
        assert (status, headers["connection"]) == (400, "close")
        assert json.loads(body)["error"]["code"] == "invalid_http"
        assert it.is_closed()


def test_broken_chunks_are_refused_while_the_body_is_awaited(shared_gateway: Gateway) -> None:
    with wire(shared_gateway) as it:
        it.send(CHAT + b"Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert it.response()[0] == 100  # so it is
        it.send(BROKEN_CHUNKS[0])
        assert it.response()[0] == 400
        assert it.is_closed()


def test_broken_chunks_after_the_answer_end_the_connection(shared_gateway: Gateway) -> None:
    with wire(shared_gateway) as it:
        it.send(GET_HEALTH.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n"))
        assert it.response()[0] == 200
        it.send(BROKEN_CHUNKS[0])
        assert it.is_closed()


@pytest.mark.parametrize("size", [MAX_HEAD, MAX_HEAD + 1])
@pytest.mark.parametrize("cut", [None, MAX_HEAD - 3, MAX_HEAD - 1])
def test_the_limit_of_a_head_is_exact_whatever_packets_it_comes_in(
    shared_gateway: Gateway, size: int, cut: int | None
) -> None:
    before, after = b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\nx:", b"x\r\n\r\n"
    head = before + b" " * (size - len(before) - len(after)) + after
    request = head + b"x" * 100_000 + GET_HEALTH
    with wire(shared_gateway) as it:
        it.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        it.send(GET_HEALTH + request[:cut])
        assert it.response()[0] == 200  # so the first part was read
        it.send(b"" if cut is None else request[cut:])
        if size > MAX_HEAD:
            assert it.response()[0] == 431
        else:
            assert [it.response()[0] for _ in range(2)] == [200, 200]


def test_heads_of_many_small_requests_are_not_added_up(shared_gateway: Gateway) -> None:
    count = 2 * MAX_HEAD // len(GET_HEALTH)
    requests = GET_HEALTH * count
    with wire(shared_gateway) as it:
        it.send(requests[:-10])
        assert {it.response()[0] for _ in range(count - 1)} == {200}
        it.send(requests[-10:])
        assert it.response()[0] == 200


OFFER = b"Upgrade: h2c\r\nConnection: "


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("method", [b"GET", b"POST"])
@pytest.mark.parametrize("connection", [b"Upgrade", b"upgrade, close", b"close, Upgrade", b"keep-alive, Upgrade"])
def test_an_offer_to_speak_another_protocol_changes_nothing(
    gateway: Gateway, version: bytes, method: bytes, connection: bytes
) -> None:
    request = chat(OFFER + connection + b"\r\n", stream=True)
    if method == b"GET":
        request = GET_HEALTH.replace(b"\r\n\r\n", b"\r\n" + OFFER + connection + b"\r\n\r\n")
    stays = b"close" not in connection and (version == b"1.1" or b"keep-alive" in connection)
    with wire(gateway) as it:
        it.send(request.replace(b"HTTP/1.1", b"HTTP/" + version))
        status, headers, _ = it.response()
        assert status == 200
        if method == b"POST":
            assert ("transfer-encoding" in headers) == (version == b"1.1")
            while it.file.readline() != b"data: [DONE]\n":
                pass
            it.file.readline()
            stays = stays and version == b"1.1"  # otherwise the end of the connection is that of the stream
            if version == b"1.1":
                assert it.file.read(7) == b"\r\n0\r\n\r\n"
        assert (headers.get("connection") != "close") == stays
        if stays:
            it.send(GET_HEALTH)
            assert it.response()[0] == 200
        else:
            assert it.is_closed()


def test_many_offers_at_once_are_answered(shared_gateway: Gateway) -> None:
    with wire(shared_gateway) as it:
        it.send(GET_HEALTH.replace(b"\r\n\r\n", b"\r\n" + OFFER + b"upgrade\r\n\r\n") * 1100)
        assert {it.response()[0] for _ in range(1100)} == {200}
