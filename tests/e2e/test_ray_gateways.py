"""Two gateways over the same two workers, on two nodes of a real Ray cluster with a real Redis. The nodes share this
machine and its address, so each gateway takes a free port."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import Server, start_server
from tests.e2e.test_ray import ENGINE, MODEL, parent
from tests.e2e.test_server import is_alive
from tests.ray_cluster import RayCluster
from tests.redis_server import RedisServer, free_port

LIMIT = 30
SETTINGS = {
    "server": {"host": "0.0.0.0", "drain_seconds": 60},
    "replicas": 2,
    "ray": {"gateways": 2, "gateway_resources": {"cpus": 0}},  # the CPUs are for the workers
    "tenants": {"limited": {"requests_per_minute": LIMIT}, "streaming": {}},
    "cache": {"enabled": False},
}


@dataclass
class Running:
    server: Server
    cluster: RayCluster
    keys: dict[str, str]  # by tenant

    def client(self, tenant: str, url: str | None = None) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {self.keys[tenant]}"}
        return httpx.AsyncClient(base_url=url or self.server.url, headers=headers, timeout=100)

    async def fleet(self, url: str | None = None) -> dict[str, Any]:
        async with self.client("admin", url) as http:
            found: dict[str, Any] = (await http.get("/admin/fleet")).json()
        return found

    async def gateways(self, replicas: int = 2) -> list[dict[str, Any]]:
        """Once they are all ready, with so many replicas."""
        while True:
            fleet = await self.fleet()
            ready = [each["state"] for each in (*fleet["data"], *fleet["gateways"])]
            if ready == ["ready"] * (replicas + 2):
                gateways: list[dict[str, Any]] = fleet["gateways"]
                return gateways
            await asyncio.sleep(0.05)

    async def stream(self, url: str, number: int, tokens: int = 100, begun: asyncio.Event | None = None) -> str:
        """The whole text. `begun` is set at its first token."""
        body = {"model": MODEL, "prompt": f"Number {number} is", "max_tokens": tokens, "temperature": 0}
        body |= {"stream": True, "ignore_eos": True}
        text, ended = "", False
        async with self.client("streaming", url) as http, http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    if begun is not None:
                        begun.set()
                ended = ended or line == "data: [DONE]"
        assert ended
        return text


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with RayCluster(4) as cluster:  # for two servers at once
        cluster.add_node(cpus=1)
        yield cluster


@contextmanager
def serving(cluster: RayCluster, redis: RedisServer, folder: Path, *arguments: str) -> Iterator[Running]:
    """Not stopped in the end."""
    config = folder / "settings.yaml"
    config.write_text(json.dumps({**SETTINGS, "state": redis.url}))
    create = [
        sys.executable,
        "-m",
        "penstock.cli.main",
        "keys",
        "create",
        "--state",
        redis.url,
        "--config",
        str(config),
    ]

    def key(*whose: str) -> str:
        return subprocess.run([*create, *whose], capture_output=True, text=True, check=True).stdout.strip()

    keys = {"admin": key("--admin"), "limited": key("limited"), "streaming": key("streaming")}
    on_ray = ("--on", "ray", "--ray-address", cluster.address, "--config", str(config), "--state", redis.url)
    server = start_server(*on_ray, *ENGINE, *arguments, environ=cluster.environment)
    try:
        yield Running(server, cluster, keys)
    finally:
        if server.process.poll() is None:
            server.stop()


@pytest.fixture(scope="module")
def running(cluster: RayCluster, redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(cluster, redis, tmp_path_factory.mktemp("gateways")) as running:
        yield running


async def test_limits_are_exact_over_both(running: Running) -> None:
    urls = [gateway["url"] for gateway in await running.gateways()]

    async def ask(number: int) -> int:
        async with running.client("limited", urls[number % 2]) as http:
            body = {"model": MODEL, "prompt": f"{number}", "max_tokens": 1}
            return (await http.post("/v1/completions", json=body)).status_code

    statuses = await asyncio.gather(*(ask(number) for number in range(LIMIT + 10)))
    assert (statuses.count(200), statuses.count(429)) == (LIMIT, 10)
    assert 200 in statuses[0::2]
    assert 200 in statuses[1::2]


async def test_gateways_are_listed(running: Running) -> None:
    await running.gateways()
    listing = [sys.executable, "-m", "penstock.cli.main", "fleet", "list", "--url", running.server.url]
    environ = {**os.environ, "PENSTOCK_API_KEY": running.keys["admin"]}
    shown = await asyncio.to_thread(subprocess.check_output, listing, text=True, env=environ)
    for gateway in await running.gateways():
        assert f"{gateway['place']} {gateway['process']}" in shown
        assert gateway["url"] in shown


async def test_replicas_come_and_go_at_both(running: Running) -> None:
    """Whichever gateway is asked for it. Both name the same replicas, and are ready each for itself."""
    urls = [gateway["url"] for gateway in await running.gateways()]
    async with running.client("admin", urls[1]) as http:
        (victim, kept) = (replica["id"] for replica in (await running.fleet(urls[1]))["data"])
        assert (await http.post(f"/admin/fleet/{victim}/drain", json={"drain_seconds": 60})).status_code == 202
        while [replica["id"] for replica in (await running.fleet(urls[0]))["data"]] != [kept]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        (new,) = (await http.post("/admin/fleet", json={"model": MODEL, "count": 1})).json()["data"]
    await running.gateways()
    assert {replica["id"] for replica in (await running.fleet(urls[0]))["data"]} == {kept, new["id"]}
    for url in urls:
        async with running.client("streaming", url) as http:
            served: set[str] = set()
            while served != {kept, new["id"]}:
                body = {"model": MODEL, "prompt": f"{len(served)}", "max_tokens": 1}
                answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(4)))
                served |= {answer.headers["x-penstock-replica"] for answer in answers}
            assert (await http.get("/ready")).status_code == 200


@pytest.mark.parametrize("victim", ["actor", "process"])
async def test_a_killed_gateway_is_started_again_and_the_other_streams_on(running: Running, victim: str) -> None:
    """What the actor hosts finishes its streams without it. A gateway process takes its own with it, and no others."""
    here, there = await running.gateways()
    right = await asyncio.gather(*(running.stream(here["url"], number) for number in range(4)))
    began = [asyncio.Event() for _ in range(4)]
    urls = [here["url"], there["url"]] * 2
    streams = [
        asyncio.create_task(running.stream(url, number, begun=begun))
        for number, (url, begun) in enumerate(zip(urls, began, strict=True))
    ]
    await asyncio.gather(*(event.wait() for event in began))
    os.kill(there["process"] if victim == "process" else parent(there["process"]), signal.SIGKILL)
    ended = await asyncio.gather(*streams, return_exceptions=True)
    assert ended[0::2] == right[0::2]
    if victim == "actor":
        assert ended[1::2] == right[1::2]
    else:
        assert all(isinstance(each, httpx.TransportError) for each in ended[1::2])
    while (again := (await running.gateways())[1])["process"] == there["process"]:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    assert again["restarts"] == there["restarts"] + 1
    assert await running.stream(again["url"], 1) == right[1]


async def test_a_port_that_is_taken_is_named(cluster: RayCluster, redis: RedisServer, tmp_path: Path) -> None:
    """The other node has the same address here, so the first gateway has the port."""
    port = free_port()
    with serving(cluster, redis, tmp_path, "--port", str(port), "--replicas", "1") as running:
        while True:
            here, there = (await running.fleet())["gateways"]
            if there["state"] == "lost":
                break
            await asyncio.sleep(0.05)
        assert here["url"] == f"http://0.0.0.0:{port}"
        assert f"cannot listen on 0.0.0.0:{port}: Address already in use" in there["detail"]


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGKILL])
async def test_the_launching_process_ends(
    sig: signal.Signals, cluster: RayCluster, redis: RedisServer, tmp_path: Path
) -> None:
    """However it does, streams of the gateway on the other node are finished. Then it ends, and so do the workers."""
    with serving(cluster, redis, tmp_path) as running:
        here, there = await running.gateways()
        workers = [replica["process"] for replica in (await running.fleet())["data"]]
        right, begun = await running.stream(here["url"], 7), asyncio.Event()
        stream = asyncio.create_task(running.stream(there["url"], 7, begun=begun))
        await begun.wait()
        running.server.process.send_signal(sig)
        assert await stream == right
        assert await asyncio.to_thread(running.server.process.wait) == (0 if sig == signal.SIGTERM else -sig)
        while any(map(is_alive, [here["process"], there["process"], *workers])):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
