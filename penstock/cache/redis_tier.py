"""The Redis tier, which gateways share. A Redis that does not answer counts as a miss, never as an error."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from penstock.cache.tier import Reading

log = logging.getLogger(__name__)

PREFIX = b"penstock:answer:"
CLAIM_PREFIX = b"penstock:computing:"
TIMEOUT_SECONDS = 0.1
RETRY_SECONDS = 1.0
CONNECTIONS = 32


def connect(url: str) -> Redis:
    """A client whose every call fails fast. Connects when first used."""
    return Redis.from_url(
        url, socket_timeout=TIMEOUT_SECONDS, socket_connect_timeout=TIMEOUT_SECONDS, retry=Retry(NoBackoff(), 0)
    )


class RedisTier:
    """Once a call has failed, requests pass by without waiting until a ping in the background is answered again. Where
    too many ask at once, one that gets no connection in time passes by alone."""

    name = "redis"
    shared = True

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._reviving: asyncio.Task[None] | None = None
        self._turns = asyncio.Semaphore(CONNECTIONS)
        self.errors = 0

    @property
    def up(self) -> bool:
        return self._reviving is None

    async def get(self, key: bytes) -> bytes | None:
        found: bytes | None = await self._call(lambda: self._redis.get(PREFIX + key))
        return found

    async def put(self, key: bytes, value: bytes, ttl: float) -> None:
        await self._call(lambda: self._redis.set(PREFIX + key, value, ex=max(1, round(ttl))))

    async def claim(self, key: bytes, seconds: float) -> bool:
        lasting = round(seconds * 1000)

        def ask() -> Awaitable[Any]:
            return self._redis.set(CLAIM_PREFIX + key, b"1", nx=True, px=lasting)

        return bool(await self._call(ask, otherwise=True))

    async def release(self, key: bytes) -> None:
        await self._call(lambda: self._redis.delete(CLAIM_PREFIX + key))

    async def clear(self) -> None:
        await self._call(self._delete_all)

    async def _delete_all(self) -> None:
        async for key in self._redis.scan_iter(match=PREFIX + b"*", count=1000):
            await self._redis.unlink(key)

    async def _call(self, command: Callable[[], Awaitable[Any]], otherwise: Any = None) -> Any:
        if not self.up or not await self._turn():
            return otherwise
        try:
            return await command()
        except (RedisError, OSError, TimeoutError) as error:
            self.errors += 1
            if self.up:
                log.warning("the answer cache goes on without Redis: %s", error)
                self._reviving = asyncio.create_task(self._revive())
            return otherwise
        finally:
            self._turns.release()

    async def _turn(self) -> bool:
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                return await self._turns.acquire()
        except TimeoutError:
            self.errors += 1
            return False

    async def _revive(self) -> None:
        while True:
            await asyncio.sleep(RETRY_SECONDS)
            try:
                await self._redis.ping()
            except (RedisError, OSError, TimeoutError):
                continue
            log.info("the answer cache uses Redis again")
            self._reviving = None
            return

    def reading(self) -> Reading:
        return Reading(self.name, errors=self.errors, up=self.up)

    async def close(self) -> None:
        if self._reviving is not None:
            self._reviving.cancel()
        await self._redis.aclose()
