"""How a replica's engine comes to be: the `Launcher` seam, and launchers of workers here and on other machines."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from penstock.core.engine import ServedEngine
from penstock.core.errors import PenstockError, StartupError, Unavailable
from penstock.core.request import GenerateRequest
from penstock.worker.client import WorkerClient
from penstock.worker.control import send_gateway
from penstock.worker.protocol import Failed, Prepared, Standby, Start, frame, read_control
from penstock.worker.remote import prove_as_gateway

_STOP_SECONDS = 10.0
_EXIT_SECONDS = 1.0  # for a process whose socket has ended
_CONNECT_SECONDS = 5.0

Address = tuple[str, int]  # host and port


@dataclass(frozen=True, slots=True)
class Loss:
    """Why an engine is gone. `from_outside`: its process was stopped or ended by somebody, as far as the system can
    tell, so that none of its requests is to blame."""

    reason: str
    from_outside: bool = False


class Instance(Protocol):
    """An engine that runs, until it is lost or stopped."""

    @property
    def engine(self) -> ServedEngine: ...

    @property
    def process(self) -> int | None:
        """The id of its process where that is of this machine."""
        ...

    @property
    def start_seconds(self) -> Mapping[str, float]:
        """How long the phases of its start took, where it was started for this and says so."""
        ...

    def refusal(self, request: GenerateRequest) -> PenstockError | None:
        """Why this kind of engine cannot compute a request, whatever its load."""
        ...

    async def lost(self) -> Loss:
        """Wait until the engine is gone for good, and say why."""
        ...

    async def stop(self) -> None: ...

    def kill(self) -> None:
        """At once, whatever it is doing."""
        ...


class Launcher(Protocol):
    """Starts an engine, again and again if need be.

    `place` says to people where it runs. `owns` tells whether the engine's process is started and ended by this
    launcher, and not by somebody else.
    """

    place: str
    owns: bool

    async def launch(self) -> Instance:
        """Returns when the engine serves. Raises StartupError with the reason why it cannot, or Unavailable where that
        is the fault of somebody else and may pass."""
        ...


class LocalLauncher:
    """Each instance is a worker process of this machine."""

    place = "local process"
    owns = True

    def __init__(self, start: Start, listener: socket.socket | None = None) -> None:
        """`listener`: where the worker serves gateways on other machines, too, which have the secret in `start`."""
        self._start = start
        # Makes the process. A warm pool puts its own in its place.
        self.spawn: Callable[[Start], Awaitable[WorkerProcess]] = partial(WorkerProcess.spawn, listener=listener)

    async def launch(self) -> LocalInstance:
        """There is no limit to the time a model may take to load; it ends with its process."""
        worker = await self.spawn(self._start)
        try:
            client = await WorkerClient.connect(worker.connect(), is_stopped=worker.is_stopped)
        except ConnectionError as error:
            raise StartupError(await worker.failure()) from error
        except BaseException:
            worker.kill()
            raise
        return LocalInstance(worker, client)


class WorkerProcess:
    """A worker process and its control socket."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._killed = False  # by this process
        self._oom_kills = _oom_kills()

    @classmethod
    async def spawn(cls, first: Start | Standby, listener: socket.socket | None = None) -> WorkerProcess:
        """`first` is the first thing that it is told."""
        ours, theirs = socket.socketpair()
        with theirs:  # the process has its own of it
            passed = [theirs.fileno(), *([] if listener is None else [listener.fileno()])]
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "penstock.worker.main",
                *map(str, passed),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr,
                pass_fds=passed,
                env=_environment(),
                start_new_session=True,
            )
        ours.sendall(frame(first))
        return cls(process, ours)

    async def prepared(self) -> None:
        """Returns when a standby is. Raises StartupError with the reason why it cannot be."""
        loop = asyncio.get_running_loop()
        heard = asyncio.Event()
        loop.add_reader(self._control, heard.set)
        try:
            await heard.wait()
        finally:
            loop.remove_reader(self._control)
        said = read_control(self._control)
        if not isinstance(said, Prepared):
            code = await self.reap(_EXIT_SECONDS)
            raise StartupError(said.message if isinstance(said, Failed) else f"it ended with exit code {code}")

    def begin(self, start: Start) -> bool:
        """Tell a standby to load. False: it has gone."""
        self._oom_kills = _oom_kills()
        try:
            self._control.sendall(frame(start))
        except OSError:
            return False
        return True

    async def ended(self) -> None:
        await self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    def connect(self) -> socket.socket:
        """A new connection for a gateway. The worker greets over it as soon as it can serve."""
        try:
            return send_gateway(self._control)
        except OSError as error:
            raise ConnectionError("the worker has gone") from error

    async def failure(self) -> str:
        """Why it ended, in its own words if it had any."""
        code = await self.reap(_EXIT_SECONDS)
        said = read_control(self._control)  # its end is closed, so this waits for nothing
        return said.message if isinstance(said, Failed) else f"the worker ended with exit code {code} while starting"

    async def reap(self, patience: float) -> int:
        """The exit code of the process, which is killed if it does not end in time."""
        try:
            async with asyncio.timeout(patience):
                return await self._process.wait()
        except TimeoutError:
            self.kill()
            return await self._process.wait()

    def is_stopped(self) -> bool:
        """Whether it was stopped by a signal, as far as the system can tell."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_bytes()
        except OSError:  # no /proc (macOS), or no process
            return False
        return stat.rpartition(b") ")[2][:1] == b"T"

    def terminate(self) -> None:
        if self._process.returncode is None:
            self._process.terminate()

    def kill(self) -> None:
        if self._process.returncode is None:
            self._killed = True
            self._process.kill()

    @property
    def ended_by_somebody(self) -> bool:
        """Whether a signal from outside has ended it. SIGKILL may also come from the kernel for want of memory, which
        requests can cause; it counts those."""
        code = self._process.returncode
        if code == -signal.SIGKILL:
            return not self._killed and self._oom_kills is not None and self._oom_kills == _oom_kills()
        return code in (0, -signal.SIGTERM)

    def close(self) -> None:
        self._control.close()


def _oom_kills() -> int | None:
    """Processes that the kernel has killed for want of memory; None where it does not say."""
    try:
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(counters["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None


def _environment() -> dict[str, str]:
    """The worker's: no secrets of the gateway."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}


