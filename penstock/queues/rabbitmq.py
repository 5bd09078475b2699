"""Requests from a RabbitMQ queue: fetched when there is room for them, so nothing waits in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import aio_pika
from aio_pika.exceptions import AMQPError, ChannelNotFoundEntity, ChannelPreconditionFailed

from penstock.core.errors import Unavailable
from penstock.queues.broker import WAIT_SECONDS, Message, too_large
from penstock.queues.settings import ConsumeConfig

CONFIRM_SECONDS = 30.0  # for the broker to say that it has a message
HEARTBEAT_SECONDS = 10
_POLLS = 5  # of an empty queue, in one `receive`


class RabbitMQ:
    incarnation = ""  # a queue here has no more than its name

    def __init__(self, config: ConsumeConfig) -> None:
        self._config = config
        self._connection: Any = None
        self._channel: Any = None
        # Another channel: what is too large closes it, and with it all that is not acknowledged there.
        self._publishing: Any = None
        self._queue: Any = None

    async def open(self) -> None:
        await self.close()
        with _failures():
            self._connection = await aio_pika.connect(self._config.url, timeout=10, heartbeat=HEARTBEAT_SECONDS)
            for name in (self._config.results, self._config.dead_letters, self._config.requests):
                await self._declare(name)
            self._channel = await self._connection.channel()
            self._publishing = None
            self._queue = await self._channel.get_queue(self._config.requests)

    async def _declare(self, name: str) -> None:
        """One that is there stays as it is, of whatever kind."""
        channel = await self._connection.channel()
        try:
            await channel.declare_queue(name, passive=True)
        except ChannelNotFoundEntity:  # which closes the channel
            channel = await self._connection.channel()
            await channel.declare_queue(name, durable=True)
        await channel.close()

    async def close(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(AMQPError, OSError):
                await self._connection.close()

    async def receive(self, most: int) -> Sequence[Message]:
        found: list[Message] = []
        with _failures():
            for _ in range(_POLLS):
                while len(found) < most and (message := await self._queue.get(fail=False)) is not None:
                    found.append(Message(message.body, message, message.message_id or ""))
                if found:
                    break
                await asyncio.sleep(WAIT_SECONDS / _POLLS)
        return found

    async def publish(self, queue: str, id: str, payloads: Sequence[bytes]) -> None:
        with _failures():
            for payload in payloads:
                if self._publishing is None or self._publishing.is_closed:
                    opened = self._connection.channel(publisher_confirms=True, on_return_raises=True)
                    self._publishing = await opened
                message = aio_pika.Message(
                    payload,
                    content_type="application/json",
                    delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
                    message_id=id,
                    correlation_id=id,
                )
                exchange = self._publishing.default_exchange
                try:
                    await exchange.publish(message, queue, timeout=CONFIRM_SECONDS)
                except ChannelPreconditionFailed as error:
                    if "larger than" not in str(error):
                        raise
                    raise too_large(payload, queue) from error

    async def acknowledge(self, message: Message) -> None:
        with _failures():
            await message.tag.ack()

    async def release(self, message: Message) -> None:
        with _failures():
            await message.tag.nack(requeue=True)

    async def renew(self, messages: Sequence[Message]) -> None:
        """The connection does that."""

    async def lag(self) -> int:
        with _failures():
            declared = await self._channel.declare_queue(self._config.requests, passive=True)
            return int(declared.declaration_result.message_count or 0)


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except (AMQPError, OSError, RuntimeError) as error:  # RuntimeError: a channel that is closed
        raise Unavailable(f"RabbitMQ does not answer: {error!r}", code="broker_unavailable") from error
