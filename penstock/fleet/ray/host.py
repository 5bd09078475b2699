"""The Ray actors around one worker process, and around one gateway process.

They are what Ray sees of a replica or gateway: its reservation, its name, its end. What they host is a process of its
own, the same as without Ray. It ends with its actor; the actor ends with the process. A worker serves gateways at a TCP
port of its node; a gateway is connected to by the process that launches.

This file is sent to the node as it is, so that a node without Penstock can say so: imports of Penstock stand in the
methods.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Coroutine
from typing import Any

_TOLD_SECONDS = 5.0  # how long the actor outlives its process, so that the driver can ask why that ended
_CONNECT_SECONDS = 10.0  # how long a gateway waits for the process that launches


class Host:
    _ended: asyncio.Task[tuple[str, bool]]

    async def node(self) -> dict[str, Any]:
        """Where this is, and which versions are installed there."""
        import ray

        try:
            from penstock import __version__
        except ImportError:
            version = None
        else:
            version = __version__
        return {
            "address": ray.util.get_node_ip_address(),
            "penstock": version,
            "executable": sys.executable,
        }

    async def loss(self) -> tuple[str, bool]:
        """Waits until the process is gone, and says why, and whether from outside."""
        return await asyncio.shield(self._ended)

    def _end_with(self, ended: Coroutine[None, None, tuple[str, bool]]) -> None:
        self._ended = asyncio.create_task(ended)
        self._ending = asyncio.create_task(self._exit())

    async def _exit(self) -> None:
        """Without asking Ray, which may be away: actors outlive the rest of their node."""
        await asyncio.wait([self._ended])
        await asyncio.sleep(_TOLD_SECONDS)
        os._exit(0)


class WorkerHost(Host):
    async def start(self, start: bytes, address: str) -> dict[str, Any]:
        """Run the worker. Returns its port when it serves."""
        import msgspec

        from penstock.core.errors import PenstockError
        from penstock.fleet.launcher import LocalLauncher
        from penstock.worker.protocol import Start

        wanted = msgspec.msgpack.decode(start, type=Start)
        path = wanted.model.removeprefix("dummy:")
        if os.path.isabs(path) and not await asyncio.to_thread(os.path.exists, path):
            return {"failed": f"there is no {path}", "missing": path}
        _undo_limits()
        with _listen(address) as listener:
            try:
                self._instance = await LocalLauncher(wanted, listener).launch()
            except PenstockError as error:
                return {"failed": error.message}
            port = listener.getsockname()[1]
        self._end_with(self._lost())
        return {"port": port, "process": self._instance.process, "machine": machine()}

    async def _lost(self) -> tuple[str, bool]:
        loss = await self._instance.lost()
        return loss.reason, loss.from_outside

    async def stop(self) -> None:
        await self._instance.stop()


class GatewayHost(Host):
    async def start(self, start: bytes, address: str) -> dict[str, Any]:
        """Returns the port at which the gateway waits for the process that launches, to be told of replicas."""
        _undo_limits()
        listener = _listen(address)
        self._end_with(self._serve(listener, start))
        return {"port": listener.getsockname()[1]}

    async def _serve(self, listener: socket.socket, start: bytes) -> tuple[str, bool]:
        import msgspec

        from penstock.fleet.gateways import GatewayProcess, GatewayStart, notice_silence

        secret = msgspec.msgpack.decode(start, type=GatewayStart).secret
        with listener:
            async with asyncio.timeout(_CONNECT_SECONDS):
                connection = await _accept(listener, secret)
        with connection:  # the process has its own of it
            notice_silence(connection)
            process = await GatewayProcess.spawn(connection, start)
        return f"exit code {await process.ended()}", True

    async def stop(self) -> None:
        os._exit(0)


def _listen(address: str) -> socket.socket:
    return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


async def _accept(listener: socket.socket, secret: str) -> socket.socket:
    """The first connection from somebody who has the secret."""
    from penstock.worker.remote import HandshakeFailed, prove_as_worker

    listener.setblocking(False)
    while True:
        connection, _ = await asyncio.get_running_loop().sock_accept(listener)
        connection.setblocking(False)
        try:
            await prove_as_worker(connection, secret)
        except (OSError, HandshakeFailed):
            connection.close()
        else:
            return connection


def _undo_limits() -> None:
    """Ray gives what it starts a low priority and as many OpenMP threads as CPUs are reserved, and a process would
    inherit both. Without Ray it has the usual priority and uses all CPUs that its process may run on."""
    os.environ.pop("OMP_NUM_THREADS", None)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    except PermissionError:
        print("this process runs at a low priority; start Ray's nodes with RAY_worker_niceness=0", file=sys.stderr)


def machine() -> str:
    """Where a process id means the same process: a boot of a machine, and a namespace of its processes."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:  # no /proc (macOS)
        return ""
