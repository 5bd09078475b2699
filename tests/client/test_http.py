from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from penstock.client import http
from penstock.client.http import HttpClient
from penstock.core.errors import InvalidRequest, Unavailable
from tests.client.web_server import serving

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

TEXT = "naïve 🌊 水\nsecond line"
JSON = json.dumps(TEXT, ensure_ascii=False)
STREAM = f"data: {JSON}\r\n\r\n: comment\r\nevent: x\r\ndata:a\ndata: b\n\ndata: [DONE]\n\n"
EVENTS = [JSON, "a\nb", "[DONE]"]


@asynccontextmanager
async def raw_server(handler: Handler) -> AsyncIterator[str]:
    """A server that sends exactly these bytes, for what a proper one would never send."""
    async with await asyncio.start_server(handler, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def answering(*parts: bytes) -> Handler:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.writelines(parts)
        writer.close()

    return handle


async def echo(request: Request) -> Response:
    peer = request.client
    assert peer is not None
    key = request.headers.get("authorization")
    return JSONResponse({"body": await request.json(), "port": peer.port, "key": key}, 201)


async def bytewise(request: Request) -> Response:
    async def parts() -> AsyncIterator[bytes]:
        for byte in STREAM.encode():
            yield bytes([byte])

    return StreamingResponse(parts(), media_type="text/event-stream")


async def large(request: Request) -> Response:
    return Response(b"x" * 300_000)


APP = Starlette(
    routes=[
        Route("/base/echo", echo, methods=["POST"]),
        Route("/base/events", bytewise),
        Route("/base/large", large),
        Route("/base/empty", lambda request: Response(status_code=204)),
    ]
)


async def test_one_connection_carries_every_kind_of_answer() -> None:
    with serving(APP) as url:
        async with HttpClient(url + "/base/", api_key="secret") as client:
            first = await client.post("/echo", {"text": TEXT})
            assert first.status == 201
            async with client.stream("GET", "/events") as response:
                assert [event async for event in response.events()] == EVENTS
            assert len((await client.get("/large")).body) == 300_000
            assert (await client.get("/empty")).body == b""
            assert (await client.get("/nowhere")).status == 404
            last = await client.post("/echo", {"text": TEXT})
    assert first.json() == last.json() == {"body": {"text": TEXT}, "port": first.json()["port"], "key": "Bearer secret"}


async def test_a_stream_left_early_does_not_leak_into_the_next_answer() -> None:
    with serving(APP) as url:
        async with HttpClient(url + "/base") as client:
            async with client.stream("GET", "/events") as response:
                async for _ in response.events():
                    break
            assert (await client.post("/echo", 1)).json()["body"] == 1


@given(
    cuts=st.lists(st.integers(1, len(STREAM.encode()) - 1), max_size=6),
    line_end=st.sampled_from(["\n", "\r\n", "\r"]),
    start=st.sampled_from(["", "\ufeff"]),
    left_out=st.integers(0, 2),
)
@settings(deadline=None, max_examples=200)
def test_events_do_not_depend_on_how_the_stream_is_cut_and_written(
    cuts: list[int], line_end: str, start: str, left_out: int
) -> None:
    data = (start + STREAM.replace("\r\n", "\n").replace("\n", line_end)).encode()
    data = data[: len(data) - left_out * len(line_end)]
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]

    class Cut(http.StreamingResponse):
        def __init__(self) -> None:
            self.headers = {"content-type": "text/event-stream"}
            self.complete = False

        async def body(self) -> AsyncIterator[bytes]:  # type: ignore[override]
            for start, end in pairwise(edges):
                yield data[start:end]
            self.complete = True

    async def collect() -> list[str]:
        return [event async for event in Cut().events()]

    assert asyncio.run(collect()) == EVENTS


