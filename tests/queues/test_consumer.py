"""Requests from real brokers, before a scripted engine."""

from __future__ import annotations

import json
import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import redis

from penstock.batches.records import Answered
from penstock.batches.runner import Asked, Attempt
from penstock.batches.settings import BatchesConfig
from penstock.checkpoint.source import BUILT_IN_ENCODER, resolve
from penstock.core.request import GenerateRequest, SamplingParams
from penstock.engine.settings import EngineConfig
from penstock.gateway.api.batches import BATCHED
from penstock.gateway.api.models import ServedModel
from penstock.gateway.settings import PriceConfig, ServerConfig, TenantConfig
from penstock.kernels.native import bindings
from penstock.queues.answers import AnswerStore
from penstock.queues.consumer import Consumer
from penstock.queues.open import make_broker
from penstock.queues.settings import ConsumeConfig
from penstock.runner.startup import start
from penstock.settings import Settings
from penstock.simulation.scripted_engine import MODEL, hang
from penstock.text.tokenizer import Tokenizer, load_tokenizer
from tests.batches.answering import ServesOne
from tests.gateway.api.test_embeddings import InProcess
from tests.gateway.conftest import serving
from tests.queues.conftest import LARGEST, SECONDS, Queue
from tests.redis_server import RedisServer

CHAT = "/v1/chat/completions"


def settings(folder: Path, consume: ConsumeConfig) -> Settings:
    return Settings(server=ServerConfig(max_body_mib=0.25), batches=BatchesConfig(folder=str(folder)), consume=consume)


def asked(custom_id: str, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **fields}
    return {"custom_id": custom_id, "url": CHAT, "body": body}


def test_each_request_is_answered_once(queue: Queue, tokenizer: Tokenizer, tmp_path: Path) -> None:
    queue.send(*(asked(f"r{n}") for n in range(10)), asked("r3"), b"{", asked("bad", temperature=-1))
    with serving(tokenizer, settings(tmp_path, queue.config)) as gateway:
        answers = queue.take(11)
        (dead,) = queue.take(1, queue.config.dead_letters)
        assert dead["code"] == "invalid_message"
        assert dead["payload"] == "{"
        statuses = {each["custom_id"]: each["response"]["status_code"] for each in answers}
        assert statuses == {**{f"r{n}": 200 for n in range(10)}, "bad": 400}
        good = next(each for each in answers if each["custom_id"] == "r0")
        assert good["response"]["body"]["choices"][0]["message"]["content"] == "Hello there, friend!"
        queue.send(asked("r5"), asked("last"))  # the one again, long after its answer
        assert queue.take(12)[11]["custom_id"] == "last"
        assert len(gateway.engine.requests) == 11
        assert {request.objective.name for request in gateway.engine.requests} == {"batch"}
        with gateway.http() as http:
            metrics = http.get("/metrics").text
        assert f'penstock_queue_messages_total{{outcome="answered",queue="{queue.config.requests}"}} 12.0' in metrics
        assert "penstock_queue_lag" in metrics


