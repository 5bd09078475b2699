"""Requests from a queue pass through what requests over HTTP pass through."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.batches.place import Batches
from penstock.core.errors import StartupError, Unavailable
from penstock.gateway.api.batches import BATCHED
from penstock.gateway.batch_lines import LineAnswers, running_batches
from penstock.gateway.edge import Edge
from penstock.gateway.tenancy.tenants import Directory
from penstock.queues.answers import AnswerStore
from penstock.queues.consumer import Consumer
from penstock.queues.open import make_broker
from penstock.queues.settings import ConsumeConfig


class QueueMetrics(Collector):
    def __init__(self, queue: str, consumer: Consumer) -> None:
        self._queue = queue
        self._consumer = consumer

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        messages = CounterMetricFamily(
            "penstock_queue_messages", "Requests from a queue, by what became of them", labels=["queue", "outcome"]
        )
        for outcome, count in self._consumer.outcomes.items():
            messages.add_metric([self._queue, outcome], count)
        yield messages
        for name, about, value in (
            ("running", "Requests from a queue that are being answered", self._consumer.running),
            ("lag", "Requests in the queue that are not acknowledged", self._consumer.lag),
        ):
            gauge = GaugeMetricFamily(f"penstock_queue_{name}", about, labels=["queue"])
            gauge.add_metric([self._queue], value)
            yield gauge


@asynccontextmanager
async def background_work(
    consume: ConsumeConfig | None, batches: Batches | None, edge: Edge, directory: Directory
) -> AsyncIterator[None]:
    """Requests that nobody waits for are answered while this is open: of batches, and of a queue."""
    async with running_batches(batches, edge, directory), consuming(consume, batches, edge, directory):
        yield


@asynccontextmanager
async def consuming(
    config: ConsumeConfig | None, batches: Batches | None, edge: Edge, directory: Directory
) -> AsyncIterator[None]:
    """Requests are taken from the queue while this is open. None: there is no queue."""
    if config is None:
        yield
        return
    folder = None if batches is None else batches.folder
    if folder is None:
        raise StartupError("answers need a place: set batches.folder", param="batches.folder")
    if config.tenant is not None and config.tenant not in directory.tenants:
        raise StartupError(f"there is no tenant {config.tenant!r}", param="consume.tenant")
    if config.tenant is None and not directory.open:
        raise StartupError("say whose requests these are, since there are tenants", param="consume.tenant")
    store = AnswerStore(folder)
    endpoints = [path for path in BATCHED if edge.routes.has(path)]
    consumer = Consumer(config, make_broker(config), store, LineAnswers(edge, directory), endpoints)
    await store.open()
    try:
        await consumer.open()
    except Unavailable as error:
        raise StartupError(f"cannot consume from {config.requests}: {error.message}", param="consume.url") from error
    edge.metrics.registry.register(QueueMetrics(config.requests, consumer))
    try:
        yield
    finally:
        await consumer.close()
        await store.close()
