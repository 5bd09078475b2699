"""A gateway process and the process that launches its workers, over a channel."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping

from penstock.fleet.channel import Channel
from penstock.fleet.control import FleetControl
from penstock.fleet.launcher import Instance, LaunchedInstance, Loss
from penstock.fleet.shared import BrokeredLauncher, SharedFleet, launcher_handlers
from penstock.observability.settings import LogConfig
from penstock.worker.client import WorkerClient
from penstock.worker.server import GatewayConnection
from tests.fleet.simulated import SimulatedLauncher, SimulatedWorker
from tests.fleet.test_fleet import until


class SharedInstance(LaunchedInstance):
    """A worker that others can connect to. Somebody ends it from outside."""

    process = None
    start_seconds: Mapping[str, float] = {}

    def __init__(self, worker: SimulatedWorker, client: WorkerClient) -> None:
        self.engine = client
        self._worker = worker
        self._tasks: list[asyncio.Task[object]] = []

    def connect(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        greeting = loop.create_unix_connection(lambda: GatewayConnection(self._worker.server), sock=theirs)
        self._tasks.append(loop.create_task(greeting))
        return ours

    async def lost(self) -> Loss:
        await asyncio.shield(self.engine.closed)
        return Loss("exit code -9", from_outside=True)

    async def stop(self) -> None:
        self.engine.close()

    def kill(self) -> None:
        self.engine.close()


class Launching(SimulatedLauncher):
    async def launch(self) -> Instance:
        await super().launch()
        return SharedInstance(self.worker, await self.worker.connect())


async def test_a_gateway_that_notices_late_is_told_why_its_own_worker_ended() -> None:
    """Another one may have been launched in its place by then, as from a warm pool."""
    launcher, fleet = Launching(), SharedFleet("m")
    await fleet.start([launcher])
    ours, theirs = socket.socketpair()
    control = FleetControl({"m": fleet}, {}, LogConfig(), lambda *_: launcher)
    launching, gateway = Channel(ours, launcher_handlers({"m": fleet}, control)), Channel(theirs, {})
    instance = await BrokeredLauncher(gateway, "m-0", "").launch()
    launcher.worker.die()
    await until(lambda: fleet.replicas[0].restarts == 1 and fleet.replicas[0].state == "ready")
    assert await instance.lost() == Loss("exit code -9", from_outside=True)
    await fleet.stop()
    launching.close()
    gateway.close()
    await launcher.close()
