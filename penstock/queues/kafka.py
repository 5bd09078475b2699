"""Requests from a Kafka topic. A partition's offset is committed when every request before it is answered."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from penstock.core.errors import Unavailable
from penstock.queues.broker import WAIT_SECONDS, Message, too_large
from penstock.queues.offsets import Offsets
from penstock.queues.settings import ConsumeConfig

T = TypeVar("T")

DELIVERY_SECONDS = 30.0  # for the cluster to say that it has a message
_HOUR_MS = 3_600_000
_TOO_LARGE = (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE)  # for this client, topic or broker


class Kafka:
    """The library blocks: one thread receives, and one does all else meanwhile."""

    def __init__(self, config: ConsumeConfig) -> None:
        self._config = config
        self._receiving = ThreadPoolExecutor(1, "kafka-receiving")
        self._thread = ThreadPoolExecutor(1, "kafka")
        self._consumer: Any = None
        self._producer: Any = None
        self._partitions: dict[int, Offsets] = {}
        self.incarnation = ""

    async def open(self) -> None:
        await self._do(self._open, self._receiving)

    def _open(self) -> None:
        self._close()
        servers = {"bootstrap.servers": self._config.url.removeprefix("kafka://").rstrip("/")}
        self._producer = confluent_kafka.Producer({**servers, "acks": "all", "enable.idempotence": True})
        self._consumer = confluent_kafka.Consumer(
            {
                **servers,
                "group.id": self._config.group,
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "session.timeout.ms": 10_000,
                "max.poll.interval.ms": _HOUR_MS,  # an engine that is full for long is no reason to leave the group
                "queued.max.messages.kbytes": 8192,  # of a partition, fetched ahead
            }
        )
        self._consumer.subscribe([self._config.requests], on_revoke=self._forget)
        self.incarnation = self._producer.list_topics(timeout=10).cluster_id or ""

    def _forget(self, *revoked: object) -> None:
        self._partitions = {}

    async def close(self) -> None:
        await self._do(self._close, self._receiving)

    def _close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None
        self._forget()

    async def receive(self, most: int) -> Sequence[Message]:
        def receive() -> list[Any]:
            found = []
            for message in self._consumer.consume(most, WAIT_SECONDS):
                if message.error() is None:
                    found.append(message)
                elif message.error().code() != KafkaError.UNKNOWN_TOPIC_OR_PART:  # it is made with its first message
                    raise KafkaException(message.error())
            return found

        messages = []
        for found in await self._do(receive, self._receiving):
            offsets = self._partitions.setdefault(found.partition(), Offsets())
            offsets.begin(found.offset())
            source = f"{found.topic()}/{found.partition()}/{found.offset()}"
            messages.append(Message(found.value() or b"", (found.partition(), found.offset(), offsets), source))
        return messages

    async def publish(self, queue: str, id: str, payloads: Sequence[bytes]) -> None:
        def publish() -> None:
            failed: list[Any] = []

            def delivered(error: Any, message: object) -> None:
                if error is not None:
                    failed.append(error)

            for payload in payloads:
                self._producer.produce(queue, payload, key=id.encode(), on_delivery=delivered)
            left = self._producer.flush(DELIVERY_SECONDS)
            if failed or left:
                raise KafkaException(failed[0] if failed else f"{left} messages were not taken")

        try:
            await self._do(publish)
        except Unavailable as error:
            why = error.__cause__.args[0] if isinstance(error.__cause__, KafkaException) else None
            if isinstance(why, KafkaError) and why.code() in _TOO_LARGE:
                raise too_large(max(payloads, key=len), queue) from error
            raise

    async def acknowledge(self, message: Message) -> None:
        partition, offset, offsets = message.tag
        current = self._partitions.get(partition)
        if current is None or current is not offsets:
            return  # it belongs to another consumer by now, which gets this message again
        if (committed := current.done(offset)) is not None:
            place = TopicPartition(self._config.requests, partition, committed)
            await self._do(lambda: self._consumer.commit(offsets=[place], asynchronous=False))

    async def release(self, message: Message) -> None:
        """What is not committed is delivered again once this consumer has left its group."""

    async def renew(self, messages: Sequence[Message]) -> None:
        """The library does that."""

    async def lag(self) -> int:
        def lag() -> int:
            total = 0
            for place in self._consumer.committed(self._consumer.assignment(), timeout=10):
                first, end = self._consumer.get_watermark_offsets(place, timeout=10)
                total += end - max(first, place.offset)  # the offset is negative where nothing was committed
            return total

        return await self._do(lag)

    async def _do(self, work: Callable[[], T], thread: ThreadPoolExecutor | None = None) -> T:
        with _failures():
            return await asyncio.get_running_loop().run_in_executor(thread or self._thread, work)


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except (KafkaException, RuntimeError, AttributeError) as error:  # a consumer that is closed
        raise Unavailable(f"Kafka does not answer: {error}", code="broker_unavailable") from error
