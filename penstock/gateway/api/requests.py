"""GET /v1/requests and /v1/requests/{id}: the accounts of requests that ended lately."""

from __future__ import annotations

from typing import Literal
from urllib.parse import parse_qs

from msgspec import Raw, Struct

from penstock.core.errors import NotFound
from penstock.gateway.api.serving import encode_json
from penstock.gateway.api.siblings import Siblings
from penstock.gateway.errors import require
from penstock.gateway.http.request import Request
from penstock.gateway.http.response import Response
from penstock.gateway.tenancy.tenants import Tenant
from penstock.observability.request_log import RequestLog

DEFAULT_LIMIT = 20
MAX_LIMIT = 100


class AccountList(Struct):
    data: list[Raw]  # of Account
    object: Literal["list"] = "list"


class RequestEndpoints:
    def __init__(self, requests: RequestLog, siblings: Siblings) -> None:
        self.requests = requests
        self.siblings = siblings

    async def one(self, request: Request, response: Response, tenant: Tenant) -> None:
        id = request.path_params["id"]
        found = self.requests.find(tenant.name, id) or await self.siblings.account(tenant.name, id)
        if found is None:
            raise NotFound(
                f"no request {id[:200]!r} among the last {len(self.requests)}: it may still run, be too old, "
                "or never have reached the engine",
                param="id",
                code="request_not_found",
            )
        await response.send(200, found)

    async def slowest(self, request: Request, response: Response, tenant: Tenant) -> None:
        limit = _limit(request.query)
        found = await self.siblings.slowest(tenant.name, limit)
        if found is None:
            found = self.requests.slowest(tenant.name, limit)
        await response.send(200, encode_json(AccountList([Raw(body) for body in found])))


def _limit(query: bytes) -> int:
    given = parse_qs(query.decode("latin-1"), keep_blank_values=True).get("limit", [str(DEFAULT_LIMIT)])[-1]
    digits = given.isascii() and given.isdigit() and len(given) < 9
    require(digits and 1 <= int(given) <= MAX_LIMIT, "limit", f"must be between 1 and {MAX_LIMIT}")
    return int(given)
