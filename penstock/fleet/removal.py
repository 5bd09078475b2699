"""Replicas that leave a fleet, each once, however many ask for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from penstock.fleet.replica import Replica


class Removals:
    """Of several who remove the same replica the least patient decides, and all see it go."""

    def __init__(self, drained: Callable[[Replica, float], Awaitable[None]], forget: Callable[[Replica], None]) -> None:
        """`drained` returns when a replica has no requests any more, or after so many seconds. `forget` is told of one
        that has stopped."""
        self.running: set[asyncio.Task[None]] = set()
        self._drained = drained
        self._forget = forget
        self._stops: dict[Replica, asyncio.Task[None]] = {}  # of replicas that have drained

    def start(self, replica: Replica, drain_seconds: float) -> asyncio.Task[None]:
        """It takes no more requests from now on."""
        if replica.comes_back:
            replica.drain()
        removal = asyncio.create_task(self._remove(replica, drain_seconds))
        self.running.add(removal)
        removal.add_done_callback(self.running.discard)
        return removal

    async def _remove(self, replica: Replica, drain_seconds: float) -> None:
        if replica.state != "stopped":
            await self._drained(replica, drain_seconds)
        if replica not in self._stops:
            if replica.state == "stopped":  # and forgotten
                return
            self._stops[replica] = asyncio.create_task(self._stop(replica))
        await self._stops[replica]

    async def _stop(self, replica: Replica) -> None:
        try:
            await replica.stop()
        finally:
            self._forget(replica)
            del self._stops[replica]
