"""Who a request belongs to: tenants of the settings and of the store, and the keys that lead to them."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.core.errors import PenstockError, StartupError
from penstock.gateway.http.origins import is_loopback
from penstock.gateway.settings import GatewaySettings, TenantConfig, tenant_config
from penstock.gateway.tenancy import keys
from penstock.gateway.tenancy.keys import KeyRecord
from penstock.state.store import Store

logger = logging.getLogger("penstock.gateway")

KIND = "tenant"  # of records in the store
RELOAD_SECONDS = 0.5  # after which a revoked key is refused, at the latest


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


class Directory:
    """Tenants and keys as of the last reload. Those in the settings cannot be changed while the server runs."""

    def __init__(self, settings: GatewaySettings, store: Store) -> None:
        self.settings = settings
        self.store = store
        self.keys: dict[str, KeyRecord] = {}
        self.tenants: dict[str, Tenant] = {}
        self.public = named("", settings.tenant_defaults)
        self._trusts_everybody = settings.server.open or is_loopback(settings.server.host)
        self._was_closed = settings.jwt is not None
        self._version = -1
        self._set_tenants({})

    @property
    def open(self) -> bool:
        """Whether requests need no key: on a loopback address, until there has been a tenant."""
        return self._trusts_everybody and not self._was_closed

    def check_open(self) -> None:
        """Refuse to serve the whole network by mistake."""
        host = self.settings.server.host
        if not self.tenants and not self._trusts_everybody:
            raise StartupError(
                f"host is {host}, which others can reach, but no tenant is configured: create a key with "
                "'penstock keys create NAME', add tenants to the settings, or say --open to serve anybody",
                param="host",
            )
        if self.open:
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

    def _set_tenants(self, stored: Mapping[str, str]) -> None:
        defaults = given_fields(self.settings.tenant_defaults)
        from_store = {name: tenant_config(name, msgspec.json.decode(value), defaults) for name, value in stored.items()}
        self.tenants = {
            name: named(name, config) for name, config in (from_store | dict(self.settings.tenants)).items()
        }
        self._was_closed = self._was_closed or bool(self.tenants)

    async def watch(self) -> None:
        """Reload whatever another process changes. Without the store, what is known stays valid."""
        failing = False
        while True:
            await asyncio.sleep(RELOAD_SECONDS)
            try:
                if await self.reload():
                    logger.info("reloaded %d tenants and %d keys", len(self.tenants), len(self.keys))
                failing = False
            except (PenstockError, msgspec.MsgspecError) as error:
                if not failing:
                    logger.warning("cannot reload keys: %s", error)
                failing = True


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
