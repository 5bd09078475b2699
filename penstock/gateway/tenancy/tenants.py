"""Who a request belongs to: tenants of the settings and of the store, and the keys that lead to them."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.core.errors import PenstockError, StartupError
from penstock.gateway.http.origins import is_loopback
from penstock.gateway.settings import GatewaySettings, ServerConfig, TenantConfig, tenant_config
from penstock.gateway.tenancy import keys
from penstock.gateway.tenancy.keys import KeyRecord
from penstock.state.store import BILLION, Store

logger = logging.getLogger("penstock.gateway")

KIND = "tenant"  # of records in the store
RELOAD_SECONDS = 0.5  # after which a revoked key is refused, at the latest
SOONEST_LOOK_SECONDS = 0.05  # between two looks at the store for keys that are unknown here
LOOKS_PER_BUDGET = 20  # of those looks at the store, one in so many asks what tenants have spent


@dataclass(frozen=True, slots=True)
class Tenant(TenantConfig):
    """A name and what it may use. The nameless one stands for everybody where no tenant is configured."""

    name: str = ""


OPEN = Tenant()


def named(name: str, config: TenantConfig) -> Tenant:
    return Tenant(name=name, **{f.name: getattr(config, f.name) for f in dataclasses.fields(TenantConfig)})


def given_fields(config: TenantConfig) -> dict[str, Any]:
    """Those that differ from the defaults."""
    empty = TenantConfig()
    return {
        f.name: v for f in dataclasses.fields(TenantConfig) if (v := getattr(config, f.name)) != getattr(empty, f.name)
    }


def _trusts_everybody(server: ServerConfig) -> bool:
    return server.open or is_loopback(server.host)


def check_host(server: ServerConfig, *, some_tenant: bool) -> None:
    """Raise StartupError where others can connect, and would need no key since no tenant has one."""
    if not some_tenant and not _trusts_everybody(server):
        raise StartupError(
            f"server.host is {server.host}, which others can reach, but no tenant is configured: create a key with "
            "'penstock keys create NAME', add tenants to the settings, or say --open to serve anybody",
            param="server.host",
        )


class Directory:
    """Tenants and keys as of the last reload. Those in the settings cannot be changed while the server runs."""

    def __init__(self, settings: GatewaySettings, store: Store) -> None:
        self.settings = settings
        self.store = store
        self.keys: dict[str, KeyRecord] = {}
        self.tenants: dict[str, Tenant] = {}
        self.public = named("", settings.tenant_defaults)
        self._trusts_everybody = _trusts_everybody(settings.server)
        self._was_closed = settings.jwt is not None
        self._version = -1
        self.reachable = True  # the store, when it was last asked
        self._next_look: asyncio.Task[None] | None = None
        self._last_look = -SOONEST_LOOK_SECONDS  # when it began
        self.spent: dict[tuple[str, str], float] = {}  # share of budgets, by (tenant, "day" or "month")
        self._set_tenants({})

    @property
    def open(self) -> bool:
        """Whether requests need no key: on a loopback address, until there has been a tenant."""
        return self._trusts_everybody and not self._was_closed

    def check_open(self) -> None:
        """Refuse to serve the whole network by mistake."""
        check_host(self.settings.server, some_tenant=bool(self.tenants))
        if self.open:
            host = self.settings.server.host
            logger.warning("open mode: no tenant is configured, so requests to %s need no key", host)

    async def reload(self) -> bool:
        """Whether anything has changed."""
        version = await self.store.version()
        if version == self._version:
            return False
        found = await keys.stored_keys(self.store)
        self._set_tenants(await self.store.records(KIND))
        self.keys = {record.id: record for record in found if record.admin or record.tenant in self.tenants}
        self._version = version
        return True

    async def find_key(self, presented: bytes) -> KeyRecord | None:
        """One that was made after the last look at the store is found by another look, which all that wait share."""
        record = keys.find_key(self.keys, presented)
        if record is not None or not keys.looks_like_key(presented):
            return record
        if self._next_look is None:
            self._next_look = asyncio.create_task(self._look_again())
        await asyncio.shield(self._next_look)
        return keys.find_key(self.keys, presented)

    async def _look_again(self) -> None:
        await asyncio.sleep(self._last_look + SOONEST_LOOK_SECONDS - time.monotonic())
        self._last_look, self._next_look = time.monotonic(), None  # whoever comes from now on needs another one
        with suppress(PenstockError, msgspec.MsgspecError):  # `watch` reports it
            await self.reload()

    def _set_tenants(self, stored: Mapping[str, str]) -> None:
        defaults = given_fields(self.settings.tenant_defaults)
        from_store = {name: tenant_config(name, msgspec.json.decode(value), defaults) for name, value in stored.items()}
        self.tenants = {
            name: named(name, config) for name, config in (from_store | dict(self.settings.tenants)).items()
        }
        self._was_closed = self._was_closed or bool(self.tenants)

    async def watch(self) -> None:
        """Reload whatever another process changes. Without the store, what is known stays valid."""
        for look in itertools.count():
            await asyncio.sleep(RELOAD_SECONDS)
            try:
                if await self.reload():
                    logger.info("reloaded %d tenants and %d keys", len(self.tenants), len(self.keys))
                if look % LOOKS_PER_BUDGET == 0:
                    await self.read_spent()
                self.reachable = True
            except (PenstockError, msgspec.MsgspecError) as error:
                if self.reachable:
                    logger.warning("cannot reload keys: %s", error)
                self.reachable = False

    async def read_spent(self) -> None:
        """How much of their budgets tenants have spent, at all gateways together."""
        budgets = {
            (tenant.name, period): budget
            for tenant in self.tenants.values()
            for period, budget in (("day", tenant.budget_per_day), ("month", tenant.budget_per_month))
            if budget
        }
        if not budgets:
            self.spent = {}
            return
        today = datetime.now(UTC).date().isoformat()
        usage = await self.store.usage(f"{today[:7]}-01", today)
        self.spent = {
            (name, period): sum(
                used.cost
                for key, used in usage.items()
                if key.tenant == name and (period == "month" or key.day == today)
            )
            / BILLION
            / budget
            for (name, period), budget in budgets.items()
        }


class DirectoryMetrics(Collector):
    """What the store says of tenants, as of the last look at it."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "penstock_state_up", "0: the state that gateways share does not answer", int(self._directory.reachable)
        )
        spent = GaugeMetricFamily(
            "penstock_budget_spent_ratio", "Share of a budget that is spent, 0 to 1", labels=["tenant", "period"]
        )
        for names, share in sorted(self._directory.spent.items()):
            spent.add_metric(names, share)
        yield spent


@asynccontextmanager
async def open_directory(settings: GatewaySettings, store: Store) -> AsyncIterator[Directory]:
    directory = Directory(settings, store)
    await directory.reload()
    directory.check_open()
    watching = asyncio.create_task(directory.watch())
    try:
        yield directory
    finally:
        watching.cancel()
