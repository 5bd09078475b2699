"""Answers in the memory of another process of this machine: gateway processes share them, without Redis."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.cache.memory import MemoryTier
from penstock.cache.tier import Reading
from penstock.core.caller import Caller
from penstock.core.errors import Unavailable


class BrokeredTier:
    """A gateway process's end."""

    name = "shared"
    shared = True

    def __init__(self, channel: Caller) -> None:
        self._channel = channel

    async def get(self, key: bytes) -> bytes | None:
        found: bytes | None = await self._call("get_answer", key)
        return found

    async def put(self, key: bytes, value: bytes, ttl: float) -> None:
        await self._call("put_answer", key, value)

    async def claim(self, key: bytes, seconds: float) -> bool:
        return await self._call("claim_answer", key, seconds) is not False

    async def release(self, key: bytes) -> None:
        await self._call("release_answer", key)

    async def clear(self) -> None:
        await self._call("clear_answers")

    async def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return await self._channel.call(method, *arguments)
        except Unavailable:
            return None

    def reading(self) -> Reading:
        return Reading(self.name)

    async def close(self) -> None:
        pass


def answer_handlers(memory_mib: float) -> dict[str, Callable[..., Awaitable[Any]]]:
    """The end of the process that holds the answers."""
    memory = MemoryTier(int(memory_mib * 2**20))
    claims: dict[bytes, float] = {}  # until when

    async def get(key: bytes) -> bytes | None:
        return memory.get(key)

    async def put(key: bytes, value: bytes) -> None:
        memory.put(key, value)

    async def claim(key: bytes, seconds: float) -> bool:
        now = time.monotonic()
        if claims.get(key, 0.0) > now:
            return False
        for old in [old for old, until in claims.items() if until <= now]:
            del claims[old]
        claims[key] = now + seconds
        return True

    async def release(key: bytes) -> None:
        claims.pop(key, None)

    async def clear() -> None:
        memory.clear()

    return {
        "get_answer": get,
        "put_answer": put,
        "claim_answer": claim,
        "release_answer": release,
        "clear_answers": clear,
    }
