"""`penstock serve` with several gateways: one process launches workers and gateway processes, here and on Ray nodes.

Those of a machine share a port (`server.processes`). The launching process answers no HTTP. It holds the store and the
common answers unless the state is a Redis, so limits are exact over all gateway processes, and it restarts what dies.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from functools import partial
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from penstock.cache.brokered import answer_handlers
from penstock.cli.autoscaling import autoscalers, running
from penstock.cli.checkpoints import label_of
from penstock.cli.serve import Place, announce, end_at_signals, launchers_on, url_of
from penstock.cli.served_adapters import adapters_at_start
from penstock.core.engine import Task
from penstock.core.errors import PenstockError, StartupError
from penstock.core.machine import ending_signals
from penstock.fleet.build import own_launchers
from penstock.fleet.channel import Channel, Handler
from penstock.fleet.control import FleetControl
from penstock.fleet.gateways import Gateway, GatewayLauncher, GatewayStart, Heartbeats, LocalGatewayLauncher
from penstock.fleet.metrics import ScalingMetrics
from penstock.fleet.ray.gateways import RayGateways
from penstock.fleet.ray.launcher import RayLaunchers
from penstock.fleet.shared import SharedFleet, in_time, launcher_handlers
from penstock.gateway.http.listener import bind
from penstock.observability.merging import merged, retired, snapshot
from penstock.observability.process_metrics import ProcessMetrics
from penstock.settings import Settings
from penstock.state.brokered import store_handlers
from penstock.state.open import is_shared, open_store

log = logging.getLogger(__name__)

Lent = Callable[[], AbstractContextManager[Mapping[str, Handler]]]

_RETRY_SECONDS = 1.0
_LAST_RETRY_SECONDS = 30.0
_END_SECONDS = 10.0  # beyond the time that requests have to finish
_ASK_SECONDS = 2.0


def nothing_lent() -> AbstractContextManager[Mapping[str, Handler]]:
    """The gateway processes reach the store on their own."""
    return nullcontext({})


class Gateways:
    """The gateway processes, here and on other nodes, and what they have in common."""

    def __init__(
        self,
        launcher: GatewayLauncher,
        count: int,
        url: Callable[[str, int], str],
        fleets: Mapping[str, SharedFleet],
        handlers: dict[str, Handler],
        lent: Lent,
        own_metrics: CollectorRegistry,
    ) -> None:
        """`count` are those of this machine, `url` makes the address of host and port. `fleets` by the name of the
        model. `lent` makes the handlers of one process, until that ends. `own_metrics` are those of the launching
        process."""
        self._lent = lent
        self._own_metrics = own_metrics
        self._url = url
        self._fleets = fleets
        self._handlers = {**handlers, **self._shared(handlers["replicas"]), "hello": self._told_of_fleets}
        self._here = [Gateway(f"gateway-{number}", launcher) for number in range(count)]
        self._elsewhere: list[Gateway] = []
        self._keepers: dict[asyncio.Task[int], Gateway] = {}
        self._ready: dict[Gateway, Channel] = {}
        self._metrics: dict[Channel, bytes] = {}  # snapshots, as they were read last
        self._retired = retired([])  # what processes that have gone had counted by then
        self._stopping = False
        self.channels: list[Channel] = []
        self.all_ready: asyncio.Future[tuple[dict[str, Task], bool]] = asyncio.get_running_loop().create_future()

    def start(self) -> None:
        self._keepers |= {asyncio.create_task(self._keep(gateway)): gateway for gateway in self._here}

    def start_elsewhere(self, launcher: GatewayLauncher, count: int) -> None:
        """Nobody waits for them: what keeps one from starting is logged, shown and tried again."""
        first = len(self._here)
        self._elsewhere = [Gateway(f"gateway-{number}", launcher) for number in range(first, first + count)]
        self._keepers |= {asyncio.create_task(self._keep(gateway)): gateway for gateway in self._elsewhere}

    async def _keep(self, gateway: Gateway) -> int:
        """Returns the exit code of its last process, 0 if that had nothing to lose yet when it was told to stop."""
        delay = _RETRY_SECONDS
        while True:
            try:
                code = await self._run(gateway)
            except (PenstockError, OSError) as error:
                code, gateway.detail = 1, str(error)
            if self._stopping:
                return code if gateway.state == "ready" else 0
            if gateway in self._here and not self.all_ready.done():
                self.all_ready.set_exception(StartupError(gateway.detail or f"{gateway.name} ended with {code}"))
                return code
            delay = _RETRY_SECONDS if gateway.state == "ready" else min(_LAST_RETRY_SECONDS, 2 * delay)
            reason = gateway.detail or f"{gateway.view().place} ended" + (f" with exit code {code}" if code else "")
            log.error("%s was lost: %s; next try in %.0f s", gateway.name, reason, delay)
            gateway.become("lost", reason)
            gateway.restarts += 1
            gateway.launched = gateway.process = None
            await asyncio.sleep(delay)
            gateway.become("starting", reason)

    async def _run(self, gateway: Gateway) -> int:
        """Returns its exit code. What it has failed for is its detail."""
        launched = gateway.launched = await gateway.launcher.launch()
        gateway.detail = ""

        async def failed(message: str) -> None:
            gateway.detail = message

        async def ready(models: dict[str, Task], open: bool, port: int, process: int) -> None:
            gateway.url, gateway.process = self._url(launched.host, port), process
            gateway.become("ready")
            self._ready[gateway] = channel
            if gateway in self._elsewhere:
                log.info("%s serves at %s", gateway.name, gateway.url)
            if all(one in self._ready for one in self._here) and not self.all_ready.done():
                self.all_ready.set_result((models, open))

        async def end_if_silent() -> None:
            gateway.detail = await heartbeats.until_silent()
            launched.kill()
            channel.close()

        heartbeats = Heartbeats()
        own: dict[str, Handler] = {"failed": failed, "ready": ready, "heartbeat": heartbeats.heard}
        with self._lent() as lent:
            channel = Channel(launched.connection, {**self._handlers, **lent, **own})
            self.channels.append(channel)
            watching = asyncio.create_task(end_if_silent())
            try:
                await channel.closed
            finally:
                watching.cancel()
                self._ready.pop(gateway, None)
                self._retired = retired([self._retired, self._metrics.pop(channel, retired([]))])
                self.channels.remove(channel)
                gateway.url = ""
        return await launched.end()

    async def _told_of_fleets(self) -> dict[str, Any]:
        """The replicas there are, and what is known of the model once one has served."""
        return {
            name: {"replicas": [replica.name for replica in fleet.replicas], "info": getattr(fleet, "info", None)}
            for name, fleet in self._fleets.items()
        }

    def end_if_failed(self, starting: asyncio.Task[str]) -> None:
        """Gateways would wait for ever for workers that cannot start."""
        if not starting.cancelled() and (error := starting.exception()) and not self.all_ready.done():
            self.all_ready.set_exception(error)

    def stop(self, sig: signal.Signals, drain_seconds: float) -> None:
        """Pass a signal on: at the first one they drain, at a second one they end at once. One that does not is left
        alone after a while."""
        self._stopping = True
        for channel in self.channels:
            channel.tell("signal", int(sig))
        for keeper, gateway in self._keepers.items():
            if gateway.launched is None:
                keeper.cancel()
        asyncio.get_running_loop().call_later(drain_seconds + _END_SECONDS, self._leave)

    def _leave(self) -> None:
        for channel in list(self.channels):
            channel.close()

    async def ended(self) -> int:
        """Wait until they have been stopped. Returns the exit status."""
        done, _ = await asyncio.wait(self._keepers)
        return max((keeper.result() for keeper in done if not keeper.cancelled()), key=abs, default=0)

    def kill(self) -> None:
        for gateway in self._keepers.values():
            if gateway.launched is not None:
                gateway.launched.kill()

    async def _ask(self, method: str, *arguments: Any) -> list[Any]:
        """All of them. Those that do not answer are left out."""
        answers = await asyncio.gather(
            *(in_time(channel.call(method, *arguments), _ASK_SECONDS) for channel in self._ready.values())
        )
        return [answer for answer in answers if answer is not None]

    async def _read_metrics(self, channel: Channel) -> None:
        """What one that does not answer said before stays: its counters must not be missing."""
        found = await in_time(channel.call("own_metrics"), _ASK_SECONDS)
        if found is not None and not channel.closed.done():
            self._metrics[channel] = found

    def _shared(self, launched: Handler) -> dict[str, Handler]:
        """What one process asks for and all of them know. `launched` are the replicas of the launching process."""

        async def metrics(openmetrics: bool) -> bytes:
            await asyncio.gather(*map(self._read_metrics, self._ready.values()))
            snapshots = [snapshot(self._own_metrics), *self._metrics.values(), self._retired]
            return await asyncio.to_thread(merged, snapshots, openmetrics)

        async def account(tenant: str, id: str) -> bytes | None:
            return next(iter(await self._ask("own_account", tenant, id)), None)

        async def slowest(tenant: str, limit: int) -> list[bytes]:
            found = [one for answer in await self._ask("own_slowest", tenant, limit) for one in answer]
            return [body for _, body in heapq.nlargest(limit, found, key=lambda one: one[0])]

        async def replicas() -> list[Any]:
            """Those launched here, and workers on other machines and upstreams as one of the processes sees them."""
            return [*await launched(), *next(iter(await self._ask("own_replicas")), [])]

        async def gateways() -> list[Any]:
            return [gateway.view() for gateway in (*self._here, *self._elsewhere)]

        async def flush() -> None:
            await self._ask("own_flush")

        return {
            "metrics": metrics,
            "account": account,
            "slowest": slowest,
            "replicas": replicas,
            "gateways": gateways,
            "flush": flush,
        }


async def serve_in_processes(settings: Settings, values: dict[str, Any], on: Place) -> int:
    """`values` are the settings as a file holds them, for the gateway processes."""
    server = settings.server
    if server.port:
        bind(server.host, server.port).close()  # raises where another server listens: a shared address would join it
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
        launchers = await stack.enter_async_context(launchers_on(on, settings))
        control = FleetControl(by_label, configs, server.logs, launchers.replica)
        stack.callback(reserved.close)
        start = await _gateway_start(settings, values, port, launchers.secret)
        handlers = launcher_handlers(by_label, control)
        lent: Lent = nothing_lent
        if not start.own_store:
            lent = partial(store_handlers, await stack.enter_async_context(open_store(settings.state)))
            handlers |= answer_handlers(settings.cache.memory_mib)
        control.autoscalers = autoscalers(settings, fleets, control)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(ProcessMetrics())
        registry.register(ScalingMetrics(by_label.values(), control.autoscalers.values()))
        url = partial(url_of, tls=server.tls is not None)
        here = LocalGatewayLauncher(start, host)
        gateways = Gateways(here, server.processes, url, by_label, handlers, lent, registry)
        for name, config in settings.served.items():
            fleet = fleets[name]
            fleet.gateways = lambda: gateways.channels
            stack.push_async_callback(fleet.stop)
            own = own_launchers(config.model or name, config, server.logs, launchers.replica)
            if own:
                starting = asyncio.create_task(fleet.start(own))
                starting.add_done_callback(gateways.end_if_failed)
                stack.callback(starting.cancel)
        await asyncio.sleep(0)
        stack.callback(gateways.kill)
        gateways.start()
        models, open = await gateways.all_ready
        for sig in ending_signals():
            asyncio.get_running_loop().add_signal_handler(sig, gateways.stop, sig, server.drain_seconds)
        await stack.enter_async_context(running(control.autoscalers.values()))
        announce(server, host, port, models, open=open)
        if isinstance(launchers, RayLaunchers):
            gateways.start_elsewhere(_ray_gateways(settings, launchers, start), _elsewhere(settings))
        return await gateways.ended()


async def _gateway_start(settings: Settings, values: dict[str, Any], port: int, secret: str) -> GatewayStart:
    return GatewayStart(
        settings=values,
        folder=os.getcwd(),
        port=port,
        shares_port=True,
        own_store=is_shared(settings.state),
        adapters=list(await adapters_at_start(settings)),
        secret=secret,
    )


def _ray_gateways(settings: Settings, launchers: RayLaunchers, start: GatewayStart) -> RayGateways:
    """On their nodes they share the port among themselves alone: a port that is taken is to be noticed."""
    server = settings.server
    there = msgspec.structs.replace(start, port=server.port, shares_port=server.processes > 1, elsewhere=True)
    return RayGateways(launchers.cluster, settings.ray, there, server.processes)


def _elsewhere(settings: Settings) -> int:
    """Gateway processes on other nodes."""
    return (settings.ray.gateways - 1) * settings.server.processes
