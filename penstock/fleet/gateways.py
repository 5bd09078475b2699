"""Where the gateways of one fleet come from: processes of this machine. On a Ray cluster: `ray/gateways.py`."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from typing import Any, BinaryIO, Literal, Protocol

import msgspec

from penstock.fleet.channel import Channel

HEARTBEAT_SECONDS = 0.5
DEAD_AFTER_HEARTBEATS = 10  # that are missed

_END_SECONDS = 10.0  # for a process whose channel has closed
_LENGTH = 4  # bytes, of the length before what a process is told

# A network that has gone ends a connection that nobody uses after about ten seconds.
_KEEPALIVE = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}


class GatewayStart(msgspec.Struct, kw_only=True):
    """What a gateway process is told before all else, on its standard input."""

    settings: dict[str, Any]  # as a file holds them
    folder: str  # that relative paths in the settings begin at
    port: int
    shares_port: bool  # with other processes of its machine
    own_store: bool  # it opens the state itself
    adapters: list[Any]
    secret: str  # of workers that serve gateways at TCP ports
    elsewhere: bool = False  # on another node than the launching process


State = Literal["starting", "ready", "lost"]


class GatewayView(msgspec.Struct, kw_only=True):
    id: str
    place: str
    url: str  # where clients reach it; empty: nowhere yet
    process: int | None
    state: State
    detail: str
    seconds: float  # in this state
    restarts: int


class LaunchedGateway(Protocol):
    place: str  # for people
    host: str  # that it serves on
    connection: socket.socket  # for the channel to it

    async def end(self) -> int:
        """After its channel has closed: see that it is gone. Returns its exit code, 0 where nobody knows."""
        ...

    def kill(self) -> None: ...


class GatewayLauncher(Protocol):
    """Starts gateways, again and again if need be. `place` says to people where that is."""

    place: str

    async def launch(self) -> LaunchedGateway:
        """Raises StartupError or OSError with the reason why it cannot."""
        ...


class Gateway:
    """One that is kept running, as people see it."""

    def __init__(self, name: str, launcher: GatewayLauncher) -> None:
        self.name = name
        self.launcher = launcher
        self.launched: LaunchedGateway | None = None
        self.url = ""
        self.process: int | None = None
        self.state: State = "starting"
        self.detail = ""
        self.since = time.time()
        self.restarts = 0

    def become(self, state: State, detail: str = "") -> None:
        self.state, self.detail, self.since = state, detail, time.time()

    def view(self) -> GatewayView:
        return GatewayView(
            id=self.name,
            place=(self.launched or self.launcher).place,
            url=self.url,
            process=self.process,
            state=self.state,
            detail=self.detail,
            seconds=time.time() - self.since,
            restarts=self.restarts,
        )


class LocalGatewayLauncher:
    """Each gateway is a process of this machine."""

    place = "local process"

    def __init__(self, start: GatewayStart, host: str) -> None:
        """`host` that they serve on."""
        self._start = msgspec.msgpack.encode(start)
        self._host = host

    async def launch(self) -> LaunchedGateway:
        ours, theirs = socket.socketpair()
        with theirs:
            return LocalGateway(await GatewayProcess.spawn(theirs, self._start), ours, self._host)


class GatewayProcess:
    """A process that was started here. Its standard input stays open for as long as this process lives."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def spawn(cls, channel: socket.socket, start: bytes) -> GatewayProcess:
        """`channel` is its end of the channel to the launching process, `start` an encoded `GatewayStart`."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "penstock.cli.gateway_process",
            str(channel.fileno()),
            stdin=asyncio.subprocess.PIPE,
            pass_fds=[channel.fileno()],
            start_new_session=True,
        )
        assert process.stdin is not None
        process.stdin.write(len(start).to_bytes(_LENGTH) + start)
        return cls(process)

    async def ended(self) -> int:
        return await self._process.wait()

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()


async def send_heartbeats(channel: Channel) -> None:
    """From a gateway process, for as long as its event loop runs."""
    while True:
        channel.tell("heartbeat")
        await asyncio.sleep(HEARTBEAT_SECONDS)


class Heartbeats:
    """Those of a gateway process, from the first on: it may take any time to start.

    They are counted, and not timed: where this process did not run itself (stopped, suspended, short of CPU), it finds
    out late but misses one heartbeat, and the channel is read before the next.
    """

    def __init__(self) -> None:
        self._missed = 0
        self._begun = asyncio.Event()

    async def heard(self) -> None:
        """The handler of the channel."""
        self._missed = 0
        self._begun.set()

    async def until_silent(self) -> str:
        """Returns when too many are missing, and says so."""
        await self._begun.wait()
        while self._missed < DEAD_AFTER_HEARTBEATS:
            self._missed += 1
            await asyncio.sleep(HEARTBEAT_SECONDS)
        return f"nothing heard from it for {DEAD_AFTER_HEARTBEATS * HEARTBEAT_SECONDS:.2g} s"


def read_start(told: BinaryIO) -> GatewayStart:
    """In the process that was started."""
    length = int.from_bytes(told.read(_LENGTH))
    return msgspec.msgpack.decode(told.read(length), type=GatewayStart)


class LocalGateway:
    place = LocalGatewayLauncher.place

    def __init__(self, process: GatewayProcess, connection: socket.socket, host: str) -> None:
        self._process = process
        self.host = host
        self.connection = connection

    async def end(self) -> int:
        try:
            async with asyncio.timeout(_END_SECONDS):  # unlike wait_for it loses no cancellation as the process ends
                return await self._process.ended()
        except TimeoutError:
            self._process.kill()
            return await self._process.ended()

    def kill(self) -> None:
        self._process.kill()


def notice_silence(connection: socket.socket) -> None:
    """Let the system end a TCP connection whose other machine has gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:  # not all systems have all of them
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
