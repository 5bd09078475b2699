"""Calls between processes: here both ends are in one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from penstock.core.errors import EngineFailure, Overloaded, Unavailable
from penstock.fleet.channel import Channel, Handler


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


@asynccontextmanager
async def connected(
    pair: Callable[[], tuple[socket.socket, socket.socket]] = socket.socketpair,
) -> AsyncIterator[tuple[Channel, Channel]]:
    ours, theirs = pair()
    received: list[object] = []

    async def echo(value: object) -> object:
        return value

    async def refuse() -> None:
        raise Overloaded("no room", retry_after=2.5)

    async def fail() -> None:
        raise KeyError("replica-7")

    async def hang() -> None:
        await asyncio.Event().wait()

    async def note(value: object) -> None:
        received.append(value)

    async def noted() -> list[object]:
        return received

    async def open_pair() -> socket.socket:
        one, other = socket.socketpair()
        one.sendall(b"hello")
        one.close()
        return other

    handlers: dict[str, Handler] = {
        "echo": echo,
        "refuse": refuse,
        "fail": fail,
        "hang": hang,
        "note": note,
        "noted": noted,
        "open": open_pair,
    }
    left, right = Channel(ours, handlers), Channel(theirs, handlers)
    try:
        yield left, right
    finally:
        left.close()
        right.close()


@pytest.mark.parametrize("pair", [socket.socketpair, tcp_pair])
async def test_calls_go_both_ways_and_come_back_to_whoever_asked(
    pair: Callable[[], tuple[socket.socket, socket.socket]],
) -> None:
    async with connected(pair) as (left, right):
        answers = await asyncio.gather(*(side.call("echo", n) for n in range(50) for side in (left, right)))
        assert answers == [n for n in range(50) for _ in range(2)]
        large = "x" * 3_000_000
        assert await left.call("echo", large) == large


async def test_errors_cross_it() -> None:
    async with connected() as (left, _):
        with pytest.raises(Overloaded) as refused:
            await left.call("refuse")
        assert refused.value.retry_after == 2.5
        with pytest.raises(EngineFailure, match="fail failed: KeyError\\('replica-7'\\)"):
            await left.call("fail")


async def test_sockets_cross_it_in_order_beside_other_answers() -> None:
    async with connected() as (left, _):
        passed = await asyncio.gather(
            *(left.call("open") if n % 2 else left.call("echo", "y" * 400_000) for n in range(8))
        )
        for number, value in enumerate(passed):
            if number % 2:
                with value:
                    assert value.recv(10) == b"hello"


async def test_what_is_only_told_has_no_answer() -> None:
    async with connected() as (left, _):
        left.tell("note", 7)
        assert await left.call("noted") == [7]


async def test_calls_fail_when_the_other_end_goes() -> None:
    async with connected() as (left, right):
        waiting = asyncio.create_task(left.call("hang"))
        await left.call("echo", 1)
        right.close()
        with pytest.raises(Unavailable):
            await waiting
        await left.closed
        with pytest.raises(Unavailable):
            await left.call("echo", 1)
