"""Frames from several threads over a real socket whose other end reads late, or has gone."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from penstock.worker.outbox import Outbox
from penstock.worker.protocol import Profiled, decode_from_worker, frame, take_frames

THREADS, FRAMES = 4, 150


class Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.outbox = transport, Outbox(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.outbox.discard()
        self.lost.set()


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Connection, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    _, connection = await asyncio.get_running_loop().create_unix_connection(Connection, sock=theirs)
    with ours:
        yield connection, ours
        connection.transport.close()
        await connection.lost.wait()


async def read_until(ours: socket.socket, frames: int | None) -> list[Profiled]:
    """So many, or all until the connection ends."""
    found: list[Profiled] = []
    buffer = bytearray()
    while frames is None or len(found) < frames:
        data = await asyncio.get_running_loop().sock_recv(ours, 100_000)
        if not data:
            break
        for body in take_frames(buffer, data):
            message = decode_from_worker(body)
            assert isinstance(message, Profiled)
            found.append(message)
    assert not buffer
    return found


def write_all(outbox: Outbox, writer: int) -> None:
    sizes = random.Random(writer)
    for number in range(FRAMES):
        outbox.write(frame(Profiled(writer * FRAMES + number, b"x" * sizes.choice([10, 1_000, 50_000]))))


def expect_all(found: list[Profiled]) -> None:
    for writer in range(THREADS):
        own = [message.asked - writer * FRAMES for message in found if message.asked // FRAMES == writer]
        assert own == list(range(FRAMES))
    assert len(found) == THREADS * FRAMES


@pytest.mark.parametrize("late", [False, True])
async def test_frames_of_several_threads_arrive_whole_and_in_order(late: bool) -> None:
    async with connected() as (connection, ours):
        writers = [threading.Thread(target=write_all, args=(connection.outbox, n)) for n in range(THREADS)]
        for writer in writers:
            writer.start()
        if late:  # more than the kernel keeps
            for writer in writers:
                await asyncio.to_thread(writer.join)
        async with asyncio.timeout(60):
            expect_all(await read_until(ours, THREADS * FRAMES))
            connection.outbox.write(frame(Profiled(7)))  # from the loop's thread, when nothing is left of the others
            (last,) = await read_until(ours, 1)
        assert last.asked == 7
        for writer in writers:
            await asyncio.to_thread(writer.join)


async def test_what_is_not_sent_yet_goes_before_the_end() -> None:
    async with connected() as (connection, ours):
        for writer in range(THREADS):
            write_all(connection.outbox, writer)
        connection.outbox.close()
        async with asyncio.timeout(60):
            expect_all(await read_until(ours, None))
            await connection.lost.wait()


async def test_a_gateway_that_has_gone_takes_nothing() -> None:
    async with connected() as (connection, ours):
        write_all(connection.outbox, 0)
        ours.close()
        write_all(connection.outbox, 1)
        async with asyncio.timeout(60):
            await connection.lost.wait()
        write_all(connection.outbox, 2)
