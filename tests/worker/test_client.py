"""The gateway's end of a worker's socket, against a server that sends what it is told."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.engine import EngineInfo
from penstock.core.errors import Unavailable
from penstock.core.request import Chunk, GenerateRequest, SamplingParams, TokenLogprob
from penstock.worker.client import WorkerClient
from penstock.worker.protocol import Chunks, Hello, frame, frames_of, read_frame, take_frames

HELLO = frame(Hello(EngineInfo("m", 100, 10)))
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


async def connect(folder: Path, answer: bytes) -> WorkerClient:
    """To a worker that greets, waits for a request, answers with these bytes and goes away."""

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HELLO)
        await read_frame(reader)
        writer.write(answer)
        writer.close()

    await asyncio.start_unix_server(converse, str(folder / "s"))
    return await WorkerClient.connect(str(folder / "s"))


async def test_long_prompts_are_scored_in_many_frames(tmp_path: Path) -> None:
    scores = [None, *(TokenLogprob(token, -0.5, ((token, -0.5), (7, -1.0))) for token in range(1000))]
    sent = frames_of([Chunk("r", [5], prompt_logprobs=list(scores)), Chunk("x", [6], prompt_logprobs=scores[:3])])
    assert max(map(len, take_frames(bytearray(), sent))) < 20_000
    client = await connect(tmp_path, sent + frame(Chunks([Chunk("r", [7], "length")])))
    chunks = [chunk async for chunk in client.submit(REQUEST)]
    assert [(chunk.token_ids, chunk.prompt_logprobs) for chunk in chunks] == [([5], scores), ([7], None)]


async def test_what_came_before_the_worker_died_is_delivered(tmp_path: Path) -> None:
    client = await connect(tmp_path, frame(Chunks([Chunk("r", [5]), Chunk("x", [6])])))
    assert client.info.model == "m"
    stream = client.submit(REQUEST)
    assert (await anext(stream)).token_ids == [5]
    with pytest.raises(Unavailable, match="died"):
        await anext(stream)
    await client.closed
    assert not client.health().ok
    with pytest.raises(Unavailable, match="not running"):
        await anext(client.submit(REQUEST))


@pytest.mark.parametrize("junk", [b"\xff\xff\xff\xff", b"\x03\x00\x00\x00junk", frame(Chunks([]))[:-1]])
async def test_a_worker_that_talks_nonsense_is_a_dead_one(tmp_path: Path, junk: bytes) -> None:
    client = await connect(tmp_path, junk)
    with pytest.raises(Unavailable, match="died"):
        await anext(client.submit(REQUEST))
    await client.closed


async def test_a_worker_that_leaves_without_a_greeting_is_no_connection(tmp_path: Path) -> None:
    async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    await asyncio.start_unix_server(leave, str(tmp_path / "s"))
    with pytest.raises(ConnectionError):
        await WorkerClient.connect(str(tmp_path / "s"))
