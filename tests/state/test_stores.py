"""What stores keep and share, in a real SQLite file and a real Redis; and what happens without them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import StartupError, Unavailable
from penstock.state import redis as redis_module
from penstock.state.memory import MemoryStore
from penstock.state.open import open_store
from penstock.state.redis import RedisStore
from penstock.state.sqlite import SqliteStore
from penstock.state.store import Claim, Grant, Keep, Store, UsageKey, UsageRecord
from tests.redis_server import RedisServer

_numbers = itertools.count()
USED = UsageRecord(1, 100, 40, 20, 5_000)


def claim(tokens: int = 10, **limits: int) -> Claim:
    return Claim(str(next(_numbers)), "acme", "a model", tokens, **limits)


Make = Callable[[], Store]


@pytest.fixture(params=["memory", "sqlite", "redis"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Makes stores that share what they can; memory is one and the same."""
    if request.param == "memory":
        store = MemoryStore()
        return lambda: store
    if request.param == "sqlite":
        return lambda: SqliteStore(tmp_path / "new" / "folder" / "state.db")
    server: RedisServer = request.getfixturevalue("redis_server")
    prefix = f"stores{next(_numbers)}"
    return lambda: RedisStore(server.url, prefix)


KEEP = Keep(documents=3, bytes=100, seconds=3600)


async def test_documents_are_bounded_for_each_tenant(make: Make) -> None:
    one, other = make(), make()
    await one.open()
    await other.open()
    for number in range(5):
        await one.save("response", "acme", f"d{number}", b"%d" % number, KEEP)
    await one.save("response", "other", "d0", "schön".encode(), KEEP)
    await one.save("file", "acme", "d0", b"x", KEEP)
    found = [await other.load("response", "acme", f"d{number}") for number in range(5)]
    assert found == [None, None, b"2", b"3", b"4"]
    assert await other.load("response", "other", "d0") == "schön".encode()
    await one.save("response", "acme", "d2", b"22", KEEP)  # the newest now
    await one.save("response", "acme", "large", b"l" * 98, KEEP)
    assert [await one.load("response", "acme", name) for name in ("d3", "d4", "d2")] == [None, None, b"22"]
    assert await other.discard("response", "acme", "large")
    assert not await other.discard("response", "acme", "large")
    assert not await other.discard("response", "acme", "nothing")
    await one.save("response", "acme", "a", b"a" * 98, KEEP)
    assert await other.load("response", "acme", "d2") == b"22", "what was discarded takes no room"
    await one.save("response", "acme", "too large", b"l" * 101, KEEP)
    assert await other.load("response", "acme", "too large") is None
    assert await other.load("response", "acme", "d2") == b"22"
    await one.save("response", "late", "d", b"d", KEEP._replace(seconds=0.001))
    await asyncio.sleep(0.01)
    assert await other.load("response", "late", "d") is None
    await one.close()
    await other.close()


async def test_of_those_who_replace_a_document_the_first_one_wins(make: Make) -> None:
    stores = [make() for _ in range(4)]
    for store in stores:
        await store.open()
    await stores[0].save("response", "acme", "a", "alt und schön".encode(), KEEP)
    for turn in range(10):
        before = await stores[0].load("response", "acme", "a")
        assert before is not None
        attempts = [
            store.save("response", "acme", "a", f"{number} in turn {turn}".encode(), KEEP, before)
            for number, store in enumerate(stores)
        ]
        kept = await asyncio.gather(*attempts)
        assert kept.count(True) == 1
        found = await stores[0].load("response", "acme", "a")
        assert found == f"{kept.index(True)} in turn {turn}".encode()
    assert not await stores[1].save("response", "acme", "nothing", b"new", KEEP, b"old")
    assert await stores[1].load("response", "acme", "nothing") is None
    for store in stores:
        await store.close()


async def test_documents_outlast_their_process(tmp_path: Path) -> None:
    for expected in (None, b"{}"):
        store = SqliteStore(tmp_path / "state.db")
        await store.open()
        assert await store.load("response", "", "a") == expected
        await store.save("response", "", "a", b"{}", KEEP)
        await store.close()


@pytest.mark.parametrize("who", ["the writer", "a reader"])
async def test_spend_outlasts_who_wanted_it_written(tmp_path: Path, who: str) -> None:
    """Cancelled while other work has the thread, as at the end of a server."""
    store, day = SqliteStore(tmp_path / "state.db"), MemoryStore().day()
    await store.open()
    store.settle(await store.reserve(claim()), USED)
    begun, go_on = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait()

    busy = asyncio.ensure_future(store._in_thread(work))
    await asyncio.to_thread(begun.wait)
    waiting: asyncio.Task[Any] = asyncio.create_task(store.sync() if who == "the writer" else store.usage(day, day))
    while store._thread._work_queue.empty():  # noqa: ASYNC110
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    store.settle(await store.reserve(claim()), USED)
    go_on.set()
    await asyncio.gather(busy, store.close())
    again = SqliteStore(tmp_path / "state.db")
    await again.open()
    assert await again.usage(day, day) == {UsageKey(day, "acme", "a model"): USED.plus(USED)}
    await again.close()


