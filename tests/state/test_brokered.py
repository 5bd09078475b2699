"""A store in another process: here both ends of the channel are in one."""

from __future__ import annotations

import asyncio
import socket

from penstock.fleet.channel import Channel
from penstock.state.brokered import BrokeredStore, store_handlers
from penstock.state.memory import MemoryStore
from penstock.state.store import Claim, Keep, UsageRecord


async def test_limits_are_exact_over_all_who_share_it() -> None:
    held, channels, stores = MemoryStore(), [], []
    for _ in range(3):
        ours, theirs = socket.socketpair()
        channels += [Channel(ours, {}), Channel(theirs, store_handlers(held))]
        stores.append(BrokeredStore(channels[-2]))

    async def claim(number: int) -> bool:
        store = stores[number % 3]
        grant = await store.reserve(Claim(f"{number}", "acme", "m", 10, requests_per_minute=20))
        if grant.refused is None:
            store.settle(grant, UsageRecord(1, 7, 0, 3, 5))
            return True
        assert (grant.refused, grant.retry_after > 0) == ("requests", True)
        return False

    granted = await asyncio.gather(*(claim(number) for number in range(50)))
    assert sum(granted) == 20
    await stores[0].put("tenant", "acme", "{}")
    assert await stores[1].records("tenant") == {"acme": "{}"}
    assert await stores[2].version() == await stores[0].version()
    assert await stores[1].delete("tenant", "acme")
    await stores[0].save("response", "acme", "a", b"\x00{}", Keep(9, 99, 60.0))
    assert await stores[1].load("response", "acme", "a") == b"\x00{}"
    assert not await stores[2].save("response", "acme", "a", b"b", Keep(9, 99, 60.0), b"other")
    assert await stores[2].save("response", "acme", "a", b"c", Keep(9, 99, 60.0), b"\x00{}")
    assert await stores[2].discard("response", "acme", "a")
    assert await stores[2].load("response", "acme", "a") is None
    (used,) = (await stores[2].usage("2000-01-01", "2099-12-31")).values()
    assert used == UsageRecord(20, 140, 0, 60, 100)
    for channel in channels:
        channel.close()