async def test_an_event_ends_with_the_cr_of_its_empty_line_and_not_with_a_lost_connection() -> None:
    sent = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: whole\r\r")
        await sent.wait()
        writer.write(b"data: ha")
        writer.close()

    async with raw_server(handle) as url, HttpClient(url, timeout=5) as client, client.stream("GET", "/") as response:
        events = response.events()
        assert await anext(events) == "whole"
        sent.set()
        assert [event async for event in events] == []


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"", "closed"),
        (b"SSH-2.0-OpenSSH\r\n", "protocol"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort", "closed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n", "protocol"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nabcd\r\n", "closed"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nabcdef\r\n0\r\n\r\n", "protocol"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n", "protocol"),
    ],
)
async def test_broken_answers_are_errors_with_their_kind(sent: bytes, code: str) -> None:
    async with raw_server(answering(sent)) as url, HttpClient(url) as client:
        with pytest.raises(Unavailable) as caught:
            await client.get("/")
    assert caught.value.code == code


async def test_interim_answers_trailers_and_close_delimited_bodies() -> None:
    chunked = b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    handler = answering(chunked, b"3;ext=1\r\nabc\r\n", b"0\r\nX-Sum: 1\r\n\r\n")
    async with raw_server(handler) as url, HttpClient(url) as client:
        assert (await client.get("/")).body == b"abc"
    async with raw_server(answering(b"HTTP/1.0 200 OK\r\n\r\n", b"until the end")) as url, HttpClient(url) as client:
        assert (await client.get("/")).body == b"until the end"


async def test_silence_is_a_timeout_and_nobody_listening_names_the_url() -> None:
    hang_up = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hang_up.wait()
        writer.close()

    async with raw_server(silent) as url:
        async with HttpClient(url, timeout=0.05) as client:
            with pytest.raises(Unavailable) as caught:
                await client.get("/")
        hang_up.set()
    assert caught.value.code == "timeout"

    nobody = "http://127.0.0.1:9"
    async with HttpClient(nobody) as client:
        with pytest.raises(Unavailable, match=nobody) as caught:
            await client.get("/")
    assert caught.value.code == "connect"


async def test_a_kept_connection_that_the_server_closed_is_replaced() -> None:
    """Idle connections die on real servers; the request after that must not fail."""
    connections = 0

    async def one_answer_each(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await reader.read(1)  # the next request arrives, and then the door shuts
        writer.close()

    async with raw_server(one_answer_each) as url, HttpClient(url) as client:
        assert [(await client.get("/")).body for _ in range(3)] == [b"ok"] * 3
    assert connections == 3


async def test_connections_of_a_busy_time_go_when_the_server_closes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "SWEEP_SECONDS", 0.0)
    open_ones: list[asyncio.StreamWriter] = []
    all_here = asyncio.Barrier(5)
    busy = True

    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_ones.append(writer)
        with suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                if busy:
                    await all_here.wait()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        writer.close()

    async with raw_server(answers) as url, HttpClient(url) as client:
        await asyncio.gather(*(client.get("/") for _ in range(5)))
        busy = False
        assert len(client._idle) == 5
        kept, (last, *_) = client._idle[:-1], client._idle[-1:]
        port = last._writer.get_extra_info("sockname")[1]
        for writer in open_ones:
            if writer.get_extra_info("peername")[1] != port:
                writer.close()
        for connection in kept:
            while connection.usable:  # noqa: ASYNC110 until the news is here
                await asyncio.sleep(0)
        await client.get("/")
        assert client._idle == [last]
        assert all(connection._writer.is_closing() for connection in kept)


async def test_a_stream_that_outlives_its_client_leaves_no_connection() -> None:
    with serving(APP) as url:
        client = HttpClient(url + "/base")
        async with client.stream("GET", "/large") as response:
            await client.close()
            assert len(await response.read()) == 300_000
        assert not client._idle
        assert response._connection._writer.is_closing()


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port"])
def test_a_url_that_cannot_work_is_refused_by_name(url: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        HttpClient(url)
    assert caught.value.param == "url"
