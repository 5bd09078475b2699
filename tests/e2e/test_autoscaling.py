"""Real workers that follow their load: from zero, from one to three and back, and from the warm pool after a crash."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock.client.http import HttpClient
from tests.conftest import start_with_admin

SETTINGS = """
server: {processes: 2, open: true}
cache: {enabled: false}
engine: {kv_memory_gib: 0.05, max_model_len: 1024}
models:
  sleepy:
    model: smollm2-135m
    standby: 1
    autoscale: {min_replicas: 0, interval_seconds: 0.2, idle_seconds: 1, policy: "tests.e2e.scaling_policy:by_streams"}
  busy:
    model: smollm2-135m
    autoscale:
      max_replicas: 3
      interval_seconds: 0.2
      down_cooldown_seconds: 1
      policy: "tests.e2e.scaling_policy:by_streams"
"""
LONGEST_SECONDS = 100.0


class Running:
    def __init__(self, http: HttpClient, admin: HttpClient) -> None:
        self.http = http
        self.admin = admin

    async def until(self, model: str, condition: Callable[[dict[str, Any], list[dict[str, Any]]], bool]) -> Any:
        """Wait for a state of a model's autoscaler and of its replicas, and return both."""
        async with asyncio.timeout(LONGEST_SECONDS):
            while True:
                found = (await self.admin.get("/admin/fleet")).json()
                (scaling,) = (each for each in found["autoscale"] if each["model"] == model)
                replicas = [each for each in found["data"] if each["model"] == model]
                if condition(scaling, replicas):
                    return scaling, replicas
                await asyncio.sleep(0.02)

    async def ask(self, model: str, number: int, tokens: int = 24) -> dict[str, Any]:
        body = {"model": model, "prompt": f"Number {number} is", "max_tokens": tokens, "temperature": 0}
        headers = {"x-penstock-ledger": "true"}
        async with self.http.stream("POST", "/v1/completions", {**body, "ignore_eos": True}, headers) as response:
            found: dict[str, Any] = json.loads(await response.read())
            assert response.status == 200, found
        assert found["usage"]["completion_tokens"] == tokens
        return found

    async def metric(self, name: str) -> float:
        text = (await self.admin.get("/metrics")).body.decode()
        (value,) = re.findall(rf"^{re.escape(name)} (\S+)", text, re.M)
        return float(value)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    running, key = start_with_admin(tmp_path_factory.mktemp("autoscaling"), SETTINGS)
    yield running.url, key
    running.stop()


@asynccontextmanager
async def clients(server: tuple[str, str]) -> AsyncIterator[Running]:
    url, key = server
    async with (
        HttpClient(url, timeout=LONGEST_SECONDS) as http,
        HttpClient(url, api_key=key, timeout=LONGEST_SECONDS) as admin,
    ):
        yield Running(http, admin)


async def test_a_request_wakes_a_model_from_zero(server: tuple[str, str]) -> None:
    async with clients(server) as running:
        await running.until("sleepy", lambda scaling, replicas: not replicas and scaling["standby"] == 1)
        assert (await running.http.get("/ready")).status == 200
        taken = await running.metric('penstock_standby_starts_total{model="sleepy",outcome="taken"}')
        answers = await asyncio.gather(*(running.ask("sleepy", number) for number in range(4)))
        for answer in answers:
            assert answer["usage"]["ledger"]["choices"][0]["parts"]["held"] > 0
        assert await running.metric('penstock_standby_starts_total{model="sleepy",outcome="taken"}') > taken
        refused = await running.admin.post("/admin/fleet", {"model": "sleepy", "count": 1})
        assert refused.status == 400
        assert "autoscale.min_replicas" in (refused.error_message or "")


async def test_a_standby_takes_over_from_a_worker_that_is_killed(server: tuple[str, str]) -> None:
    """Of a model whose only worker it is."""
    async with clients(server) as running:
        prepared = asyncio.create_task(
            running.until("sleepy", lambda scaling, replicas: scaling["standby"] == 1 and scaling["ready"] == 1)
        )
        while not prepared.done():
            await running.ask("sleepy", 1)
        long = asyncio.create_task(running.ask("sleepy", 7, tokens=300))
        _, (replica,) = await running.until("sleepy", lambda _, replicas: bool(replicas and replicas[0]["running"]))
        missed = await running.metric('penstock_standby_starts_total{model="sleepy",outcome="missed"}')
        killed = await running.admin.post(f"/admin/fleet/{replica['id']}/fault", {"fault": "kill"})
        assert killed.status == 202
        answer = await long
        (failover,) = answer["usage"]["ledger"]["choices"][0]["engine"]["failovers"]
        assert failover["replica"] == replica["id"]
        assert await running.metric('penstock_standby_starts_total{model="sleepy",outcome="missed"}') == missed
        await running.until("sleepy", lambda scaling, replicas: not replicas)
        assert (await running.ask("sleepy", 7, tokens=300))["choices"] == answer["choices"]


async def test_one_to_three_replicas_and_back_under_load(server: tuple[str, str]) -> None:
    """Whatever replicas come and go, each answer is the same every time, and none fails."""
    texts: dict[int, set[str]] = {number: set() for number in range(6)}
    enough = asyncio.Event()

    async with clients(server) as running:

        async def ask(number: int) -> None:
            answer = await running.ask("busy", number, 40)
            texts[number].add(answer["choices"][0]["text"])

        async def keep_asking(number: int) -> None:
            while not enough.is_set():
                await ask(number)

        asking = [asyncio.create_task(keep_asking(number % 6)) for number in range(24)]
        await running.until("busy", lambda scaling, replicas: scaling["ready"] == 3)
        enough.set()
        await asyncio.gather(*asking)
        alone = asyncio.create_task(running.until("busy", lambda scaling, replicas: len(replicas) == 1))
        while not alone.done():
            await ask(3)
        await alone
    assert all(len(each) == 1 for each in texts.values())
