"""Workers behind a name: each address a replica, found and dropped as the name's addresses change."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection
from contextlib import AsyncExitStack
from functools import partial

import pytest

from penstock.fleet.build import start
from penstock.fleet.discovery import Discovery, addresses
from penstock.fleet.fleet import Fleet
from penstock.fleet.launcher import RemoteLauncher
from penstock.fleet.settings import ModelConfig
from penstock.simulation.paged_executor import expected_output
from tests.fleet.test_remote import SECRET, asking, listening_worker

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")


class Names:
    """A name server with one name, whose addresses are these."""

    def __init__(self, *found: str) -> None:
        self.found: Collection[str] | OSError = found

    async def __call__(self, host: str) -> Collection[str]:
        assert host == "workers"
        if isinstance(self.found, OSError):
            raise self.found
        return self.found


async def states(fleet: Fleet, expected: dict[str, str]) -> None:
    """Wait until the replicas are these, by name."""
    while {replica.name: replica.state for replica in fleet.replicas} != expected:
        await fleet._changed.wait()


async def test_replicas_follow_the_addresses_of_a_name() -> None:
    async with AsyncExitStack() as stack:
        first, port = await stack.enter_async_context(listening_worker(HOSTS[0]))
        for host in HOSTS[1:]:
            await stack.enter_async_context(listening_worker(host, port))
        held, fleet, names = first.hold(20), Fleet("m"), Names(HOSTS[0])
        discovery = Discovery(fleet, "workers", partial(RemoteLauncher, port=port, secret=SECRET), 60, names)
        await discovery.look()
        await fleet.until_ready()
        stream = fleet.submit(asking("r", 100))
        tokens = [*(await anext(stream)).token_ids]

        names.found = HOSTS
        await discovery.look()
        await states(fleet, {f"m-{host}": "ready" for host in HOSTS})

        names.found = HOSTS[1:]
        await discovery.look()
        await states(fleet, {"m-127.0.0.1": "draining", "m-127.0.0.2": "ready", "m-127.0.0.3": "ready"})
        names.found = HOSTS  # it comes back before it has drained: there are never two of one name
        await discovery.look()
        assert len(fleet.replicas) == 3
        names.found = HOSTS[1:]
        held.released.set()
        tokens += [token async for chunk in stream for token in chunk.token_ids]
        assert tokens == expected_output([1, 2, 3], 5, 100, frozenset())
        assert fleet.failovers == 0
        await asyncio.gather(*discovery._removals.values())
        assert not discovery._removals

        for names.found in (OSError("the name server is down"), ()):
            await discovery.look()
            await states(fleet, {"m-127.0.0.2": "ready", "m-127.0.0.3": "ready"})

        await fleet.remove(fleet.replicas[0], 0)  # by an administrator
        names.found = HOSTS[1:]
        await discovery.look()
        await states(fleet, {"m-127.0.0.3": "ready"})
        names.found = HOSTS[::2]
        await discovery.look()
        await states(fleet, {"m-127.0.0.3": "ready", "m-127.0.0.1": "ready"})

        busy = fleet.replicas[1]
        fleet._router.snapshot(busy).sent(3, 0, 0.0)  # a stream that does not end
        for removed_first in (False, True):  # by an administrator, who has less patience
            leaving = [fleet.remove_soon(busy, 3600)] if removed_first else []
            names.found = HOSTS[2:]
            await discovery.look()
            names.found = HOSTS[::2]
            await discovery.look()
            await states(fleet, {"m-127.0.0.3": "ready", "m-127.0.0.1": "draining"})
            await asyncio.gather(fleet.remove(busy, 0), *leaving, *discovery._removals.values())
            await discovery.look()
            await states(fleet, {"m-127.0.0.3": "ready", "m-127.0.0.1": "ready"})
            busy = fleet.replicas[1]
            fleet._router.snapshot(busy).sent(3, 0, 0.0)
        await fleet.stop()


async def test_the_system_resolves_names() -> None:
    found = await addresses("localhost")
    assert found in (["127.0.0.1"], ["::1"])
    with pytest.raises(socket.gaierror):
        await addresses("nowhere.invalid")


async def test_a_fleet_waits_for_workers_that_have_no_address_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the system's resolver. A worker that is not there yet does not end the gateway."""
    monkeypatch.setenv("PENSTOCK_WORKER_SECRET", SECRET)
    monkeypatch.setattr("penstock.fleet.discovery.RESOLVE_SECONDS", 0.01)
    async with listening_worker() as (_, port):
        fleet = Fleet("m")
        config = ModelConfig(workers=(f"dns://nowhere.invalid:{port}", f"dns://127.0.0.1:{port}"))
        await start(fleet, [], config, 0)
        assert [replica.name for replica in fleet.replicas] == ["m-127.0.0.1"]
        await fleet.stop()
