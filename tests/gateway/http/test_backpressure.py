"""Clients that ask for more than they take."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from websockets.sync.client import ClientConnection, connect

from penstock.gateway.http import connection as http
from penstock.gateway.http.response import Response
from penstock.gateway.http.traffic import Traffic
from penstock.simulation.scripted_engine import MODEL
from penstock.text.tokenizer import Tokenizer
from tests.gateway.conftest import Gateway, serving
from tests.gateway.wire import Wire, chat

T = TypeVar("T")

HIGH_WATER = 65_536  # bytes buffered from which on an event loop pauses writing


def get(path: str, id: int) -> bytes:
    return b"GET %b HTTP/1.1\r\nHost: localhost\r\nx-request-id: %d\r\n\r\n" % (path.encode(), id)


class Watched:
    """A gateway, a client, the server's side of their connection, and kernels that hold little between them."""

    def __init__(self, gateway: Gateway, it: Wire, connection: http.Connection) -> None:
        self.gateway = gateway
        self.it = it
        self.connection = connection

    def limit_kernel(self) -> None:
        self._on_loop(self._limit_kernel())

    def buffered(self) -> int:
        return self._on_loop(self._buffered())

    def until_paused(self) -> None:
        self._on_loop(self._until_paused())

    def until_closed(self) -> None:
        self._on_loop(self._until_closed())

    def let_go_on(self) -> None:
        """For as long as a server that did not wait would need for hundreds of answers."""
        self._on_loop(self._turns())

    def sweep(self, seconds: float) -> None:
        """As if it came in so many seconds from now."""
        self._on_loop(self._sweep(seconds))

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.gateway.loop).result(20)

    async def _limit_kernel(self) -> None:
        server_side = self.connection.transport.get_extra_info("socket")
        server_side.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32_768)

    async def _buffered(self) -> int:
        return self.connection.transport.get_write_buffer_size()

    async def _until_paused(self) -> None:
        while not self.connection.paused:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    def wait(self, seconds: float) -> None:
        self._on_loop(asyncio.sleep(seconds))

    async def _until_closed(self) -> None:
        await self.connection.closed

    async def _turns(self) -> None:
        for _ in range(1000):
            await asyncio.sleep(0)

    async def _sweep(self, seconds: float) -> None:
        self.connection.close_if_stale(self.gateway.loop.time() + seconds)


@pytest.fixture
def watched(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    made: list[http.Connection] = []
    is_made = threading.Event()

    def make(answer: http.Answer, connections: set[http.Connection], traffic: Traffic) -> http.Connection:
        made.append(http.Connection(answer, connections, traffic))
        is_made.set()
        return made[-1]

    monkeypatch.setattr("penstock.gateway.http.server.Connection", make)
    monkeypatch.setattr("penstock.gateway.http.server.SWEEP_SECONDS", 1e9)
    with serving(tokenizer) as gateway, small_client(gateway) as it:
        assert is_made.wait(20)
        watched = Watched(gateway, it, made[0])
        watched.limit_kernel()
        yield watched


@contextmanager
def small_client(gateway: Gateway) -> Iterator[Wire]:
    with socket.socket() as connection:
        connection.settimeout(20)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32_768)
        connection.connect((gateway.host, gateway.port))
        it = Wire(connection)
        with it.file:
            yield it


def test_answers_that_are_not_taken_are_not_made(watched: Watched) -> None:
    it = watched.it
    it.send(get("/openapi.json", 0))
    answer = len(it.response()[2]) + 1000
    for id in range(1, 1001):
        it.send(get("/openapi.json", id))
    watched.until_paused()
    watched.let_go_on()
    assert watched.buffered() <= HIGH_WATER + answer
    watched.sweep(0)
    watched.sweep(http.DRAIN_SECONDS + 1)
    watched.until_closed()


