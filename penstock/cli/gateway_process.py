"""One of several gateway processes: `python -m penstock.cli.gateway_process CHANNEL_FD`, started by `penstock serve`.

The launching process (`cli/processes.py`) tells it the settings and gives it sockets to the workers, or addresses. It
ends when that process does; on another node it drains first.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any

import msgspec
import uvloop

from penstock.cache.brokered import BrokeredTier
from penstock.cache.build import AnswerCache
from penstock.cli.checkpoints import for_others, label_of
from penstock.cli.serve import SharedParts, serve_fleets
from penstock.core.engine import EngineInfo, Task
from penstock.core.errors import PenstockError
from penstock.core.machine import raise_file_limit
from penstock.fleet.build import elsewhere, local_launcher, start
from penstock.fleet.channel import Channel, Handler
from penstock.fleet.control import FleetControl
from penstock.fleet.fleet import Fleet
from penstock.fleet.gateways import GatewayStart, read_start, send_heartbeats
from penstock.fleet.shared import BrokeredLauncher, RemoteControl, gateway_handlers
from penstock.gateway.api.adapters import NamedAdapter
from penstock.gateway.edge import Edge
from penstock.gateway.http.listener import bind
from penstock.observability.logging import configure_logging
from penstock.observability.merging import snapshot
from penstock.settings import Settings, settings_from_mapping
from penstock.state.brokered import BrokeredStore


class OtherProcesses:
    """Asked by way of the launching process."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def metrics(self, openmetrics: bool) -> bytes | None:
        found: bytes | None = await self._channel.call("metrics", openmetrics)
        return found

    async def account(self, tenant: str, id: str) -> bytes | None:
        found: bytes | None = await self._channel.call("account", tenant, id)
        return found

    async def slowest(self, tenant: str, limit: int) -> list[bytes] | None:
        found: list[bytes] = await self._channel.call("slowest", tenant, limit)
        return found

    async def flush(self) -> bool:
        await self._channel.call("flush")
        return True


class Signals:
    """Those that this process sends to itself, to drain as others do at theirs."""

    def __init__(self) -> None:
        self.sent = False

    async def send(self, number: int) -> None:
        self.sent = True
        os.kill(os.getpid(), number)

    def drain(self) -> None:
        """Once: a second signal would end what is in flight."""
        if not self.sent:
            self.sent = True
            os.kill(os.getpid(), signal.SIGTERM)


async def serve(connection: socket.socket, start: GatewayStart) -> int:
    fleets: dict[str, Fleet] = {}
    signals = Signals()
    handlers = {**gateway_handlers(lambda: channel, fleets, start.secret), "signal": signals.send}
    channel = Channel(connection, handlers)
    if start.elsewhere:
        loop = asyncio.get_running_loop()
        channel.closed.add_done_callback(lambda _: signals.drain())
        loop.add_reader(sys.stdin, _drain_at_end_of_input, loop, signals)
    try:
        return await _serve(channel, handlers, fleets, start)
    except PenstockError as error:
        channel.tell("failed", error.message)
        return 1
    finally:
        signals.sent = True
        channel.close()


def _drain_at_end_of_input(loop: asyncio.AbstractEventLoop, signals: Signals) -> None:
    """The Ray actor that this process belongs to has gone."""
    loop.remove_reader(sys.stdin)
    signals.drain()


async def _serve(channel: Channel, handlers: dict[str, Handler], fleets: dict[str, Fleet], start: GatewayStart) -> int:
    settings = settings_from_mapping(start.settings)
    configure_logging(settings.server.logs)
    listener = bind(settings.server.host, start.port, shared=start.shares_port)
    told: dict[str, Any] = await channel.call("hello")
    by_name = {
        name: Fleet(label_of(name, config), config.routing, config.failover) for name, config in settings.served.items()
    }
    fleets.update({fleet.model: fleet for fleet in by_name.values()})
    async with AsyncExitStack() as stack:
        brokered = partial(BrokeredLauncher, channel, secret=start.secret)
        starts = [
            asyncio.create_task(_start(fleet, settings, name, channel, brokered, told[fleet.model]))
            for name, fleet in by_name.items()
        ]
        for starting in starts:
            stack.callback(starting.cancel)
            starting.add_done_callback(lambda done: done.cancelled() or done.exception())  # who awaits it may be gone
        for fleet in by_name.values():
            stack.push_async_callback(fleet.stop)

        def on_ready(app: Edge, own: FleetControl, cache: AnswerCache, models: dict[str, Task], open: bool) -> None:
            handlers.update({**_own(app, own), "own_flush": cache.flush})
            channel.tell("ready", models, open, listener.getsockname()[1], os.getpid())
            heartbeats = asyncio.create_task(send_heartbeats(channel))
            channel.closed.add_done_callback(lambda _: heartbeats.cancel())

        store, answers = (None, None) if start.own_store else (BrokeredStore(channel), BrokeredTier(channel))
        adapters = msgspec.convert(start.adapters, list[NamedAdapter])
        shared = SharedParts(store, answers, RemoteControl(channel), OtherProcesses(channel), adapters, on_ready)
        serving = asyncio.create_task(serve_fleets(settings, by_name, starts, listener, stack, local_launcher, shared))
        if not start.elsewhere:
            channel.closed.add_done_callback(lambda _: serving.cancel())  # the workers go with the launching process
        try:
            return await serving
        except asyncio.CancelledError:
            return 1


async def _start(
    fleet: Fleet,
    settings: Settings,
    name: str,
    channel: Channel,
    brokered: Callable[[str], BrokeredLauncher],
    told: dict[str, Any],
) -> str:
    config, replicas = settings.served[name], told["replicas"]
    if config.autoscale is not None and config.autoscale.min_replicas == 0:
        fleet.wake = lambda: channel.tell("wake", fleet.model)
    if told["info"] is not None:
        fleet.info = msgspec.convert(told["info"], EngineInfo)
    tokenizer = expected = None
    if config.upstreams or config.workers:
        tokenizer, expected = await asyncio.to_thread(for_others, config.model or name, config)
    launchers = [*map(brokered, replicas), *elsewhere(config, tokenizer)]
    return await start(fleet, launchers, config, settings.server.drain_seconds, replicas, expected)


def _own(app: Edge, control: FleetControl) -> dict[str, Handler]:
    """What other processes may ask this one for."""

    async def own_metrics() -> bytes:
        return snapshot(app.metrics.registry)

    async def own_account(tenant: str, id: str) -> bytes | None:
        return app.requests.find(tenant, id)

    async def own_slowest(tenant: str, limit: int) -> list[tuple[float, bytes]]:
        return app.requests.timed(tenant, limit)

    async def own_replicas() -> list[Any]:
        return [view for view in await control.replicas() if view.place != BrokeredLauncher.place]

    return {
        "own_metrics": own_metrics,
        "own_account": own_account,
        "own_slowest": own_slowest,
        "own_replicas": own_replicas,
    }


def main() -> int:
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    start = read_start(sys.stdin.buffer)
    raise_file_limit()  # on another node it is Ray's
    with suppress(OSError):
        os.chdir(start.folder)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(connection, start))


if __name__ == "__main__":
    sys.exit(main())
