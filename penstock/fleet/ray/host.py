"""The Ray actor around one worker process, on whichever node Ray has chosen.

It is what Ray sees of a replica: its reservation, its name, its end. The worker is a process of its own, the same as
without Ray, and serves gateways at a TCP port of the node. It ends with this actor; the actor ends with the worker.

This file is sent to the node as it is, so that a node without Penstock can say so: imports of Penstock stand in the
methods.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from typing import Any

_TOLD_SECONDS = 5.0  # how long the actor outlives its worker, so that the driver can ask why that ended


class WorkerHost:
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
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family) as listener:
            try:
                self._instance = await LocalLauncher(wanted, listener).launch()
            except PenstockError as error:
                return {"failed": error.message}
            port = listener.getsockname()[1]
        self._loss = asyncio.create_task(self._instance.lost())
        self._ending = asyncio.create_task(self._end_with_worker())
        return {"port": port, "process": self._instance.process, "machine": machine()}

    async def loss(self) -> tuple[str, bool]:
        """Waits until the worker is gone, and says why."""
        loss = await asyncio.shield(self._loss)
        return loss.reason, loss.from_outside

    async def stop(self) -> None:
        await self._instance.stop()

    async def _end_with_worker(self) -> None:
        """Without asking Ray, which may be away: actors outlive the rest of their node."""
        await asyncio.shield(self._loss)
        await asyncio.sleep(_TOLD_SECONDS)
        os._exit(0)


def _undo_limits() -> None:
    """Ray gives what it starts a low priority and as many OpenMP threads as CPUs are reserved, and the worker would
    inherit both. Without Ray it has the usual priority and uses all CPUs that its process may run on."""
    os.environ.pop("OMP_NUM_THREADS", None)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    except PermissionError:
        print("this worker runs at a low priority; start Ray's nodes with RAY_worker_niceness=0", file=sys.stderr)


def machine() -> str:
    """Where a process id means the same process: a boot of a machine, and a namespace of its processes."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:  # no /proc (macOS)
        return ""
