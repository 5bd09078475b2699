"""`penstock serve` with `server.processes`: one process launches workers and gateway processes, which share a port.

The launching process answers no HTTP. It holds the store and the common answers unless the state is a Redis, so limits
are exact over all gateway processes, and it restarts what dies.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from prometheus_client import CollectorRegistry

from penstock.cache.brokered import answer_handlers
from penstock.cli.autoscaling import autoscalers, running
from penstock.cli.serve import Place, announce, end_at_signals, label_of, launchers_on
from penstock.cli.served_adapters import adapters_at_start
from penstock.core.engine import Task
from penstock.core.errors import Unavailable
from penstock.fleet.build import own_launchers
from penstock.fleet.channel import Channel, Handler
from penstock.fleet.control import FleetControl
from penstock.fleet.metrics import ScalingMetrics
from penstock.fleet.shared import SharedFleet, in_time, launcher_handlers
from penstock.gateway.http.listener import bind
from penstock.observability.merging import merged, snapshot
from penstock.settings import Settings
from penstock.state.brokered import store_handlers
from penstock.state.open import is_shared, open_store

log = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
_ASK_SECONDS = 2.0


class GatewayProcesses:
    """The gateway processes, and what they have in common."""

    def __init__(
        self,
        count: int,
        welcome: dict[str, Any],
        fleets: Mapping[str, SharedFleet],
        handlers: dict[str, Handler],
        own_metrics: CollectorRegistry,
    ) -> None:
        """`welcome` is what each is told first. `fleets` by the name of the model. `own_metrics` are those of the
        launching process."""
        self._count = count
        self._own_metrics = own_metrics
        self._welcome = welcome
        self._fleets = fleets
        self._handlers = {**handlers, **self._shared(handlers["replicas"])}
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._ready: set[Channel] = set()
        self._keepers: list[asyncio.Task[None]] = []
        self._stopping = False
        self.channels: list[Channel] = []
        self.all_ready: asyncio.Future[tuple[dict[str, Task], bool]] = asyncio.get_running_loop().create_future()

    def start(self) -> None:
        self._keepers = [asyncio.create_task(self._keep(number)) for number in range(self._count)]

    async def _keep(self, number: int) -> None:
        while not self._stopping:
            code = await self._run(number)
            if self._stopping:
                return
            if not self.all_ready.done():
                self.all_ready.set_exception(Unavailable(f"gateway process {number} ended with {code} while starting"))
                return
            log.error("gateway process %d ended with exit code %d; starting another", number, code)
            await asyncio.sleep(_RETRY_SECONDS)

    async def _run(self, number: int) -> int:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "penstock.cli.gateway_process", str(theirs.fileno())]
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, pass_fds=(theirs.fileno(),), start_new_session=True
            )
        self._processes[number] = process

        async def hello() -> dict[str, Any]:
            return self._welcome | {"fleets": self._told_of_fleets()}

        async def ready(models: dict[str, Task], open: bool) -> None:
            self._ready.add(channel)
            if len(self._ready) == self._count and not self.all_ready.done():
                self.all_ready.set_result((models, open))

        channel = Channel(ours, {**self._handlers, "hello": hello, "ready": ready})
        self.channels.append(channel)
        try:
            return await process.wait()
        finally:
            self._ready.discard(channel)
            self.channels.remove(channel)
            channel.close()

    def _told_of_fleets(self) -> dict[str, Any]:
        """The replicas there are, and what is known of the model once one has served."""
        return {
            name: {"replicas": [replica.name for replica in fleet.replicas], "info": getattr(fleet, "info", None)}
            for name, fleet in self._fleets.items()
        }

    def end_if_failed(self, starting: asyncio.Task[None]) -> None:
        """Gateways would wait for ever for workers that cannot start."""
        if not starting.cancelled() and (error := starting.exception()) and not self.all_ready.done():
            self.all_ready.set_exception(error)

    def stop(self, sig: signal.Signals) -> None:
        """Pass a signal on: at the first one they drain, at a second one they end at once."""
        self._stopping = True
        for process in self._processes.values():
            if process.returncode is None:
                process.send_signal(sig)

    async def ended(self) -> int:
        """Wait until they have been stopped. Returns the exit status."""
        await asyncio.gather(*self._keepers)
        return max((process.returncode or 0 for process in self._processes.values()), key=abs, default=0)

    def kill(self) -> None:
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()

    async def _ask(self, method: str, *arguments: Any) -> list[Any]:
        """All of them. Those that do not answer are left out."""
        answers = await asyncio.gather(
            *(in_time(channel.call(method, *arguments), _ASK_SECONDS) for channel in self._ready)
        )
        return [answer for answer in answers if answer is not None]

    def _shared(self, launched: Handler) -> dict[str, Handler]:
        """What one process asks for and all of them know. `launched` are the replicas of the launching process."""

        async def metrics(openmetrics: bool) -> bytes:
            snapshots = [snapshot(self._own_metrics), *await self._ask("own_metrics")]
            return await asyncio.to_thread(merged, snapshots, openmetrics)

        async def account(tenant: str, id: str) -> bytes | None:
            return next(iter(await self._ask("own_account", tenant, id)), None)

        async def slowest(tenant: str, limit: int) -> list[bytes]:
            found = [one for answer in await self._ask("own_slowest", tenant, limit) for one in answer]
            return [body for _, body in heapq.nlargest(limit, found, key=lambda one: one[0])]

        async def replicas() -> list[Any]:
            """Those launched here, and workers on other machines and upstreams as one of the processes sees them."""
            return [*await launched(), *next(iter(await self._ask("own_replicas")), [])]

        async def flush() -> None:
            await self._ask("own_flush")

        return {"metrics": metrics, "account": account, "slowest": slowest, "replicas": replicas, "flush": flush}


async def serve_in_processes(settings: Settings, values: dict[str, Any], on: Place) -> int:
    """`values` are the settings as a file holds them, for the gateway processes."""
    server = settings.server
    reserved = bind(server.host, server.port, shared=True)
    host, port = reserved.getsockname()[:2]
    fleets = {
        name: SharedFleet(label_of(name, config), config.routing, config.failover, config.standby)
        for name, config in settings.served.items()
    }
    configs = {fleets[name].model: config for name, config in settings.served.items()}
    by_label = {fleet.model: fleet for fleet in fleets.values()}
    end_at_signals(list(fleets.values()))
    async with AsyncExitStack() as stack:
        new_launcher = await stack.enter_async_context(launchers_on(on, settings))
        control = FleetControl(by_label, configs, server.logs, new_launcher)
        stack.callback(reserved.close)
        own_store = is_shared(settings.state)
        handlers = launcher_handlers(by_label, control)
        if not own_store:
            handlers |= store_handlers(await stack.enter_async_context(open_store(settings.state)))
            handlers |= answer_handlers(settings.cache.memory_mib)
        adapters = await adapters_at_start(settings)
        welcome = {"settings": values, "port": port, "own_store": own_store, "adapters": adapters}
        control.autoscalers = autoscalers(settings, fleets, control)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(ScalingMetrics(by_label.values(), control.autoscalers.values()))
        gateways = GatewayProcesses(server.processes, welcome, by_label, handlers, registry)
        for name, config in settings.served.items():
            fleet = fleets[name]
            fleet.gateways = lambda: gateways.channels
            stack.push_async_callback(fleet.stop)
            checkpoint = config.model or name
            own = own_launchers(checkpoint, config, server.logs, new_launcher)
            if own:
                starting = asyncio.create_task(fleet.start(own))
                starting.add_done_callback(gateways.end_if_failed)
                stack.callback(starting.cancel)
        await asyncio.sleep(0)
        stack.callback(gateways.kill)
        gateways.start()
        models, open = await gateways.all_ready
        for sig in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(sig, gateways.stop, sig)
        await stack.enter_async_context(running(control.autoscalers.values()))
        announce(host, port, models, open=open, tls=server.tls is not None)
        return await gateways.ended()
