"""A worker's end of its launcher's socket: gateways come over it, and the worker ends when it ends.

Each gateway is a socket of a pair without a name, handed over as a descriptor (SCM_RIGHTS): nothing lies on disk, and
nobody else can connect.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable

from penstock.worker.server import GatewayConnection, WorkerServer


def send_gateway(control: socket.socket) -> socket.socket:
    """The launcher's side: a new connection to the worker, which greets over it as soon as it can serve."""
    ours, theirs = socket.socketpair()
    with theirs:
        socket.send_fds(control, [b"g"], [theirs.fileno()])
    return ours


class Control:
    """Read by a thread of its own, as the main one is busy while a model is loaded."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._waiting: list[socket.socket] = []  # until `attach`
        self._deliver: Callable[[socket.socket | None], None] | None = None
        threading.Thread(target=self._read, name="control", daemon=True).start()

    async def attach(self, server: WorkerServer, stop: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        tasks: set[asyncio.Task[object]] = set()

        def connect(gateway: socket.socket | None) -> None:
            if gateway is None:
                stop()
                return
            task = loop.create_task(loop.create_unix_connection(lambda: GatewayConnection(server), sock=gateway))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        def deliver(gateway: socket.socket | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(connect, gateway)

        with self._lock:
            self._deliver = deliver
            for gateway in self._waiting:
                connect(gateway)

    def _read(self) -> None:
        while True:
            try:
                data, descriptors, *_ = socket.recv_fds(self._connection, 1, 1)
            except OSError:
                data = b""
            gateway = None
            if data:
                gateway = socket.socket(fileno=descriptors[0])
                gateway.set_inheritable(False)
            with self._lock:
                if self._deliver is not None:
                    self._deliver(gateway)
                elif gateway is not None:
                    self._waiting.append(gateway)
                else:
                    os._exit(0)  # the launcher has gone while the model was loading
            if gateway is None:
                return