class WorkerInstance:
    """A worker computes all requests that a gateway accepts."""

    start_seconds: Mapping[str, float] = {}

    def refusal(self, request: GenerateRequest) -> PenstockError | None:
        return None


class LaunchedInstance(WorkerInstance, ABC):
    """A worker that this process has launched, and that other gateway processes can connect to as well."""

    @abstractmethod
    def connect(self) -> socket.socket | Address:
        """A connection for another gateway process, or where it connects with the secret. Raises ConnectionError."""


class LocalInstance(LaunchedInstance):
    def __init__(self, worker: WorkerProcess, client: WorkerClient) -> None:
        self._worker = worker
        self.engine = client
        self.start_seconds = client.start_seconds

    @property
    def process(self) -> int:
        return self._worker.pid

    def connect(self) -> socket.socket:
        return self._worker.connect()

    async def lost(self) -> Loss:
        silence = await asyncio.shield(self.engine.closed)
        stopped = self._worker.is_stopped()
        code = await self._worker.reap(0 if silence else _EXIT_SECONDS)
        self._worker.close()
        return Loss(silence, stopped) if silence else Loss(f"exit code {code}", self._worker.ended_by_somebody)

    async def stop(self) -> None:
        self._worker.terminate()
        await self._worker.reap(_STOP_SECONDS)
        self._worker.close()

    def kill(self) -> None:
        self._worker.kill()


class RemoteLauncher:
    """Connects to a worker that somebody runs on another machine (`penstock worker`). It starts and ends nothing."""

    owns = False

    def __init__(self, host: str, port: int, secret: str) -> None:
        self._address = (host, port)
        self._secret = secret
        self.place = f"tcp://{host}:{port}"

    async def launch(self) -> Instance:
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                connection = await connect_over_network(*self._address, self._secret)
                return RemoteInstance(await WorkerClient.connect(connection))
        except (OSError, TimeoutError) as error:
            raise Unavailable(f"no worker answers at {self.place}: {error or 'timed out'}") from error


async def connect_over_network(host: str, port: int, secret: str) -> socket.socket:
    """A connection to a worker's port. Raises OSError, or HandshakeFailed."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(_CONNECT_SECONDS):
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        connection = socket.socket(family, kind, protocol)
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await loop.sock_connect(connection, address)
            await prove_as_gateway(connection, secret)
        except BaseException:
            connection.close()
            raise
    return connection


async def connect_to_node(host: str, port: int, secret: str) -> socket.socket:
    """To what Ray has placed. Raises ConnectionError."""
    try:
        return await connect_over_network(host, port, secret)
    except OSError as error:
        raise ConnectionError(
            f"{host}:{port} on a Ray node cannot be reached: {error or 'timed out'}; gateways need TCP connections to "
            "the nodes, to ports that these choose"
        ) from error


class RemoteInstance(WorkerInstance):
    process = None

    def __init__(self, client: WorkerClient) -> None:
        self.engine = client

    async def lost(self) -> Loss:
        silence = await asyncio.shield(self.engine.closed)
        return Loss(silence or "the connection ended", from_outside=self.engine.leaving.done())

    async def stop(self) -> None:
        self.engine.close()

    def kill(self) -> None:
        self.engine.close()