async def test_records_are_seen_by_everyone(make: Make) -> None:
    one, other = make(), make()
    await one.open()
    await other.open()
    before = await other.version()
    await one.put("key", "id'; DROP TABLE records; --", "value")
    assert await other.version() != before
    assert await other.records("key") == {"id'; DROP TABLE records; --": "value"}
    assert await other.records("tenant") == {}
    seen = await one.version()
    assert await other.delete("key", "id'; DROP TABLE records; --")
    assert await one.version() != seen
    assert not await one.delete("key", "id'; DROP TABLE records; --")
    await one.close()
    await other.close()


async def test_usage_outlives_the_gateway_and_adds_up(make: Make) -> None:
    one, other = make(), make()
    for store in (one, other):
        await store.open()
        for _ in range(3):
            store.settle(await store.reserve(claim()), USED)
        await store.close()
    reader = make()
    await reader.open()
    found = await reader.usage("2000-01-01", "2000-01-02")
    assert found == {}
    day = MemoryStore().day()
    found = await reader.usage(day, day)
    assert found == {UsageKey(day, "acme", "a model"): UsageRecord(6, 600, 240, 120, 30_000)}
    await reader.close()


@pytest.mark.parametrize("period", ["day", "month"])
async def test_budgets_hold_across_restarts(make: Make, period: str) -> None:
    limits = {f"budget_per_{period}": 9_000}
    for _ in range(2):  # 5,000 each: the second passes the budget, the third is refused
        store = make()
        await store.open()
        grant = await store.reserve(claim(**limits))
        assert grant.refused is None
        store.settle(grant, USED)
        await store.close()
    store = make()
    await store.open()
    grant = await store.reserve(claim(**limits))
    assert grant.refused == period
    assert 0 < grant.retry_after <= {"day": 86_400, "month": 31 * 86_400}[period]
    await store.close()


@pytest.mark.parametrize("period", ["day", "month"])
async def test_budgets_are_reserved(make: Make, period: str) -> None:
    store = make()
    await store.open()
    budget: dict[str, Any] = {f"budget_per_{period}": 10_500}
    asked = claim()._replace(cost=1_000, **budget)

    async def reserve(cost: int = 1_000) -> Grant:
        return await store.reserve(asked._replace(id=str(next(_numbers)), cost=cost))

    grants = await asyncio.gather(*(reserve() for _ in range(100)))
    admitted = [grant for grant in grants if grant.refused is None]
    assert len(admitted) == 10
    assert {(grant.refused, grant.left) for grant in grants} == {(None, 0), (period, 500)}
    assert {grant.retry_after for grant in grants} == {0.0}, "running requests may spend less"
    assert (await reserve(10_501)).retry_after > 0
    store.settle(admitted[0], UsageRecord(1, 0, 0, 0, 400))  # 600 less than it might have
    store.settle(admitted[1], UsageRecord())  # it has failed
    assert [(await reserve()).refused for _ in range(3)] == [None, None, period]
    assert (await reserve(101)).left == 100
    assert (await reserve(100)).refused is None
    assert (await reserve(0)).refused == period, "all is reserved"
    await store.close()


async def test_budgets_are_reserved_among_gateways_until_one_dies(redis_server: RedisServer) -> None:
    now = [1000.0]
    prefix = f"stores{next(_numbers)}"
    dead, alive = (RedisStore(redis_server.url, prefix, lambda: now[0]) for _ in range(2))
    await dead.open()
    await alive.open()
    grants = []
    for _ in range(10):
        for store in (dead, alive):
            grants.append(await store.reserve(claim(budget_per_day=10_000)._replace(cost=1_000)))
    assert [grant.refused for grant in grants] == [None] * 10 + ["day"] * 10
    now[0] += redis_module.LEASE_SECONDS - 1
    assert (await alive.reserve(claim(budget_per_day=10_000)._replace(cost=1_000))).refused == "day"
    now[0] += 1
    assert (await alive.reserve(claim(budget_per_day=10_000)._replace(cost=10_000))).refused is None
    await dead.close()
    await alive.close()


