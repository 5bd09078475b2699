"""Real worker processes: what they are told, and what becomes of those that hang."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.core.errors import Unavailable
from penstock.core.request import GenerateRequest, SamplingParams
from penstock.engine.settings import EngineConfig
from penstock.fleet.launcher import LocalLauncher
from penstock.gateway.settings import TenantConfig
from penstock.settings import Settings
from penstock.worker.client import WorkerClient
from penstock.worker.control import send_gateway
from penstock.worker.protocol import DEAD_AFTER_HEARTBEATS, HEARTBEAT_SECONDS, Start

SECRET = "correct-horse-battery-staple"


async def test_a_worker_gets_no_secret_of_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_STATE", f"redis://:{SECRET}@127.0.0.1/0")
    settings = Settings(
        engine=EngineConfig(kv_memory_gib=0.05, max_model_len=128),
        state=f"redis://:{SECRET}@127.0.0.1/0",
        tenants={SECRET: TenantConfig()},
    )
    worker = await LocalLauncher(Start(settings.model, settings.engine, settings.server.logs)).launch()
    try:
        process = Path(f"/proc/{worker.process}")
        for file in ("cmdline", "environ"):
            assert SECRET.encode() not in (process / file).read_bytes()
    finally:
        await worker.stop()


@asynccontextmanager
async def hanging_worker(*options: str) -> AsyncIterator[tuple[WorkerClient, asyncio.subprocess.Process]]:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "tests.worker.hanging_worker", str(theirs.fileno()), *options]
    root = Path(__file__).parents[2]
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=root, pass_fds=[theirs.fileno()], stderr=asyncio.subprocess.PIPE
        )
    with ours:  # the worker ends with it
        yield await WorkerClient.connect(send_gateway(ours)), process


async def test_a_worker_whose_engine_hangs_ends() -> None:
    async with hanging_worker() as (client, process):
        with pytest.raises(Unavailable, match="died"):
            await anext(client.submit(GenerateRequest("r", [1], SamplingParams())))
        assert await client.closed == "", "it beat to the end"
        _, said = await process.communicate()
    assert process.returncode == 70
    assert b"no step finished for 1 s" in said


async def test_a_step_that_hangs_counts_though_its_request_was_aborted() -> None:
    """Or clients that give up before the worker does would keep it from ever being replaced."""
    async with hanging_worker() as (client, process):
        for number in range(100):
            if client.closed.done():
                break
            stream = client.submit(GenerateRequest(str(number), [1], SamplingParams()))
            with pytest.raises((TimeoutError, Unavailable)):
                await asyncio.wait_for(anext(stream), 0.3)
        await process.communicate()
    assert process.returncode == 70


async def test_a_worker_may_be_silent_while_a_library_holds_the_gil() -> None:
    """Reading the vocabulary of a grammar takes seconds on a busy machine, and no heartbeat can be sent meanwhile."""
    pause = 2 * DEAD_AFTER_HEARTBEATS * HEARTBEAT_SECONDS
    async with hanging_worker(str(pause)) as (client, process):

        async def heartbeat() -> float:
            """Seconds until the next one."""
            began, before = time.monotonic(), client.stats
            while True:
                await asyncio.sleep(0.01)
                if client.stats is not before or client.closed.done():
                    return time.monotonic() - began

        while await heartbeat() < pause / 2 and not client.closed.done():
            pass
        await heartbeat()  # by now it has said that it is over
        assert not client.closed.done()
        process.send_signal(signal.SIGSTOP)
        assert "nothing heard" in await client.closed
        process.kill()
        await process.communicate()
