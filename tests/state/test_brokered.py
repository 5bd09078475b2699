"""A store in another process: here both ends of the channel are in one."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack

from penstock.fleet.channel import Channel
from penstock.state.brokered import BrokeredStore, store_handlers
from penstock.state.memory import MemoryStore
from penstock.state.store import Claim, Keep, Store, UsageRecord


def gateway(held: Store, stack: ExitStack) -> BrokeredStore:
    """The store of a gateway process that ends with the stack."""
    ours, theirs = socket.socketpair()
    handlers = stack.enter_context(store_handlers(held))
    channels = Channel(ours, {}), Channel(theirs, handlers)
    for channel in channels:
        stack.callback(channel.close)
    return BrokeredStore(channels[0])


async def test_limits_are_exact_over_all_who_share_it() -> None:
    held, stack = MemoryStore(), ExitStack()
    stores = [gateway(held, stack) for _ in range(3)]

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
    stack.close()


async def test_what_a_process_leaves_unsettled_is_released() -> None:
    """Of the others nothing is, and what was settled stays."""
    held, killed, other = MemoryStore(), ExitStack(), ExitStack()
    first, second = gateway(held, killed), gateway(held, other)

    def claim(id: str, requests: int = 1) -> Claim:
        return Claim(id, "acme", "m", 10, 9, 60, 3, 60, cost=10, requests=requests)

    settled = await first.reserve(claim("settled"))
    for id, requests in (("a", 1), ("a", 0), ("a", 0)):  # the last two are equal
        assert (await first.reserve(claim(id, requests))).refused is None
    kept = await second.reserve(claim("kept"))
    assert (await first.reserve(claim("b"))).refused == "concurrent"
    first.settle(settled, UsageRecord(1, 6, 0, 4, 10))
    await first.version()  # comes after the settlement
    killed.close()
    found = await second.reserve(claim("c"))
    assert (found.refused, found.requests and found.requests.left, found.tokens and found.tokens.left) == (None, 6, 30)
    assert (await second.reserve(claim("d"))).refused is None
    assert (await second.reserve(claim("e"))).refused == "concurrent"
    for budget, refused in ((49, "day"), (50, None)):  # 10 are spent, 30 reserved
        more = await second.reserve(claim("c", 0)._replace(budget_per_day=budget, concurrent=None))
        assert more.refused == refused
    second.settle(kept, UsageRecord())
    (used,) = (await second.usage("2000-01-01", "2099-12-31")).values()
    assert used == UsageRecord(1, 6, 0, 4, 10)
    other.close()


async def test_a_grant_whose_client_has_left_is_given_back() -> None:
    held, stack = MemoryStore(), ExitStack()
    store = gateway(held, stack)
    only = Claim("left", "acme", "m", 10, concurrent=1)
    asking = asyncio.create_task(store.reserve(only))
    await asyncio.sleep(0)  # it has asked
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled()
    await store.version()  # comes after the grant
    assert (await store.reserve(only._replace(id="next"))).refused is None
    stack.close()
