"""A server on a socket: listening, and signals that drain."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Protocol

from penstock.core.machine import ending_signals, file_limit, open_files
from penstock.gateway.http.connection import HEAD_SECONDS, Connection
from penstock.gateway.http.listener import cannot_listen
from penstock.gateway.http.request import Request
from penstock.gateway.http.response import Response
from penstock.gateway.http.tls import Certificate
from penstock.gateway.http.traffic import Traffic
from penstock.gateway.settings import TlsConfig
from penstock.observability.logging import log

logger = logging.getLogger("penstock.gateway")

GC_THRESHOLDS = (10_000, 20, 50)  # a request makes some hundred objects, nearly none of them in cycles

SWITCH_SECONDS = 0.0005  # for how long a thread that tokenises or writes to disk may hold up the event loop

BACKLOG = 2048  # connections not accepted yet
SWEEP_SECONDS = 5.0  # between looks for stale connections
MANY_FILES = 0.95  # of the file descriptors that may be open
REMIND_SECONDS = 60.0  # between warnings of the same
CLOSE_SECONDS = 1.0  # after draining, all that is left to do is closing

OnReady = Callable[[str, int], None]  # host, port


class Application(Protocol):
    @property
    def traffic(self) -> Traffic: ...

    async def answer(self, request: Request, response: Response) -> None: ...

    async def close(self) -> None:
        """When no request is in flight any more."""


def tune_interpreter() -> None:
    """For a process that does nothing but serve, once all is loaded."""
    gc.collect()
    gc.freeze()  # what was loaded stays; collecting garbage must not walk through it in the middle of a stream
    gc.set_threshold(*GC_THRESHOLDS)
    sys.setswitchinterval(SWITCH_SECONDS)


async def serve(
    app: Application,
    listener: socket.socket,
    on_ready: OnReady,
    drain_seconds: float,
    tls: TlsConfig | None = None,
) -> int:
    """Serve until a signal, over TLS if there are files for it, and return the exit status of the process.

    The first SIGTERM, SIGINT or SIGHUP drains: new requests are refused while those in flight may take
    `drain_seconds`; then 0. A second one ends everything at once; then 128 plus its number. Not so SIGHUP, which both
    the kernel and the shell send when a terminal is closed.
    Run it on uvloop (`asyncio.Runner(loop_factory=uvloop.new_event_loop)`), which is twice as fast.
    """
    with listener:
        server = _Server(app, drain_seconds, None if tls is None else Certificate(tls))
        try:
            await server.listen(listener)
            on_ready(*listener.getsockname()[:2])
            return await server.stopped
        finally:
            await server.close()
            await app.close()


class _Server:
    def __init__(self, app: Application, drain_seconds: float, certificate: Certificate | None) -> None:
        self._app = app
        self._traffic = app.traffic
        self._drain_seconds = drain_seconds
        self._certificate = certificate
        self._loop = asyncio.get_running_loop()
        self._connections: set[Connection] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._draining = False
        self._remind_at = 0.0
        self._listening: asyncio.Server | None = None
        self.stopped: asyncio.Future[int] = self._loop.create_future()

    async def listen(self, listener: socket.socket) -> None:
        try:
            self._listening = await self._loop.create_server(
                lambda: Connection(self._app.answer, self._connections, self._traffic),
                sock=listener,
                backlog=BACKLOG,
                ssl=None if self._certificate is None else self._certificate.context,
                ssl_handshake_timeout=None if self._certificate is None else HEAD_SECONDS,
            )
        except OSError as error:  # two that took the address at once, before either listened
            host, port = listener.getsockname()[:2]
            raise cannot_listen(host, port, error) from error
        self._tasks.append(self._loop.create_task(self._sweep()))
        if threading.current_thread() is threading.main_thread():
            for sig in ending_signals():
                self._loop.add_signal_handler(sig, self._on_signal, sig)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            for connection in list(self._connections):
                connection.close_if_stale(self._loop.time())
            if self._certificate is not None:
                self._certificate.reload_if_changed()
            self._watch_files()

    def _watch_files(self) -> None:
        """Without any left, libuv closes new connections and says nothing."""
        taken, limit, now = open_files(), file_limit(), self._loop.time()
        if taken >= MANY_FILES * limit and now >= self._remind_at:
            self._remind_at = now + REMIND_SECONDS
            said = "few file descriptors are left, and without any new connections are closed; raise ulimit -Hn"
            log(logger, logging.WARNING, said, open=taken, limit=limit)

    def _on_signal(self, sig: signal.Signals) -> None:
        if not self._draining:
            self._draining = True
            said, requests = "draining; another signal ends at once", len(self._traffic.requests)
            log(logger, logging.INFO, said, signal=sig.name, in_flight=requests, at_most_seconds=self._drain_seconds)
            self._tasks.append(self._loop.create_task(self._drain()))
        elif sig != signal.SIGHUP:
            self._traffic.abort()
            self._stop(128 + sig)

    async def _drain(self) -> None:
        self._traffic.drain()
        try:
            async with asyncio.timeout(self._drain_seconds):
                await self._traffic.idle()
        except TimeoutError:
            log(logger, logging.WARNING, "drain time is over", aborted=len(self._traffic.requests))
            self._traffic.abort()
        self._stop(0)

    def _stop(self, status: int) -> None:
        if not self.stopped.done():
            self.stopped.set_result(status)

    async def close(self) -> None:
        """End what is left, and let its last words reach the clients."""
        if self._listening is not None:
            self._listening.close()
        for task in self._tasks:
            task.cancel()
        self._traffic.abort()
        for connection in list(self._connections):
            connection.shut_down()
        if closing := [connection.closed for connection in self._connections]:
            await asyncio.wait(closing, timeout=CLOSE_SECONDS)
