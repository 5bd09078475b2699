"""The gateway's side of a Ray cluster: launches workers there by way of a driver process. Nothing here imports Ray."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from penstock.core.errors import PenstockError, StartupError, Unavailable
from penstock.fleet.channel import Channel
from penstock.fleet.launcher import Address, Instance, LaunchedInstance, Launcher, Loss, connect_to_node
from penstock.fleet.ray.host import machine
from penstock.fleet.ray.reasons import AWAY, NEVER_RAN
from penstock.fleet.ray.settings import RayConfig
from penstock.fleet.settings import ModelConfig
from penstock.observability.settings import LogConfig
from penstock.worker.client import WorkerClient
from penstock.worker.protocol import Start

_LOSS_SECONDS = 3.0  # how long the reason of a loss is waited for
_STOP_SECONDS = 20.0
_PLACEMENTS = 3  # attempts at one launch
_CONNECT_SECONDS = 90.0  # to the cluster, or to start one
_GREETING_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _Placed:
    """A worker that Ray has placed."""

    actor: str  # name
    host: str
    port: int
    process: int
    machine: str


class RayCluster:
    """The driver process beside this one. If it goes, as it does when the head of the cluster is away for long, the
    next launch starts another; workers and their connections need neither."""

    def __init__(self, config: RayConfig) -> None:
        self.wait_seconds = config.wait_seconds
        self._address = config.address
        self._process: asyncio.subprocess.Process | None = None
        self._channel: Channel | None = None
        self._connecting = asyncio.Lock()

    async def call(self, method: str, *arguments: Any) -> Any:
        """Raises StartupError, with what is to be done, if the cluster cannot be reached."""
        async with self._connecting:
            channel = self._channel
            if channel is None or channel.closed.done():
                channel = await self._connect()
        try:
            return await channel.call(method, *arguments)
        except Unavailable as error:
            raise StartupError(AWAY) from error

    def tell(self, method: str, *arguments: Any) -> None:
        """Without an answer, and only if the driver runs."""
        if self._channel is not None:
            self._channel.tell(method, *arguments)

    async def _connect(self) -> Channel:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "penstock.fleet.ray.driver",
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        channel = Channel(ours, {})
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                await channel.call("connect", self._address)
        except BaseException as error:
            channel.close()
            self._process.kill()
            if isinstance(error, Unavailable | TimeoutError):
                raise StartupError(AWAY) from error
            raise
        self._channel = channel
        return channel

    async def end(self, actor: str) -> None:
        """Where the cluster cannot be asked, a worker ends when no gateway has been connected for a while, and a
        gateway when its channel has closed."""
        with suppress(PenstockError, TimeoutError):
            await asyncio.wait_for(self.call("stop", actor), _STOP_SECONDS)

    def end_soon(self, actor: str) -> None:
        self.tell("stop", actor)

    async def close(self) -> None:
        """The driver ends what it has launched, then itself."""
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                if self._channel is not None:
                    with suppress(PenstockError):
                        await self._channel.call("stop_all")
                    self._channel.close()
                if self._process is not None:
                    await self._process.wait()
        except TimeoutError:
            if self._process is not None:
                self._process.kill()


class RayLaunchers:
    """Makes the launchers of replicas on a Ray cluster. Workers take gateways that have one secret."""

    def __init__(self, config: RayConfig) -> None:
        self.cluster = RayCluster(config)
        self.secret = secrets.token_hex(32)

    def replica(self, checkpoint: str, config: ModelConfig, number: int, logs: LogConfig) -> Launcher:
        if config.devices:
            raise StartupError("devices are of this machine; under Ray say how many: resources.gpus", param="devices")
        engine, gpus = config.engine, config.resources.gpus
        if engine.gpu_memory_share is None and gpus is not None and 0 < gpus < 1:
            engine = replace(engine, gpu_memory_share=gpus)
        start = Start(_absolute(checkpoint), engine, logs, secret=self.secret)
        return RayLauncher(self.cluster, start, config)


@asynccontextmanager
async def ray_launchers(config: RayConfig) -> AsyncIterator[RayLaunchers]:
    launchers = RayLaunchers(config)
    try:
        yield launchers
    finally:
        await launchers.cluster.close()


def _absolute(checkpoint: str) -> str:
    """The same path is looked for on the worker's node, where the working directory is another one."""
    kind, path = ("dummy:", checkpoint[6:]) if checkpoint.startswith("dummy:") else ("", checkpoint)
    found = Path(path).expanduser()
    return f"{kind}{found.resolve()}" if found.exists() else checkpoint