def test_who_takes_his_answers_slowly_gets_them_all_in_order(watched: Watched) -> None:
    it, count = watched.it, 300
    for id in range(count):
        it.send(get("/openapi.json", id))
    watched.until_paused()
    seconds = 0.0
    for id in range(count):
        status, headers, _ = it.response()
        assert (status, headers["x-request-id"]) == (200, str(id))
        if id % 30 == 0:
            seconds += http.DRAIN_SECONDS * 0.9
            watched.sweep(seconds)
    it.send(get("/health", count))
    assert it.response()[0] == 200


def test_a_stream_that_is_not_taken_waits_and_ends_with_its_client(watched: Watched) -> None:
    watched.gateway.runs(lambda request: [[100]] * 400)
    watched.it.send(chat(stream=True, max_tokens=400, n=100))
    watched.until_paused()
    watched.let_go_on()
    assert watched.buffered() <= 2 * HIGH_WATER
    watched.sweep(0)
    watched.sweep(http.DRAIN_SECONDS + 1)
    watched.until_closed()
    assert all(ended.wait(20) for ended in watched.gateway.engine.ended.values())


def test_the_last_answer_does_not_keep_a_connection_for_ever(watched: Watched) -> None:
    """Closing waits for what is buffered, so closing is not enough."""
    watched.gateway.answers("A long answer. " * 30)
    watched.it.send(chat(b"Connection: close\r\n", max_tokens=400, n=128, logprobs=True, top_logprobs=20))
    watched.until_paused()
    watched.sweep(0)
    watched.sweep(http.DRAIN_SECONDS + 1)
    watched.until_closed()


STREAMS, TOKENS = 50, 200


@contextmanager
def unread_websocket(watched: Watched) -> Iterator[ClientConnection]:
    """One whose client has asked for streams, and takes nothing of them."""
    watched.gateway.runs(lambda request: [[100]] * TOKENS)
    address = f"ws://{watched.gateway.host}:{watched.gateway.port}/v1/stream"
    with connect(address, sock=watched.it.connection, max_queue=1, close_timeout=1, ping_interval=None) as client:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": TOKENS}
        for id in range(STREAMS):
            client.send(json.dumps({"type": "request", "id": str(id), "url": "/v1/chat/completions", "body": body}))
        watched.until_paused()
        yield client


def test_streams_of_a_websocket_wait_until_they_are_taken(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that reads nothing for a while cannot answer pings, and is not given up for that."""
    ping = "penstock.gateway.api.websocket.PING_SECONDS"
    monkeypatch.setattr(ping, 0.75)
    with unread_websocket(watched) as client:
        watched.let_go_on()
        watched.wait(1.8)
        assert watched.buffered() <= 2 * HIGH_WATER
        assert any(not ended.is_set() for ended in watched.gateway.engine.ended.values())
        with watched.gateway.http() as other:
            body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
            assert other.post("/v1/chat/completions", json=body).status_code == 200
        monkeypatch.setattr(ping, 60.0)
        tokens = dict.fromkeys(map(str, range(STREAMS)), 0)
        ends: dict[str, int] = {}
        while len(ends) < STREAMS:
            message = json.loads(client.recv(20))
            if message["type"] == "response":
                ends[message["id"]] = message["status"]
            else:
                tokens[message["id"]] += sum(bool(part["delta"].get("content")) for part in message["data"]["choices"])
    assert set(ends.values()) == {200}
    assert set(tokens.values()) == {TOKENS}


def test_a_websocket_that_is_never_read_ends_with_its_requests(watched: Watched) -> None:
    with unread_websocket(watched):
        watched.sweep(0)
        watched.sweep(http.DRAIN_SECONDS + 1)
        watched.until_closed()
        assert all(ended.wait(20) for ended in watched.gateway.engine.ended.values())


async def test_nothing_is_begun_for_a_client_that_has_left() -> None:
    class Closed:
        paused = False

        def write(self, data: bytes) -> None:
            raise RuntimeError("the transport is closed")

    async def parts() -> AsyncIterator[bytes]:
        yield b"all"

    request: Any = SimpleNamespace(disconnected=True, http_1_1=True, method="GET")
    response = Response(Closed(), request, keep_alive=True)  # type: ignore[arg-type]
    await response.send_parts(3, parts())
    assert response.status == 0
