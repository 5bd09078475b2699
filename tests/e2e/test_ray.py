"""The real model on a real Ray cluster of several nodes. Replicas and nodes are killed, added, drained and removed
under load, and no client notices. Replicas serve while the head of the cluster is away."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import pytest

from penstock.bench.chaos.faults import Admin
from penstock.bench.chaos.load import Load, Phase
from penstock.bench.chaos.streams import Stream, plan
from penstock.client.http import HttpClient, openai_base
from tests.conftest import Server, start_server
from tests.ray_cluster import RayCluster
from tests.redis_server import RedisServer

MODEL = "smollm2-135m"
ENGINE = ("--kv-memory-gib", "0.1", "--max-model-len", "512")
STREAMS = 32


@dataclass
class Running:
    cluster: RayCluster
    server: Server
    key: str
    right: list[Stream] = field(default_factory=list)  # the right answers, once they have been learnt


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Two CPUs, so two replicas; what nodes there are more is up to a test. Redis keeps what the head knows."""
    redis = RedisServer()
    with RayCluster(2, redis=f"127.0.0.1:{redis.port}") as cluster:
        yield cluster
    redis.stop()


@pytest.fixture(scope="module")
def running(cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    state = f"sqlite:///{tmp_path_factory.mktemp('ray')}/state.db"
    create = [sys.executable, "-m", "penstock.cli.main", "keys", "create", "--admin", "--state", state]
    key = subprocess.run(create, capture_output=True, text=True, check=True).stdout.strip()
    environ = cluster.environment | {"PENSTOCK_RAY__WAIT_SECONDS": "3"}
    on_ray = ("--on", "ray", "--ray-address", cluster.address)
    server = start_server(*on_ray, "--replicas", "2", *ENGINE, "--state", state, environ=environ)
    yield Running(cluster, server, key)
    server.stop()


@asynccontextmanager
async def two_replicas(running: Running) -> AsyncIterator[Admin]:
    async with HttpClient(openai_base(running.server.url), api_key=running.key, timeout=100) as http:
        admin = Admin(http, MODEL)
        await resize(admin, 2)
        yield admin


async def resize(admin: Admin, count: int) -> None:
    """Returns when so many replicas are ready, and no others are there."""
    replicas = await admin.replicas()
    if count > len(replicas):
        await admin._http.post("/admin/fleet", {"model": MODEL, "count": count - len(replicas)})
    for replica in replicas[count:]:
        await admin._http.post(f"/admin/fleet/{replica['id']}/drain", {"drain_seconds": 60})
    while len(await admin.replicas()) > count:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    await admin.until_ready()


async def under_load(running: Running, act: Callable[[Load], Awaitable[None]]) -> None:
    """Streams of all kinds before, while and after something happens, every answer as it is without that."""
    fresh, done = {"Cache-Control": "no-store"}, False
    async with HttpClient(openai_base(running.server.url), timeout=100, headers=fresh) as http:
        load, phase = Load(http, STREAMS), Phase()
        if not running.right:
            await load.learn(plan(MODEL, STREAMS, 16, seed=7))
            running.right = load.right
        load.right = running.right

        def order() -> Iterator[Stream]:
            while not done:
                yield from load.right

        async def act_and_end() -> None:
            nonlocal done
            try:
                await act(load)
            finally:
                done = True

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load.run(order(), phase))
            tasks.create_task(act_and_end())
    assert len(phase.streams) >= STREAMS
    assert not [stream.error for stream in phase.streams if stream.error]
    assert not sum(stream.shed for stream in phase.streams)
    assert phase.defects == 0


async def until_busy(admin: Admin) -> None:
    while not all(replica["streams"] for replica in await admin.replicas()):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def parent(process: int) -> int:
    status = Path(f"/proc/{process}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid:"))


async def test_killed_workers_and_actors_lose_nothing(running: Running) -> None:
    async with two_replicas(running) as admin:

        async def kill(load: Load) -> None:
            for find in (int, parent):  # the worker, then the Ray actor that it belongs to
                await until_busy(admin)
                victim = (await admin.replicas())[0]
                os.kill(find(victim["process"]), signal.SIGKILL)
                await admin.until_ready(victim)

        await under_load(running, kill)


async def test_replicas_are_added_and_drained_under_load(running: Running) -> None:
    async with two_replicas(running) as admin:
        running.cluster.add_node(cpus=1)

        async def scale(load: Load) -> None:
            for count in (1, 3, 1):
                await resize(admin, count)

        await under_load(running, scale)
        running.cluster.remove_node()


async def test_a_node_gets_a_replica_and_is_removed_under_load(running: Running) -> None:
    async with two_replicas(running) as admin:
        raylet = running.cluster.add_node(cpus=1)

        async def remove(load: Load) -> None:
            await resize(admin, 3)
            (there,) = [one for one in await admin.replicas() if parent(parent(one["process"])) == raylet]
            await until_busy(admin)
            await asyncio.to_thread(running.cluster.remove_node)
            while "no room" not in (detail := await state_of(there["id"])):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            assert "missing: CPU" in detail
            running.cluster.add_node(cpus=1)
            await admin.until_ready(there)

        async def state_of(replica: str) -> str:
            return next(str(one["detail"]) for one in await admin.replicas() if one["id"] == replica)

        await under_load(running, remove)
        await resize(admin, 2)
        running.cluster.remove_node()


async def test_replicas_serve_while_the_head_is_away(running: Running) -> None:
    """And after it, without having been restarted. A replica that is asked for meanwhile starts when it is back."""
    async with two_replicas(running) as admin:
        await resize(admin, 1)
        (before,) = await admin.replicas()
        running.cluster.kill_head()

        async def come_back(load: Load) -> None:
            await admin._http.post("/admin/fleet", {"model": MODEL, "count": 1})
            await until_busy_again(load)
            running.cluster.start_head()
            await admin.until_ready()

        async def until_busy_again(load: Load) -> None:
            at = perf_counter()
            while not load.flows_since(at):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

        await under_load(running, come_back)
        after = await admin.replicas()
        assert len(after) == 2
        assert (after[0]["process"], after[0]["restarts"]) == (before["process"], before["restarts"])


async def test_a_node_without_the_weights_is_named(running: Running) -> None:
    async with two_replicas(running) as admin:
        await resize(admin, 1)
        body = {"model": MODEL, "checkpoint": "/no/such/weights", "drain_seconds": 1}
        answer = await admin._http.post("/admin/fleet/replace", body)
        assert answer.status == 400
        assert "Ray node " in answer.error_message
        assert "has no /no/such/weights: put the weights there" in answer.error_message
        assert [replica["state"] for replica in await admin.replicas()] == ["ready"]


async def test_a_cluster_is_started_for_a_server_with_gateway_processes() -> None:
    """It ends with the server, and so do its processes."""
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        environ = {**os.environ, "RAY_ADDRESS": "local", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_TMPDIR": folder}
        server = start_server("--on", "ray", "--processes", "2", *ENGINE, environ=environ)
        try:
            for _ in range(8):  # connections of their own, so that it may be either process
                async with HttpClient(openai_base(server.url), timeout=100) as http:
                    answer = await http.post("/v1/completions", {"model": MODEL, "prompt": "Rain", "max_tokens": 4})
                assert answer.status == 200, answer.error_message
        finally:
            server.stop()


def test_a_cluster_that_is_not_there() -> None:
    with pytest.raises(AssertionError, match=r"no Ray cluster at 127\.0\.0\.1:1 can be reached.*ray start --address"):
        start_server("--on", "ray", "--ray-address", "127.0.0.1:1")
