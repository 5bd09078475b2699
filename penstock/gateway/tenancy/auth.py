"""Authentication: a bearer token in, a tenant out. No message and no log line ever holds a token."""

from __future__ import annotations

import re
from typing import Protocol

from penstock.core.errors import Forbidden, Unauthorized
from penstock.gateway.http.origins import Origins
from penstock.gateway.http.request import Request
from penstock.gateway.tenancy.keys import looks_like_key
from penstock.gateway.tenancy.tenants import OPEN, Directory, Tenant

_HOW = "the operator of this server makes one with 'penstock keys create NAME'"
_HOW_ADMIN = "this needs an admin key: 'penstock keys create --admin' makes one"
_PATTERNS = {
    b"authorization": re.compile(rb"bearer +([!-~]{1,8192}) *", re.IGNORECASE),
    b"x-api-key": re.compile(rb"([!-~]{1,8192}) *"),
}
_FORMS = {b"authorization": "'Authorization: Bearer KEY'", b"x-api-key": "'X-Api-Key: KEY'"}


class Verifier(Protocol):
    async def tenant(self, token: bytes) -> str:
        """The name in a valid token; raises otherwise."""
        ...


async def public(request: Request) -> Tenant:
    """For endpoints that need no key."""
    return OPEN


class Authenticator:
    def __init__(self, directory: Directory, verifier: Verifier | None, origins: Origins) -> None:
        self.directory = directory
        self.verifier = verifier
        self.origins = origins

    async def authenticate(self, request: Request) -> Tenant:
        """Find the tenant of a request, or refuse it."""
        if self.directory.open:
            self.origins.check(request)
            return self.directory.public
        return await self._tenant(bearer(request))

    async def _tenant(self, token: bytes) -> Tenant:
        directory = self.directory
        if looks_like_key(token):
            record = await directory.find_key(token)
            if record is None:
                raise Unauthorized(f"the API key is not valid: it is unknown or was revoked; {_HOW}")
            if record.admin:
                raise Forbidden(
                    "an admin key is for operating the server (/admin, /metrics, loading adapters); use a tenant's key "
                    "here",
                    code="admin_key",
                )
            return directory.tenants[record.tenant]
        if self.verifier is None:
            raise Unauthorized(f"the API key is not valid: keys begin with psk-; {_HOW}")
        tenant = directory.tenants.get(await self.verifier.tenant(token))
        if tenant is None:
            raise Forbidden("the token is valid, but the tenant it names is not configured here", code="unknown_tenant")
        return tenant

    async def authenticate_admin(self, request: Request) -> Tenant:
        """An admin key is needed also where tenants need none."""
        record = await self.directory.find_key(bearer(request, _HOW_ADMIN))
        if record is None:
            raise Unauthorized(_HOW_ADMIN)
        if not record.admin:
            raise Forbidden("a tenant's key does not open this; use an admin key", code="not_admin")
        return OPEN

    async def authenticate_operator(self, request: Request) -> Tenant:
        """For what changes a server that may have no tenants yet: then whoever is on this machine may."""
        if not (self.directory.open and self.origins.private):
            return await self.authenticate_admin(request)
        self.origins.check(request)
        return OPEN

    async def authenticate_metrics(self, request: Request) -> Tenant:
        """Metrics name tenants and their spend, so once there are tenants they are for administrators. Before, a
        Prometheus elsewhere may know the server by any name."""
        if not self.directory.open:
            return await self.authenticate_admin(request)
        if self.origins.private:
            self.origins.check(request)
        return OPEN


def bearer(request: Request, how: str = _HOW) -> bytes:
    """The token of either header; both may be sent if they agree. `how` says where the right one comes from."""
    found: dict[bytes, bytes] = {}
    for name, value in request.raw_headers:
        if name in _PATTERNS:
            if name in found:
                raise Unauthorized(f"the header {name.decode()} came twice; send the API key once")
            match = _PATTERNS[name].fullmatch(value)
            if match is None:
                raise Unauthorized(f"the header must be {_FORMS[name]}")
            found[name] = match[1]
    tokens = set(found.values())
    if len(tokens) != 1:
        what = "two different API keys came" if tokens else "no API key came"
        raise Unauthorized(f"{what}; send one in a header: 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'; {how}")
    return tokens.pop()
