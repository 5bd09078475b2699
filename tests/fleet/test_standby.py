"""The warm pool with real processes: a start takes a prepared one, and those that end are replaced."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from penstock.core.request import GenerateRequest, SamplingParams
from penstock.engine.settings import EngineConfig
from penstock.fleet import standby
from penstock.fleet.fleet import Fleet
from penstock.fleet.launcher import LocalLauncher, WorkerProcess
from penstock.fleet.standby import StandbyPool
from penstock.observability.settings import LogConfig
from penstock.worker.protocol import Standby, Start

ENGINE = EngineConfig(kv_memory_gib=0.05, max_model_len=512)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(100):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def answer(fleet: Fleet, name: str) -> list[int]:
    request = GenerateRequest(name, [1, 2, 3], SamplingParams(temperature=0, max_tokens=4))
    return [token async for chunk in fleet.submit(request) for token in chunk.token_ids]


async def test_a_lost_worker_is_replaced_by_a_prepared_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "_LOOK_SECONDS", 0.01)
    fleet = Fleet("m", standby=1)
    pool = fleet.pool
    assert pool is not None
    await fleet.start([LocalLauncher(Start("smollm2-135m", ENGINE, LogConfig("warning")))])
    try:
        right = await answer(fleet, "first")
        (replica,) = fleet.replicas
        assert list(replica.start_seconds)[:4] == ["process", "import", "kernels", "load"]
        assert replica.start_seconds["first_token"] > 0
        await until(lambda: pool.prepared == 1)
        prepared = pool._prepared[0].pid
        replica.kill()
        await until(lambda: replica.restarts == 1)
        assert await answer(fleet, "second") == right
        assert replica.process == prepared
        assert (pool.taken, pool.missed) == (1, 1)

        await until(lambda: pool.prepared == 1)
        last = pool._prepared[0].pid
        os.kill(last, signal.SIGKILL)
        await until(lambda: pool.prepared == 1 and pool._prepared[0].pid != last)
        last = pool._prepared[0].pid
    finally:
        await fleet.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(last, 0)


async def test_a_standby_ends_with_its_launcher() -> None:
    worker = await WorkerProcess.spawn(Standby("smollm2-135m", ENGINE, LogConfig("warning")))
    await worker.prepared()
    worker.close()
    await worker.ended()


async def test_one_that_cannot_be_prepared_or_has_gone_is_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(standby, "_LOOK_SECONDS", 0.01)
    busy = True
    pool = StandbyPool(1, lambda: busy)
    pool.start()
    worker = await pool.spawn(Start("no-such-model", ENGINE, LogConfig("warning")))
    await worker.ended()
    assert "no-such-model" in await worker.failure()
    assert not caplog.text  # nothing is prepared while it is busy
    busy = False
    await until(lambda: "could not be prepared" in caplog.text)
    assert pool.prepared == 0
    await pool.stop()
