"""Two gateway processes and one real Redis: limits are exact, and losing Redis loses nothing else."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest

from penstock.client.http import HttpClient, Response
from penstock.gateway.tenancy.keys import create_key
from penstock.simulation.scripted_engine import MODEL
from penstock.state.redis import RedisStore
from penstock.state.store import UsageRecord
from tests.redis_server import RedisServer

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
PROMPT_AND_OUTPUT = 31 + 6  # tokens of BODY's answer, checked below


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.stop()


class Process:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gateway.tenancy.tenant_server", json.dumps(settings)],
            cwd=Path(__file__).parents[3],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.url = f"http://127.0.0.1:{self.process.stdout.readline().strip()}"
        self.reading = threading.Thread(target=self.log.extend, args=(self.process.stderr,))
        self.reading.start()

    def end(self) -> None:
        self.process.terminate()
        assert self.process.wait(20) == 0
        self.reading.join()


@contextmanager
def gateways(redis: RedisServer, tenants: dict[str, Any]) -> Iterator[tuple[list[Process], dict[str, str]]]:
    """Two of them, and a key of each tenant; "" is the administrator."""

    async def make_keys() -> dict[str, str]:
        store = RedisStore(redis.url)
        await store.open()
        keys = {tenant: (await create_key(store, tenant))[0] for tenant in ("", *tenants)}
        await store.close()
        return keys

    keys = asyncio.run(make_keys())
    processes = [Process({"state": redis.url, "tenants": tenants}) for _ in range(2)]
    try:
        yield processes, keys
    finally:
        for process in processes:
            process.process.kill() if process.process.poll() is None else None
            process.process.wait()


TENANTS: dict[str, dict[str, Any]] = {
    "requests": {"requests_per_minute": 400, "model_limits": {MODEL: {"requests_per_minute": 123}}},
    "tokens": {"tokens_per_minute": 5_000},
    "plain": {},
}


def test_limits_are_exact_over_two_gateways(redis_server: RedisServer) -> None:
    async def flood(urls: list[str], key: str) -> list[Response]:
        clients = [HttpClient(url, api_key=key) for url in urls]
        try:
            return await asyncio.gather(*(clients[i % 2].post(CHAT, {**BODY, "max_tokens": 50}) for i in range(500)))
        finally:
            for client in clients:
                await client.close()

    with gateways(redis_server, TENANTS) as (processes, keys):
        urls = [process.url for process in processes]
        answers = {tenant: asyncio.run(flood(urls, keys[tenant])) for tenant in ("requests", "tokens")}
        used: dict[str, int] = {}
        for tenant, responses in answers.items():
            assert {response.status for response in responses} == {200, 429}
            assert all(int(r.headers["retry-after"]) > 1 for r in responses if r.status == 429)
            usages = [response.json()["usage"]["total_tokens"] for response in responses if response.status == 200]
            assert set(usages) == {PROMPT_AND_OUTPUT}
            used[tenant] = sum(usages)
        admitted = {t: sum(r.status == 200 for r in responses) for t, responses in answers.items()}
        assert admitted["requests"] == 123
        # Each reserves its prompt and 50 tokens and gives most of them back: never more at once than the limit.
        assert 5_000 // (31 + 50) <= admitted["tokens"] <= 5_000 // PROMPT_AND_OUTPUT
        for process in processes:
            process.end()
        report = usage_from_redis(redis_server)
        assert {tenant: report[tenant] for tenant in used} == {t: (admitted[t], used[t]) for t in used}
        assert window_from_redis(redis_server, "tokens") == used["tokens"], "settled is what was used"
        logs = [line for process in processes for line in process.log if "tenant=" in line]
        assert len(logs) == 1000
        assert not [line for line in logs if any(key in line for key in keys.values())]


def usage_from_redis(server: RedisServer) -> dict[str, tuple[int, int]]:
    """Requests and tokens of each tenant; midnight may have come in between."""

    async def read() -> dict[str, tuple[int, int]]:
        store = RedisStore(server.url)
        await store.open()
        today = date.today()
        found = await store.usage(str(today - timedelta(days=1)), str(today + timedelta(days=1)))
        await store.close()
        total: defaultdict[str, UsageRecord] = defaultdict(UsageRecord)
        for key, used in found.items():
            total[key.tenant] = total[key.tenant].plus(used)
        return {tenant: (used.requests, used.tokens) for tenant, used in total.items()}

    return asyncio.run(read())


def window_from_redis(server: RedisServer, tenant: str) -> int:
    async def read() -> int:
        store = RedisStore(server.url)
        amounts = await store.redis.hgetall(f"penstock:tokens:{tenant}:{MODEL}")
        await store.close()
        return sum(int(amount) for amount in amounts.values())

    return asyncio.run(read())


def test_requests_go_on_without_redis_and_come_back_to_it(redis_server: RedisServer) -> None:
    """Redis stops and starts again under load."""

    async def load(urls: list[str], keys: dict[str, str]) -> list[int]:
        statuses: list[int] = []
        done = asyncio.Event()

        async def ask(client: HttpClient) -> None:
            statuses.append((await client.post(CHAT, BODY)).status)

        async def keep_asking(client: HttpClient) -> None:
            while not done.is_set():
                await ask(client)

        clients = [HttpClient(url, api_key=keys["limited"]) for url in urls]
        async with asyncio.TaskGroup() as tasks:
            for client in clients * 8:
                tasks.create_task(keep_asking(client))
            for stop_or_start, word in ((redis_server.stop, "lost Redis"), (redis_server.start, "shared again")):
                await ask(clients[0])
                await asyncio.to_thread(stop_or_start)
                while not all(any(word in line for line in process.log) for process in processes):
                    await ask(clients[0])
            for _ in range(20):
                await ask(clients[0])
            done.set()
        for client in clients:
            await client.close()
        return statuses

    tenants = {"limited": {"requests_per_minute": 10**6, "tokens_per_minute": 10**9, "concurrent": 1000}}
    with gateways(redis_server, tenants) as (processes, keys):
        statuses = asyncio.run(load([process.url for process in processes], keys))
        assert set(statuses) == {200}
        for process in processes:
            process.end()
            for word in ("lost Redis", "shared again", "cannot reload keys"):
                assert len([line for line in process.log if word in line]) <= 1, "said once"
    # The server that came back was empty: what was settled before the outage is gone, the rest is all there.
    requests, tokens = usage_from_redis(redis_server)["limited"]
    assert tokens == requests * PROMPT_AND_OUTPUT
    assert 20 <= requests <= len(statuses)