def test_another_server_goes_on(queue: Queue, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """From the tokens that a request had, and with its seed. It was not acknowledged, so it is delivered again."""
    taken = threading.Event()

    async def hang_noticed() -> None:
        taken.set()
        await hang()

    queue.send(asked("long", temperature=1.0))
    with serving(tokenizer, settings(tmp_path, queue.config)) as first:
        spoken = list(first.engine.script(GenerateRequest("x-0", [1], SamplingParams())))[:4]
        first.runs(lambda request: [*spoken[:2], hang_noticed])
        assert taken.wait(SECONDS)
        (before,) = first.engine.requests
    with serving(tokenizer, settings(tmp_path, queue.config)) as second:
        eos = tokenizer.eos_ids[0]
        second.runs(lambda request: [*spoken[len(request.output) : 4], [eos]])
        (answer,) = queue.take(1)
        (after,) = second.engine.requests
    assert after.seed == before.seed
    assert list(after.output) == [token for tokens in spoken[:2] for token in tokens]  # type: ignore[union-attr]
    whole = [token for tokens in spoken for token in tokens]  # type: ignore[union-attr]
    assert answer["response"]["body"]["choices"][0]["message"]["content"] == tokenizer.decode(whole)


def test_answers_in_chunks(queue: Queue, tokenizer: Tokenizer, tmp_path: Path) -> None:
    queue.send(asked("a"))
    with serving(tokenizer, settings(tmp_path, replace(queue.config, answers="chunks"))):
        found = queue.take(1)
        while not any(part["finish_reason"] for each in found for part in each["chunk"]["choices"]):
            found = queue.take(len(found) + 1)
    assert [each["index"] for each in found] == list(range(len(found)))
    assert len({(each["custom_id"], each["attempt"]) for each in found}) == 1
    text = "".join(part["delta"].get("content") or "" for each in found for part in each["chunk"]["choices"])
    assert text == "Hello there, friend!"


def test_a_message_without_data_is_kept(redis_url: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    queue = Queue(redis_url)
    with redis.Redis.from_url(redis_url) as client:
        id = client.xadd(queue.config.requests, {"payload": "{}", "custom_id": "x"})
    with serving(tokenizer, settings(tmp_path, queue.config)):
        (letter,) = queue.take(1, queue.config.dead_letters)
    assert json.loads(letter["payload"]) == {"payload": "{}", "custom_id": "x"}
    assert letter["source"] == id.decode()
    queue.close()


def test_a_dead_letter_is_cut_to_what_the_broker_takes(queue: Queue, tokenizer: Tokenizer, tmp_path: Path) -> None:
    poison = b'"' * 700_000  # each of which takes two bytes in the letter
    queue.send(poison, asked("next"))
    with serving(tokenizer, settings(tmp_path, queue.config)):
        (letter,) = queue.take(1, queue.config.dead_letters)
        assert queue.take(1)[0]["custom_id"] == "next"
    assert poison.decode().startswith(letter["payload"])
    assert letter["payload_bytes"] == len(poison)
    assert f"here are its first {len(letter['payload'])} bytes" in letter["message"]


class Says(ServesOne):
    """Answers with so many bytes."""

    def __init__(self, size: int) -> None:
        super().__init__(MODEL)
        self.size = size

    async def answer(self, asked: Asked) -> Attempt:
        return Attempt(Answered(200, "request", b'"' + b"x" * self.size + b'"'))


def test_an_answer_that_the_broker_does_not_take_is_said(queue: Queue, tmp_path: Path) -> None:
    """Others go on, and the request may be sent again."""
    store, answers = AnswerStore(tmp_path), Says(max(LARGEST.values()))
    consumer = Consumer(queue.config, make_broker(queue.config), store, answers, [CHAT])
    queue.run(store.open)
    queue.run(consumer.open)
    queue.send(asked("large"))
    response = queue.take(1)[0]["response"]
    assert (response["status_code"], response["body"]["error"]["code"]) == (500, "answer_too_large")
    answers.size = 10
    queue.send(asked("large"), asked("other"))
    found = {each["custom_id"]: each["response"]["body"] for each in queue.take(3)[1:]}
    assert found == {"large": "x" * 10, "other": "x" * 10}
    queue.run(consumer.close)
    queue.run(store.close)


def test_lag_counts_what_is_left_after_some_was_deleted(redis_url: str) -> None:
    queue = Queue(redis_url)
    queue.config = replace(queue.config, group="counting")
    broker = make_broker(queue.config)
    queue.run(broker.open)
    with redis.Redis.from_url(redis_url) as client:
        ids = [client.xadd(queue.config.requests, {"data": "{}"}) for _ in range(250)]
        client.xdel(queue.config.requests, ids[200])
    assert queue.run(broker.lag) == 249
    (message,) = queue.run(lambda: broker.receive(1))
    assert queue.run(broker.lag) == 249  # it is not acknowledged
    queue.run(lambda: broker.acknowledge(message))
    assert queue.run(broker.lag) == 248
    queue.run(broker.close)
    queue.close()


BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"model": MODEL, "prompt": "Hi"},
    "/v1/embeddings": {"model": "encoder", "input": ["a", "b"]},
    "/v1/responses": {"model": MODEL, "input": "Hi"},
}


