"""The `Broker` protocol: what a consumer needs of Redis Streams, RabbitMQ or Kafka."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from penstock.core.errors import MessageTooLarge

WAIT_SECONDS = 0.5  # `receive` returns after this, with or without messages


class Message(NamedTuple):
    payload: bytes
    tag: Any  # the broker's own name of this delivery
    source: str = ""  # where people find it in the broker


def too_large(payload: bytes, queue: str) -> MessageTooLarge:
    return MessageTooLarge(
        f"the answer has {len(payload)} bytes, and the broker of {queue} takes no message of that size: ask for less"
    )


class Broker(Protocol):
    """Every call raises Unavailable where the broker cannot be reached. After `open` has been called again, messages of
    the connection before are delivered again, to this consumer or to another one."""

    @property
    def incarnation(self) -> str:
        """Of the queue, as of `open`: another one since it was emptied or made anew, and the same for all consumers. ""
        where the broker cannot tell."""
        ...

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def receive(self, most: int) -> Sequence[Message]: ...

    async def publish(self, queue: str, id: str, payloads: Sequence[bytes]) -> None:
        """Returns once the broker has them. Raises MessageTooLarge where it will never take one of them."""
        ...

    async def acknowledge(self, message: Message) -> None:
        """It is not delivered again."""
        ...

    async def release(self, message: Message) -> None:
        """Others may have it."""
        ...

    async def renew(self, messages: Sequence[Message]) -> None:
        """This consumer still works on them."""
        ...

    async def lag(self) -> int:
        """How many messages have not been acknowledged."""
        ...
