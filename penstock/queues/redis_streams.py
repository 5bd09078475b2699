"""Requests from a Redis stream. A message has the field `data`.

What a consumer of the group has read belongs to it until it is silent for `lease_seconds`; then another claims it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.exceptions import RedisError, ResponseError

from penstock.batches.records import new_id
from penstock.core.errors import Unavailable
from penstock.queues.broker import WAIT_SECONDS, Message, too_large
from penstock.queues.settings import ConsumeConfig

CONNECTIONS = 32
_CLAIMS = 3  # looks for messages of silent consumers, for each lease
MOST_COUNTED = 10_000  # messages that were not delivered, where Redis cannot say how many there are
_COUNTED_AT_ONCE = 100  # Redis copies their payloads meanwhile

# KEYS: the stream. ARGV: the id after which to count, and how many at most. Returns how many, and the last id.
_COUNT = """
local found = redis.call('XRANGE', KEYS[1], '(' .. ARGV[1], '+', 'COUNT', ARGV[2])
return {#found, #found > 0 and found[#found][1] or ARGV[1]}
"""

DEFAULT_LARGEST = 512 * 2**20  # bytes of a field, of Redis as it comes

# KEYS: the stream, and where its incarnation is kept. ARGV: the group, and the incarnation if it is a new one: the
# group is not there after the stream was deleted, the key is not after a flush. Returns the incarnation.
_OPEN = """
local made = redis.pcall('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0', 'MKSTREAM')
if made.err then
    if not string.find(made.err, 'BUSYGROUP', 1, true) then return made end
    local known = redis.call('GET', KEYS[2])
    if known then return known end
end
redis.call('SET', KEYS[2], ARGV[2])
return ARGV[2]
"""


class RedisStreams:
    def __init__(self, config: ConsumeConfig) -> None:
        self._config = config
        self._lease_ms = int(config.lease_seconds * 1000)
        self._consumer = new_id("penstock-")
        self._redis: Any = None
        self._claim_at = 0.0
        self.incarnation = ""
        self._largest = DEFAULT_LARGEST
        self._cursor = b"0-0"  # up to where silent consumers' messages have been looked for

    async def open(self) -> None:
        await self.close()
        requests, group = self._config.requests, self._config.group
        pool = BlockingConnectionPool.from_url(
            self._config.url,
            max_connections=CONNECTIONS,
            timeout=None,  # more answers at once than connections are no lost broker
            socket_connect_timeout=5,
            socket_timeout=10,
        )
        self._redis = Redis.from_pool(pool)
        with _failures():
            keys = (requests, f"{requests}:penstock:{group}")
            self.incarnation = (await self._redis.eval(_OPEN, len(keys), *keys, group, new_id(""))).decode()
            with contextlib.suppress(ResponseError):  # not everybody may ask
                limit = "proto-max-bulk-len"
                self._largest = int((await self._redis.config_get(limit)).get(limit, DEFAULT_LARGEST))

    async def close(self) -> None:
        if self._redis is not None:
            with contextlib.suppress(RedisError, OSError):
                await self._redis.aclose()

    async def receive(self, most: int) -> Sequence[Message]:
        config = self._config
        with _failures():
            if time.monotonic() >= self._claim_at:
                self._cursor, entries, *_ = await self._redis.xautoclaim(
                    config.requests, config.group, self._consumer, self._lease_ms, self._cursor, count=most
                )
                if self._cursor == b"0-0":
                    self._claim_at = time.monotonic() + config.lease_seconds / _CLAIMS
                if entries:
                    return [_message(*entry) for entry in entries]
            wait = int(WAIT_SECONDS * 1000)
            found = await self._redis.xreadgroup(
                config.group, self._consumer, {config.requests: ">"}, count=most, block=wait
            )
        return [_message(*entry) for _, entries in found for entry in entries]

    async def publish(self, queue: str, id: str, payloads: Sequence[bytes]) -> None:
        """Redis closes the connection over a field that is too large, so it must not be sent."""
        if payloads and len(largest := max(payloads, key=len)) > self._largest:
            raise too_large(largest, queue)
        with _failures():
            async with self._redis.pipeline(transaction=True) as pipeline:
                for payload in payloads:
                    pipeline.xadd(queue, {"id": id, "data": payload})
                await pipeline.execute()

    async def acknowledge(self, message: Message) -> None:
        with _failures():
            await self._redis.xack(self._config.requests, self._config.group, message.tag)

    async def release(self, message: Message) -> None:
        """As if the lease had passed, so that whoever looks next claims it."""
        with _failures():
            await self._redis.xclaim(
                self._config.requests,
                self._config.group,
                self._consumer,
                0,
                [message.tag],
                idle=self._lease_ms,
                justid=True,
            )

    async def renew(self, messages: Sequence[Message]) -> None:
        with _failures():
            tags = [message.tag for message in messages]
            await self._redis.xclaim(self._config.requests, self._config.group, self._consumer, 0, tags, justid=True)

    async def lag(self) -> int:
        with _failures():
            for group in await self._redis.xinfo_groups(self._config.requests):
                if group["name"] == self._config.group.encode():
                    behind = group.get("lag")
                    if behind is None:
                        behind = await self._count_after(group["last-delivered-id"])
                    return int(group["pending"]) + int(behind)
        return 0

    async def _count_after(self, id: bytes) -> int:
        """Redis does not know how many messages have not been delivered once one of them was deleted."""
        count = 0
        while count < MOST_COUNTED:
            found, id = await self._redis.eval(_COUNT, 1, self._config.requests, id, _COUNTED_AT_ONCE)
            count += found
            if found < _COUNTED_AT_ONCE:
                break
        return count


def _message(tag: bytes, fields: dict[bytes, bytes] | None) -> Message:
    """What has no field `data` is no request, and its dead letter holds all that it has."""
    known = fields or {}
    if b"data" in known:
        return Message(known[b"data"], tag, tag.decode())
    readable = {name.decode(errors="replace"): value.decode(errors="replace") for name, value in known.items()}
    return Message(json.dumps(readable).encode(), tag, tag.decode())


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except (RedisError, OSError) as error:
        raise Unavailable(f"Redis does not answer: {error}", code="broker_unavailable") from error
