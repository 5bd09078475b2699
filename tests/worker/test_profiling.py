"""Profiles of a worker with a simulated model, over its socket."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from time import monotonic_ns
from typing import Any

import pytest

from penstock.core.engine import EngineInfo
from penstock.core.errors import Conflict, Unavailable
from penstock.core.request import GenerateRequest, SamplingParams
from penstock.engine.limits import SchedulerLimits
from penstock.engine.loop import EngineLoop
from penstock.engine.scheduler import Scheduler
from penstock.engine.step_work import Gemm, Kernel, KernelProbe, KernelRecord, Limits, ModelWork
from penstock.simulation.paged_executor import VOCAB, PagedExecutor
from penstock.worker import client as worker_client
from penstock.worker.client import WorkerClient
from penstock.worker.profiling import WorkerProfiler
from penstock.worker.protocol import Profile, WorkerProfile, decode_profile
from penstock.worker.server import GatewayConnection, WorkerServer

LIMITS = SchedulerLimits(
    num_blocks=2000, block_size=4, max_seqs=4, max_step_tokens=8, max_model_len=8000, vocab_size=VOCAB
)
HOUR = 3_600_000_000_000  # nanoseconds


class ScriptedProbe:
    """Finds one kernel of a microsecond in every step; or fails at the end."""

    work = ModelWork({"gemm": Gemm(100, 200)}, Gemm(10, 20), kv_token_bytes=2, attention_width=4)

    def __init__(self, failure: Exception | None = None, most_steps: int | None = None) -> None:
        self.most_steps = most_steps
        self._failure = failure
        self._found = KernelRecord()
        self.begun = threading.Event()

    def limits(self) -> Limits:
        return Limits(1e9, 1e9, "a script")

    def step(self) -> AbstractContextManager[None]:
        now = monotonic_ns()
        self._found.kernels.append(Kernel("gemm", "gemm_kernel", now, now + 1000, stream=7))
        return nullcontext()

    def record(self, begun: Callable[[], None], stop: threading.Event) -> KernelRecord:
        begun()
        self.begun.set()
        stop.wait()
        if self._failure is not None:
            raise self._failure
        return self._found


@asynccontextmanager
async def worker(probe: KernelProbe | None, gateways: int = 1) -> AsyncIterator[list[WorkerClient]]:
    server, scheduler, executor = WorkerServer(), Scheduler(LIMITS), PagedExecutor(LIMITS.num_blocks, LIMITS.block_size)
    server.info = EngineInfo("m", LIMITS.max_model_len, VOCAB)
    engine = server.engine = EngineLoop(scheduler, executor, server.emit)
    profiler, idle = WorkerProfiler(server, scheduler, executor, "a script", probe), asyncio.Event()
    idle.set()

    async def take(asked: Profile) -> bytes:
        idle.clear()
        try:
            return await profiler.take(asked)
        finally:
            idle.set()

    server.profile = take
    before = set(vars(executor)), set(vars(engine))
    thread = threading.Thread(target=engine.run)
    thread.start()
    clients = []
    for _ in range(gateways):
        ours, theirs = socket.socketpair()
        await asyncio.get_running_loop().create_unix_connection(lambda: GatewayConnection(server), sock=theirs)
        clients.append(await WorkerClient.connect(ours))
    try:
        yield clients
    finally:
        server.close()
        engine.stop()
        await asyncio.to_thread(thread.join)
        await idle.wait()
        assert (set(vars(executor)), set(vars(engine))) == before, "what was replaced is back"


async def busy(client: WorkerClient) -> None:
    """Until it is cancelled."""
    for number in range(1_000_000):
        request = GenerateRequest(f"r{number}", [1, 2, 3, 4, 5], SamplingParams(max_tokens=50, ignore_eos=True))
        async for _ in client.submit(request):
            pass


async def profile_under_load(client: WorkerClient, seconds: float = 0.3) -> WorkerProfile:
    load = asyncio.create_task(busy(client))
    profile = decode_profile(await client.profile(seconds, "m-0", 5))
    load.cancel()
    await asyncio.gather(load, return_exceptions=True)
    return profile


def events_of(profile: WorkerProfile) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(b"[%b]" % profile.events)
    assert {event["pid"] for event in events} == {5}
    return events


async def test_steps_kernels_and_frames_are_in_it() -> None:
    async with worker(ScriptedProbe()) as (client,):
        for _ in range(2):  # the second is as good as the first
            profile = await profile_under_load(client)
    summary, events = profile.summary, events_of(profile)
    assert {"steps", "engine", "kernels", "socket"} <= {event["cat"] for event in events if "cat" in event}
    assert summary.steps == sum(event.get("cat") == "steps" and event["ph"] == "b" for event in events)
    assert (summary.replica, summary.model, summary.device) == ("m-0", "m", "a script")
    gemm, everything = summary.kernels
    assert gemm.name == "gemm"
    assert gemm.bytes == 200
    assert gemm.limit_seconds == pytest.approx(max(200, gemm.flops or 0) / 1e9)
    assert everything.name == "all kernels"
    assert [part.name for part in summary.engine][-1] == "other"
    assert summary.notes == []


async def test_the_summary_is_of_the_steps_whose_kernels_were_recorded() -> None:
    async with worker(ScriptedProbe(most_steps=3)) as (client,):
        profile = await profile_under_load(client)
    summary, events = profile.summary, events_of(profile)
    assert summary.steps == 3
    assert sum(event.get("cat") == "steps" and event["ph"] == "b" for event in events) > 3
    gemm, _ = summary.kernels
    assert gemm.bytes == 200


async def test_kernels_that_cannot_be_recorded_leave_the_rest() -> None:
    async with worker(ScriptedProbe(RuntimeError("CUPTI is not there"))) as (client,):
        profile = await profile_under_load(client)
    assert profile.summary.steps > 0
    assert profile.summary.kernels == []
    assert any("CUPTI is not there" in note for note in profile.summary.notes)


async def test_an_idle_worker_gives_an_empty_profile() -> None:
    async with worker(None) as (client,):
        profile = decode_profile(await client.profile(0.01, "m-0", 5))
    assert profile.summary.steps == 0
    assert "no step ended while it was profiled" in profile.summary.notes


async def test_one_profile_at_a_time_whoever_asks() -> None:
    probe = ScriptedProbe()
    async with worker(probe, gateways=2) as (one, other):
        first = asyncio.create_task(one.profile(0.5, "m-0", 2))
        await asyncio.to_thread(probe.begun.wait)
        with pytest.raises(Conflict):
            await one.profile(0.01, "m-0", 2)
        with pytest.raises(Conflict, match="another gateway"):
            await other.profile(0.01, "m-0", 2)
        assert decode_profile(await first).summary.seconds >= 0.5
        assert decode_profile(await other.profile(0.01, "m-0", 2))


async def test_a_worker_that_goes_away_ends_the_profile() -> None:
    async with worker(None) as (client,):
        asked = asyncio.create_task(client.profile(60, "m-0", 2))
        await asyncio.sleep(0)
        client.close()
        with pytest.raises(Unavailable):
            await asked


async def test_a_worker_of_another_machine_takes_the_clock_of_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the gateway's clock is an hour ahead."""
    monkeypatch.setattr(worker_client, "boot_id", lambda: "another machine")
    monkeypatch.setattr("penstock.worker.client.time.monotonic_ns", lambda: monotonic_ns() + HOUR)
    began = monotonic_ns() + HOUR
    async with worker(ScriptedProbe()) as (client,):
        events = events_of(await profile_under_load(client))
    times = [event["ts"] * 1e3 for event in events if "ts" in event]
    assert began <= min(times) + 1
    assert max(times) <= monotonic_ns() + HOUR + 1
