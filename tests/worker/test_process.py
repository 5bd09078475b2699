"""Real worker processes: what they are told, and what becomes of those that hang."""

from __future__ import annotations

import asyncio
import socket
import sys
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
from penstock.worker.protocol import Start

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
async def hanging_worker() -> AsyncIterator[tuple[WorkerClient, asyncio.subprocess.Process]]:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "tests.worker.hanging_worker", str(theirs.fileno())]
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
