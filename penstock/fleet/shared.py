"""One fleet for several gateway processes: one process launches the replicas, and all others connect to them.

The launching process has a `SharedFleet` of each model, which serves no requests itself. Each gateway process has a
`Fleet` of its own. Its replicas come from a `BrokeredLauncher`, which asks the launching process for a socket, or for
the address of a worker on a Ray cluster.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.core.errors import StartupError, Unavailable
from penstock.fleet.channel import Channel, Handler
from penstock.fleet.control import FleetControl
from penstock.fleet.fleet import Fleet
from penstock.fleet.launcher import (
    Address,
    Instance,
    LaunchedInstance,
    Launcher,
    Loss,
    RemoteInstance,
    connect_to_node,
)
from penstock.fleet.replica import Replica
from penstock.worker.client import WorkerClient

_AGAIN_SECONDS = 0.02  # after a worker went away while it was being connected to
_NEWS_SECONDS = 1.0  # how long the news of a drained replica may take beyond its drain


class SharedFleet(Fleet):
    """In the process that launches. `gateways` are the channels to the others."""

    gateways: Callable[[], Sequence[Channel]] = staticmethod(lambda: ())

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._streams: dict[str, int] = {}  # in flight, over all gateways

    def _new(self, launcher: Launcher, name: str | None = None, number: int | None = None) -> Replica:
        replica = super()._new(launcher, name, number)
        for gateway in self.gateways():
            gateway.tell("join", self.model, replica.name)
        return replica

    async def _drained(self, replica: Replica, seconds: float) -> None:
        calls = (in_time(gateway.call("leave", replica.name, seconds), seconds) for gateway in self.gateways())
        await asyncio.gather(*calls)

    def cut(self, replica: Replica) -> None:
        for gateway in self.gateways():
            gateway.tell("cut", replica.name)

    async def refresh(self) -> None:
        """Ask every gateway what it has in flight, and what it holds."""
        calls = (in_time(gateway.call("streams", self.model), 0.0) for gateway in self.gateways())
        answers = [answer for answer in await asyncio.gather(*calls) if answer is not None]
        self.held = sum(held for held, _ in answers)
        self._streams = {}
        for _, streams in answers:
            for name, count in streams.items():
                self._streams[name] = self._streams.get(name, 0) + count

    def streams(self, replica: Replica) -> int:
        return self._streams.get(replica.name, 0)

    async def connect(self, name: str) -> socket.socket | Address:
        """A way to a replica for a gateway process, as soon as the replica serves."""
        while True:
            replica = next((replica for replica in self.replicas if replica.name == name), None)
            if replica is None:
                raise StartupError(f"replica {name} has been removed")
            instance, changed = replica.instance, self._changed
            if replica.state in ("ready", "draining") and isinstance(instance, LaunchedInstance):
                try:
                    return instance.connect()
                except ConnectionError:  # it has died, and nobody knows yet
                    pass
            await changed.wait()


async def in_time(call: Any, seconds: float) -> Any:
    """The answer of a gateway process; None if it goes away, or does not answer in time."""
    try:
        async with asyncio.timeout(seconds + _NEWS_SECONDS):
            return await call
    except (TimeoutError, Unavailable, StartupError):
        return None


class BrokeredLauncher:
    """In a gateway process: a worker that another process has launched."""

    place = "local process"
    owns = False

    def __init__(self, channel: Channel, replica: str, secret: str) -> None:
        """`secret` of workers that are connected to over the network."""
        self._channel = channel
        self._replica = replica
        self._secret = secret

    async def launch(self) -> Instance:
        while True:
            try:
                found: Any = await self._channel.call("connect", self._replica)
                if not isinstance(found, socket.socket):
                    host, port = found
                    found = await connect_to_node(host, port, self._secret)
            except Unavailable as error:
                raise StartupError("the launching process has gone") from error
            except ConnectionError as error:
                raise StartupError(str(error)) from error
            try:
                client = await WorkerClient.connect(found)
            except ConnectionError:
                await asyncio.sleep(_AGAIN_SECONDS)
            else:
                return BrokeredInstance(client, self._channel, self._replica)


class BrokeredInstance(RemoteInstance):
    def __init__(self, client: WorkerClient, channel: Channel, replica: str) -> None:
        """Asks at once how it ends: when this process notices that it has, another one may be in its place."""
        super().__init__(client)
        self._end: asyncio.Future[Any] = asyncio.ensure_future(channel.call("loss", replica))
        self._end.add_done_callback(lambda end: end.cancelled() or end.exception())  # it may not be waited for

    async def lost(self) -> Loss:
        """How a process has ended is known to the one that launched it."""
        silence = await asyncio.shield(self.engine.closed)
        known = None if silence else await in_time(self._end, 0.0)
        self._end.cancel()
        return Loss(*known) if known else Loss(silence or "the connection ended")

    async def stop(self) -> None:
        self._end.cancel()
        self.engine.close()


def gateway_handlers(channel: Callable[[], Channel], fleets: Mapping[str, Fleet], secret: str) -> dict[str, Handler]:
    """What the launching process can ask of a gateway process. `fleets` by the name of the model."""

    def find(name: str) -> tuple[Fleet, Replica] | None:
        for fleet in fleets.values():
            for replica in fleet.replicas:
                if replica.name == name:
                    return fleet, replica
        return None

    async def join(model: str, name: str) -> None:
        if find(name) is None:
            fleets[model].add(BrokeredLauncher(channel(), name, secret), name)

    async def leave(name: str, drain_seconds: float) -> None:
        if (found := find(name)) is not None:
            fleet, replica = found
            await fleet.remove(replica, drain_seconds)

    async def streams(model: str) -> tuple[int, dict[str, int]]:
        """Requests that are held, and those in flight by replica."""
        fleet = fleets.get(model)
        if fleet is None:
            return 0, {}
        return fleet.held, {replica.name: fleet.streams(replica) for replica in fleet.replicas}

    async def cut(name: str) -> None:
        if (found := find(name)) is not None:
            found[1].cut()

    return {"join": join, "leave": leave, "streams": streams, "cut": cut}


def launcher_handlers(fleets: Mapping[str, SharedFleet], control: FleetControl) -> dict[str, Handler]:
    """What a gateway process can ask of the launching process."""

    async def connect(name: str) -> socket.socket | Address:
        for fleet in fleets.values():
            if any(replica.name == name for replica in fleet.replicas):
                return await fleet.connect(name)
        raise StartupError(f"replica {name} has been removed")

    async def loss(name: str) -> tuple[str, bool]:
        for fleet in fleets.values():
            for replica in fleet.replicas:
                if replica.name == name:
                    found = await asyncio.shield(replica.loss)
                    return found.reason, found.from_outside
        raise StartupError(f"replica {name} has been removed")

    async def replicas() -> Any:
        await asyncio.gather(*(fleet.refresh() for fleet in fleets.values()))
        return await control.replicas()

    async def wake(model: str) -> None:
        if (start := fleets[model].wake) is not None:
            start()

    return {
        "wake": wake,
        "autoscaling": control.autoscaling,
        "connect": connect,
        "loss": loss,
        "replicas": replicas,
        "add": control.add,
        "remove": control.remove,
        "replace": control.replace,
        "restart": control.restart,
        "fault": control.fault,
    }


class RemoteControl:
    """In a gateway process: what an administrator asks for is done by the launching process."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def replicas(self) -> list[Any]:
        found: list[Any] = await self._channel.call("replicas")
        return found

    async def gateways(self) -> list[Any]:
        found: list[Any] = await self._channel.call("gateways")
        return found

    async def autoscaling(self) -> list[Any]:
        found: list[Any] = await self._channel.call("autoscaling")
        return found

    async def add(self, model: str, count: int) -> list[Any]:
        found: list[Any] = await self._channel.call("add", model, count)
        return found

    async def remove(self, name: str, drain_seconds: float) -> Any:
        return await self._channel.call("remove", name, drain_seconds)

    async def replace(self, model: str, checkpoint: str, drain_seconds: float) -> list[Any]:
        found: list[Any] = await self._channel.call("replace", model, checkpoint, drain_seconds)
        return found

    async def restart(self, name: str, drain_seconds: float) -> list[Any]:
        found: list[Any] = await self._channel.call("restart", name, drain_seconds)
        return found

    async def fault(self, name: str, fault: str, seconds: float) -> Any:
        return await self._channel.call("fault", name, fault, seconds)