async def test_what_a_living_gateway_holds_is_renewed(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases and reservations of a request that runs for long, until it ends; also the keys that hold them."""
    monkeypatch.setattr(redis_module, "LEASE_SECONDS", 1)
    monkeypatch.setattr(redis_module, "RENEW_SECONDS", 0.05)
    store = RedisStore(redis_server.url, f"stores{next(_numbers)}")
    await store.open()
    running = await store.reserve(claim(budget_per_day=10_000, concurrent=1)._replace(cost=10_000))
    await asyncio.sleep(2.5)  # longer than a lease, and than twice that, after which its key would go
    assert (await store.reserve(claim(concurrent=1))).refused == "concurrent"
    assert (await store.reserve(claim(budget_per_day=10_000)._replace(cost=1))).refused == "day"
    store.settle(running, UsageRecord(1, 0, 0, 0, 1))
    assert (await store.reserve(claim(budget_per_day=10_000)._replace(cost=9_999))).refused is None
    await store.close()


async def test_a_file_that_cannot_be_used_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "state.db").write_text("this is not a database, whatever its name says" * 100)
    with pytest.raises(StartupError, match=r"state\.db .* set state to another file"):
        async with open_store(f"sqlite:///{tmp_path}/state.db"):
            pass


async def test_redis_that_is_not_there_is_a_clear_error() -> None:
    with pytest.raises(StartupError, match="cannot reach Redis at localhost:1") as caught:
        async with open_store("redis://user:hunter2@localhost:1/0"):
            pass
    assert "hunter2" not in str(caught.value)


async def test_leaving_while_waiting_for_redis_gives_everything_back(redis_server: RedisServer) -> None:
    store = RedisStore(redis_server.url, f"stores{next(_numbers)}")
    await store.open()
    limits = {"concurrent": 1, "tokens_per_minute": 10}
    waiting = asyncio.create_task(store.reserve(claim(10, **limits)))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    while (await store.reserve(claim(11, **limits))).tokens.left < 10:  # type: ignore[union-attr]
        pass
    grant = await store.reserve(claim(10, **limits))
    assert grant.refused is None
    await store.close()


async def test_leaving_when_redis_has_just_answered_gives_everything_back(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is there and who asked for it is cancelled before it runs again."""
    store = RedisStore(redis_server.url, f"stores{next(_numbers)}")
    await store.open()
    limits: dict[str, Any] = {"concurrent": 1, "budget_per_day": 10_000}

    async def leave() -> None:
        waiting = asyncio.create_task(store.reserve(claim(**limits)._replace(cost=10_000)))
        exchange = store._exchange

        async def and_then_it_leaves() -> None:
            await exchange()
            waiting.cancel()

        with monkeypatch.context() as patch:
            patch.setattr(store, "_exchange", and_then_it_leaves)
            with pytest.raises(asyncio.CancelledError):
                await waiting

    await leave()
    assert not store._held, "nothing is renewed"
    grant = await store.reserve(claim(**limits)._replace(cost=10_000))
    assert grant.refused is None
    await store._settled.wait()
    await leave()  # it was refused
    assert not store._settlements
    store.settle(grant, UsageRecord())
    await store.close()


async def test_a_gateway_that_died_frees_its_concurrency(redis_server: RedisServer) -> None:
    now = [1000.0]
    prefix = f"stores{next(_numbers)}"
    dead, alive = (RedisStore(redis_server.url, prefix, lambda: now[0]) for _ in range(2))
    await dead.open()
    await alive.open()
    assert (await dead.reserve(claim(concurrent=1))).refused is None
    assert (await alive.reserve(claim(concurrent=1))).refused == "concurrent"
    now[0] += redis_module.LEASE_SECONDS
    assert (await alive.reserve(claim(concurrent=1))).refused is None
    await dead.close()
    await alive.close()


async def test_a_clock_that_is_set_back_locks_nobody_out(redis_server: RedisServer) -> None:
    now = [100_000.0]
    store = RedisStore(redis_server.url, f"stores{next(_numbers)}", lambda: now[0])
    await store.open()
    assert (await store.reserve(claim(tokens_per_minute=10))).refused is None
    refused = await store.reserve(claim(tokens_per_minute=10))
    assert (refused.refused, refused.retry_after) == ("tokens", 61.0)
    now[0] -= 3600.0
    assert (await store.reserve(claim(tokens_per_minute=10))).refused is None
    assert (await store.reserve(claim(tokens_per_minute=10))).refused == "tokens"
    await store.close()


async def test_a_redis_that_hangs_is_given_up_soon(own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_module, "TIMEOUT_SECONDS", 1.0)
    store = RedisStore(own_redis.url)
    await store.open()
    own_redis.pause()
    grants = await asyncio.gather(*(store.reserve(claim(concurrent=5)) for _ in range(10)))
    assert [grant.refused for grant in grants] == [None] * 5 + ["concurrent"] * 5
    assert all(grant.local for grant in grants)
    own_redis.resume()
    while (await store.reserve(claim(concurrent=10**6))).local:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await store.close()


async def test_more_questions_than_connections_are_no_lost_redis(redis_server: RedisServer) -> None:
    store = RedisStore(redis_server.url, f"stores{next(_numbers)}")
    await store.open()
    await store.save("response", "acme", "a", b"x" * 100, KEEP)
    assert (await store.reserve(claim(requests_per_minute=1))).refused is None
    loaded = await asyncio.gather(*(store.load("response", "acme", "a") for _ in range(300)))
    assert loaded == [b"x" * 100] * 300
    assert store.online
    assert (await store.reserve(claim(requests_per_minute=1))).refused == "requests", "it is still counted"
    await store.close()


async def test_who_waits_for_a_connection_fails_with_those_who_have_one(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RedisStore(own_redis.url)
    await store.open()
    get, asked = store.redis.get, []

    async def noted(key: str) -> Any:
        asked.append(key)
        return await get(key)

    monkeypatch.setattr(store.redis, "get", noted)
    own_redis.stop()
    waiting = (store.load("response", "acme", str(number)) for number in range(100))
    failures = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(failure) for failure in failures} == {Unavailable}
    assert len(asked) == redis_module.CONNECTIONS
    await store.close()


async def test_a_redis_that_hangs_counts_once_what_it_is_sent_again(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it goes on it runs the batch that was given up, beside that of the next connection."""
    monkeypatch.setattr(redis_module, "TIMEOUT_SECONDS", 1.0)
    store = RedisStore(own_redis.url)
    await store.open()
    grants = [await store.reserve(claim(concurrent=10)) for _ in range(6)]
    for at, grant in enumerate(grants):
        store.settle(grant, USED)
        if at == 1:  # these two are answered
            await store._settled.wait()
            own_redis.pause()
        elif at == 3:  # the next two are not, and the last two are sent with them
            while store.online:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    own_redis.resume()
    await store._settled.wait()
    day = store.local.day()
    found = await store.usage(day, day)
    assert found == {UsageKey(day, "acme", "a model"): UsageRecord(6, 600, 240, 120, 30_000)}
    await store.close()


async def test_a_batch_that_comes_late_changes_nothing(redis_server: RedisServer) -> None:
    """The next connection may be served before the one that was given up."""
    store = RedisStore(redis_server.url, f"stores{next(_numbers)}")
    await store.open()
    sent: list[tuple[Any, ...]] = []
    send = store._line.send_command

    async def noted(*command: Any) -> None:
        sent.append(command)
        await send(*command)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store._line, "send_command", noted)
        store.settle(await store.reserve(claim()), USED)
        await store._settled.wait()
        store.settle(await store.reserve(claim()), USED)
        await store._settled.wait()
    for command in reversed(sent):
        await store.redis.evalsha(*command[1:])
    day = store.local.day()
    assert await store.usage(day, day) == {UsageKey(day, "acme", "a model"): UsageRecord(2, 200, 80, 40, 10_000)}
    await store.close()


async def test_without_redis_limits_are_local_and_spend_is_made_up_for(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(redis_module, "RETRY_SECONDS", 0.01)
    store = RedisStore(own_redis.url)
    await store.open()
    with caplog.at_level(logging.INFO, "penstock.state"):
        before = await store.reserve(claim(concurrent=2, budget_per_day=9_000))
        own_redis.stop()
        during = [await store.reserve(claim(concurrent=2, budget_per_day=9_000)) for _ in range(3)]
        assert [grant.refused for grant in during] == [None, None, "concurrent"], "limits hold, in this process"
        for grant in (before, *during[:2]):
            store.settle(grant, USED)
        assert (await store.reserve(claim(budget_per_day=9_000))).refused == "day", "and so do budgets"
        with pytest.raises(Unavailable):
            await store.records("key")
        own_redis.start()
        day = store.local.day()
        found: dict[UsageKey, UsageRecord] = {}
        while not found:
            with suppress(Unavailable):
                found = await store.usage(day, day)
    assert found == {UsageKey(day, "acme", "a model"): UsageRecord(3, 300, 120, 60, 15_000)}
    assert (await store.reserve(claim(budget_per_day=9_000))).refused == "day"
    assert [record.getMessage().split(" at ")[0] for record in caplog.records] == ["lost Redis", "Redis"]
    await store.close()


async def test_without_a_place_a_server_keeps_all_in_memory_and_says_so_and_commands_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    async with open_store(None) as store:
        assert type(store) is MemoryStore
    for words in ("kept in memory", "'penstock keys'", str(tmp_path / "file"), "--state sqlite:///PATH"):
        assert words in caplog.text
    with pytest.raises(StartupError, match="XDG_STATE_HOME"):
        async with open_store(None, lasting=True):
            pass
