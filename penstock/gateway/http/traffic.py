"""The requests in flight, and the drain before a shutdown."""

from __future__ import annotations

import asyncio

from penstock.core.errors import Unavailable
from penstock.gateway.http.request import Request


class Traffic:
    def __init__(self) -> None:
        self.draining = False
        self.requests: set[Request] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self, request: Request) -> None:
        self.requests.add(request)
        self._idle.clear()

    def leave(self, request: Request) -> None:
        self.requests.discard(request)
        if not self.requests:
            self._idle.set()

    def admit(self) -> None:
        if self.draining:
            raise Unavailable("the server is shutting down; send the request to another one", code="draining")

    def drain(self) -> None:
        """Refuse new generation requests from now on; those in flight go on, except those that nobody waits for."""
        self.draining = True
        for request in list(self.requests):
            if request.background:
                request.cancel(Unavailable("the server is shutting down; another goes on", code="draining"))

    async def idle(self) -> None:
        await self._idle.wait()

    def abort(self) -> None:
        """End every request in flight with an error its client can read."""
        for request in list(self.requests):
            request.cancel(Unavailable("the server shut down before the request finished", code="shutdown"))
