"""Whether an upstream can be asked: what checks at intervals and failed requests say about it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from penstock.core.engine import Health
from penstock.core.errors import PenstockError
from penstock.fleet.upstream.settings import UpstreamTimeouts

log = logging.getLogger(__name__)

Check = Callable[[], Awaitable[None]]


class HealthMonitor:
    """A failed check, or a request that was lost, makes an upstream unhealthy; a check makes it healthy again.

    A server can answer health checks for ever while it generates nothing. So after a request has stalled only a check
    that generates a token counts. Such a check also tells whether a request that a server has failed is alone to blame.
    """

    def __init__(self, name: str, alive: Check, generates: Check, timeouts: UpstreamTimeouts) -> None:
        self._name, self._alive, self._generates, self._timeouts = name, alive, generates, timeouts
        self._problem = ""
        self._stalled = False
        self._wake = asyncio.Event()
        self._failed = asyncio.Event()
        self._doubt: asyncio.Task[None] | None = None
        self._task = asyncio.create_task(self._watch())

    def health(self) -> Health:
        return Health(not self._problem, self._problem or "ready")

    def lost(self, problem: str, *, stalled: bool = False) -> None:
        """A request failed for a reason that would make others fail. The next check follows at once."""
        self._set(problem)
        self._stalled = self._stalled or stalled
        self._wake.set()

    async def doubt(self) -> None:
        """A request failed, which may be its own fault. Returns when a check has shown whether another one would."""
        if self._doubt is None or self._doubt.done():
            self._stalled = True
            self._doubt = asyncio.create_task(self.check())
        await asyncio.wait([self._doubt])

    async def unhealthy(self) -> str:
        """Wait until it is, and say why."""
        while not self._problem:
            self._failed.clear()
            await self._failed.wait()
        return self._problem

    async def close(self) -> None:
        self._task.cancel()
        if self._doubt is not None:
            self._doubt.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _watch(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._timeouts.check_interval):
                    await self._wake.wait()
            self._wake.clear()
            await self.check()

    async def check(self) -> None:
        try:
            async with asyncio.timeout(self._timeouts.check):
                await (self._generates if self._stalled else self._alive)()
        except TimeoutError:
            self._set(f"a health check was not answered within {self._timeouts.check:g} s")
        except PenstockError as error:
            self._set(error.message)
        else:
            self._stalled = False
            self._set("")

    def _set(self, problem: str) -> None:
        if problem and not self._problem:
            log.warning("upstream %s is not healthy: %s", self._name, problem)
        elif self._problem and not problem:
            log.info("upstream %s is healthy again", self._name)
        self._problem = problem
        if problem:
            self._failed.set()
