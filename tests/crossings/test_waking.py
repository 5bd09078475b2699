"""Scaling to zero crossed with what requests can ask for: held until a replica is woken, each answer is what it is of a
replica that is awake."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from penstock.bench.chaos.faults import Admin
from penstock.bench.chaos.streams import difference
from penstock.client.http import HttpClient
from tests.conftest import start_with_admin
from tests.crossings.test_failover import (
    LONG,
    PROMPT,
    Running,
    ask,
    choices_with,
    completion,
    every_kind,
    kill_when_busy,
)

SETTINGS = """
autoscale:
  min_replicas: 0
  max_replicas: 1
  interval_seconds: 0.1
  idle_seconds: 1
  policy: "tests.e2e.scaling_policy:by_streams"
engine: {kv_memory_gib: 0.05, max_model_len: 1024}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running, key = start_with_admin(tmp_path_factory.mktemp("waking"), SETTINGS)
    yield Running(running.url, key)
    running.stop()


async def until_asleep(admin: Admin) -> None:
    while await admin.replicas():  # noqa: ASYNC110
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
async def test_every_kind_of_request(server: Running, streamed: bool) -> None:
    asks = every_kind(streamed)
    async with server.clients() as (http, admin):
        rights = await asyncio.gather(*(ask(http, what) for what in asks.values()))
        await until_asleep(admin)
        answers = await asyncio.gather(*(ask(http, what) for what in asks.values()))
    for name, (right, right_events), (found, events) in zip(asks, rights, answers, strict=True):
        assert not difference(right, found), name
        assert all(ledger["held"] > 0 for ledger in found.ledgers.values()), name
        assert choices_with("prompt_logprobs", events) == choices_with("prompt_logprobs", right_events)


async def test_a_prefix_that_was_cached_before(server: Running) -> None:
    """The KV cache has gone with its replica, so nothing of it may be taken for granted."""
    what = completion(prompt=LONG, temperature=0)
    async with server.clients() as (http, admin):
        await ask(http, what)
        right, events = await ask(http, what)
        assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        await until_asleep(admin)
        found, events = await ask(http, what)
    assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert not difference(right, found)


async def test_two_clients_that_share_one_computation_and_an_answer_from_the_cache(server: Running) -> None:
    what = completion(prompt=f"Both of us are asleep. {PROMPT}", temperature=0)
    async with server.clients() as (http, admin):
        await until_asleep(admin)
        answers = await asyncio.gather(*(ask(http, what, cached=True) for _ in range(2)))
        await until_asleep(admin)
        stored, events = await ask(http, what, cached=True)
        assert events[-1]["usage"]["ledger"]["choices"][0]["cache"] == "hit"
        assert not await admin.replicas()  # which needs none
    accounts = [events[-1]["usage"]["ledger"]["choices"][0] for _, events in answers]
    assert sorted(account["cache"] for account in accounts) == ["miss", "shared"]
    for found, _ in answers:
        assert not difference(stored, found)


async def test_the_replica_that_was_woken_is_killed(server: Running) -> None:
    what = completion(temperature=0.9)
    async with server.clients() as (http, admin):
        right, _ = await ask(http, what)
        await until_asleep(admin)
        killing = asyncio.create_task(kill_when_busy(admin, 1, 1))
        found, _ = await ask(http, what)
        await killing
    assert found.ledgers[0]["held"] > 0
    assert not difference(right, found)


async def test_a_client_that_leaves_while_it_is_held(server: Running) -> None:
    """Its request is not computed, and the next one is answered."""
    what = completion(temperature=0)
    async with server.clients() as (http, admin):
        right, _ = await ask(http, what)
        await until_asleep(admin)
        async with HttpClient(server.url) as leaver:
            leaving = asyncio.create_task(ask(leaver, completion(temperature=0, max_tokens=900)))
            await asyncio.sleep(0.01)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
        found, _ = await ask(http, what)
    assert not difference(right, found)
