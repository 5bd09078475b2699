"""A store that another process of this machine holds: gateway processes then share its limits exactly, without Redis.

A reservation is one call over a socket; settling it waits for nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from penstock.core.caller import Caller
from penstock.state.store import Claim, Grant, Keep, Store, UsageKey, UsageRecord


class BrokeredStore:
    """A gateway process's end."""

    def __init__(self, channel: Caller) -> None:
        self._channel = channel

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def reserve(self, claim: Claim) -> Grant:
        asked = asyncio.ensure_future(self._channel.call("reserve", claim))
        try:
            return msgspec.convert(await asyncio.shield(asked), Grant)
        except asyncio.CancelledError:  # its client left while it waited here
            asked.add_done_callback(self._give_back)
            raise

    def _give_back(self, asked: asyncio.Future[Any]) -> None:
        if asked.cancelled() or asked.exception() is not None:
            return
        grant = msgspec.convert(asked.result(), Grant)
        if grant.refused is None:
            self.settle(grant, UsageRecord())

    def settle(self, grant: Grant, used: UsageRecord) -> None:
        self._channel.tell("settle", grant, used)

    async def usage(self, first_day: str, last_day: str) -> dict[UsageKey, UsageRecord]:
        found = await self._channel.call("usage", first_day, last_day)
        return {UsageKey(*key): UsageRecord(*used) for key, used in found}

    async def put(self, kind: str, name: str, value: str) -> None:
        await self._channel.call("put", kind, name, value)

    async def delete(self, kind: str, name: str) -> bool:
        return bool(await self._channel.call("delete", kind, name))

    async def records(self, kind: str) -> dict[str, str]:
        return dict(await self._channel.call("records", kind))

    async def save(
        self, kind: str, tenant: str, name: str, document: bytes, keep: Keep, instead_of: bytes | None = None
    ) -> bool:
        return bool(await self._channel.call("save", kind, tenant, name, document, keep, instead_of))

    async def load(self, kind: str, tenant: str, name: str) -> bytes | None:
        found: bytes | None = await self._channel.call("load", kind, tenant, name)
        return found

    async def discard(self, kind: str, tenant: str, name: str) -> bool:
        return bool(await self._channel.call("discard", kind, tenant, name))

    async def version(self) -> int:
        return int(await self._channel.call("version"))


@contextmanager
def store_handlers(store: Store) -> Iterator[dict[str, Callable[..., Awaitable[Any]]]]:
    """The end of the process that holds the store, for one gateway process: what that one leaves unsettled is released
    at the exit."""
    unsettled: Counter[Grant] = Counter()  # grants of one request can be equal

    async def reserve(claim: list[Any]) -> Grant:
        grant = await store.reserve(Claim(*claim))
        if grant.refused is None:
            unsettled[grant] += 1
        return grant

    async def settle(settled: list[Any], used: list[Any]) -> None:
        grant = msgspec.convert(settled, Grant)
        unsettled[grant] -= 1
        if not unsettled[grant]:
            del unsettled[grant]
        store.settle(grant, UsageRecord(*used))

    async def usage(first_day: str, last_day: str) -> list[Any]:
        return list((await store.usage(first_day, last_day)).items())

    async def save(
        kind: str, tenant: str, name: str, document: bytes, keep: list[Any], instead_of: bytes | None
    ) -> bool:
        return await store.save(kind, tenant, name, document, Keep(*keep), instead_of)

    try:
        yield {
            "save": save,
            "load": store.load,
            "discard": store.discard,
            "reserve": reserve,
            "settle": settle,
            "usage": usage,
            "put": store.put,
            "delete": store.delete,
            "records": store.records,
            "version": store.version,
        }
    finally:
        for grant in unsettled.elements():
            store.settle(grant, UsageRecord())
