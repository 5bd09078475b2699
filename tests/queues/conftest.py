"""Real brokers, and what tests do with them. Kafka is the cluster inside librdkafka."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from penstock.batches.records import new_id
from penstock.queues.broker import Broker
from penstock.queues.open import make_broker
from penstock.queues.settings import ConsumeConfig
from penstock.text.tokenizer import Tokenizer
from tests.gateway.scripted_server import load_built_in_tokenizer
from tests.rabbitmq_server import RabbitServer
from tests.redis_server import RedisServer

LARGEST = {"redis": 2**20, "rabbitmq": 1_000_000, "kafka": 1_000_000}  # bytes of a message; Kafka's: of the client

SECONDS = 60.0  # a busy machine may take for what takes a moment


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_built_in_tokenizer()


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    server = RedisServer()
    with redis.Redis.from_url(server.url) as client:
        client.config_set("proto-max-bulk-len", LARGEST["redis"])
    yield server.url
    server.stop()


@pytest.fixture(scope="session")
def rabbitmq_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = RabbitServer(tmp_path_factory.mktemp("rabbitmq"), LARGEST["rabbitmq"])
    yield server.url
    server.stop()


@pytest.fixture(scope="session")
def kafka_url() -> Iterator[str]:
    kafka = pytest.importorskip("confluent_kafka")
    cluster = kafka.Producer({"bootstrap.servers": "", "test.mock.num.brokers": 1})
    (broker,) = cluster.list_topics(timeout=20).brokers.values()
    yield f"kafka://{broker.host}:{broker.port}"
    del cluster


class Queue:
    """The other end: sends requests and takes answers, by the same brokers with the names exchanged."""

    def __init__(self, url: str) -> None:
        name = new_id("q")
        self.config = ConsumeConfig(url, f"{name}-in", f"{name}-out", f"{name}-dead", lease_seconds=2.0)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)  # connections live while nobody waits for them
        self._thread.start()
        self._read: dict[str, Broker] = {}
        self._answers: dict[str, list[dict[str, Any]]] = {}

    def run(self, work: Callable[[], Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result(SECONDS)

    def _broker(self, queue: str) -> Broker:
        if queue not in self._read:
            config = ConsumeConfig(self.config.url, queue, self.config.requests, "unused", group="readers")
            self._read[queue] = make_broker(config)
            self.run(self._read[queue].open)
        return self._read[queue]

    def send(self, *requests: dict[str, Any] | bytes) -> None:
        sender = self._broker(self.config.results)
        for request in requests:
            payload = request if isinstance(request, bytes) else json.dumps(request).encode()
            self.run(lambda payload=payload: sender.publish(self.config.requests, "x", [payload]))  # type: ignore[misc]

    def take(self, count: int, queue: str | None = None) -> list[dict[str, Any]]:
        """The first so many, in the order in which they came."""
        queue = queue or self.config.results
        found = self._answers.setdefault(queue, [])
        broker = self._broker(queue)
        deadline = time.monotonic() + SECONDS
        while len(found) < count:
            assert time.monotonic() < deadline, found
            for message in self.run(lambda: broker.receive(100)):
                found.append(json.loads(message.payload))
                self.run(lambda message=message: broker.acknowledge(message))  # type: ignore[misc]
        return found

    def close(self) -> None:
        for broker in self._read.values():
            self.run(broker.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(params=["redis", "rabbitmq", "kafka"])
def queue(request: pytest.FixtureRequest) -> Iterator[Queue]:
    queue = Queue(request.getfixturevalue(f"{request.param}_url"))
    yield queue
    queue.close()