@pytest.mark.skipif(not bindings.available(), reason=str(bindings.unavailable_reason()))
def test_every_endpoint_that_a_request_may_name(redis_url: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert set(BODIES) == set(BATCHED)
    engine = InProcess(*start(BUILT_IN_ENCODER, EngineConfig(device="cpu", dtype="float32")))
    encoder = ServedModel(["encoder"], load_tokenizer(resolve(BUILT_IN_ENCODER)), engine)
    kinds: tuple[Literal["whole", "chunks"], ...] = ("whole", "chunks")
    for answers in kinds:
        queue = Queue(redis_url)
        queue.config = replace(queue.config, answers=answers)
        queue.send(*({"custom_id": url, "url": url, "body": body} for url, body in BODIES.items()))
        with serving(tokenizer, settings(tmp_path, queue.config), beside=[encoder]):
            found = queue.take(len(BODIES))
            while {each["custom_id"] for each in found} != set(BODIES):
                found = queue.take(len(found) + 1)
        statuses = {each["custom_id"]: each["response"]["status_code"] for each in found if "response" in each}
        assert statuses == dict.fromkeys(BODIES if answers == "whole" else ["/v1/embeddings"], 200)
        queue.close()
    engine.close()


def limited(folder: Path, consume: ConsumeConfig, **tenant: float) -> Settings:
    given = settings(folder, replace(consume, tenant="poor"))
    prices = {MODEL: PriceConfig(input=1.0, output=1.0)}
    return replace(given, tenants={"poor": TenantConfig(**tenant)}, prices=prices)  # type: ignore[arg-type]


def counted(metrics: str, outcome: str) -> float:
    """Of the one queue."""
    (count,) = re.findall(rf'penstock_queue_messages_total{{outcome="{outcome}",.*}} (\S+)', metrics)
    return float(count)


def test_requests_wait_for_a_spent_budget(
    redis_url: str, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are given back by a server that stops meanwhile, and answered when there is money."""
    monkeypatch.setattr("penstock.batches.decisions.FIRST_DELAY", 0.01)
    monkeypatch.setattr("penstock.batches.decisions.MAX_WAIT", 0.01)
    queue = Queue(redis_url)
    queue.send(*(asked(f"r{n}") for n in range(3)))
    with serving(tokenizer, limited(tmp_path, queue.config, budget_per_day=1e-9)) as gateway, gateway.http() as http:
        deadline, key = time.monotonic() + SECONDS, {"authorization": f"Bearer {gateway.key('')}"}
        while not counted(text := http.get("/metrics", headers=key).text, "retried"):
            assert time.monotonic() < deadline, text
        assert not counted(text, "answered")
    with serving(tokenizer, limited(tmp_path, queue.config, budget_per_day=1000.0)):
        found = queue.take(3)
    assert {each["custom_id"]: each["response"]["status_code"] for each in found} == {f"r{n}": 200 for n in range(3)}
    queue.close()


def test_what_was_refused_may_be_sent_again(
    queue: Queue, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.queues.consumer.PATIENCE_SECONDS", 0.0)
    queue.send(asked("r"), asked("r"))
    with serving(tokenizer, limited(tmp_path, queue.config, budget_per_month=1e-9)):
        assert [each["response"]["status_code"] for each in queue.take(2)] == [429, 429]
    queue.send(asked("r"))
    with serving(tokenizer, limited(tmp_path, queue.config, budget_per_month=1000.0)):
        found = queue.take(3)
        while found[-1]["response"]["status_code"] != 200:  # the server had not come to acknowledge the last one
            found = queue.take(len(found) + 1)


def test_ids_are_of_one_tenant_and_broker(redis_url: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Two databases of a Redis, with requests of the same names and ids, and one folder that remembers answers."""
    databases = [Queue(redis_url), Queue(redis_url.removesuffix("/0") + "/1")]
    databases[1].config = replace(databases[0].config, url=databases[1].config.url)
    try:
        for queue, tenant, answer in zip(databases, ("acme", "other"), ("for acme", "for other"), strict=True):
            given = settings(tmp_path, replace(queue.config, tenant=tenant))
            given = replace(given, tenants={"acme": TenantConfig(), "other": TenantConfig()})
            queue.send(asked("1"))
            with serving(tokenizer, given) as gateway:
                gateway.answers(answer)
                (found,) = queue.take(1)
                assert found["response"]["body"]["choices"][0]["message"]["content"] == answer
    finally:
        for queue in databases:
            queue.close()


@pytest.mark.parametrize("flushes", [True, False])
def test_a_queue_that_was_made_anew_has_new_requests(flushes: bool, tokenizer: Tokenizer, tmp_path: Path) -> None:
    server = RedisServer()
    queue, after = Queue(server.url), Queue(server.url)
    after.config = queue.config
    try:
        with serving(tokenizer, settings(tmp_path, queue.config)), redis.Redis.from_url(server.url) as client:
            queue.send(asked("1"))
            queue.take(1)
            if flushes:
                client.flushall()
            else:
                client.delete(queue.config.requests, queue.config.results)
            after.send(asked("1"))
            assert after.take(1)[0]["response"]["status_code"] == 200
    finally:
        queue.close()
        after.close()
        server.stop()