class RayLauncher:
    """Each instance is a worker process on a node of the cluster, in the keeping of a Ray actor."""

    owns = True
    _ids = itertools.count()

    def __init__(self, cluster: RayCluster, start: Start, config: ModelConfig) -> None:
        self.place = "ray"
        self._cluster = cluster
        self._start = start
        resources = config.resources
        self._resources = asdict(resources) | {"cuda": config.engine.device == "cuda"}
        self._session = secrets.token_hex(4)
        self._silent: _Placed | None = None  # it fell silent, and nobody knows whether it has ended

    async def launch(self) -> Instance:
        if self._silent is not None:
            placed, self._silent = self._silent, None
            with suppress(OSError, PenstockError):
                return await self._connect(placed)
            self.end_soon(placed)
        placed = await self._place()
        try:
            return await self._connect(placed)
        except BaseException as error:
            await self.end(placed)
            if isinstance(error, OSError):
                raise StartupError(str(error) or f"the worker on {self.place} does not answer") from error
            raise

    async def _place(self) -> _Placed:
        """Ray may cancel an actor that has not run yet, as around a restart of its head: then it is asked again."""
        start = msgspec.msgpack.encode(self._start)
        for attempt in range(1, _PLACEMENTS + 1):
            name = f"penstock-{self._session}-{next(self._ids)}"
            try:
                found = await self._cluster.call("launch", name, start, self._resources, self._cluster.wait_seconds)
                return _Placed(name, **found)
            except StartupError as error:
                if error.code != NEVER_RAN or attempt == _PLACEMENTS:
                    raise
        raise AssertionError("the last attempt returns or raises")

    async def _connect(self, placed: _Placed) -> RayInstance:
        connection = await connect_to_node(placed.host, placed.port, self._start.secret)
        async with asyncio.timeout(_GREETING_SECONDS):
            client = await WorkerClient.connect(connection)
        self.place = f"ray node {placed.host}"
        return RayInstance(self, placed, client)

    async def end(self, placed: _Placed) -> None:
        await self._cluster.end(placed.actor)

    def end_soon(self, placed: _Placed) -> None:
        self._cluster.end_soon(placed.actor)

    async def loss_of(self, placed: _Placed, silence: str) -> Loss:
        """Why its connection ended. `silence`: nothing was heard from it any more."""
        if silence:
            self._silent = placed
            return Loss(silence)
        try:
            reason, from_outside = await asyncio.wait_for(self._cluster.call("loss", placed.actor), _LOSS_SECONDS)
            return Loss(reason, from_outside)
        except (PenstockError, TimeoutError):  # with the node or the head: no request has that power
            return Loss(f"Ray node {placed.host} or the head of its cluster is gone", from_outside=True)
        finally:
            self.end_soon(placed)  # what it has reserved is free for the next one


class RayInstance(LaunchedInstance):
    def __init__(self, launcher: RayLauncher, placed: _Placed, client: WorkerClient) -> None:
        self._launcher = launcher
        self._placed = placed
        self.engine = client
        self.start_seconds = client.start_seconds
        here = machine()
        self.process = placed.process if here and here == placed.machine else None

    def connect(self) -> Address:
        return self._placed.host, self._placed.port

    async def lost(self) -> Loss:
        silence = await asyncio.shield(self.engine.closed)
        return await self._launcher.loss_of(self._placed, silence)

    async def stop(self) -> None:
        await self._launcher.end(self._placed)
        self.engine.close()

    def kill(self) -> None:
        self._launcher.end_soon(self._placed)
        self.engine.close()
