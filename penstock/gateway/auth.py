"""The door: a bearer token in, a tenant out. No message and no log line ever holds a token."""

from __future__ import annotations

import re
from typing import Protocol

from penstock.core.errors import Forbidden, Unauthorized
from penstock.gateway.exchange import Exchange
from penstock.gateway.keys import find_key, looks_like_key
from penstock.gateway.tenants import Directory, Tenant

_BEARER = re.compile(rb"bearer +([!-~]{1,8192}) *", re.IGNORECASE)


class Verifier(Protocol):
    async def tenant(self, token: bytes) -> str:
        """The name in a valid token; raises otherwise."""
        ...


class Door:
    def __init__(self, directory: Directory, verifier: Verifier | None) -> None:
        self.directory = directory
        self.verifier = verifier

    async def enter(self, exchange: Exchange) -> None:
        """Find the tenant of a request, or refuse it."""
        if self.directory.open:
            exchange.tenant = self.directory.anybody
        else:
            exchange.tenant = await self._tenant(bearer(exchange))

    async def _tenant(self, token: bytes) -> Tenant:
        directory = self.directory
        if looks_like_key(token):
            record = find_key(directory.keys, token)
            if record is None:
                raise Unauthorized("the API key is not valid: it is unknown or was revoked")
            if record.admin:
                raise Forbidden("an admin key is for /admin only; use a tenant's key here", code="admin_key")
            return directory.tenants[record.tenant]
        if self.verifier is None:
            raise Unauthorized("the API key is not valid: keys begin with psk-")
        tenant = directory.tenants.get(await self.verifier.tenant(token))
        if tenant is None:
            raise Forbidden("the token is valid, but the tenant it names is not configured here", code="unknown_tenant")
        return tenant

    async def enter_admin(self, exchange: Exchange) -> None:
        """Also where tenants need no key."""
        record = find_key(self.directory.keys, bearer(exchange))
        if record is None:
            raise Unauthorized("this needs an admin key: 'penstock keys create --admin' makes one")
        if not record.admin:
            raise Forbidden("a tenant's key does not open this; use an admin key", code="not_admin")

    async def enter_metrics(self, exchange: Exchange) -> None:
        """Metrics name tenants and their spend, so once there are tenants they are for administrators."""
        if not self.directory.open:
            await self.enter_admin(exchange)


def bearer(exchange: Exchange) -> bytes:
    found = [value for key, value in exchange.given_headers if key == b"authorization"]
    if len(found) != 1:
        raise Unauthorized("send the API key once, in a header: 'Authorization: Bearer KEY'")
    match = _BEARER.fullmatch(found[0])
    if match is None:
        raise Unauthorized("the Authorization header must be 'Bearer KEY'")
    token: bytes = match[1]
    return token
