"""Workers over a network: the secret, and a network that is cut."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from penstock.core.errors import StartupError, Unavailable
from penstock.core.request import GenerateRequest, SamplingParams
from penstock.fleet.fleet import Fleet
from penstock.fleet.launcher import RemoteLauncher
from penstock.simulation.paged_executor import expected_output
from penstock.worker import remote
from penstock.worker.remote import Port
from tests.fleet.simulated import SimulatedWorker

SECRET = "correct-horse"


class Proxy:
    """A network between a gateway and a worker that can be cut: bytes vanish, and no end notices by itself."""

    def __init__(self, port: int) -> None:
        self._to = port
        self.cut = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> int:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", self._to)
        for source, target in ((reader, there[1]), (there[0], writer)):
            task = asyncio.create_task(self._pass_on(source, target))
            self._tasks.add(task)

    async def _pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await source.read(65536):
                if not self.cut.is_set():
                    target.write(data)
            if not self.cut.is_set():
                target.close()

    def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()


@asynccontextmanager
async def listening_worker(host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[tuple[SimulatedWorker, int]]:
    worker = SimulatedWorker()
    listener = socket.create_server((host, port))
    gateways = Port(listener, SECRET)
    await gateways.attach(worker.server, lambda: None)
    try:
        yield worker, listener.getsockname()[1]
    finally:
        worker.die()
        for task in gateways._tasks:
            task.cancel()
        listener.close()
        await asyncio.to_thread(worker.thread.join)


def asking(name: str, tokens: int) -> GenerateRequest:
    return GenerateRequest(name, [1, 2, 3], SamplingParams(max_tokens=tokens, ignore_eos=True), seed=5)


async def test_a_worker_computes_for_those_who_have_its_secret() -> None:
    async with listening_worker() as (_, port):
        with pytest.raises(StartupError, match="PENSTOCK_WORKER_SECRET"):
            await RemoteLauncher("127.0.0.1", port, "wrong").launch()
        fleet = Fleet("m")
        await fleet.start([RemoteLauncher("127.0.0.1", port, SECRET)])
        tokens = [token async for chunk in fleet.submit(asking("r", 20)) for token in chunk.token_ids]
        assert tokens == expected_output([1, 2, 3], 5, 20, frozenset())
        await fleet.stop()


async def test_ends_that_would_misread_each_other_say_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = asyncio.current_task()
    monkeypatch.setattr(remote, "_version", lambda: b"\0\7" if asyncio.current_task() is gateway else b"\0\6")
    async with listening_worker() as (_, port):
        with pytest.raises(StartupError, match="the worker is of another release of Penstock: it speaks version 6"):
            await RemoteLauncher("127.0.0.1", port, SECRET).launch()
        while "it speaks version 7" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert "the gateway is of another release of Penstock" in caplog.text


async def test_who_is_no_gateway_gets_nothing() -> None:
    async with listening_worker() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n".ljust(66))
        said = await reader.read()
        assert len(said) == 32, "a challenge and then the end"
        writer.close()


async def test_gateways_can_connect_again_after_a_time_of_too_many_open_files(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote, "_LOOK_SECONDS", 0.01)
    most, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with asyncio.timeout(30), listening_worker() as (_, port):
        with socket.socket() as early:
            early.setblocking(False)
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, limit))
            try:
                await asyncio.get_running_loop().sock_connect(early, ("127.0.0.1", port))
                while "Too many open files" not in caplog.text:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, limit))
        instance = await RemoteLauncher("127.0.0.1", port, SECRET).launch()
        await instance.stop()


async def test_a_place_where_nobody_listens_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(Unavailable, match=f"no worker answers at tcp://127.0.0.1:{port}"):
        await RemoteLauncher("127.0.0.1", port, SECRET).launch()


async def test_a_cut_network_is_noticed_at_both_ends() -> None:
    """The stream goes on at the other worker, and the one that is out of reach stops working for it."""
    async with listening_worker() as (far, far_port), listening_worker() as (near, near_port):
        proxy, held = Proxy(far_port), far.hold(100)
        fleet = Fleet("m")
        await fleet.start([RemoteLauncher("127.0.0.1", await proxy.open(), SECRET)])
        stream = fleet.submit(asking("r", 3900))
        tokens = [*(await anext(stream)).token_ids]
        await fleet.add_ready(RemoteLauncher("127.0.0.1", near_port, SECRET))
        proxy.cut.set()
        tokens += [token async for chunk in stream for token in chunk.token_ids]
        assert tokens == expected_output([1, 2, 3], 5, 3900, frozenset())
        assert fleet.failovers == 1
        held.released.set()
        while far.scheduler.has_work:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert near.scheduler.stats(0.0).output_tokens > 0
        await fleet.stop()
        proxy.close()


async def test_a_worker_that_is_told_to_stop_drains() -> None:
    """It finishes its stream and gets no other. Requests wait while there is no other worker."""
    async with listening_worker() as (leaving, leaving_port), listening_worker() as (_, other_port):
        held, fleet = leaving.hold(20), Fleet("m")
        await fleet.start([RemoteLauncher("127.0.0.1", leaving_port, SECRET)])
        stream = fleet.submit(asking("r", 100))
        tokens = [*(await anext(stream)).token_ids]
        draining = asyncio.create_task(leaving.server.drain(60))
        while fleet.replicas[0].state != "draining":  # noqa: ASYNC110
            await asyncio.sleep(0)
        waits = asyncio.create_task(_tokens(fleet, "waits"))
        await asyncio.sleep(0)
        await fleet.add_ready(RemoteLauncher("127.0.0.1", other_port, SECRET))
        assert await waits == expected_output([1, 2, 3], 5, 20, frozenset())
        assert not draining.done()
        held.released.set()
        tokens += [token async for chunk in stream for token in chunk.token_ids]
        await draining
        assert tokens == expected_output([1, 2, 3], 5, 100, frozenset())
        assert leaving.scheduler.stats(0.0).output_tokens == 100
        assert fleet.failovers == 0
        await fleet.stop()


async def test_what_outlasts_the_drain_goes_on_elsewhere_without_suspicion() -> None:
    async with listening_worker() as (leaving, leaving_port), listening_worker() as (_, other_port):
        leaving.hold(20)
        fleet = Fleet("m")
        await fleet.start([RemoteLauncher("127.0.0.1", leaving_port, SECRET)])
        stream = fleet.submit(asking("r", 100))
        tokens = [*(await anext(stream)).token_ids]
        await fleet.add_ready(RemoteLauncher("127.0.0.1", other_port, SECRET))
        loss = fleet.replicas[0].loss
        await leaving.server.drain(0)
        leaving.server.close()
        tokens += [token async for chunk in stream for token in chunk.token_ids]
        assert tokens == expected_output([1, 2, 3], 5, 100, frozenset())
        assert fleet.failovers == 1
        assert loss.result().from_outside
        await fleet.stop()


async def _tokens(fleet: Fleet, name: str) -> list[int]:
    return [token async for chunk in fleet.submit(asking(name, 20)) for token in chunk.token_ids]
