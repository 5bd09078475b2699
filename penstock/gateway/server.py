"""An app on a socket: uvicorn with signals that drain."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from penstock.core.errors import StartupError
from penstock.gateway.exchange import Traffic
from penstock.observability.logging import log

logger = logging.getLogger("penstock.gateway")

GC_THRESHOLDS = (10_000, 20, 50)  # a request makes some hundred objects, nearly none of them in cycles

SWITCH_SECONDS = 0.0005  # for how long a thread that tokenises or writes to disk may hold up the event loop

OnReady = Callable[[str, int], None]  # host, port


def tune_interpreter() -> None:
    """For a process that does nothing but serve, once all is loaded."""
    gc.collect()
    gc.freeze()  # what was loaded stays; collecting garbage must not walk through it in the middle of a stream
    gc.set_threshold(*GC_THRESHOLDS)
    sys.setswitchinterval(SWITCH_SECONDS)


async def serve(app: Starlette, host: str, port: int, on_ready: OnReady, drain_seconds: float) -> int:
    """Serve until a signal, and return the exit status of the process.

    The first SIGTERM or SIGINT drains: new requests are refused while those in flight may take `drain_seconds`;
    then 0. A second one ends everything at once; then 128 plus its number. Port 0 takes a free one.
    Run it on uvloop (`asyncio.Runner(loop_factory=uvloop.new_event_loop)`), which is twice as fast.
    """
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,  # longer than what load balancers keep an idle connection for
        timeout_graceful_shutdown=1,  # after draining, all that is left to do is closing
    )
    with _bind(host, port) as listener:
        server = _Server(config, app.state.traffic, lambda: on_ready(host, listener.getsockname()[1]), drain_seconds)
        try:
            await server.serve(sockets=[listener])
        finally:
            if app.state.tracing is not None:
                await asyncio.to_thread(app.state.tracing.close)
    return server.exit_status


def _bind(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        return socket.create_server(address, family=family)
    except OSError as error:
        raise StartupError(f"cannot listen on {host}:{port}: {error.strerror or error}", param="port") from error


class _Server(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, traffic: Traffic, on_started: Callable[[], None], drain_seconds: float
    ) -> None:
        super().__init__(config)
        self.exit_status = 0
        self._traffic = traffic
        self._on_started = on_started
        self._drain_seconds = drain_seconds
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._loop.call_soon_threadsafe(self._on_signal, sig)

    def _on_signal(self, sig: int) -> None:
        if self._draining is None:
            in_flight = len(self._traffic.exchanges)
            log(logger, logging.INFO, "draining", signal=signal.Signals(sig).name, in_flight=in_flight)
            self._draining = self._loop.create_task(self._drain())
        else:
            self.exit_status = 128 + sig
            self._traffic.abort()
            self.should_exit = True

    async def _drain(self) -> None:
        self._traffic.drain()
        try:
            async with asyncio.timeout(self._drain_seconds):
                await self._traffic.idle()
        except TimeoutError:
            log(logger, logging.WARNING, "drain time is over", aborted=len(self._traffic.exchanges))
            self._traffic.abort()
        self.should_exit = True
