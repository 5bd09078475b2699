"""Files and batches of gateways that share a Redis: what one has, all have."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import redis

from penstock.batches.decisions import LEASE_SECONDS
from penstock.batches.redis_queue import RedisQueue
from penstock.batches.redis_scripts import ADVANCE, PREFIX
from penstock.batches.settings import BatchesConfig
from penstock.core.request import GenerateRequest
from penstock.gateway.settings import TenantConfig
from penstock.settings import Settings
from penstock.simulation.scripted_engine import MODEL, Action, hang
from penstock.text.tokenizer import Tokenizer
from tests.gateway.api.test_batches import SECONDS, ended, jsonl, line, lines_of, submitted
from tests.gateway.conftest import Gateway, serving
from tests.redis_server import RedisServer


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.stop()


@pytest.fixture
def settings(own_redis: RedisServer) -> Settings:
    return Settings(state=own_redis.url, batches=BatchesConfig(concurrent=1))


@pytest.fixture
def gateways(tokenizer: Tokenizer, settings: Settings) -> Iterator[tuple[Gateway, Gateway]]:
    with serving(tokenizer, settings) as first, serving(tokenizer, settings) as second:
        yield first, second


def test_gateways_share_files_batches_and_lines(gateways: tuple[Gateway, Gateway]) -> None:
    begun = [threading.Event(), threading.Event()]
    for gateway, mine, other in zip(gateways, begun, begun[::-1], strict=True):

        def script(
            request: GenerateRequest,
            answer: object = gateway.engine.script,
            mine: threading.Event = mine,
            other: threading.Event = other,
        ) -> list[Action]:
            mine.set()

            async def until_both_have_one() -> None:
                assert await asyncio.to_thread(other.wait, SECONDS)

            return [until_both_have_one, *answer(request)]  # type: ignore[operator]

        gateway.runs(script)
    here, there = (gateway.client() for gateway in gateways)
    file = here.files.create(file=("lines.jsonl", jsonl(*(line(f"l{n}") for n in range(10)))), purpose="batch")
    batch = there.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    batch = ended(here, batch.id)
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 10, "completed": 10, "failed": 0}
    assert set(lines_of(there, batch.output_file_id)) == {f"l{n}" for n in range(10)}
    assert sum(len(gateway.engine.requests) for gateway in gateways) == 10
    assert all(gateway.engine.requests for gateway in gateways)
    assert {each.id for each in there.files.list()} == {file.id, batch.output_file_id}
    here.files.delete(file.id)
    with pytest.raises(openai.NotFoundError):
        there.files.content(file.id)


def test_lines_wait_for_the_gateway_that_has_their_model(tokenizer: Tokenizer, own_redis: RedisServer) -> None:
    """Whichever validates the batch, and though none has all of its models."""
    settings = Settings(
        state=own_redis.url,
        tenants={"all": TenantConfig(), "some": TenantConfig(models=("alias",)), "none": TenantConfig(models=("x",))},
    )
    with (
        serving(tokenizer, settings, names=("first",)) as first,
        serving(tokenizer, settings, names=("second", "alias")) as second,
        redis.Redis.from_url(own_redis.url) as client,
    ):
        deadline = time.monotonic() + SECONDS
        while client.zcard(f"{PREFIX}served") < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        keys = {tenant: first.key(tenant) for tenant in settings.tenants}
        mixed = [line("a", model="first"), line("b", model="second"), line("c", model="alias")]
        for gateway in (first, second, first, second):
            for tenant, lines, status in (
                ("all", mixed, "completed"),
                ("some", mixed[1:], "completed"),
                ("none", mixed[1:], "failed"),
            ):
                asking = gateway.client(keys[tenant])
                batch = ended(asking, submitted(asking, jsonl(*lines)).id)
                assert batch.status == status, batch
                assert status == "failed" or set(lines_of(asking, batch.output_file_id)) == {
                    each["custom_id"] for each in lines
                }


def test_a_batch_is_cancelled_at_any_gateway(gateways: tuple[Gateway, Gateway]) -> None:
    taken = threading.Event()

    async def hang_noticed() -> None:
        taken.set()
        await hang()

    for gateway in gateways:
        gateway.runs(lambda request: [hang_noticed])
    here, there = (gateway.client() for gateway in gateways)
    batch = submitted(here, jsonl(line("a"), line("b"), line("c")))
    assert taken.wait(SECONDS)
    assert there.batches.cancel(batch.id).status == "cancelling"
    batch = ended(here, batch.id)
    assert batch.status == "cancelled"
    assert len(lines_of(here, batch.error_file_id)) == 3


def test_a_redis_that_is_away_is_said(tokenizer: Tokenizer) -> None:
    server = RedisServer()
    with serving(tokenizer, Settings(state=server.url)) as gateway, gateway.http() as http:
        file = gateway.client().files.create(file=("x", b"x"), purpose="batch")
        server.stop()
        for answer in (
            http.get(f"/v1/files/{file.id}/content"),
            http.post("/v1/files", files={"file": b"x"}, data={"purpose": "batch"}),
            http.get("/v1/batches"),
        ):
            assert answer.status_code == httpx.codes.SERVICE_UNAVAILABLE
            assert "Redis does not answer" in answer.json()["error"]["message"]


def test_a_redis_that_hangs_is_said_soon_and_batches_go_on(tokenizer: Tokenizer, own_redis: RedisServer) -> None:
    """Also while work that is patient with it takes all of its threads."""
    is_frozen = threading.Event()
    with serving(tokenizer, Settings(state=own_redis.url)) as gateway, gateway.http() as http:
        answer, taken = gateway.engine.script, threading.Event()

        async def until_frozen() -> None:
            taken.set()
            assert await asyncio.to_thread(is_frozen.wait, SECONDS)

        gateway.runs(lambda request: [until_frozen, *answer(request)])
        batch = submitted(gateway.client(), jsonl(*(line(f"l{n}") for n in range(20))))
        assert taken.wait(SECONDS)
        file, new = f"/v1/files/{batch.input_file_id}", {"endpoint": "/v1/chat/completions", "completion_window": "1h"}

        def asked(method: str, path: str, **fields: Any) -> tuple[int, float]:
            begun = time.monotonic()
            return http.request(method, path, timeout=SECONDS, **fields).status_code, time.monotonic() - begun

        own_redis.pause()
        is_frozen.set()
        try:
            with ThreadPoolExecutor(32) as pool:
                asking = [
                    *(
                        pool.submit(asked, "GET", path)
                        for path in ("/v1/files", "/v1/batches", f"{file}/content", file) * 6
                    ),
                    pool.submit(asked, "POST", "/v1/batches", json={"input_file_id": batch.input_file_id, **new}),
                    pool.submit(asked, "POST", f"/v1/batches/{batch.id}/cancel"),
                    pool.submit(asked, "POST", "/v1/files", files={"file": b"x"}, data={"purpose": "batch"}),
                    pool.submit(asked, "DELETE", file),
                ]
                answers = [each.result() for each in asking]
        finally:
            own_redis.resume()
        assert {status for status, _ in answers} == {503}
        assert max(seconds for _, seconds in answers) < 6, "2 seconds, and some for a slow machine"
        assert len(lines_of(gateway.client(), ended(gateway.client(), batch.id).output_file_id)) == 20


def test_a_lease_that_ended_begins_no_line_again(
    tokenizer: Tokenizer, own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """As when Redis was away for longer than a lease: its gateway still runs the line."""
    taken, goes_on = threading.Semaphore(0), threading.Event()

    async def until_told() -> None:
        taken.release()
        assert await asyncio.to_thread(goes_on.wait, SECONDS)

    with serving(tokenizer, Settings(state=own_redis.url)) as gateway:
        answer = gateway.engine.script
        gateway.runs(lambda request: [until_told, *answer(request)])
        batch = submitted(gateway.client(), jsonl(line("a")))
        assert taken.acquire(timeout=SECONDS)
        with redis.Redis.from_url(own_redis.url) as client:
            key, leased = f"{PREFIX}pending:{batch.id}:{MODEL}", f"{PREFIX}leased:{batch.id}"
            RedisQueue(own_redis.url).run(ADVANCE, time.time() + LEASE_SECONDS + 1)
            deadline = time.monotonic() + SECONDS
            while client.zcard(key) or not client.zcard(leased):  # until it is leased again
                assert time.monotonic() < deadline
                time.sleep(0.01)
        goes_on.set()
        assert len(lines_of(gateway.client(), ended(gateway.client(), batch.id).output_file_id)) == 1
        assert len(gateway.engine.requests) == 1
    assert "KeyError" not in caplog.text


def test_a_batch_outlasts_a_restart_of_redis(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its answers wait in memory while Redis is away."""
    monkeypatch.setattr("penstock.batches.runner.RETRY_SECONDS", 0.1)
    server = RedisServer(tmp_path)
    taken, is_away = threading.Event(), threading.Event()

    async def until_away() -> None:
        taken.set()
        assert await asyncio.to_thread(is_away.wait, SECONDS)

    with serving(tokenizer, Settings(state=server.url)) as gateway, gateway.http() as http:
        answer = gateway.engine.script
        gateway.runs(lambda request: [until_away, *answer(request)])
        batch = submitted(gateway.client(), jsonl(*(line(f"l{n}") for n in range(5))))
        assert taken.wait(SECONDS)
        server.stop()
        is_away.set()
        deadline = time.monotonic() + SECONDS
        while "answers wait to be kept: Redis does not answer" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        server.start()
        while (found := http.get(f"/v1/batches/{batch.id}")).status_code == httpx.codes.SERVICE_UNAVAILABLE:
            assert time.monotonic() < deadline, found.text
        assert len(lines_of(gateway.client(), ended(gateway.client(), batch.id).output_file_id)) == 5
    server.stop()
