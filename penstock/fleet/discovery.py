"""Workers behind a DNS name, as of a headless Service of Kubernetes or a scaled service of Docker Compose: one replica
for each address that the name resolves to."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Collection
from functools import partial

from penstock.fleet.fleet import Fleet
from penstock.fleet.launcher import Launcher
from penstock.fleet.replica import Replica

log = logging.getLogger(__name__)

RESOLVE_SECONDS = 5.0  # between two lookups, which the resolver may answer from its cache

Resolve = Callable[[str], Awaitable[Collection[str]]]


async def addresses(host: str) -> list[str]:
    """Those of one family, so that a worker with an IPv4 and an IPv6 address counts once. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for family, *_, address in found if family == found[0][0]})


class Discovery:
    """`launcher` makes that of an address. A worker whose address is gone drains for `drain_seconds`.

    A lookup that fails or finds nothing changes nothing: a name server that is down must not take the fleet along, and
    workers that have really gone are noticed by their connections.
    """

    def __init__(
        self,
        fleet: Fleet,
        host: str,
        launcher: Callable[[str], Launcher],
        drain_seconds: float,
        resolve: Resolve = addresses,
    ) -> None:
        self._fleet = fleet
        self._host = host
        self._launcher = launcher
        self._drain_seconds = drain_seconds
        self._resolve = resolve
        self._replicas: dict[str, Replica] = {}  # by address
        self._failing = ""  # why the last lookup failed
        self._removals: dict[str, asyncio.Task[None]] = {}  # of replicas that drain, by address

    async def follow(self) -> None:
        """Look the name up again and again, until this is cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(RESOLVE_SECONDS)

    async def look(self) -> None:
        try:
            found = await self._resolve(self._host)
        except (OSError, UnicodeError) as error:
            found, failing = [], str(error)
        else:
            failing = "" if found else "it has no address"
        if failing and failing != self._failing:
            log.warning("the workers at %s cannot be looked up: %s", self._host, failing)
        self._failing = failing
        if found:
            self._update(found)

    def _update(self, found: Collection[str]) -> None:
        for address in self._replicas.keys() - set(found):
            replica = self._replicas.pop(address)
            if replica.comes_back:  # else an administrator has removed it, or is doing so
                log.info("%s has gone from %s", address, self._host)
            removal = self._removals[address] = self._fleet.remove_soon(replica, self._drain_seconds)
            removal.add_done_callback(partial(self._removed, address))
        for address in found:
            if address not in self._replicas and address not in self._removals:
                log.info("%s is a worker of %s", address, self._host)
                name = f"{self._fleet.model}-{address}"
                self._replicas[address] = self._fleet.add(self._launcher(address), name)

    def _removed(self, address: str, _: asyncio.Task[None]) -> None:
        del self._removals[address]
