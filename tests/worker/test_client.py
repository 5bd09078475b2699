"""The gateway's end of a worker's socket, against a server that sends what it is told."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.engine import EngineInfo, EngineStats
from penstock.core.errors import (
    ContextTooLong,
    DeadlineExceeded,
    EngineFailure,
    Failure,
    InvalidRequest,
    Overloaded,
    PenstockError,
    Unavailable,
)
from penstock.core.ledger import Ledger
from penstock.core.request import Chunk, GenerateRequest, SamplingParams, TokenLogprob, failed
from penstock.worker.client import WorkerClient
from penstock.worker.protocol import (
    DEAD_AFTER_HEARTBEATS,
    HEARTBEAT_SECONDS,
    Chunks,
    Heartbeat,
    Hello,
    Refused,
    frame,
    frames_of,
    take_frames,
)

HELLO = frame(Hello(EngineInfo("m", 100, 10), EngineStats()))
REQUEST = GenerateRequest("r", [1], SamplingParams())


@given(st.lists(st.integers(0, 300)), st.data())
def test_frames_come_out_whole_however_they_arrive(sizes: list[int], data: st.DataObject) -> None:
    chunks = [Chunk(str(number), list(range(size))) for number, size in enumerate(sizes)]
    sent = b"".join(frame(Chunks([chunk])) for chunk in chunks)
    buffer, found, at = bytearray(), [], 0
    while at < len(sent):
        step = data.draw(st.integers(1, 400))
        found += take_frames(buffer, sent[at : at + step])
        at += step
    assert [len(body) + 4 for body in found] == [len(frame(Chunks([chunk]))) for chunk in chunks]
    assert not buffer


async def connect(answer: bytes) -> WorkerClient:
    """To a worker that greets, waits for a request, answers with these bytes and goes away."""
    ours, theirs = socket.socketpair()

    async def converse() -> None:
        reader, writer = await asyncio.open_unix_connection(sock=theirs)
        writer.write(HELLO)
        await reader.read(1)
        writer.write(answer)
        writer.close()

    worker = asyncio.create_task(converse())
    client = await WorkerClient.connect(ours)
    client.closed.add_done_callback(lambda _: worker.cancel())  # and so it is kept until then
    return client


async def test_long_prompts_are_scored_in_many_frames() -> None:
    scores = [None, *(TokenLogprob(token, -0.5, ((token, -0.5), (7, -1.0))) for token in range(1000))]
    sent = frames_of([Chunk("r", [5], prompt_logprobs=list(scores)), Chunk("x", [6], prompt_logprobs=scores[:3])])
    assert max(map(len, take_frames(bytearray(), sent))) < 20_000
    client = await connect(sent + frame(Chunks([Chunk("r", [7], "length")])))
    chunks = [chunk async for chunk in client.submit(REQUEST)]
    assert [(chunk.token_ids, chunk.prompt_logprobs) for chunk in chunks] == [([5], scores), ([7], None)]


async def test_chunks_of_steps_arrive_as_they_were_sent() -> None:
    """Those with nothing but tokens, which are sent without the rest, and a failure in the same frame as its tokens."""
    logprobs = [TokenLogprob(7, -0.5)]
    steps = [
        [Chunk("r", [5], cached_tokens=16, queue_seconds=0.25), Chunk("x", [1])],
        [Chunk("x", [2]), Chunk("r", [6, 60])],
        [Chunk("r", [7], logprobs=logprobs)],
        [Chunk("r", [8]), Chunk("x", [3], "length"), failed("r", "error", EngineFailure("lost"), Ledger("r"))],
    ]
    expected = [chunk for step in steps for chunk in step if chunk.request_id == "r"]
    client = await connect(b"".join(frames_of(step) for step in steps))
    assert [chunk async for chunk in client.submit(REQUEST)] == expected


async def test_what_came_before_the_worker_died_is_delivered() -> None:
    client = await connect(frame(Chunks([Chunk("r", [5]), Chunk("x", [6])])))
    assert client.info.model == "m"
    stream = client.submit(REQUEST)
    assert (await anext(stream)).token_ids == [5]
    with pytest.raises(Unavailable, match="died"):
        await anext(stream)
    await client.closed
    assert not client.health().ok
    with pytest.raises(Unavailable, match="not running"):
        await anext(client.submit(REQUEST))


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("no", param="prompt"),
        ContextTooLong("too long", param="prompt"),
        Overloaded("full", retry_after=2.5),
        DeadlineExceeded("late"),
        Unavailable("gone", code="aborted"),
        EngineFailure("lost"),
    ],
)
async def test_errors_cross_the_socket_as_they_are(error: PenstockError) -> None:
    def same(other: PenstockError) -> bool:
        return type(other) is type(error) and vars(other) == vars(error)

    refusing = await connect(frame(Refused("r", Failure.of(error))))
    with pytest.raises(PenstockError) as refused:
        await anext(refusing.submit(REQUEST))
    assert same(refused.value)
    assert await refusing.aborted("r") is None
    failing = await connect(frame(Chunks([failed("r", "error", error, Ledger("r"))])))
    (chunk,) = [chunk async for chunk in failing.submit(REQUEST)]
    assert chunk.ledger == Ledger("r")
    with pytest.raises(PenstockError) as ended:
        chunk.raise_failure()
    assert same(ended.value)


@pytest.mark.parametrize("junk", [b"\xff\xff\xff\xff", b"\x03\x00\x00\x00junk", frame(Chunks([]))[:-1]])
async def test_a_worker_that_talks_nonsense_is_a_dead_one(junk: bytes) -> None:
    client = await connect(junk)
    with pytest.raises(Unavailable, match="died"):
        await anext(client.submit(REQUEST))
    await client.closed


async def test_a_worker_that_does_not_greet_is_no_connection() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with pytest.raises(ConnectionError):
        await WorkerClient.connect(ours)


@contextmanager
def beating_worker() -> Iterator[socket.socket]:
    """On a thread of its own, so that it beats whatever this one does. Yields the gateway's end of its socket."""
    ours, theirs = socket.socketpair()
    stop = threading.Event()

    def beat() -> None:
        theirs.sendall(HELLO)
        steps = 0
        while not stop.wait(HEARTBEAT_SECONDS):
            steps += 1
            with suppress(OSError):
                theirs.sendall(frame(Heartbeat(EngineStats(steps=steps))))

    with theirs:
        thread = threading.Thread(target=beat)
        thread.start()
        yield ours
        stop.set()
        thread.join()


async def test_a_worker_that_falls_silent_is_a_dead_one() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(HELLO)
        client = await WorkerClient.connect(ours)
        with pytest.raises(Unavailable, match="died"):
            await anext(client.submit(REQUEST))
        assert "nothing heard" in await client.closed
        assert not client.health().ok


async def test_a_gateway_that_was_held_up_does_not_blame_its_worker() -> None:
    with beating_worker() as connection:
        client = await WorkerClient.connect(connection)
        time.sleep(1.5 * DEAD_AFTER_HEARTBEATS * HEARTBEAT_SECONDS)  # noqa: ASYNC251  (the loop is what is held up)
        known = client.stats.steps
        while client.stats.steps < known + 2 * DEAD_AFTER_HEARTBEATS and not client.closed.done():  # noqa: ASYNC110
            await asyncio.sleep(HEARTBEAT_SECONDS)
        assert client.health().ok
