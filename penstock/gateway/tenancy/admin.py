"""/admin: tenants, keys and spend, for whoever has an admin key."""

from __future__ import annotations

import time
from typing import Any, Literal
from urllib.parse import parse_qsl

import msgspec

from penstock.core.errors import InvalidRequest, NotFound, StartupError
from penstock.gateway.api.serving import Serving, encode_json
from penstock.gateway.errors import require
from penstock.gateway.http.request import Request
from penstock.gateway.http.response import Response
from penstock.gateway.settings import check_class, tenant_config
from penstock.gateway.tenancy import keys, tenants
from penstock.gateway.tenancy.budgets import COLUMNS, as_csv, day_range, rows
from penstock.gateway.tenancy.keys import KeyRecord
from penstock.gateway.tenancy.tenants import Directory, Tenant, given_fields

_CSV = (b"content-type", b"text/csv; charset=utf-8")


class NewKey(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Either `tenant` or `admin`."""

    tenant: str | None = None
    admin: bool = False
    note: str = ""


class KeyView(msgspec.Struct, kw_only=True):
    id: str
    prefix: str
    tenant: str | None
    admin: bool
    created: int
    note: str
    key: str | msgspec.UnsetType = msgspec.UNSET  # only in the answer that creates it


class List(msgspec.Struct):
    data: list[Any]
    object: Literal["list"] = "list"


class Deleted(msgspec.Struct):
    id: str
    deleted: bool = True


_new_key_decoder = msgspec.json.Decoder(NewKey)
_fields_decoder = msgspec.json.Decoder(dict[str, Any])


class AdminEndpoints:
    def __init__(self, serving: Serving, directory: Directory) -> None:
        self.serving = serving
        self.directory = directory
        self.store = directory.store

    async def tenants(self, request: Request, response: Response, tenant: Tenant) -> None:
        found = [self._view(tenant) for tenant in self.directory.tenants.values()]
        await response.send(200, encode_json(List(found)))

    def _view(self, tenant: Tenant) -> dict[str, Any]:
        source = "settings" if tenant.name in self.directory.settings.tenants else "store"
        return {"name": tenant.name, "source": source, **given_fields(tenant)}

    async def put_tenant(self, request: Request, response: Response, tenant: Tenant) -> None:
        name = self._changeable(request)
        given = await self.serving.read(request, _fields_decoder)
        try:
            config = tenant_config(name, given, {})
            check_class("default_class", config.default_class, self.directory.settings.classes)
        except StartupError as error:
            raise InvalidRequest(error.message, param=error.param) from None
        await self.store.put(tenants.KIND, name, encode_json(given_fields(config)).decode())
        await self.directory.reload()
        await response.send(200, encode_json(self._view(self.directory.tenants[name])))

    async def delete_tenant(self, request: Request, response: Response, tenant: Tenant) -> None:
        """And all its keys."""
        name = self._changeable(request)
        for record in await keys.stored_keys(self.store):
            if record.tenant == name:
                await self.store.delete(keys.KIND, record.id)
        found = await self.store.delete(tenants.KIND, name)
        await self.directory.reload()
        if not found:
            raise NotFound(f"no tenant {name!r}", param="name", code="tenant_not_found")
        await response.send(200, encode_json(Deleted(name)))

    def _changeable(self, request: Request) -> str:
        name = request.path_params["name"]
        if name in self.directory.settings.tenants:
            raise InvalidRequest(f"tenant {name!r} is in the settings file: change it there", param="name")
        return name

    async def keys(self, request: Request, response: Response, tenant: Tenant) -> None:
        found = [_key_view(record) for record in await keys.stored_keys(self.store)]
        await response.send(200, encode_json(List(found)))

    async def create_key(self, request: Request, response: Response, tenant: Tenant) -> None:
        body = await self.serving.read(request, _new_key_decoder)
        require(body.admin != bool(body.tenant), "tenant", "must be given, or admin be true, but not both")
        known = ", ".join(self.directory.tenants) or "those of /admin/tenants, where there is none yet"
        require(body.admin or body.tenant in self.directory.tenants, "tenant", f"must be one of {known}")
        require(len(body.note) <= 200, "note", "must be at most 200 characters")
        key, record = await keys.create_key(self.store, body.tenant or "", body.note)
        await self.directory.reload()
        view = _key_view(record)
        view.key = key
        await response.send(201, encode_json(view))

    async def revoke_key(self, request: Request, response: Response, tenant: Tenant) -> None:
        id = request.path_params["id"]
        found = await self.store.delete(keys.KIND, id)
        await self.directory.reload()
        if not found:
            raise NotFound("no key has this id", param="id", code="key_not_found")
        await response.send(200, encode_json(Deleted(id)))

    async def usage(self, request: Request, response: Response, tenant: Tenant) -> None:
        query = dict(parse_qsl(request.query.decode("latin-1"), keep_blank_values=True))
        today = time.strftime("%Y-%m-%d", time.gmtime())
        since, until = query.get("since", today[:7] + "-01"), query.get("until", today)
        found = rows(await self.store.usage(*day_range(since, until)), query.get("tenant"))
        if query.get("format") == "csv":
            await response.send(200, as_csv(found).encode(), _CSV)
        else:
            await response.send(200, encode_json(List([dict(zip(COLUMNS, row, strict=True)) for row in found])))


def _key_view(record: KeyRecord) -> KeyView:
    return KeyView(
        id=record.id,
        prefix=record.prefix,
        tenant=record.tenant or None,
        admin=record.admin,
        created=record.created,
        note=record.note,
    )
